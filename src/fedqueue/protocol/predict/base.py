"""The seam between a queue and whoever forecasts it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

LEVELS: Final[tuple[float, ...]] = (0.01, 0.025, *(n / 100 for n in range(5, 100, 5)), 0.975, 0.99)
"""The probabilities at which a forecast names its quantiles."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What we think the next admission delay (q) will be, in seconds.

    >>> Forecast(2.0, ((0.5, 1.0), (0.9, 5.0))).quantile(0.5)
    1.0
    """

    mean: float  # q-hat
    quantiles: tuple[tuple[float, float], ...]  # (probability, seconds), both rising

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
