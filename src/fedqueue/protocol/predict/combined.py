"""Several predictors at once, each believed as far as it has been right lately: no need to know which suits a queue.

Every level has weights of its own, because one predictor may know the usual wait and another the long ones. After each
delay a predictor's weight shrinks with its loss at that level, and a small share of all weights is dealt out evenly, so
that one that was wrong for long comes back soon when the queue changes (fixed share, Herbster and Warmuth 1998). What
comes out is calibrated as in `conformal`, by levels of the mixture itself.
"""

from __future__ import annotations

from math import exp, sqrt

from fedqueue.protocol.predict.base import LEVELS, Ewma, Forecast, Predictor, between
from fedqueue.protocol.predict.change_point import ChangePoint
from fedqueue.protocol.predict.conformal import Levels
from fedqueue.protocol.predict.log_ewma import LogEwma
from fedqueue.protocol.predict.log_kalman import LogKalman
from fedqueue.protocol.predict.logspace import ERRORS, from_log, to_log
from fedqueue.protocol.predict.rolling_quantile import RollingQuantile

RATE = 0.5  # how fast weights follow losses
SHARE = 0.01  # of the weights, dealt out evenly after each delay
STEP = 0.005  # how far a level moves; the mixture is nearly right by itself
SLOW = 0.2  # smoothing of the log-EWMA, beside the EWMA with the smoothing that is set
MEDIAN = LEVELS.index(0.5)
SCALES = tuple(sqrt(p * (1 - p)) for p in LEVELS)  # by which losses at different levels are alike


class Combined:
    """Quantiles are averaged in log space. The mean is the members', with their weights at the median.

    >>> predictor = Combined(first=5.0, smoothing=0.5)
    >>> for delay in [5.0] * 40: predictor.observe(0.0, delay)
    >>> round(predictor.forecast(0.0).quantile(0.95), 3)
    5.0
    """

    def __init__(self, first: float | None, smoothing: float) -> None:
        self._members: tuple[Predictor, ...] = (
            Ewma(first, smoothing),
            LogEwma(first, SLOW, ERRORS),
            RollingQuantile(first),
            ChangePoint(first),
            LogKalman(first),
        )
        even = 1 / len(self._members)
        self._weights = [[even] * len(self._members) for _ in LEVELS]
        self._levels = Levels(STEP)
        self._waited = 0.0

    def observe(self, at: float, delay: float) -> None:
        self._waited = 0.0
        forecasts = [member.forecast(at) for member in self._members]
        logs = [[to_log(q) for _, q in forecast.quantiles] for forecast in forecasts]
        self._levels.adapt(self._calibrated(self._mixed(logs)), delay)
        self._weigh(logs, to_log(delay))
        for member in self._members:
            member.observe(at, delay)

    def still_waiting(self, at: float, waited: float) -> None:
        self._waited = waited

    def forecast(self, at: float) -> Forecast:
        calm = self._forecast(at)
        if self._waited == 0.0:
            return calm
        for member in self._members:
            member.still_waiting(at, self._waited)
        lifted = self._forecast(at)
        for member in self._members:
            member.still_waiting(at, 0.0)
        return calm.lifted(lifted, self._waited)

    def _forecast(self, at: float) -> Forecast:
        forecasts = [member.forecast(at) for member in self._members]
        logs = [[to_log(q) for _, q in forecast.quantiles] for forecast in forecasts]
        mean = sum(w * forecast.mean for w, forecast in zip(self._weights[MEDIAN], forecasts, strict=True))
        return Forecast(mean, tuple(zip(LEVELS, self._calibrated(self._mixed(logs)), strict=True)))

    def _mixed(self, logs: list[list[float]]) -> list[float]:
        """Quantiles of the mixture in log space; sorted, as weights differ from level to level."""
        return sorted(
            sum(w * values[i] for w, values in zip(weights, logs, strict=True))
            for i, weights in enumerate(self._weights)
        )

    def _calibrated(self, mixed: list[float]) -> list[float]:
        return [from_log(between(LEVELS, mixed, level)) for level in self._levels.rising()]

    def _weigh(self, logs: list[list[float]], value: float) -> None:
        for i, (level, scale) in enumerate(zip(LEVELS, SCALES, strict=True)):
            errors = [value - values[i] for values in logs]
            losses = [level * e if e > 0 else (level - 1) * e for e in errors]  # pinball
            least = min(losses)
            shrunk = [w * exp(-RATE * (loss - least) / scale) for w, loss in zip(self._weights[i], losses, strict=True)]
            total, even = sum(shrunk), SHARE / len(shrunk)
            self._weights[i] = [(1 - SHARE) * w / total + even for w in shrunk]
