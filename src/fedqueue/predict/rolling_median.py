"""The median of the newest delays: a spike moves it by one place, not by its size."""

from __future__ import annotations

from fedqueue.predict.base import LEVELS, Forecast, Spread, quantile_of

WINDOW = 25


class RollingMedian:
    """Its `mean` is the median of the newest 25 delays: the figure to plan with when waits have heavy tails.

    >>> median = RollingMedian(first=2.0)
    >>> for delay in (1.0, 1.0, 900.0): median.observe(0.0, delay)
    >>> median.forecast(0.0).mean
    1.0
    """

    def __init__(self, first: float | None) -> None:
        self._first = first
        self._seen = Spread(WINDOW)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        self._seen.add(delay)
        self._waited = 0.0

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        values = self._seen.sorted or [self._first or 0.0]
        calm = _of(values)
        if self._waited <= values[len(values) // 2]:
            return calm
        return calm.lifted(_of(sorted([*values, self._waited])), self._waited)


def _of(values: list[float]) -> Forecast:
    return Forecast(quantile_of(values, 0.5), tuple((p, quantile_of(values, p)) for p in LEVELS))
