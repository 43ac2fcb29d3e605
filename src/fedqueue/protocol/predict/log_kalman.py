"""A Kalman filter for a level that wanders: how fast it follows is learned from the delays, not set.

Log delays are taken as a level that moves by a random step (variance Q) plus noise of the day (variance R). Of the
differences of successive delays, Q + 2R is the variance and -R the covariance with the next, and both are averaged
as they come.
"""

from __future__ import annotations

from fedqueue.protocol.predict.base import Forecast
from fedqueue.protocol.predict.logspace import ERRORS, LogErrors, to_log

MEMORY = 0.02  # weight of the newest difference in its variance and covariance
LEAST = 1e-4  # R at the least, and Q as a share of R at the least: the filter never stops listening
MOST = 10.0  # Q as a share of R at the most


class LogKalman:
    """A local-level filter of log(q + 1 s), with quantiles from its own newest 300 errors.

    >>> predictor = LogKalman(first=10.0)
    >>> for delay in [10.0] * 20: predictor.observe(0.0, delay)
    >>> round(predictor.forecast(0.0).quantile(0.5), 3)
    10.0
    """

    def __init__(self, first: float | None) -> None:
        self._level = None if first is None else to_log(first)
        self._doubt = 1.0  # variance of the level
        self._newest: float | None = None
        self._step: float | None = None  # newest difference
        self._variance, self._covariance = 2.0, -0.8  # of the differences: Q / R is a half, until they say more
        self._errors = LogErrors(ERRORS)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        value = to_log(delay)
        self._waited = 0.0
        self._learn(value)
        if self._level is None:
            self._level = value
            return
        error = value - self._level
        self._errors.add(error)
        gain = self._gain()
        self._doubt = (1 - gain) * (self._doubt + self._noises()[0])
        self._level += gain * error

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        level, waited = self._level or 0.0, to_log(self._waited)
        if waited > level:  # it counts as if it ended now
            level += self._gain() * (waited - level)
        return self._errors.around(level, self._waited)

    def _learn(self, value: float) -> None:
        if self._newest is not None:
            step = value - self._newest
            self._variance += MEMORY * (step * step - self._variance)
            if self._step is not None:
                self._covariance += MEMORY * (step * self._step - self._covariance)
            self._step = step
        self._newest = value

    def _noises(self) -> tuple[float, float]:
        """Q and R."""
        noise = max(LEAST, min(-self._covariance, self._variance / 2))
        return min(MOST * noise, max(LEAST * noise, self._variance - 2 * noise)), noise

    def _gain(self) -> float:
        wander, noise = self._noises()
        return (self._doubt + wander) / (self._doubt + wander + noise)
