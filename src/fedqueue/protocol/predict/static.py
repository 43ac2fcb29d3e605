"""A number that never changes: the ablation without prediction, and a site that promises its wait."""

from __future__ import annotations

from fedqueue.protocol.predict.base import LEVELS, Forecast, Spread, quantiles_of


class Static:
    """Mean fixed at `first` seconds (None: at the first delay seen); quantiles from the delays seen."""

    def __init__(self, first: float | None) -> None:
        self._mean = first
        self._seen = Spread(64)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        if self._mean is None:
            self._mean = delay
        self._seen.add(delay)
        self._waited = 0.0

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        mean = self._mean or 0.0
        seen = self._seen.sorted or [mean]
        spread = quantiles_of(seen, LEVELS)
        # A wait under way says nothing about the fixed mean, but the tail must reach it.
        spread[-1] = max(spread[-1], self._waited)
        return Forecast(mean, tuple(zip(LEVELS, spread, strict=True)))
