"""The seam between a queue and whoever forecasts it, the published predictor, and how much of a forecast to reserve."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Final, Literal, Protocol, get_args

LEVELS: Final[tuple[float, ...]] = (0.01, 0.025, *(n / 100 for n in range(5, 100, 5)), 0.975, 0.99)
"""The probabilities at which a forecast names its quantiles."""


Quantiles = tuple[tuple[float, float], ...]
"""(probability, seconds), both rising."""


class Forecast:
    """What we think the next admission delay (q) will be, in seconds.

    >>> Forecast(2.0, ((0.5, 1.0), (0.9, 5.0))).quantile(0.5)
    1.0
    """

    __slots__ = ("_quantiles", "mean")

    def __init__(self, mean: float, quantiles: Quantiles | Callable[[], Quantiles]) -> None:
        """`quantiles`, or what finds them when somebody asks for one: many want no more than the mean (q-hat)."""
        self.mean = mean
        self._quantiles = quantiles

    @property
    def quantiles(self) -> Quantiles:
        if callable(self._quantiles):
            self._quantiles = self._quantiles()
        return self._quantiles

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forecast) and (self.mean, self.quantiles) == (other.mean, other.quantiles)

    def __hash__(self) -> int:
        return hash((self.mean, self.quantiles))

    def __repr__(self) -> str:
        return f"Forecast(mean={self.mean!r}, quantiles={self.quantiles!r})"

    def quantile(self, probability: float) -> float:
        """Seconds that the delay stays under with this probability: linear between the levels, flat outside."""
        levels, seconds = zip(*self.quantiles, strict=True)
        return between(levels, seconds, probability)

    def lifted(self, other: Forecast, reach: float) -> Forecast:
        """The longer of two forecasts at every level, and the greatest level reaches `reach` seconds at least.

        How a wait under way counts: it may lengthen a forecast, and never shortens it.

        >>> calm, worried = Forecast(2.0, ((0.5, 1.0), (0.9, 5.0))), Forecast(3.0, ((0.5, 2.0), (0.9, 4.0)))
        >>> calm.lifted(worried, reach=7.0)
        Forecast(mean=3.0, quantiles=((0.5, 2.0), (0.9, 7.0)))
        """
        values = [max(a, b) for (_, a), (_, b) in zip(self.quantiles, other.quantiles, strict=True)]
        values[-1] = max(values[-1], reach)
        levels = (p for p, _ in self.quantiles)
        return Forecast(max(self.mean, other.mean), tuple(zip(levels, values, strict=True)))


class Predictor(Protocol):
    """Told what a facility's queue did; asked what it will do. Causal: only what it was told counts.

    `at` is the run clock; predictors for which only the order matters leave it unused.
    """

    def observe(self, at: float, delay: float) -> None:
        """A job started after waiting `delay` seconds."""

    def still_waiting(self, at: float, waited: float) -> None:
        """A job has waited `waited` seconds and has not started: its delay will be at least that.

        It counts until the next `observe`, which says what that delay really was. Until then no quantile is below
        what it was without it, and the distribution reaches `waited`.
        """

    def forecast(self, at: float) -> Forecast:
        """The delay of a job that becomes eligible now."""


class Spread:
    """The newest `size` values in order of arrival and in order of size: an empirical distribution.

    >>> spread = Spread(3)
    >>> for value in (9.0, 1.0, 2.0, 3.0): spread.add(value)
    >>> spread.sorted
    [1.0, 2.0, 3.0]
    """

    __slots__ = ("_order", "_size", "sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[float] = deque()
        self.sorted: list[float] = []

    def __len__(self) -> int:
        return len(self.sorted)

    def add(self, value: float) -> None:
        self._order.append(value)
        insort(self.sorted, value)
        if len(self._order) > self._size:
            del self.sorted[bisect_left(self.sorted, self._order.popleft())]


def between(levels: Sequence[float], values: Sequence[float], level: float) -> float:
    """The value at a level: linear between the rising levels, flat outside.

    >>> between((0.5, 1.0), (1.0, 5.0), 0.75)
    3.0
    """
    i = bisect_left(levels, level)
    if i == 0:
        return values[0]
    if i == len(levels):
        return values[-1]
    if levels[i] == level:
        return values[i]
    return values[i - 1] + (values[i] - values[i - 1]) * (level - levels[i - 1]) / (levels[i] - levels[i - 1])


def quantile_of(ordered: Sequence[float], probability: float) -> float:
    """Of values in rising order, the one under which `probability` of the next lies: position p*(n+1), clamped.

    >>> quantile_of([1.0, 2.0, 3.0], 0.5)
    2.0
    """
    return quantiles_of(ordered, (probability,))[0]


def quantiles_of(ordered: Sequence[float], probabilities: tuple[float, ...]) -> list[float]:
    """Several at once."""
    return [
        ordered[low] if part == 0.0 else ordered[low] + (ordered[low + 1] - ordered[low]) * part
        for low, part in _positions(len(ordered), probabilities)
    ]


@lru_cache(maxsize=1024)
def _positions(count: int, probabilities: tuple[float, ...]) -> list[tuple[int, float]]:
    """Of each quantile among so many values: the value before it, and which part of the way to the next."""
    clamped = [min(max(0.0, probability * (count + 1) - 1), float(count - 1)) for probability in probabilities]
    return [(int(position), position - int(position)) for position in clamped]


# The published predictor: an exponentially weighted moving average of the delays seen --------------------

RESIDUALS = 64  # how many of its own newest errors shape the quantiles
FEW = 5  # with fewer errors than this the spread is a guess: from nothing to four times the mean
GUESS: Final = Forecast(1.0, ((0.1, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (0.9, 2.3), (0.95, 3.0), (0.99, 4.0)))


class Ewma:
    """q-hat <- (1 - alpha) * q-hat + alpha * q on every delay seen; quantiles from its own newest errors.

    >>> ewma = Ewma(first=2.0, smoothing=0.5)
    >>> ewma.observe(10.0, 4.0)
    >>> ewma.forecast(10.0).mean
    3.0
    """

    def __init__(self, first: float | None, smoothing: float) -> None:
        self._mean = first
        self._smoothing = smoothing
        self._errors = Spread(RESIDUALS)
        self._waited = 0.0
        self._known: Forecast | None = None  # it stays until something is observed

    def observe(self, at: float, delay: float) -> None:
        if self._mean is None:
            self._mean = delay
        else:
            self._errors.add(delay - self._mean)
            self._mean = self._toward(delay)
        self._waited, self._known = 0.0, None

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited, self._known = waited, None

    def forecast(self, at: float) -> Forecast:
        if self._known is None:
            self._known = self._made()
        return self._known

    def _made(self) -> Forecast:
        # A wait that is already longer than expected counts as if it ended now.
        mean = self._toward(self._waited) if self._waited > (self._mean or 0.0) else self._mean or 0.0
        return Forecast(mean, partial(_quantiles, mean, self._errors.sorted.copy(), self._waited))

    def _toward(self, delay: float) -> float:
        if self._mean is None:
            return delay
        return (1 - self._smoothing) * self._mean + self._smoothing * delay


def _quantiles(mean: float, errors: list[float], waited: float) -> Quantiles:
    if len(errors) < FEW:
        spread = [mean * GUESS.quantile(p) for p in LEVELS]
    else:
        spread = [max(0.0, mean + error) for error in quantiles_of(errors, LEVELS)]
    spread[-1] = max(spread[-1], waited)
    return tuple(zip(LEVELS, spread, strict=True))


# How much of the time until a cutoff is set aside for the wait -------------------------------------------

ReserveRule = Literal["paper", "late-rate", "newsvendor"]
"""How much of the time until a cutoff is set aside for the wait."""

RESERVE_RULES: Final[tuple[ReserveRule, ...]] = get_args(ReserveRule)


def reserve(rule: ReserveRule, forecast: Forecast, until_cutoff: float, *, margin: float, late_rate: float) -> float:
    """U, the seconds set aside for the wait; `until_cutoff` is without the overhead. A job is late if q is above U.

    paper: q-hat + delta. late-rate: the quantile that is exceeded with the probability `late_rate`. newsvendor: where
    (until_cutoff - U) * F(U) is greatest, the training time that can be expected to be back by the cutoff.

    >>> forecast = Forecast(3.0, ((0.5, 1.0), (0.9, 5.0), (0.95, 9.0)))
    >>> [reserve(rule, forecast, 10.0, margin=2.0, late_rate=0.05) for rule in RESERVE_RULES]
    [5.0, 9.0, 3.0]
    """
    if rule == "paper":
        return forecast.mean + margin
    if rule == "late-rate":
        return forecast.quantile(1 - late_rate)
    return _newsvendor(forecast, until_cutoff)


def _newsvendor(forecast: Forecast, until_cutoff: float) -> float:
    """F is linear between the quantiles, so that the best place on each piece is known; 0 before the first of them."""
    best, where = 0.0, max(0.0, until_cutoff)  # nothing fits: no time is left, and the caller's floor holds
    points = forecast.quantiles
    candidates = [(q, p) for p, q in points]
    for (p0, q0), (p1, q1) in pairwise(points):
        if p1 > p0 and q1 > q0:
            slope = (p1 - p0) / (q1 - q0)
            peak = (until_cutoff + q0 - p0 / slope) / 2
            if q0 < peak < q1:
                candidates.append((peak, p0 + slope * (peak - q0)))
    for seconds, share in candidates:
        if (until_cutoff - seconds) * share > best:
            best, where = (until_cutoff - seconds) * share, seconds
    return where
