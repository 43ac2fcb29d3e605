"""Forecasts are distributions that make sense and only of the past, their levels are right where the answer is known,
and the rules that use them do what they say."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedqueue.config import Config, parse
from fedqueue.protocol.budget import GUARD, binding, linger_until, longest_stay, train_budget
from fedqueue.protocol.contract import Standing
from fedqueue.protocol.messages import JobFailed, PostWork, Record, SubmitJob, TimerFired, UpdateArrived
from fedqueue.protocol.pace import LADDER, busy_share, choose_round_length
from fedqueue.protocol.predict import LEVELS, PREDICTORS, Forecast, Predictor, make_predictor
from fedqueue.protocol.predict.base import reserve
from fedqueue.sim.runner import simulate
from tests.conftest import ONE_A_ROUND, commands_of, trace_of

NAMES = [*PREDICTORS, "conformal/ewma", "conformal/rolling-quantile", "conformal/combined"]
DELAYS = st.lists(st.floats(0, 1e7), max_size=120)
EMPIRICAL = ("static", "rolling-median", "rolling-quantile")  # never beyond what was seen


def told(name: str, delays: list[float], first: float | None = 2.0, smoothing: float = 0.5) -> Predictor:
    predictor = make_predictor(name, first, smoothing)
    for i, delay in enumerate(delays):
        predictor.observe(float(i), delay)
    return predictor


def values(forecast: Forecast) -> list[float]:
    assert [p for p, _ in forecast.quantiles] == list(LEVELS)
    return [q for _, q in forecast.quantiles]


# Every predictor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(delays=DELAYS, first=st.floats(0, 1e6), smoothing=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_quantiles_are_ordered_and_within_bounds(
    name: str, delays: list[float], first: float, smoothing: float
) -> None:
    """Bound: the longest delay seen, times by how much the longest exceeds the shortest (a centre that is as long as
    any, with an error as great as any); four times the longest while a predictor guesses its spread."""
    found = told(name, delays, first, smoothing).forecast(0.0)
    quantiles = values(found)
    assert quantiles == sorted(quantiles)
    shortest, longest = min([first, *delays]), max([first, *delays])
    factor = (longest + 1) / (shortest + 1)
    bound = longest if name in EMPIRICAL else max(4 * longest, (longest + 1) * max(math.exp(0.8), factor))
    for q in (*quantiles, found.mean):
        assert 0 <= q <= bound * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(delays=DELAYS, later=DELAYS, asked=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_the_future_does_not_change_a_forecast_nor_does_asking(
    name: str, delays: list[float], later: list[float], asked: int
) -> None:
    short, long = told(name, delays), told(name, delays)
    for _ in range(asked):
        long.forecast(0.0)
    before = long.forecast(0.0)
    for delay in later:
        long.observe(0.0, delay)
    assert short.forecast(0.0) == before


@pytest.mark.parametrize("name", NAMES)
@given(delays=DELAYS, waited=st.floats(0, 1e8), then=st.floats(0, 1e7))
@settings(max_examples=60, deadline=None)
def test_wait_under_way_never_shortens_a_forecast_and_is_within_it(
    name: str, delays: list[float], waited: float, then: float
) -> None:
    predictor, twin = told(name, delays), told(name, delays)
    calm = predictor.forecast(0.0)
    predictor.still_waiting(0.0, waited)
    lifted = predictor.forecast(0.0)
    assert lifted.mean >= calm.mean
    assert all(after >= before for before, after in zip(values(calm), values(lifted), strict=True))
    assert values(lifted) == sorted(values(lifted))
    assert values(lifted)[-1] >= waited
    predictor.observe(0.0, then)
    twin.observe(0.0, then)
    assert predictor.forecast(0.0) == twin.forecast(0.0), "it counts until the real delay is known"


@pytest.mark.parametrize("name", [n for n in NAMES if n != "static"])
def test_a_long_wait_under_way_lifts_more_than_the_last_quantile(name: str) -> None:
    predictor = told(name, [60.0 + n % 7 for n in range(50)])
    calm = predictor.forecast(0.0)
    predictor.still_waiting(0.0, 50_000.0)
    lifted = predictor.forecast(0.0)
    assert sum(after > before for before, after in zip(values(calm), values(lifted), strict=True)) > 3


@pytest.mark.parametrize("name", NAMES)
def test_queue_that_always_waits_the_same_is_never_above_its_forecast(name: str) -> None:
    for delay in (0.0, 60.0, 1234.56789):
        predictor = told(name, [delay] * 400, first=None)
        for level in (0.5, 0.95):
            assert delay <= predictor.forecast(0.0).quantile(level) <= delay + 1e-6


def test_unknown_predictor_is_one_clear_error() -> None:
    for name in ("oracle", "conformal/oracle", "conformal/conformal"):
        with pytest.raises(ValueError, match=r"predictor must be one of static, ewma, .* found '") as caught:
            make_predictor(name, None, 0.5)
        assert "\n" not in str(caught.value)


# Queues with known answers ------------------------------------------------------------------------------


def shares_under(predictor: Predictor, waits: list[float], warm_up: int) -> dict[float, float]:
    """Of the waits after the warm-up, the share under each level's quantile."""
    under = dict.fromkeys(LEVELS, 0)
    for i, wait in enumerate(waits):
        if i >= warm_up:
            for level, quantile in predictor.forecast(float(i)).quantiles:
                under[level] += wait <= quantile
        predictor.observe(float(i), wait)
    return {level: count / (len(waits) - warm_up) for level, count in under.items()}


