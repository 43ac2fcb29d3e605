"""A slow average of log delays that forgets when the queue has changed: calm when nothing happens, quick when it does.

Two cumulative sums (CUSUM) of the standardised errors, one up and one down, look for a change that lasts.
"""

from __future__ import annotations

from math import sqrt

from fedqueue.protocol.predict.base import Forecast
from fedqueue.protocol.predict.logspace import ERRORS, LogErrors, to_log

SLOWEST = 0.05  # weight of the newest delay, a long while after a change
DRIFT = 0.5  # standard deviations: a shift of less than twice this is left to the average
ALARM = 6.0  # standard deviations, summed: a shift of two is found after about four delays
MOST_SURPRISE = 3.0  # standard deviations: one spike alone is no change
MEMORY = 0.02  # weight of the newest error in the variance
LEAST_VARIANCE = 1e-4  # of log seconds: a queue that always waits the same is no reason for alarm at a second more


class ChangePoint:
    """Right after a change it averages what came since, then slows down to an average with the weight 0.05.

    >>> predictor = ChangePoint(first=10.0)
    >>> for delay in [10.0] * 50 + [1000.0] * 8: predictor.observe(0.0, delay)
    >>> 900 < predictor.forecast(0.0).quantile(0.5) < 1100
    True
    """

    def __init__(self, first: float | None) -> None:
        self._centre = None if first is None else to_log(first)
        self._since = 0 if first is None else 1  # delays that the centre is made of
        self._variance = 1.0
        self._up = self._down = 0.0
        self._errors = LogErrors(ERRORS)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        value = to_log(delay)
        self._waited = 0.0
        if self._centre is None:
            self._centre, self._since = value, 1
            return
        error = value - self._centre
        self._errors.add(error)
        deviation = sqrt(self._variance)
        surprise = max(-MOST_SURPRISE, min(MOST_SURPRISE, error / deviation))
        self._variance += MEMORY * ((surprise * deviation) ** 2 - self._variance)
        self._variance = max(LEAST_VARIANCE, self._variance)
        self._up = max(0.0, self._up + surprise - DRIFT)
        self._down = max(0.0, self._down - surprise - DRIFT)
        if max(self._up, self._down) > ALARM:
            self._up = self._down = 0.0
            self._since = 0
        self._since += 1
        self._centre += self._weight(self._since) * error

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        centre, waited = self._centre or 0.0, to_log(self._waited)
        if waited > centre:  # it counts as if it ended now
            centre += self._weight(self._since + 1) * (waited - centre)
        return self._errors.around(centre, self._waited)

    def _weight(self, count: int) -> float:
        return max(SLOWEST, 1 / count)
