"""How long will the next job wait? Predictors that are pure arithmetic; one file each.

Every predictor answers with a distribution (`Forecast`), so that a rule may use its mean, as the published
algorithm does, or a quantile. To add one: write its file, and name it in `PREDICTORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fedqueue.predict.base import LEVELS, Forecast, Predictor
from fedqueue.predict.ewma import Ewma
from fedqueue.predict.log_ewma import LogEwma
from fedqueue.predict.rolling_median import RollingMedian
from fedqueue.predict.static import Static

PREDICTORS: Final[Mapping[str, Callable[[float | None, float], Predictor]]] = {
    "static": lambda first, smoothing: Static(first),
    "ewma": Ewma,
    "log-ewma": LogEwma,
    "rolling-median": lambda first, smoothing: RollingMedian(first),
}
"""Name -> maker(first, smoothing): the first expected delay (None: the first seen) and alpha."""

__all__ = ["LEVELS", "PREDICTORS", "Ewma", "Forecast", "LogEwma", "Predictor", "RollingMedian", "Static"]
