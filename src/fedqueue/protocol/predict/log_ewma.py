"""A moving average of log delays: one long wait moves it by its logarithm, not by its size."""

from __future__ import annotations

from fedqueue.protocol.predict.base import RESIDUALS, Forecast
from fedqueue.protocol.predict.logspace import LogErrors, to_log


class LogEwma:
    """Averages log(q + 1 s); errors in log space give the quantiles, and lift the mean from geometric to plain.

    >>> predictor = LogEwma(first=3.0, smoothing=0.5)
    >>> round(predictor.forecast(0.0).quantile(0.5), 6)
    3.0
    """

    def __init__(self, first: float | None, smoothing: float, errors: int = RESIDUALS) -> None:
        self._centre = None if first is None else to_log(first)
        self._smoothing = smoothing
        self._errors = LogErrors(errors)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        value = to_log(delay)
        if self._centre is None:
            self._centre = value
        else:
            self._errors.add(value - self._centre)
            self._centre = self._toward(value)
        self._waited = 0.0

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        centre, waited = self._centre or 0.0, to_log(self._waited)
        # A wait that is already longer than expected counts as if it ended now.
        return self._errors.around(self._toward(waited) if waited > centre else centre, self._waited)

    def _toward(self, value: float) -> float:
        if self._centre is None:
            return value
        return (1 - self._smoothing) * self._centre + self._smoothing * value
