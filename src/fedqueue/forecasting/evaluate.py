"""The protocol by which forecasters are compared on a queue's past.

Rounds begin at t0 + k*T. The probe of a round is the first job of the shape that is submitted in it, if the previous
probe has started. A forecaster of pure arithmetic knows the waits of earlier probes; one that looks at the scheduler
knows what the scheduler showed when the probe was submitted. The first probes only teach.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final

import numpy as np

from fedqueue.errors import ConfigError, DataError
from fedqueue.forecasting.boosting import MISSING, Boosting
from fedqueue.forecasting.probes import default_warm_up, probe_jobs
from fedqueue.forecasting.scores import (
    Floats,
    best_margin,
    budget,
    budget_at,
    late_rate,
    margin_budget_at,
    on_time_budget,
)
from fedqueue.forecasting.state import Kind, events
from fedqueue.history.joblog import JobLog
from fedqueue.protocol.predict import CALIBRATED, LEVELS, PREDICTORS, Forecast, check_name, make_predictor
from fedqueue.protocol.predict.base import reserve

PUBLISHED: Final = "ewma"  # what every forecaster is held against
BOOSTING: Final = "boosting"
SMOOTHING: Final = {PUBLISHED: 0.5}  # as published ...
OTHER_SMOOTHING: Final = 0.2  # ... and of the others
NOMINAL: Final = 0.05  # late rate that is aimed at
STRETCH: Final = 160  # probes that are kept to be drawn
FORECASTERS: Final = (*(name for name in PREDICTORS if name != "static"), BOOSTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Jobs that stand for ours."""

    procs: tuple[int, int] | None = None  # fewest and most; None: any
    requested: float | None = None  # most seconds; None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How one forecaster did; seconds, or shares of the round length T."""

    mae: float  # of the mean
    median_mae: float  # of the median forecast
    mae_ratio: float | None  # over the published forecaster's mae; None: that is 0
    median_mae_ratio: float | None
    median_error: float  # median absolute error of the median forecast
    late: float  # realised, at nominal 5 %
    budget: float  # mean J/T at nominal 5 % late
    equal_budget: float  # at exactly 5 % late, log(1 + U) shifted in hindsight
    margin_budget: float  # the same with U = mean + a margin in seconds
    on_time: float  # mean J/T of jobs in time, newsvendor rule
    calibration: tuple[tuple[float, float], ...]  # (nominal, realised share of waits at or below the quantile)
    per_second: float  # forecasts, learning included


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The last probes, to be drawn: quantiles 0.05, 0.5 and 0.95 of each forecaster."""

    at: tuple[float, ...]
    waits: tuple[float, ...]
    quantiles: Mapping[str, tuple[tuple[float, float, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One trace, shape and round length."""

    jobs: int  # of the log
    of_shape: int
    probes: int
    warm_up: int
    mean_wait: float
    median_wait: float
    oracle: float  # mean J/T if every wait were known
    ewma_budget: float  # published forecaster, best margin in hindsight: mean J/T at 5 % late
    ewma_on_time: float  # ... and the most on-time J/T
    constant_on_time: float  # the best constant U in hindsight
    scores: Mapping[str, Score]
    stretch: Stretch


def available() -> tuple[str, ...]:
    """Forecasters that can run here."""
    return FORECASTERS if find_spec("sklearn") else tuple(name for name in FORECASTERS if name != BOOSTING)


def check_forecaster(name: str) -> None:
    """ConfigError: there is none of this name, or it cannot run here."""
    if name == BOOSTING:
        if name not in available():
            raise ConfigError(MISSING)
        return
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(f"{error}; or {BOOSTING}") from None


def evaluate(log: JobLog, shape: Shape, round_length: float, names: Sequence[str]) -> Evaluation:
    """Every forecaster over the same probes; the published one is always among them."""
    places = np.flatnonzero(log.which(shape.procs, shape.requested)).tolist()
    if not places:
        raise DataError(f"{log.name}: {log.none_like(shape.procs, shape.requested)}")
    submits, waited = log.submit[places].tolist(), log.wait[places].tolist()
    found = [(at, places[i]) for at, i in probe_jobs(submits, waited, round_length)]
    count = len(found) - 1  # the first wait is the forecasters' first guess
    skip = default_warm_up(count)
    if count - skip < 1:
        raise DataError(
            f"{log.name}: {len(found)} rounds of {round_length:g} s have a job of this shape: too few to evaluate; "
            "try a shorter --round or more jobs"
        )
    kept = found[1 + skip :]
    waits = log.wait[[place for _, place in kept]]
    told: dict[str, list[Forecast]] = {}
    speed: dict[str, float] = {}
    for name in dict.fromkeys((PUBLISHED, *names)):
        begun = time.perf_counter()
        forecasts = replay_queue(log, shape, found) if name == BOOSTING else replay_waits(log, name, found)
        speed[name] = len(found) / (time.perf_counter() - begun)
        told[name] = forecasts[1 + skip :]
    published = np.array([forecast.mean for forecast in told[PUBLISHED]])
    mae = float(np.mean(np.abs(waits - published)))
    stretch = slice(-STRETCH, None)
    return Evaluation(
        jobs=len(log),
        of_shape=len(places),
        probes=len(kept),
        warm_up=skip,
        mean_wait=float(waits.mean()),
        median_wait=float(np.median(waits)),
        oracle=budget(waits, round_length),
        ewma_budget=margin_budget_at(published, waits, round_length, NOMINAL),
        ewma_on_time=best_margin(published, waits, round_length),
        constant_on_time=best_margin(np.zeros_like(waits), waits, round_length),
        scores={name: score(told[name], waits, round_length, mae, speed[name]) for name in told},
        stretch=Stretch(
            at=tuple(log.submit[[place for _, place in kept[stretch]]].tolist()),
            waits=tuple(waits[stretch].tolist()),
            quantiles={
                name: tuple((f.quantile(0.05), f.quantile(0.5), f.quantile(0.95)) for f in forecasts[stretch])
                for name, forecasts in told.items()
            },
        ),
    )


