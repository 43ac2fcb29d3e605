"""Forecasters that look at the scheduler, and the figures by which every forecaster is judged."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedqueue.agent.schedulers.pbs import read_estimates
from fedqueue.agent.schedulers.slurm import read_clock, read_plan, read_test_only
from fedqueue.errors import DataError
from fedqueue.forecasting.boosting import Boosting
from fedqueue.forecasting.calibration import Calibration
from fedqueue.forecasting.estimates import SchedulerEstimates
from fedqueue.forecasting.evaluate import FORECASTERS, Shape, evaluate, replay_queue, replay_waits, score
from fedqueue.forecasting.probes import probe_jobs
from fedqueue.forecasting.scores import best_margin, budget_at, margin_budget_at
from fedqueue.forecasting.state import (
    FEATURES,
    RECENT,
    SMOOTHING,
    Kind,
    Listed,
    SchedulerState,
    events,
    tell_differences,
)
from fedqueue.history.joblog import JobLog
from fedqueue.protocol.predict import LEVELS, Forecast
from fedqueue.protocol.predict.logspace import to_log
from tests.test_bound import luck

RECORDINGS = Path(os.environ.get("FEDQUEUE_PBS_RECORDINGS") or Path(__file__).parents[2] / "shared" / "facts" / "pbs")


def job_log(submit: Any, wait: Any, run: Any, requested: Any, procs: Any) -> JobLog:
    submit, wait, run, requested = (np.asarray(column, dtype=np.float64) for column in (submit, wait, run, requested))
    procs = np.asarray(procs, dtype=np.int64)
    return JobLog(name="made", submit=submit, wait=wait, run=run, requested=requested, procs=procs)


def one_server(jobs: int, seed: int = 1) -> JobLog:
    """First come, first served, one at a time, a minute each: whoever counts the waiting knows the wait."""
    draws = luck(seed)
    busy = np.repeat(draws.uniform(0.4, 1.3, jobs // 100 + 1), 100)[:jobs]  # calm and busy spells
    submit = np.floor(np.cumsum(draws.exponential(60 / busy)))
    starts, free = [], 0.0
    for at in submit.tolist():
        starts.append(max(at, free))
        free = starts[-1] + 60
    return job_log(submit, np.array(starts) - submit, np.full(jobs, 60), np.full(jobs, 120), np.ones(jobs))


def messy(jobs: int, seed: int) -> JobLog:
    draws = luck(seed)
    submit = np.sort(draws.integers(0, 40 * jobs, jobs))
    wait = np.where(draws.random(jobs) < 0.3, 0, np.exp(draws.normal(4, 1.2, jobs)).astype(int))
    return job_log(
        submit, wait, draws.integers(0, 4000, jobs), draws.integers(60, 7200, jobs), draws.integers(1, 9, jobs)
    )


# The state of a scheduler ---------------------------------------------------------------------------------------

times = st.integers(0, 30).map(float)
small_logs = st.lists(st.tuples(times, times, times, st.integers(1, 9), st.booleans()), min_size=1, max_size=25).map(
    lambda rows: job_log(
        *zip(*((s, w, r, nan if odd else 10.0 + p, p) for s, w, r, p, odd in sorted(rows)), strict=True)
    )
)


@given(small_logs)
def test_state_is_what_counting_every_job_gives(log: JobLog) -> None:
    state = SchedulerState()
    start, end = log.submit + log.wait, log.submit + log.wait + log.run
    area = log.procs * np.nan_to_num(log.requested)
    power = np.log2(log.procs).astype(int)
    for kind, job, at in events(log):
        if kind is Kind.STARTED:
            assert state.started(job, at) == log.wait[job]
        elif kind is not Kind.SUBMITTED:
            state.ended(job, at)
        else:
            found = dict(zip(FEATURES, state.features(at, int(log.procs[job]), log.requested[job]), strict=True))
            waits = (log.submit < at) & (start >= at)
            runs = (start < at) & (end > at)
            for name, who in (("waiting", waits), ("running", runs)):
                assert found[name] == who.sum()
                assert found[f"{name}_procs"] == log.procs[who].sum()
                assert found[f"{name}_area"] == pytest.approx(area[who].sum())
            assert found["oldest_waiting"] == (at - log.submit[waits].min() if waits.any() else 0)
            like = power == power[job]
            assert found["like_waiting"] == (waits & like).sum()
            for prefix, who in (("", start < at), ("like_", (start < at) & like)):
                order = np.lexsort((np.flatnonzero(who), start[who]))
                seen = np.log1p(log.wait[who][order])
                if not len(seen):
                    assert np.isnan(found[f"{prefix}mean_log_wait"])
                    continue
                mean = seen[0]
                for value in seen[1:]:
                    mean += SMOOTHING * (value - mean)
                assert found[f"{prefix}mean_log_wait"] == pytest.approx(mean)
                assert found[f"{prefix}last_log_wait"] == pytest.approx(seen[-1])
                assert found[f"{prefix}last_start_age"] == at - start[who].max()
                if not prefix:
                    assert found["recent_mean"] == pytest.approx(seen[-RECENT:].mean())
                    assert found["recent_max"] == pytest.approx(seen[-RECENT:].max())
            state.submitted(job, at, int(log.procs[job]), log.requested[job])
    assert state.features(1e6, 1, 1.0)[:7] == [0.0] * 7, "at the end nobody waits or runs"


@given(small_logs)
def test_listings_of_a_live_queue_tell_what_the_log_does(log: JobLog) -> None:
    state, before = SchedulerState(), dict[Hashable, Listed]()
    start, end = log.submit + log.wait, log.submit + log.wait + log.run
    for at in range(100):
        there = np.flatnonzero((log.submit <= at) & (end > at))
        now: dict[Hashable, Listed] = {
            int(job): Listed(
                submitted=log.submit[job],
                procs=int(log.procs[job]),
                requested=log.requested[job],
                started=start[job] if start[job] <= at else None,
            )
            for job in there
        }
        tell_differences(state, before, now, float(at))
        before = now
        found = dict(zip(FEATURES, state.features(at + 0.5, 1, nan), strict=True))
        assert found["waiting"] == (start[there] > at).sum()
        assert found["running"] == (start[there] <= at).sum()
    seen = np.sort(start[log.run > 0])  # whoever ran for no time was in no listing
    assert not len(seen) or found["last_start_age"] == 99.5 - seen[-1]


def test_requeued_job_waits_anew() -> None:
    state, ran = SchedulerState(), Listed(submitted=0.0, procs=2, requested=60.0, started=5.0)
    tell_differences(state, {}, {"a": ran}, 6.0)
    tell_differences(state, {"a": ran}, {"a": replace(ran, submitted=10.0, started=None)}, 11.0)
    assert state.waited("a", 14.0) == 4.0
    assert state.features(14.0, 2, 60.0)[:4] == [1, 2, 120.0, 0]


def test_state_forgets_the_oldest_beyond_its_limit_and_ignores_who_it_does_not_know() -> None:
    state = SchedulerState(most=3)
    state.started("nobody", 0.0)
    state.ended("nobody", 0.0)
    for n in range(10):
        state.submitted(n, float(n), procs=1, requested=60.0)
    assert state.features(20.0, 1, 60.0)[:3] == [3, 3, 180.0]
    assert state.started(0, 21.0) is None
    for n in (7, 8, 9):
        assert state.started(n, 21.0) == 21.0 - n
    for n in range(10, 40):
        state.submitted(n, 30.0 + n, procs=1, requested=60.0)
        state.started(n, 30.0 + n)
    assert state.features(90.0, 1, 60.0)[3] == 3


# Nobody knows the future ----------------------------------------------------------------------------------------


def probes_of(log: JobLog, length: float) -> list[tuple[float, int]]:
    return list(probe_jobs(log.submit.tolist(), log.wait.tolist(), length))


@given(small_logs, st.integers(1, 40).map(float))
def test_a_probe_is_the_first_job_of_its_round_and_the_one_before_it_has_started(log: JobLog, length: float) -> None:
    free, last = -1.0, -1.0
    for at, job in probes_of(log, length):
        assert (at - log.submit[0]) % length == 0
        assert at >= free
        assert at > last
        assert at <= log.submit[job] < at + length
        assert not ((log.submit >= at) & (log.submit < log.submit[job])).any()
        free, last = log.submit[job] + log.wait[job], at


@pytest.mark.parametrize("cut", [9_000, 21_000, 33_500])
def test_changing_the_future_changes_no_forecast(cut: int) -> None:
    log = messy(1000, seed=3)
    start, draws = log.submit + log.wait, luck(cut)
    end = start + log.run
    after = draws.integers(1, 9000, len(log)).astype(float)
    other = replace(
        log,
        wait=np.where(start >= cut, np.maximum(cut - log.submit, 0) + after, log.wait),
        run=np.where((start < cut) & (end >= cut), cut - start + after, log.run),
    ).only((log.submit < cut) | (draws.random(len(log)) < 0.3))
    probes = [(at, job) for at, job in probes_of(log, 100.0) if log.submit[job] < cut]
    assert len(probes) > 40
    for name in FORECASTERS:
        if name == "boosting":
            told = [replay_queue(one, Shape(), probes) for one in (log, other)]
        else:
            told = [replay_waits(one, name, probes) for one in (log, other)]
        assert told[0] == told[1], name


def test_boosting_says_the_same_every_time_and_its_quantiles_rise() -> None:
    log = messy(800, seed=5)
    first, second = (replay_queue(log, Shape(procs=(2, 4)), probes_of(log, 200.0)) for _ in range(2))
    assert first == second
    for forecast in first:
        values = [seconds for _, seconds in forecast.quantiles]
        assert np.isfinite(values).all()
        assert values[0] >= 0
        assert values == sorted(values)


def test_boosting_copes_with_a_log_that_says_little() -> None:
    jobs = 300
    together = job_log(np.arange(jobs), np.full(jobs, 500), np.full(jobs, nan), np.full(jobs, nan), np.ones(jobs))
    forecasts = replay_queue(together, Shape(), [(0.0, 0), (250.0, 250)])  # nobody has started yet
    assert [forecast.mean for forecast in forecasts] == [0.0, 0.0]
    later = replace(together, submit=together.submit * 100)
    assert replay_queue(later, Shape(), [(29_900.0, 299)])[0].mean == pytest.approx(500, rel=0.01)


# Queues with known answers --------------------------------------------------------------------------------------


def test_boosting_learns_a_queue_whose_wait_can_be_counted() -> None:
    found = evaluate(one_server(4000), Shape(), 600.0, ("conformal", "boosting"))
    counted, blind = found.scores["boosting"], found.scores["conformal"]
    assert counted.median_mae < 0.25 * blind.median_mae
    assert 0.03 <= counted.late <= 0.07
    assert counted.budget > blind.budget + 0.05
    assert counted.on_time > max(blind.on_time, found.constant_on_time, found.ewma_on_time)
    assert counted.on_time <= found.oracle


@pytest.mark.parametrize("sd", [0.3, 1.0, 2.0])
def test_calibration_finds_the_quantiles_of_errors_that_are_lognormal(sd: float) -> None:
    calibration, below = Calibration(), np.zeros(len(LEVELS))
    draws, rounds = luck(2), 4000
    for _ in range(rounds):
        centre = draws.uniform(4, 9)
        said = calibration.around(centre)
        delay = float(np.exp(centre + 0.5 + sd * draws.standard_normal()) - 1)
        below += [delay <= value for _, value in said.forecast.quantiles]
        calibration.learn(said, max(0.0, delay))
    assert below / rounds == pytest.approx(np.array(LEVELS), abs=0.02)
    assert to_log(calibration.around(6.0).forecast.quantile(0.5)) == pytest.approx(6.5, abs=0.25 * sd)


def test_a_job_that_still_waits_teaches_that_waits_are_long() -> None:
    def forecaster(waiting: int) -> Boosting:
        made = Boosting()
        for n in range(400):
            made.submitted(n, 100.0 * n, 1, 60.0, ours=True)
            made.started(n, 100.0 * n + 10)
            made.ended(n, 100.0 * n + 20)
        for n in range(waiting):
            made.submitted(f"w{n}", 40_000.0 + n, 4, 60.0)
        for n in range(101):  # enough of ours that a model is fitted anew, while the others wait
            made.submitted(f"o{n}", 200_000.0 + 100 * n, 1, 60.0, ours=True)
            made.started(f"o{n}", 200_000.0 + 100 * n + 10)
            made.ended(f"o{n}", 200_000.0 + 100 * n + 20)
        return made

    alone, after_them = (made.forecast(300_000.0, 4, 60.0).mean for made in (forecaster(0), forecaster(300)))
    assert alone == pytest.approx(10, abs=0.1)
    assert after_them > 10_000, "those of four processors have waited for two days"


def test_issued_forecasts_are_messages_of_their_source() -> None:
    made = Boosting((2, 4), 600.0).issue("east", 5.0)
    assert (made.facility, made.at, made.source) == ("east", 5.0, "boosting")
    assert tuple(level for level, _ in made.quantiles) == LEVELS
    assert SchedulerEstimates(first=3.0).issue("east", 5.0, None).source == "scheduler"


# What the scheduler says ----------------------------------------------------------------------------------------

# Slurm 22.05, TZ=UTC.
WAITING = (
    "JobId=3 JobName=wrap UserId=root(0) JobState=PENDING Reason=Resources Dependency=(null) Restarts=0 "
    "SubmitTime=2026-11-16T22:00:01 EligibleTime=2026-11-16T22:00:11 StartTime=2026-11-16T22:02:08 "
    "EndTime=2026-11-16T22:03:08 NodeList=(null) SchedNodeList=x1"
)
TEST_ONLY = "sbatch: Job 6 to start at 2026-11-16T22:05:08 using 1 processors on nodes x1 in partition batch\n"
NOW = 1794866411.0


def test_answers_of_slurm_are_seconds_of_its_own_clock() -> None:
    assert read_plan(WAITING) == 117.0
    for other in ("StartTime=Unknown", "StartTime=2026-11-16T22:00:02"):
        assert read_plan(WAITING.replace("StartTime=2026-11-16T22:02:08", other)) in (None, 0.0)
    assert read_plan(WAITING.replace("EligibleTime=2026-11-16T22:00:11", "EligibleTime=Unknown")) is None
    assert read_plan(WAITING.replace("PENDING", "RUNNING")) is None
    assert read_clock("*****\nsdiag output at Mon Nov 16 22:00:11 2026 (1794866411)\nData since ...\n") == NOW
    assert read_test_only(TEST_ONLY, NOW) == 297.0
    assert read_test_only("allocation failure: Requested node configuration is not available\n", NOW) is None


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="no recordings of PBS: point FEDQUEUE_PBS_RECORDINGS at them")
def test_answers_of_pbs_are_the_whole_wait_of_what_is_queued() -> None:
    def answers(case: str) -> list[str]:
        steps = json.loads((RECORDINGS / f"{case}.json").read_text())["steps"]
        return [step["stdout"] for step in steps if step.get("argv", [""])[0] == "qstat"]

    assert read_estimates(answers("10-queued")[0]) == {"36.pbs-host": 296.0}
    for text in answers("16-finished-ok") + answers("31-unknown-id"):
        assert read_estimates(text) == {}, "an estimate stays in the record of a job that ran"


@given(st.text(max_size=60))
def test_nonsense_is_no_estimate(text: str) -> None:
    assert read_plan(text) is None
    assert read_clock(text) is None
    assert read_test_only(text, 0.0) is None
    assert read_estimates(text) == {}
    assert read_estimates(json.dumps({"Jobs": {"1": text, "2": {"job_state": "Q", "estimated": text}}})) == {}


def test_estimates_are_corrected_by_the_factor_they_are_off_and_own_waits_stand_in() -> None:
    draws, forecaster, late = luck(4), SchedulerEstimates(), []
    for n in range(1500):
        at, estimate = 1e5 * n, float(np.exp(draws.uniform(3, 8)))
        wait = estimate * float(np.exp(-1.5 + 0.4 * draws.standard_normal()))
        silent = n % 5 == 0
        if n > 300 and not silent:
            late.append(wait > forecaster.forecast(at, estimate).quantile(0.95))
        forecaster.submitted(n, at, None if silent else estimate)
        forecaster.started(n, at + wait)
    assert 0.03 <= np.mean(late) <= 0.07
    assert forecaster.forecast(2e8, 1000.0).quantile(0.5) == pytest.approx(1000 * np.exp(-1.5), rel=0.2)
    blind = forecaster.forecast(2e8, None)
    assert blind.quantile(0.05) < np.exp(5.5 - 1.5) < blind.quantile(0.95)
    forecaster.submitted("ours", 2e8, None)
    forecaster.still_waiting(2e8 + 1e6)
    assert forecaster.forecast(2e8 + 1e6, None).quantile(0.99) >= 1e6


# The figures ----------------------------------------------------------------------------------------------------


def flat(mean: float, *, at_95: float, median: float = 1.0) -> Forecast:
    return Forecast(mean, tuple((p, median if p < 0.95 else at_95) for p in LEVELS))


def test_figures_of_a_small_case_are_those_worked_out_by_hand() -> None:
    waits = np.array([1.0, 3.0, 6.0, 20.0])
    forecasts = [flat(2.0, at_95=4.0), flat(2.0, at_95=4.0), flat(2.0, at_95=5.0), flat(4.0, at_95=12.0)]
    found = score(forecasts, waits, 10.0, published_mae=10.0, per_second=1.0)
    assert (found.mae, found.median_mae) == ((1 + 1 + 4 + 16) / 4, (0 + 2 + 5 + 19) / 4)
    assert (found.mae_ratio, found.median_mae_ratio) == (0.55, 0.65)
    assert found.median_error == 3.5
    assert found.late == 0.5
    assert found.budget == (0.6 + 0.6 + 0.5 + 0.0) / 4
    # 90 % below 1 s: U = 1 leaves 9 * 0.9, and the first job alone is on time.
    assert found.on_time == pytest.approx(0.9 / 4)
    assert dict(found.calibration)[0.5] == 0.25
    assert dict(found.calibration)[0.95] == 0.5
    # No job may be late of so few: log(1 + U) grows by log(21/13), log(7/6) being less.
    limits = np.array([4.0, 4.0, 5.0, 12.0])
    shifted = (1 + limits) * 21 / 13 - 1
    assert found.equal_budget == pytest.approx(np.maximum(0, 10 - shifted).mean() / 10)
    assert found.margin_budget == 0.0


def test_hindsight_finds_the_one_number_that_leaves_the_share_late() -> None:
    waits, expected = np.arange(1.0, 101.0), np.full(100, 10.0)
    assert margin_budget_at(expected, waits, 100.0, 0.05) == pytest.approx(0.05), "U = 95, and five are longer"
    assert budget_at(np.full(100, 7.0), waits, 100.0, 0.05) == pytest.approx(0.05), "whatever U it begins from"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12), st.integers(1, 40))
def test_best_margin_is_the_best_of_all_that_are_tried(pairs: list[tuple[int, int]], length: int) -> None:
    expected, waits = np.array(pairs, dtype=np.float64).T
    tried = []
    for margin in range(-31, 32):
        limits = np.maximum(0, expected + margin)
        tried.append(np.where(waits <= limits, np.maximum(0, length - limits), 0).mean() / length)
    assert best_margin(expected, waits, float(length)) == pytest.approx(max(tried))


def test_published_forecaster_is_always_among_the_figures_and_counts_the_same_probes() -> None:
    log = messy(900, seed=7)
    found = evaluate(log, Shape(procs=(2, 8)), 300.0, ("rolling-median",))
    assert list(found.scores) == ["ewma", "rolling-median"]
    assert found.scores["ewma"].mae_ratio == 1
    assert found.scores["ewma"].margin_budget == found.ewma_budget
    assert found.ewma_on_time <= found.oracle
    every = probes_of(log.of_shape((2, 8)), 300.0)
    assert found.probes + found.warm_up + 1 == len(every)
    with pytest.raises(DataError, match="too few to evaluate"):
        evaluate(log, Shape(), 1e9, ())
    with pytest.raises(DataError, match="no job has this shape"):
        evaluate(log, Shape(procs=(99, 99)), 300.0, ())


@settings(max_examples=15, deadline=None)
@given(small_logs, st.integers(1, 20).map(float))
def test_any_log_that_has_two_probes_to_spare_can_be_evaluated(log: JobLog, length: float) -> None:
    if len(probes_of(log, length)) >= 2:
        found = evaluate(log, Shape(), length, ("combined",))
        assert all(np.isfinite(one.on_time) and 0 <= one.late <= 1 for one in found.scores.values())
