"""What a forecast costs: the arithmetic predictors, with their windows full."""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.figure import Figure
from fedqueue.protocol.predict import PREDICTORS, make_predictor

DELAYS = 1000
TIMED = 500


def measure() -> list[Figure]:
    delays = np.random.default_rng(1).lognormal(6.0, 2.0, DELAYS).tolist()
    return [_cost(name, delays) for name in PREDICTORS]


def _cost(name: str, delays: list[float]) -> Figure:
    """One forecast and the delay that it is told afterwards."""
    predictor = make_predictor(name, None, 0.5)
    spent = []
    for delay in delays:
        began = time.perf_counter()
        predictor.forecast(0.0)
        predictor.observe(0.0, delay)
        spent.append(time.perf_counter() - began)
    return Figure(f"{name}: a forecast and its delay", 1000 * statistics.median(spent[-TIMED:]), "ms", "at most 1")
