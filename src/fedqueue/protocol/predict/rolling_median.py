"""The median of the newest delays: a spike moves it by one place, not by its size."""

from __future__ import annotations

from fedqueue.protocol.predict.base import quantile_of
from fedqueue.protocol.predict.rolling_quantile import RollingQuantile

WINDOW = 25


class RollingMedian(RollingQuantile):
    """Its `mean` is the median of the newest 25 delays: the figure to plan with when waits have heavy tails.

    >>> median = RollingMedian(first=2.0)
    >>> for delay in (1.0, 1.0, 900.0): median.observe(0.0, delay)
    >>> median.forecast(0.0).mean
    1.0
    """

    def __init__(self, first: float | None) -> None:
        super().__init__(first, WINDOW)

    def _middle(self, values: list[float]) -> float:
        return quantile_of(values, 0.5)
