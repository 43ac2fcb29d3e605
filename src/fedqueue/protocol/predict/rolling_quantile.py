"""The newest delays as they were: what happened in the last hundred is what may happen next."""

from __future__ import annotations

from fedqueue.protocol.predict.base import LEVELS, Forecast, Spread, quantile_of

WINDOW = 100


class RollingQuantile:
    """The empirical distribution of the newest 100 delays, and their plain mean.

    >>> newest = RollingQuantile(first=2.0)
    >>> for delay in (1.0, 2.0, 9.0): newest.observe(0.0, delay)
    >>> newest.forecast(0.0).mean, newest.forecast(0.0).quantile(0.5)
    (4.0, 2.0)
    """

    def __init__(self, first: float | None, window: int = WINDOW) -> None:
        self._first = first
        self._seen = Spread(window)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        self._seen.add(delay)
        self._waited = 0.0

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        values = self._seen.sorted or [self._first or 0.0]
        calm = self._of(values)
        if self._waited <= calm.mean:
            return calm
        return calm.lifted(self._of(sorted([*values, self._waited])), self._waited)

    def _of(self, values: list[float]) -> Forecast:
        return Forecast(self._middle(values), tuple((p, quantile_of(values, p)) for p in LEVELS))

    def _middle(self, values: list[float]) -> float:
        return sum(values) / len(values)