def lognormal(count: int, seed: int, spread: float = 1.5) -> list[float]:
    draws: list[float] = (600.0 * np.exp(spread * np.random.default_rng(seed).standard_normal(count))).tolist()
    return draws


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("conformal") or n in ("combined", "log-kalman")])
def test_every_level_is_realised_on_independent_lognormal_waits(name: str) -> None:
    count = 3000
    for level, share in shares_under(told(name, [], smoothing=0.2), lognormal(count + 300, 3), 300).items():
        # Four standard errors of a binomial share, and a little for what a window of 64 to 300 delays cannot know.
        assert share == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / count) + 0.01)


@pytest.mark.parametrize("name", ["conformal", "conformal/ewma", "combined"])
def test_late_rate_holds_through_steps_and_periods(name: str) -> None:
    waits = np.array(lognormal(2400, 5, spread=0.7))
    hours = np.arange(2400)
    stepped = np.where((hours // 400) % 2 == 0, waits, 30 * waits)
    periodic = waits * np.exp(2 * np.sin(2 * np.pi * hours / 24))
    for queue in (stepped, periodic):
        late = 1 - shares_under(told(name, [], smoothing=0.2), queue.tolist(), 200)[0.95]
        assert 0.03 <= late <= 0.07


@pytest.mark.parametrize("name", ["conformal", "conformal/rolling-median", "combined"])
def test_late_rate_holds_in_a_queue_that_grows_and_grows(name: str) -> None:
    growing = np.array(lognormal(600, 9, spread=0.02)) * 1.02 ** np.arange(600)
    late = 1 - shares_under(told(name, [], smoothing=0.2), growing.tolist(), 200)[0.95]
    assert 0.03 <= late <= 0.07


@pytest.mark.parametrize("factor", [50.0, 0.02])
def test_change_point_recovers_from_a_step_sooner_than_averages(factor: float) -> None:
    before = lognormal(200, 1, spread=0.3)

    def forecasts_until_right(name: str) -> int:
        predictor = told(name, before, smoothing=0.2)
        for count, wait in enumerate(lognormal(100, 2, spread=0.3)):
            if 0.5 < predictor.forecast(0.0).quantile(0.5) / (600 * factor) < 2:
                return count
            predictor.observe(0.0, factor * wait)
        return 100

    soon = forecasts_until_right("change-point")
    assert soon <= 4
    assert all(forecasts_until_right(name) > soon for name in ("ewma", "log-ewma", "rolling-median"))
    assert forecasts_until_right("combined") <= 12, "follows the one that is right"


def test_kalman_filter_learns_how_fast_to_follow() -> None:
    noise = np.random.default_rng(4).standard_normal((2, 1500))
    steady = np.exp(6 + noise[0])
    wandering = np.exp(6 + np.cumsum(0.3 * noise[1]).clip(-5, 5) + 0.1 * noise[0])

    def error(name: str, smoothing: float, queue: list[float]) -> float:
        predictor, total = told(name, [], smoothing=smoothing), 0.0
        for i, wait in enumerate(queue):
            centre = predictor.forecast(0.0).quantile(0.5)
            total += (math.log((1 + wait) / (1 + centre))) ** 2 if i >= 300 else 0.0
            predictor.observe(0.0, wait)
        return total

    for queue in (steady.tolist(), wandering.tolist()):
        best = min(error("log-ewma", smoothing, queue) for smoothing in (0.02, 0.2, 0.9))
        assert error("log-kalman", 0.5, queue) < 1.1 * best


def test_combined_is_about_as_good_as_the_best_wherever_that_changes() -> None:
    members = ("ewma", "log-ewma", "rolling-quantile", "change-point", "log-kalman")
    steady = lognormal(1200, 8)
    stepped = [wait * (40 if i // 60 % 2 else 1) for i, wait in enumerate(lognormal(1200, 9, spread=0.3))]
    for queue in (steady, stepped):
        losses = {}
        for name in (*members, "combined"):
            predictor, total = told(name, [], smoothing=0.2), 0.0
            for i, wait in enumerate(queue):
                if i >= 200:
                    for level, quantile in predictor.forecast(0.0).quantiles:
                        error = math.log((1 + wait) / (1 + quantile))
                        total += level * error if error > 0 else (level - 1) * error
                predictor.observe(0.0, wait)
            losses[name] = total
        assert losses["combined"] <= 1.05 * min(losses[name] for name in members), losses


# Rules --------------------------------------------------------------------------------------------------

FORECASTS = st.builds(
    lambda mean, seconds: Forecast(mean, tuple(zip(LEVELS, sorted(seconds), strict=True))),
    st.floats(0, 1e4),
    st.lists(st.floats(0, 1e4) | st.just(0.0), min_size=len(LEVELS), max_size=len(LEVELS)),
)


def share_under(forecast: Forecast, seconds: float) -> float:
    """F, in the plainest way: 0 below the first quantile, linear between them, flat above the last."""
    found = 0.0
    for (p0, q0), (p1, q1) in pairwise(forecast.quantiles):
        if q1 <= seconds:
            found = p1
        elif q0 <= seconds < q1:
            return max(found, p0 + (p1 - p0) * (seconds - q0) / (q1 - q0))
    return max(found, forecast.quantiles[0][0]) if forecast.quantiles[0][1] <= seconds else 0.0


@settings(deadline=None)
@given(forecast=FORECASTS, until=st.floats(-10, 2e4))
def test_newsvendor_is_no_worse_than_any_other_choice(forecast: Forecast, until: float) -> None:
    chosen = reserve("newsvendor", forecast, until, margin=0.0, late_rate=0.05)
    worth = max(0.0, until - chosen) * share_under(forecast, chosen)
    tried = [until * n / 997 for n in range(998)] + [q + e for _, q in forecast.quantiles for e in (0, 1e-9, -1e-9)]
    for seconds in tried:
        assert (until - seconds) * share_under(forecast, seconds) <= worth + 1e-6 * max(1.0, until)
    if all(q >= until for _, q in forecast.quantiles):
        assert train_budget(until, chosen, 0.0, 0.5) == 0.5, "nothing fits: the floor"


@given(forecast=FORECASTS, rates=st.tuples(st.floats(0, 1), st.floats(0, 1)), margin=st.floats(0, 1e3))
def test_late_rate_sets_more_aside_the_fewer_may_be_late_and_paper_is_mean_and_margin(
    forecast: Forecast, rates: tuple[float, float], margin: float
) -> None:
    few, many = sorted(rates)
    asked = [reserve("late-rate", forecast, 1e4, margin=margin, late_rate=rate) for rate in (few, many)]
    assert asked[0] >= asked[1]
    assert reserve("paper", forecast, 1e4, margin=margin, late_rate=few) == forecast.mean + margin


def run_of(strategy: str, options: dict[str, object], *, rounds: int, mean: float = 20.0) -> Config:
    queue = {"kind": "lognormal", "mean": mean, "rho": 0.9}
    return parse(
        {
            "run": {"strategy": strategy, "rounds": rounds, "seed": 3, "round_length": 100.0},
            "task": {"name": "timing"},
            "strategy": {strategy: options},
            "facility": [{"name": name, "steps_per_second": 10.0, "queue": queue} for name in ("north", "south")],
        }
    )


def test_run_by_late_rate_is_late_so_often_and_newsvendor_brings_more_on_time() -> None:
    late, on_time = {}, {}
    for rule in ("late-rate", "newsvendor"):
        options: dict[str, object] = {"rule": rule, "predictor": "conformal", "smoothing": 0.2}
        trace = trace_of(run_of("fedqueue", options, rounds=1500))
        fates = [r.facts for r in commands_of(trace, Record) if r.kind == "fate"][400:]  # two facilities
        late[rule] = sum(bool(f["deferred"]) for f in fates) / len(fates)
        steps = {e.receipt.job_id: e.receipt.steps_done for e, _ in trace if isinstance(e, UpdateArrived)}
        on_time[rule] = sum(steps[str(f["job"])] for f in fates if not f["deferred"]) / len(fates)
    assert late["late-rate"] == pytest.approx(0.05, abs=0.015)
    assert late["newsvendor"] > 0.05
    assert on_time["newsvendor"] > on_time["late-rate"]


# Just in time -------------------------------------------------------------------------------------------


@given(
    start=st.floats(0, 1e4),
    until=st.floats(0, 300),
    gap=st.floats(-100, 100),
    patience=st.floats(0, 40),
    overhead=st.floats(0, 20),
    min_steps=st.integers(1, 200),
    where=st.floats(0, 1),
)
def test_no_job_that_starts_as_foreseen_stays_longer(
    start: float, until: float, gap: float, patience: float, overhead: float, min_steps: int, where: float
) -> None:
    work = Standing(
        version=1,
        next_cutoff=max(0.0, start + gap),
        round_length=100.0,
        steps_per_second=10.0,
        overhead=overhead,
        min_steps=min_steps,
        learning_rate=0.1,
        patience=patience,
    )
    stay = longest_stay(work, start, start + until)
    assert stay <= 100.0 + max(2 * patience, min_steps / 10.0) + 1e-6, "never more than the longest"
    begun = start + where * until
    takes = linger_until(work, begun) or begun
    assert binding(work, takes).cutoff - begun - overhead - GUARD <= stay + 1e-6


@settings(deadline=None)
@given(forecasts=st.lists(FORECASTS, min_size=1, max_size=4), overhead=st.floats(0, 500), busy=st.floats(0, 1))
def test_round_length_is_the_shortest_that_keeps_facilities_busy(
    forecasts: list[Forecast], overhead: float, busy: float
) -> None:
    lengths = [100.0 * factor for factor in LADDER]
    shares = [sum(busy_share(forecast, length) for forecast in forecasts) / len(forecasts) for length in lengths]
    assert all(longer >= shorter - 1e-12 for shorter, longer in pairwise(shares))
    assert all(0 <= share <= 1 + 1e-12 for share in shares)
    grid = [forecasts[0].quantile((n + 0.5) / 2000) for n in range(2000)]
    assert busy_share(forecasts[0], 100.0) == pytest.approx(sum(100.0 / max(100.0, q) for q in grid) / 2000, abs=0.01)
    chosen = choose_round_length(100.0, forecasts, overhead, busy)
    assert chosen in lengths
    for length, share in zip(lengths, shares, strict=True):
        if length < chosen:
            assert share < busy + 1e-9 or length < 4 * overhead


def test_rounds_by_forecast_follow_the_queue_and_cutoffs_are_those_posted() -> None:
    lengths = {}
    for mean in (1.0, 1000.0):
        trace = trace_of(run_of("jit", {**ONE_A_ROUND, "rounds": "forecast", "wall": "forecast"}, rounds=40, mean=mean))
        fired = [e.at for e, _ in trace if isinstance(e, TimerFired) and e.key.startswith("cutoff/")]
        posted = {c.standing.next_cutoff for c in commands_of(trace, PostWork)}
        assert set(fired[1:-1]) <= posted
        assert not [e for e, _ in trace if isinstance(e, JobFailed)], "no job waits its wall time away"
        lengths[mean] = fired[-1] - fired[-2]
    assert lengths == {1.0: 25.0, 1000.0: pytest.approx(1600.0)}


def test_wall_time_by_forecast_asks_for_less_and_loses_little() -> None:
    asked, done = {}, {}
    for wall in ("longest", "forecast"):
        options = {"wall": wall, "predictor": "conformal", "pipeline": "off", **ONE_A_ROUND}
        config = run_of("jit", options, rounds=400)
        asked[wall] = [c.order.wall_seconds for c in commands_of(trace_of(config), SubmitJob)]
        done[wall] = simulate(config)
    assert max(asked["forecast"]) <= max(asked["longest"])
    assert sum(asked["forecast"]) / len(asked["forecast"]) < 0.95 * asked["longest"][0]
    assert done["forecast"]["jobs"]["failed"] == 0
    assert done["forecast"]["local_steps"] > 0.95 * done["longest"]["local_steps"]
