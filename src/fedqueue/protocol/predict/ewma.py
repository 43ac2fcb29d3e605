"""The published predictor: an exponentially weighted moving average of the delays seen."""

from __future__ import annotations

from typing import Final

from fedqueue.protocol.predict.base import LEVELS, Forecast, Spread, quantiles_of

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
        if len(self._errors) < FEW:
            spread = [mean * GUESS.quantile(p) for p in LEVELS]
        else:
            spread = [max(0.0, mean + error) for error in quantiles_of(self._errors.sorted, LEVELS)]
        spread[-1] = max(spread[-1], self._waited)
        return Forecast(mean, tuple(zip(LEVELS, spread, strict=True)))

    def _toward(self, delay: float) -> float:
        if self._mean is None:
            return delay
        return (1 - self._smoothing) * self._mean + self._smoothing * delay
