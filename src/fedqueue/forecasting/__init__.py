"""Forecasters that look at the scheduler, and the protocol by which every forecaster is judged.

They run beside the driver and enter a run as `ForecastIssued`, so a replay never depends on a library's version.
"""

from __future__ import annotations

from fedqueue.protocol.messages import ForecastIssued
from fedqueue.protocol.predict.base import Forecast


def issued(forecast: Forecast, *, facility: str, at: float, source: str) -> ForecastIssued:
    return ForecastIssued(at=at, facility=facility, mean=forecast.mean, quantiles=forecast.quantiles, source=source)
