"""Gradient boosting on what the scheduler shows, retrained as it goes; needs scikit-learn.

The centre of the forecast is a model of log(1 + wait), fitted to the newest started jobs of near shape. What surrounds
it is learned from our own jobs only: the errors of the centre, at levels adapted as in `predict.conformal`.

Jobs of near shape that still wait when the model is fitted count too. The wait of one is at least its age; where that
is above what the model in use said of it, it enters with its age as its wait. Below, it says nothing new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from math import inf, nan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedqueue.errors import ConfigError
from fedqueue.forecasting import issued
from fedqueue.forecasting.calibration import Calibration, Said
from fedqueue.forecasting.state import SchedulerState
from fedqueue.protocol.messages import ForecastIssued
from fedqueue.protocol.predict.base import Forecast
from fedqueue.protocol.predict.logspace import to_log

EXAMPLES: Final = 6000  # newest started jobs of near shape
FIRST: Final = 60  # so many before there is a model
RETRAIN: Final = 100  # of our jobs between two fits
PLAIN_SMOOTHING: Final = 0.2  # of the moving average until there is a model
NEAR: Final = 2  # times fewer or more processors, or more wall time, is still near
MISSING: Final = "the boosting forecaster needs scikit-learn: pip install 'fedqueue[boosting]'"
MODEL: Final[dict[str, Any]] = {
    "max_iter": 80,
    "learning_rate": 0.08,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 30,
    "early_stopping": False,
    "random_state": 0,
}


class Boosting:
    """Told of every job of the machine; asked about one of ours. `procs` and `requested` are the shape of ours: the
    fewest and most processors, the most seconds of wall time (None: any)."""

    source: Final = "boosting"

    def __init__(
        self,
        procs: tuple[int, int] | None = None,
        requested: float | None = None,
        *,
        epoch: float | None = None,
        first: float = 0.0,
    ) -> None:
        self._fit, self._limit = _library()
        low, high = procs or (0, 2**62)
        self._own = high if procs else 1, nan if requested is None else requested
        self._procs = low / NEAR, high * NEAR
        self._requested = inf if requested is None else NEAR * requested
        self._state = SchedulerState(epoch)
        self._examples: deque[tuple[list[float], float]] = deque(maxlen=EXAMPLES)
        self._open: dict[Hashable, list[float]] = {}  # of near shape, waiting
        self._ours: dict[Hashable, Said] = {}  # waiting
        self._calibration = Calibration()
        self._model: Any = None
        self._last: tuple[list[float], float] | None = None  # a job is forecast, then submitted: one answer for both
        self._fitted_on = 0  # examples
        self._since_fit = 0  # our jobs
        self._plain = to_log(first)  # the centre until there is a model: a moving average

    def submitted(self, job: Hashable, at: float, procs: int, requested: float, *, ours: bool = False) -> None:
        if ours or self._is_near(procs, requested):
            features = self._state.features(at, procs, requested)
            self._open[job] = features
            if ours:
                self._ours[job] = self._say(at, features)
        self._state.submitted(job, at, procs, requested)

    def started(self, job: Hashable, at: float) -> None:
        wait = self._state.started(job, at)
        features = self._open.pop(job, None)
        said = self._ours.pop(job, None)
        if wait is None:
            return
        value = to_log(wait)
        if features is not None:
            self._examples.append((features, value))
            self._plain += PLAIN_SMOOTHING * (value - self._plain)
        if said is not None:
            self._calibration.learn(said, wait)
            self._since_fit += 1

    def ended(self, job: Hashable, at: float) -> None:
        self._state.ended(job, at)
        self._open.pop(job, None)
        self._ours.pop(job, None)

    def forecast(self, at: float, procs: int, requested: float) -> Forecast:
        """The wait of a job of ours that is submitted now."""
        return self._say(at, self._state.features(at, procs, requested)).forecast

    def issue(
        self, facility: str, at: float, procs: int | None = None, requested: float | None = None
    ) -> ForecastIssued:
        """By default of the largest job of our shape."""
        found = self.forecast(at, self._own[0] if procs is None else procs, requested or self._own[1])
        return issued(found, facility=facility, at=at, source=self.source)

    def _say(self, at: float, features: list[float]) -> Said:
        self._retrain(at)
        return self._calibration.around(self._centre(features))

    def _is_near(self, procs: int, requested: float) -> bool:
        return self._procs[0] <= procs <= self._procs[1] and not requested > self._requested

    def _centre(self, features: list[float]) -> float:
        if self._model is None:
            return self._plain
        if self._last is None or self._last[0] != features:
            with self._limit(limits=1):
                self._last = features, float(self._model.predict(_table([features]))[0])
        return self._last[1]

    def _retrain(self, at: float) -> None:
        """When enough of ours have started, or the examples are twice those of the model in use."""
        count = len(self._examples)
        if count < FIRST or (self._since_fit < RETRAIN and count < 2 * self._fitted_on):
            return
        inputs = [features for features, _ in self._examples]
        targets = [value for _, value in self._examples]
        if self._model is not None:
            self._add_waiting(at, inputs, targets)
        with self._limit(limits=1):
            self._model = self._fit(**MODEL).fit(_table(inputs), np.array(targets))
        self._fitted_on, self._since_fit, self._last = count, 0, None

    def _add_waiting(self, at: float, inputs: list[list[float]], targets: list[float]) -> None:
        ages = {job: self._state.waited(job, at) for job in self._open}
        self._open = {job: features for job, features in self._open.items() if ages[job] is not None}
        if not self._open:
            return
        with self._limit(limits=1):
            said = self._model.predict(_table(list(self._open.values()))).tolist()
        for job, guess in zip(self._open, said, strict=True):
            age = to_log(ages[job] or 0.0)
            if age > guess:
                inputs.append(self._open[job])
                targets.append(age)


def _table(rows: list[list[float]]) -> NDArray[np.float64]:
    """What is not known becomes -1, which no feature is: a column of which nothing is known cannot be fitted."""
    table = np.array(rows, dtype=np.float64)
    table[np.isnan(table)] = -1.0
    return table


def _library() -> tuple[Any, Any]:
    """The regressor, and what keeps it to one thread: faster on so few rows, and the same sums on every machine."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import ThreadpoolController
    except ImportError:
        raise ConfigError(MISSING) from None
    return HistGradientBoostingRegressor, ThreadpoolController().limit
