"""A moving average of log delays: queue waits spread by factors, so their logarithm is what moves evenly."""

from __future__ import annotations

from math import exp, log

from fedqueue.predict.base import LEVELS, Forecast, Spread, quantile_of
from fedqueue.predict.ewma import FEW, RESIDUALS

SHIFT = 1.0  # seconds added before the logarithm: waits of zero are common on idle systems


class LogEwma:
    """Averages log(q + 1 s); errors in log space give the quantiles, and lift the mean from geometric to plain.

    >>> predictor = LogEwma(first=3.0, smoothing=0.5)
    >>> round(predictor.forecast(0.0).quantile(0.5), 6)
    3.0
    """

    def __init__(self, first: float | None, smoothing: float) -> None:
        self._centre = None if first is None else log(first + SHIFT)
        self._smoothing = smoothing
        self._errors = Spread(RESIDUALS)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        value = log(delay + SHIFT)
        if self._centre is None:
            self._centre = value
        else:
            self._errors.add(value - self._centre)
            self._centre = self._toward(value)
        self._waited = 0.0

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        centre, waited = self._centre or 0.0, log(self._waited + SHIFT)
        if waited > centre:
            centre = self._toward(waited)
        errors = self._errors.sorted
        if len(errors) < FEW:
            errors = [-0.8, -0.4, 0.0, 0.4, 0.8]
        mean = sum(max(0.0, exp(centre + error) - SHIFT) for error in errors) / len(errors)
        spread = (max(0.0, exp(centre + quantile_of(errors, p)) - SHIFT) for p in LEVELS)
        return Forecast(mean, tuple(zip(LEVELS, spread, strict=True)))

    def _toward(self, value: float) -> float:
        if self._centre is None:
            return value
        return (1 - self._smoothing) * self._centre + self._smoothing * value
