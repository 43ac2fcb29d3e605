"""The seam between a queue and whoever forecasts it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

LEVELS: Final[tuple[float, ...]] = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
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
        levels = [p for p, _ in self.quantiles]
        i = bisect_left(levels, probability)
        if i == 0:
            return self.quantiles[0][1]
        if i == len(levels):
            return self.quantiles[-1][1]
        (p0, q0), (p1, q1) = self.quantiles[i - 1], self.quantiles[i]
        return q0 + (q1 - q0) * (probability - p0) / (p1 - p0)


class Predictor(Protocol):
    """Told what a facility's queue did; asked what it will do. Causal: only what it was told counts.

    `at` is the run clock; predictors for which only the order matters leave it unused.
    """

    def observe(self, at: float, delay: float) -> None:
        """A job started after waiting `delay` seconds."""

    def still_waiting(self, at: float, waited: float) -> None:
        """A job has waited `waited` seconds and has not started: its delay will be at least that.

        It counts until the next `observe`, which says what that delay really was.
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


def quantile_of(ordered: Sequence[float], probability: float) -> float:
    """Of values in rising order, the one under which `probability` of the next lies: position p*(n+1), clamped.

    >>> quantile_of([1.0, 2.0, 3.0], 0.5)
    2.0
    """
    position = probability * (len(ordered) + 1) - 1
    if position <= 0:
        return ordered[0]
    if position >= len(ordered) - 1:
        return ordered[-1]
    low = int(position)
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (position - low)
