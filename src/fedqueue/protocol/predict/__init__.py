"""How long will the next job wait? Predictors that are pure arithmetic; one file each.

Every predictor answers with a distribution (`Forecast`), so that a rule may use its mean, as the published
algorithm does, or a quantile. To add one: write its file, and name it in `PREDICTORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fedqueue.protocol.predict.base import LEVELS, Ewma, Forecast, Predictor
from fedqueue.protocol.predict.by_wall import WaitByWall
from fedqueue.protocol.predict.change_point import ChangePoint
from fedqueue.protocol.predict.combined import Combined
from fedqueue.protocol.predict.conformal import Conformal
from fedqueue.protocol.predict.log_ewma import LogEwma
from fedqueue.protocol.predict.log_kalman import LogKalman
from fedqueue.protocol.predict.rolling_median import RollingMedian
from fedqueue.protocol.predict.rolling_quantile import RollingQuantile
from fedqueue.protocol.predict.static import Static

PREDICTORS: Final[dict[str, Callable[[float | None, float], Predictor]]] = {
    "static": lambda first, smoothing: Static(first),
    "ewma": Ewma,
    "log-ewma": LogEwma,
    "rolling-median": lambda first, smoothing: RollingMedian(first),
    "rolling-quantile": lambda first, smoothing: RollingQuantile(first),
    "change-point": lambda first, smoothing: ChangePoint(first),
    "log-kalman": lambda first, smoothing: LogKalman(first),
    "conformal": lambda first, smoothing: Conformal(LogEwma(first, smoothing)),
    "combined": Combined,
}
"""Name -> maker(first, smoothing): the first expected delay (None: the first seen) and alpha."""

CALIBRATED: Final = "conformal/"  # before the name of any of them but `conformal`: calibrated


def check_name(name: str) -> None:
    """ValueError: no predictor has this name."""
    plain = name.removeprefix(CALIBRATED)
    if plain not in PREDICTORS or (plain == "conformal" and plain != name):
        known = ", ".join(PREDICTORS)
        raise ValueError(f"predictor must be one of {known}, or conformal/ and one of them, found {name!r}")


def make_predictor(name: str, first: float | None, smoothing: float) -> Predictor:
    """The predictor of this name; "conformal/NAME" is NAME, calibrated.

    >>> type(make_predictor("conformal/rolling-median", None, 0.5)).__name__
    'Conformal'
    """
    check_name(name)
    predictor = PREDICTORS[name.removeprefix(CALIBRATED)](first, smoothing)
    return Conformal(predictor) if name.startswith(CALIBRATED) else predictor


__all__ = [
    "LEVELS",
    "PREDICTORS",
    "ChangePoint",
    "Combined",
    "Conformal",
    "Ewma",
    "Forecast",
    "LogEwma",
    "LogKalman",
    "Predictor",
    "RollingMedian",
    "RollingQuantile",
    "Static",
    "WaitByWall",
    "check_name",
    "make_predictor",
]