def score(
    forecasts: Sequence[Forecast], waits: Floats, round_length: float, published_mae: float, per_second: float
) -> Score:
    """What forecasts were worth, held against the waits that came true."""
    mean = np.array([forecast.mean for forecast in forecasts])
    quantiles = np.array([[value for _, value in forecast.quantiles] for forecast in forecasts])
    median = np.array([forecast.quantile(0.5) for forecast in forecasts])
    limits = np.array([forecast.quantile(1 - NOMINAL) for forecast in forecasts])
    rule = partial(reserve, "newsvendor", margin=0.0, late_rate=NOMINAL)
    chosen = np.array([rule(forecast, round_length) for forecast in forecasts])
    mae, median_mae = (float(np.mean(np.abs(waits - point))) for point in (mean, median))
    return Score(
        mae=mae,
        median_mae=median_mae,
        mae_ratio=mae / published_mae if published_mae else None,
        median_mae_ratio=median_mae / published_mae if published_mae else None,
        median_error=float(np.median(np.abs(waits - median))),
        late=late_rate(limits, waits),
        budget=budget(limits, round_length),
        equal_budget=budget_at(limits, waits, round_length, NOMINAL),
        margin_budget=margin_budget_at(mean, waits, round_length, NOMINAL),
        on_time=on_time_budget(chosen, waits, round_length),
        calibration=tuple((level, float(np.mean(waits <= quantiles[:, i]))) for i, level in enumerate(LEVELS)),
        per_second=per_second,
    )


def replay_waits(log: JobLog, name: str, probes: Sequence[tuple[float, int]]) -> list[Forecast]:
    """Of a forecaster that knows only the waits of earlier probes."""
    predictor = make_predictor(name, None, SMOOTHING.get(name.removeprefix(CALIBRATED), OTHER_SMOOTHING))
    forecasts = []
    for at, place in probes:
        submit, wait = float(log.submit[place]), float(log.wait[place])
        forecasts.append(predictor.forecast(at))
        predictor.observe(submit + wait, wait)
    return forecasts


def replay_queue(log: JobLog, shape: Shape, probes: Sequence[tuple[float, int]]) -> list[Forecast]:
    """Of one that looks at the scheduler, when each probe is submitted."""
    forecaster = Boosting(shape.procs, shape.requested, epoch=log.epoch)
    ours, forecasts = {place for _, place in probes}, []
    procs, requested = log.procs.tolist(), log.requested.tolist()
    for kind, job, at in events(log):
        if kind is Kind.SUBMITTED:
            if job in ours:
                forecasts.append(forecaster.forecast(at, procs[job], requested[job]))
            forecaster.submitted(job, at, procs[job], requested[job], ours=job in ours)
        elif kind is Kind.STARTED:
            forecaster.started(job, at)
        else:
            forecaster.ended(job, at)
    return forecasts


def means(found: Sequence[Evaluation]) -> dict[str, dict[str, float | None]]:
    """Over several cases, for each forecaster: the mean of every share of the round, the geometric mean of every ratio,
    the range of the late rate, and the on-time budget over the published forecaster's best in the worst case."""
    made = {}
    for name in found[0].scores:
        scores = [one.scores[name] for one in found]
        row: dict[str, float | None] = {
            key: float(np.mean([getattr(score, key) for score in scores]))
            for key in ("late", "budget", "equal_budget", "margin_budget", "on_time")
        }
        for key in ("mae_ratio", "median_mae_ratio"):
            ratios = [ratio for score in scores if (ratio := getattr(score, key))]
            row[key] = float(np.exp(np.mean(np.log(ratios)))) if ratios else None
        row["least_late"], row["most_late"] = min(score.late for score in scores), max(score.late for score in scores)
        best = [(score.on_time, one.ewma_on_time) for score, one in zip(scores, found, strict=True)]
        row["worst_on_time"] = min((mine / its - 1 for mine, its in best if its), default=None)
        made[name] = row
    return made


def best(figures: Mapping[str, Mapping[str, float | None]]) -> str:
    """Of `means`, the forecaster with the most J/T at equal lateness."""
    return max(figures, key=lambda name: figures[name]["equal_budget"] or 0.0)
