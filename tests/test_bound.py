"""Lemma 1 against errors whose tails are known, the sharper bound against the simulator, forecasts over a trace."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedqueue.errors import RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.messages import JobStarted, SubmitJob
from fedqueue.protocol.predict import PREDICTORS
from fedqueue.sim.runner import simulate
from fedqueue_reproduction.bound import Series, Setting, assess, lemma_bound, sharper_bound
from fedqueue_reproduction.bound_text import verdict
from fedqueue_reproduction.error_distribution import NEAR, reach, shape_of
from fedqueue_reproduction.forecast_errors import Probe, of_pairs, of_run, replay_forecasts
from tests.conftest import commands_of, config_of, facility, trace_of


def setting(**changes: Any) -> Setting:
    return Setting(**{"facilities": 4, "rounds": 50, "round_length": 10.0, "margin": 2.0, **changes})


def luck(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


# The arithmetic -----------------------------------------------------------------------------------------------


def test_gaussian_errors_have_a_proxy_near_their_variance_and_need_the_margin_of_the_formula() -> None:
    for seed in range(5):
        found = assess({"east": Series(2.0 * luck(seed).standard_normal(2000))}, setting())
        shape = found.by_facility["east"].shape
        assert shape.proxy_ratio is not None
        assert 1 <= shape.proxy_ratio < 1.3
        assert found.checks[0].needed_margin == pytest.approx(sqrt(2 * shape.rho**2 * log(4 * 50 / 0.05)))
        assert found.checks[0].needed_margin == pytest.approx(2.0 * sqrt(2 * log(4000)), rel=0.2)
        assert "near to sub-Gaussian" in " ".join(verdict(found))


def test_lognormal_waits_have_errors_far_from_sub_gaussian_and_log_errors_near_it() -> None:
    for seed in range(5):
        waits = np.exp(0.9 * luck(seed).standard_normal(2000))
        forecasts = np.full(2000, waits.mean())
        found = assess({"east": of_pairs(list(zip(forecasts, waits, strict=True)))}, setting())
        figures = found.by_facility["east"]
        assert figures.log is not None
        assert figures.shape.proxy_ratio is not None
        assert figures.log.shape.proxy_ratio is not None
        assert figures.shape.proxy_ratio > 3
        assert figures.log.shape.proxy_ratio < 1.3
        assert figures.log.shape.sd == pytest.approx(0.9, rel=0.1)
        logs = figures.log.shape
        assert figures.log.factor == pytest.approx(exp(logs.mean + sqrt(2 * logs.rho**2 * log(4 * 50 / 0.05))))
        assert figures.log.trains == (forecasts[0] * figures.log.factor < 10.0)
        said = " ".join(verdict(found))
        assert "far from sub-Gaussian" in said
        assert "log errors are near to it" in said


def test_small_case_by_hand() -> None:
    # Errors of +-2 s: the variance is 4, and by Hoeffding's lemma so is the proxy. With epsilon = exp(-2) and K R = 1
    # the margin is sqrt(2 * 4 * 2) = 4 s. A margin of 2 s lacks 2 s of it: gamma = 0.2, so 2 by the Lemma, and 1 as
    # rounds are counted. A job with the error 2 s is then back at its cutoff: none is deferred. With a margin of 1 s
    # half of them are.
    errors = Series(np.array([2.0, -2.0] * 30), np.full(60, 3.0))
    found = assess({"east": errors}, setting(facilities=1, rounds=1, epsilon=exp(-2), gamma=0.1))
    lemma = found.checks[0]
    assert lemma.rho == pytest.approx(2.0)
    assert lemma.needed_margin == pytest.approx(4.0)
    assert lemma.gamma == pytest.approx(0.2)
    assert (lemma.lemma_bound, lemma.sharper_bound) == (2, 1)
    assert found.margin_for_gamma == pytest.approx(3.0)
    assert found.by_facility["east"].deferred == 0
    assert found.by_facility["east"].stalest == 0
    rules = {rule.name: rule for rule in found.rules_of_run}
    assert rules["lemma"].budget == pytest.approx((10 - 3 - 4) / 10)
    assert rules["quantile"].margin == pytest.approx(2.0), "half of them are there, and exp(-2) is less than half"
    tight = assess({"east": errors}, setting(facilities=1, rounds=1, margin=1.0)).by_facility["east"]
    assert (tight.deferred, tight.stalest) == (0.5, 1)


@pytest.mark.parametrize("ones", [2, 5, 20, 45])
def test_proxy_of_a_bernoulli_sample_is_the_known_one(ones: int) -> None:
    # Kearns and Saul: the least proxy of a centred Bernoulli(p) is (1 - 2p) / (2 log((1 - p) / p)).
    p = ones / 100
    shape = shape_of(np.array([1.0] * ones + [0.0] * (100 - ones)))
    assert shape.rho**2 == pytest.approx((1 - 2 * p) / (2 * log((1 - p) / p)), rel=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60))
def test_no_sample_is_above_the_envelope_of_its_own_proxy(values: list[float]) -> None:
    errors = np.array(values)
    assume(errors.std() > 1e-3)
    shape = shape_of(errors)
    for error in values:
        if error > shape.mean:
            share = float((errors >= error).mean())
            assert share <= exp(-((error - shape.mean) ** 2) / (2 * shape.rho**2)) * (1 + 1e-6)


@given(
    rho=st.floats(0.01, 1e5),
    facilities=st.integers(1, 100),
    rounds=st.integers(1, 100_000),
    epsilon=st.floats(1e-6, 0.9),
    more=st.integers(1, 50),
)
def test_needed_margin_rises_with_facilities_and_rounds_and_falls_with_epsilon(
    rho: float, facilities: int, rounds: int, epsilon: float, more: int
) -> None:
    def needed(k: int, r: int, e: float) -> float:
        return reach(rho, setting(facilities=k, rounds=r, epsilon=e).chance)

    here = needed(facilities, rounds, epsilon)
    assert needed(facilities + more, rounds, epsilon) > here
    assert needed(facilities, rounds + more, epsilon) > here
    assert needed(facilities, rounds, epsilon * (1 + more / 500)) < here


def test_rare_great_error_shows_in_how_few_errors_decide_the_proxy() -> None:
    calm = luck().standard_normal(500)
    wild = np.append(calm, 60.0)
    assert (shape_of(calm).proxy_support or 0) > 5
    assert shape_of(wild).proxy_support == pytest.approx(1.0, abs=0.1)
    assert (shape_of(wild).proxy_ratio or 0) > 10 * NEAR


def test_same_error_always_is_no_spread_and_needs_no_margin() -> None:
    found = assess({"east": Series(np.full(50, 1.5), np.full(50, 2.0))}, setting())
    assert found.by_facility["east"].shape.proxy_ratio is None
    assert found.checks[0].needed_margin == 0
    assert found.by_facility["east"].deferred == 0


def test_bound_fitted_on_calm_errors_is_broken_by_the_wild_ones_that_follow() -> None:
    errors = np.concatenate([luck().standard_normal(200), 15.0 * luck(2).standard_normal(200)])
    found = {check.rho_from: check for check in assess({"east": Series(errors)}, setting()).checks}
    assert found["all errors"].above == 0, "it was fitted to them"
    assert found["first half"].errors == 200
    assert found["first half"].above > 20
    assert found["first half"].run_chance > 0.99


# Against the simulator ----------------------------------------------------------------------------------------


def test_staleness_exceeds_the_sharper_bound_exactly_where_the_error_exceeds_gamma_rounds_and_the_margin(
    tmp_path: Path,
) -> None:
    # Steps so short that a job uses its budget to the last; then the only question is when it is back.
    sites = [
        facility(name, steps_per_second=1e5, queue={"kind": "lognormal", "mean": mean, "rho": 1.3})
        for name, mean in (("east", 1.5), ("west", 3.0))
    ]
    options = {"margin": 1.0, "min_steps": 1, "min_train_budget": 0.0}
    simulate(config_of("fedqueue", facilities=sites, options=options, rounds=600), folder=tmp_path)
    with LedgerReader(tmp_path / FILE) as ledger:
        rows = ledger.rows(
            "SELECT expected_delay AS expected, admission_delay - expected_delay AS error, staleness "
            "FROM jobs JOIN updates USING (job) WHERE fate = 'aggregated'"
        )
    # Where q-hat + delta is more than the round, training is down to one step, and the Lemma's premise h <= J fails.
    kept = [(row["error"], row["staleness"]) for row in rows if row["expected"] + 1.0 < 10.0]
    assert len(kept) > 0.9 * len(rows) > 500
    for gamma in (0.0, 1.0, 2.0):
        above = sum(error > gamma * 10.0 + 1.0 for error, _ in kept)
        assert above > 0, "otherwise this shows nothing"
        assert sum(staleness > sharper_bound(gamma) for _, staleness in kept) == above
        assert sum(staleness > lemma_bound(gamma) for _, staleness in kept) < above, "the Lemma's is one round wider"
    for gamma in (0.2, 0.7, 1.5):
        above = sum(error > gamma * 10.0 + 1.0 for error, _ in kept)
        assert sum(staleness > sharper_bound(gamma) for _, staleness in kept) <= above


def test_errors_of_a_run_are_those_of_its_events(tmp_path: Path) -> None:
    faults = [{"kind": "preempt", "probability": 0.3}]
    config = config_of("fedqueue", rounds=30, faults=faults)
    trace = trace_of(config)
    expected = {c.order.job_id: c.order.expected_delay for c in commands_of(trace, SubmitJob)}
    waited: dict[str, float] = {}
    for event, _ in trace:
        if isinstance(event, JobStarted):
            waited.setdefault(event.job_id, event.admission_delay)
    simulate(config, folder=tmp_path)
    measured = of_run(tmp_path)
    for name in ("east", "west"):
        jobs = [job for job in expected if job in waited and job.startswith(name)]
        assert measured.series[name].errors.tolist() == [waited[job] - expected[job] for job in jobs]
    assert (measured.rounds, measured.round_length, measured.margin) == (30, 10.0, 2.0)


def test_run_that_forecasts_nothing_has_no_errors(tmp_path: Path) -> None:
    simulate(config_of("fedavg", rounds=3), folder=tmp_path)
    with pytest.raises(RunFolderError, match="fedavg"):
        of_run(tmp_path)


# Forecasts over a trace ---------------------------------------------------------------------------------------

JOBS = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 900)), min_size=1, max_size=60)


def replay(jobs: list[tuple[int, int]], predictor: str = "ewma") -> list[Probe]:
    ordered = sorted(jobs)
    return replay_forecasts([float(s) for s, _ in ordered], [float(w) for _, w in ordered], 100.0, predictor=predictor)


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
@given(jobs=JOBS, cut=st.integers(0, 4000))
def test_cutting_off_the_future_of_a_trace_changes_no_earlier_error(
    predictor: str, jobs: list[tuple[int, int]], cut: int
) -> None:
    begin = min(jobs)[0]
    past = [job for job in jobs if job[0] <= max(cut, begin)]
    short, long = replay(past, predictor), replay(jobs, predictor)
    assert short == long[: len(short)]
    assert len(short) >= sum(probe.at + 100 <= cut for probe in long)


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
@given(jobs=JOBS, now=st.integers(0, 4000), other=st.integers(1, 500))
def test_waits_that_are_not_over_change_no_forecast(
    predictor: str, jobs: list[tuple[int, int]], now: int, other: int
) -> None:
    jobs = sorted(jobs)
    changed = [(s, w if s + w <= now else w + other) for s, w in jobs]
    before = [(p.at, p.expected) for p in replay(jobs, predictor) if p.at <= now]
    after = [(p.at, p.expected) for p in replay(changed, predictor) if p.at <= now]
    assert before == after


@given(jobs=JOBS)
def test_one_probe_at_a_time_and_it_is_the_first_of_its_round(jobs: list[tuple[int, int]]) -> None:
    probes = replay(jobs)
    for probe in probes:
        inside = sorted((s, w) for s, w in jobs if probe.at <= s < probe.at + 100)
        assert (inside[0][1], (probe.at - min(jobs)[0]) % 100) == (probe.delay, 0)
    for one, following in pairwise(probes):
        assert following.at >= one.at + max(100.0, one.delay)
