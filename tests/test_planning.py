"""The planner against answers worked out by hand, and properties that no plan may break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedqueue import data
from fedqueue.config import FixedQueue
from fedqueue.errors import ConfigError, DataError
from fedqueue.history.joblog import JobLog
from fedqueue.history.read import read_log
from fedqueue.history.requests import ByRequest, Waits
from fedqueue.planning import whatif
from fedqueue.planning.advice import Advice, Wish, advise
from fedqueue.planning.candidates import Candidate, ladder
from fedqueue.planning.curve import LearningCurve, read_curve
from fedqueue.planning.measure import Worth
from fedqueue.planning.places import Place, alike
from fedqueue.planning.search import Searcher, Setting, simulate
from fedqueue.planning.shapes import Shape, choose, sizes_of
from fedqueue.planning.stays import replay, stay_curve
from fedqueue.report.planning import frontier
from fedqueue.sim.queues import Recorded, make_queue
from tests.conftest import ONE_A_ROUND, config_of, facility

HOUR = 3600.0


def log_of(waits: dict[int, float], *, jobs: int = 300, every: float = 600.0, requested: float = 1800.0) -> JobLog:
    """A job of every size each ten minutes; those of a size all wait the same."""
    rows = [(i * every, waits[procs], procs) for i in range(jobs) for procs in sorted(waits)]
    submit, wait, procs = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    run = np.full(len(rows), 60.0)
    asked = np.full(len(rows), requested)
    return JobLog(name="log", submit=submit, wait=wait, run=run, requested=asked, procs=procs.astype(np.int64))


def places_of(delays: dict[str, float], **changes: Any) -> tuple[Place, ...]:
    config = config_of(
        "jit", facilities=[facility(n, queue={"kind": "fixed", "delay": d}, **changes) for n, d in delays.items()]
    )
    return tuple(Place(settings=one) for one in config.facility)


def setting_of(places: tuple[Place, ...], *, days: float = 2.0, **worth: Any) -> Setting:
    facilities = [facility(place.name) for place in places]
    config = config_of("jit", facilities=facilities)
    return Setting(config=config, worth=Worth(**worth), days=days, seed=1, starts=2)


def plan(places: tuple[Place, ...], *, strategies: tuple[str, ...] = ("jit",), **changes: Any) -> Advice:
    worth = {key: changes.pop(key) for key in ("returns", "needed") if key in changes}
    setting = setting_of(places, **worth)
    wish = Wish(setting=setting, places=places, strategies=strategies, **changes)
    return advise(wish, Searcher(setting, 1))


# Known answers ------------------------------------------------------------------------------------------


def test_jobs_that_wait_a_round_each_give_the_updates_that_arithmetic_gives() -> None:
    """Without a pipeline and with fixed waits of an hour: submitted at a cutoff, started an hour later, trained until
    the next cutoff. Rounds of two hours: an update of an hour every two hours."""
    places = places_of({"east": HOUR, "west": HOUR})
    candidate = Candidate("jit", 2 * HOUR, (("pipeline", "off"), *ONE_A_ROUND.items()))
    outcome = simulate(setting_of(places, returns=1.0), places, candidate, 0, 2 * 86_400.0)
    assert outcome.total("updates") == pytest.approx(2 * 12, rel=0.05)
    assert outcome.total("steps") == pytest.approx(2 * 12 * HOUR * 10, rel=0.05)
    assert outcome.total("work") == pytest.approx(outcome.total("steps")), "nothing is stale, and all steps count"
    assert outcome.total("node_hours") == pytest.approx(2 * 12, rel=0.05)
    assert outcome.late_rate == 0


def test_best_round_length_without_a_pipeline_follows_the_wait() -> None:
    """With jobs that may not overlap and a fixed wait q, rounds of T give sqrt(T - q) every T: best at T = 2 q."""
    places = places_of({"east": HOUR}, max_jobs=1)
    advice = plan(places, shortest=600.0, longest=86_400.0, may_stay=False)
    assert advice.best.candidate.length == 2 * HOUR
    staying = plan(places, shortest=600.0, longest=86_400.0)
    assert dict(staying.best.candidate.options)["stay"] != "off", "where jobs may stay, they should"
    assert staying.best.mean("work") > 2 * advice.best.mean("work")
    assert advice.price is None, "there is nobody to wait for"
    assert advice.facilities[0].updates == pytest.approx(12, rel=0.1)
    assert advice.facilities[0].wait_median == HOUR


def test_every_step_counting_alike_makes_rounds_long() -> None:
    places = places_of({"east": HOUR}, max_jobs=1)
    short, long = plan(places, shortest=600.0), plan(places, shortest=600.0, returns=1.0)
    assert long.best.candidate.length > short.best.candidate.length
    assert any("--returns 1" in caution for caution in short.cautions)


def test_enormous_waits_make_fedavg_dear_and_just_in_time_best() -> None:
    advice = plan(places_of({"near": 60.0, "far": 12 * HOUR}), strategies=("jit", "fedavg"), shortest=600.0)
    assert advice.best.candidate.strategy == "jit"
    assert advice.price is not None
    assert advice.price.slowest == "far"
    assert advice.price.cost > 0.9
    assert advice.price.cost_of_best == pytest.approx(0.0, abs=0.02), "nobody waits for it"
    fedavg = next(rival for rival in advice.rivals if rival.trial.candidate.strategy == "fedavg")
    assert fedavg.against_best.mean is not None
    assert fedavg.against_best.mean < -0.5


def test_wall_time_to_request_is_whole_minutes_and_holds_a_job() -> None:
    advice = plan(places_of({"east": 600.0}), shortest=600.0)
    wall = advice.facilities[0].wall_seconds
    assert wall % 60 == 0
    assert wall >= advice.best.candidate.length


def test_plan_depends_on_its_seed_and_nothing_else() -> None:
    log = log_of({1: 300.0, 4: 900.0})
    place = Place(settings=places_of({"east": 0.0})[0].settings, log=log, procs=(1, 1))
    first, second = plan((place,)), plan((place,))
    assert first.best.candidate == second.best.candidate
    assert first.best.mean("work") == second.best.mean("work")


# What if ------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    wait=st.floats(60.0, 4 * HOUR), factor=st.floats(1.0, 20.0), strategy=st.sampled_from(["jit", "fedqueue", "fedavg"])
)
def test_longer_waits_never_give_more_work(wait: float, factor: float, strategy: str) -> None:
    places = places_of({"east": wait, "west": 120.0})
    longer = whatif.apply(f"east.wait={factor!r}x", places, 0.9)
    searcher = Searcher(setting_of(places, days=1.0), 1)
    options = tuple(ONE_A_ROUND.items()) if strategy == "jit" else ()
    tries = [Candidate(strategy, length, options) for length in (1200.0, 2 * HOUR, 8 * HOUR)]
    best = max(simulate(searcher.setting, places, c, 0, 86_400.0).total("work") for c in tries)
    worse = max(simulate(searcher.setting, longer, c, 0, 86_400.0).total("work") for c in tries)
    assert worse <= best * 1.02, "but for where the last round falls"


def test_what_ifs_change_what_they_name() -> None:
    places = places_of({"east": 60.0, "west": 60.0})
    assert [p.name for p in whatif.apply("without east", places, 0.9)] == ["west"]
    assert [p.settings.max_jobs for p in whatif.apply("max_jobs=1", places, 0.9)] == [1, 1]
    east, west = whatif.apply("east.speed=1.5x", places, 0.9)
    assert (east.settings.steps_per_second, west.settings.steps_per_second) == (15.0, 10.0)
    east, _ = whatif.apply("east.nodes=4", places, 0.5)
    assert (east.settings.nodes, east.settings.steps_per_second) == (4, 20.0)
    assert whatif.apply("east.wait=3x", places, 0.9)[0].factor == 3.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("south.wait=2x", "there is no facility 'south'; there are east, west"),
        ("without south", "there is no facility 'south'"),
        ("east.colour=blue", "keys are wait, nodes, speed"),
        ("nonsense", "must be such as"),
        ("east.wait=long", "'long' is not a number"),
        ("east.wait=-1x", "must be more than 0"),
        ("east.nodes=1.5", "must be a whole number"),
    ],
)
def test_bad_what_if_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^--what-if") as caught:
        whatif.apply(text, places_of({"east": 1.0, "west": 1.0}), 0.9)
    assert says in str(caught.value)


# Learning curves ----------------------------------------------------------------------------------------


def test_curve_is_straight_between_its_points() -> None:
    curve = LearningCurve("c", ((100.0, 0.5), (300.0, 0.9), (400.0, 0.8)))
    assert curve.steps_to(0.25) == 50.0, "from nothing"
    assert curve.steps_to(0.9) == 300.0
    with pytest.raises(DataError, match=r"never reaches 0.95, its best score is 0.9"):
        curve.steps_to(0.95)


def test_target_is_reached_when_the_work_it_needs_is_done() -> None:
    places = places_of({"east": 600.0})
    rate = plan(places, shortest=600.0).best.mean("work")
    advice = plan(places, shortest=600.0, needed=10 * rate)
    assert advice.best.target_days == pytest.approx(10, rel=0.05), "beyond what was simulated, at the mean rate"
    soon = plan(places, shortest=600.0, needed=0.5 * rate)
    assert soon.best.target_days == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("steps,accuracy\n1,2\n", "column score is missing"),
        ("steps,score\n", "has no point"),
        ("steps,score\n10,0.1\n5,0.2\n", "steps must rise"),
        ("steps,score\n10,high\n", "line 2: not a number"),
    ],
)
def test_bad_curve_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "c.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        read_curve(tmp_path / "c.csv")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# Shapes and histories -----------------------------------------------------------------------------------


def test_larger_jobs_are_chosen_where_they_do_not_wait_longer() -> None:
    base = places_of({"east": 0.0}, nodes=4)[0]
    for waits, expected in (({2: 60.0, 4: 60.0, 8: 60.0}, 8), ({2: 60.0, 4: 60.0, 8: 200_000.0}, 4)):
        place = Place(settings=base.settings, log=log_of(waits), procs=alike(4))
        assert [p.settings.nodes for p in sizes_of(place, 0.9)] == [4, 2, 8], "16 has no jobs"
        searcher = Searcher(setting_of((place,)), 1)
        (chosen,), tables = choose([place], [1200.0, 2400.0], 0.9, searcher)
        assert chosen.settings.nodes == expected
        assert [shape.nodes for shape in tables["east"]] == [2, 4, 8]
        assert chosen.settings.steps_per_second == pytest.approx(10 * (expected / 4) ** 0.9)


def test_twice_the_node_hours_must_bring_a_fifth_more_work() -> None:
    def shape(work: float, node_hours: float) -> Shape:
        return Shape(1, None, 0, 0.0, work, node_hours)

    assert shape(1.19, 2.0).score < shape(1.0, 1.0).score < shape(1.21, 2.0).score


def test_jobs_are_compared_with_jobs_that_asked_for_about_as_much() -> None:
    short, long = log_of({1: 10.0}, requested=1800.0), log_of({1: 500.0}, requested=40_000.0)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(short, name), getattr(long, name)])
        for name in ("submit", "wait", "run", "requested", "procs")
    }
    order = np.argsort(columns["submit"], kind="stable")
    log = JobLog(name="log", **{name: column[order] for name, column in columns.items()})
    place = Place(settings=places_of({"east": 0.0})[0].settings, log=log, procs=(1, 1))
    assert place.jobs.like(1200.0).quantile(0.9) == 10.0
    assert place.jobs.like(1200.0).about == HOUR / 2
    assert place.jobs.like(30_000.0).quantile(0.9) == 500.0


@given(start=st.floats(0.0, 0.999), at=st.floats(0.0, 1e6))
def test_replay_gives_the_wait_of_the_next_job_and_begins_anew(start: float, at: float) -> None:
    submits, waits = [0.0, 10.0, 20.0], [1.0, 2.0, 3.0]
    jobs = ByRequest(Waits(submits, waits), {})
    queue = Recorded(jobs=jobs, first=0.0, length=21.0, start=start * 21.0, factor=2.0)
    moment = (start * 21.0 + at) % 21.0
    expected = 1.0 if moment == 0 else 2.0 if moment <= 10 else 3.0 if moment <= 20 else 1.0
    assert queue.delay(0, 0, at, 60.0) == 2 * expected


def test_ladder_spans_the_waits_and_keeps_to_its_limits() -> None:
    config = config_of("jit")
    lengths = ladder(places_of({"east": HOUR, "west": 60.0}), config, shortest=600.0, longest=86_400.0)
    assert lengths[0] == 600.0
    assert lengths[-1] <= 86_400.0
    assert lengths[-1] >= 8 * HOUR


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1))
def test_no_candidate_beats_the_frontier(points: list[tuple[float, float]]) -> None:
    edge = frontier(points)
    assert set(edge) <= set(points)
    for cost, gain in points:
        assert any(x <= cost and y >= gain for x, y in edge)


# Jobs that stay -----------------------------------------------------------------------------------------


def log_by_request(waits: dict[float, tuple[float, float]], *, every: float = 1800.0, count: int = 1000) -> JobLog:
    """Jobs of every wall time each half hour; each waits so long in the first half of the log, and in the second."""
    rows = [(i * every, waits[wall][i >= count // 2], wall) for i in range(count) for wall in sorted(waits)]
    submit, wait, asked = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    procs = np.ones(len(rows), dtype=np.int64)
    return JobLog(name="log", submit=submit, wait=wait, run=asked / 2, requested=asked, procs=procs)


def test_replay_of_staying_jobs_by_hand() -> None:
    """Waits of 600 s. Jobs of 1800 s: the first waits, the second is ordered 600 s before the first ends, and so on:
    nothing is lost but the first wait. Jobs of 300 s: one starts every 600 s. Without a head start: 1800 of 2400 s."""
    queue = make_queue(FixedQueue(delay=600.0), facility="east", seed=1, folder=Path())
    length = 240_000.0
    assert replay(queue, 1800.0, length) == pytest.approx((length - 600.0) / length)
    assert replay(queue, 300.0, length) == pytest.approx(0.5, rel=0.01)
    assert replay(queue, 1800.0, length, lead=0.0) == pytest.approx(0.75, rel=0.01)
    assert replay(queue, 1800.0, length, lost=180.0) == pytest.approx(0.9, rel=0.01)


def test_curve_promises_by_the_first_half_and_checks_in_the_second() -> None:
    """Jobs of an hour wait 10 minutes, those of four hours 8 hours, and later 2 hours."""
    log = log_by_request({HOUR: (600.0, 600.0), 4 * HOUR: (8 * HOUR, 2 * HOUR)})
    curve = stay_curve("east", log)
    assert curve is not None
    assert [point.wall_seconds for point in curve.points] == [HOUR, 4 * HOUR]
    assert [point.jobs for point in curve.points] == [1000, 1000]
    assert curve.chosen.wall_seconds == HOUR
    assert curve.check is not None
    walls, promised, achieved = zip(*curve.check.shares, strict=True)
    assert walls == (HOUR, 4 * HOUR)
    assert promised == pytest.approx((1.0, 0.5), abs=0.02)
    assert achieved == pytest.approx((1.0, 1.0), abs=0.02)
    assert (curve.check.wall_seconds, curve.check.promised) == (HOUR, promised[0])
    assert curve.check.achieved == achieved[0]


def test_curve_keeps_to_the_limit_and_needs_jobs_that_asked_alike() -> None:
    log = log_by_request({HOUR: (600.0, 600.0), 4 * HOUR: (600.0, 600.0)})
    assert [p.wall_seconds for p in (stay_curve("east", log, most=2 * HOUR) or never()).points] == [HOUR]
    assert stay_curve("east", log, most=60.0) is None
    assert stay_curve("east", log_by_request({HOUR: (600.0, 600.0)}, count=40)) is None
    few = stay_curve("east", log_by_request({HOUR: (600.0, 600.0)}, count=60))
    assert few is not None
    assert few.check is None, "neither half has enough"


def never() -> Any:
    raise AssertionError("there should be one")


def test_history_in_a_config_stands_for_every_wall_time_and_spread() -> None:
    log = log_by_request({HOUR: (600.0, 600.0), 4 * HOUR: (900.0, 900.0)})
    place = Place(settings=places_of({"east": 0.0})[0].settings, log=log, procs=(1, 1), factor=2.0)
    assert sorted(set(place.known_waits)) == [(HOUR, 1200.0), (4 * HOUR, 1800.0)]
    assert len(place.known_waits) == 10
    assert place.known_waits[:2] == [(HOUR, 1200.0), (4 * HOUR, 1800.0)], "mixed, so that the newest are not all of one"


def test_staying_jobs_are_recommended_where_each_wait_is_long_and_two_at_once_are_not_allowed() -> None:
    """Jobs wait six hours whatever they ask for: one job a round trains little, one of a day 80 % of the time."""
    log = log_by_request({600.0: (6 * HOUR, 6 * HOUR), 24 * HOUR: (6 * HOUR, 6 * HOUR)})
    place = Place(settings=places_of({"east": 0.0}, max_jobs=1)[0].settings, log=log, procs=(1, 1))
    advice = plan((place,), shortest=600.0, longest=4 * HOUR, keep_sizes=True)
    assert dict(advice.best.candidate.options)["stay"] != "off"
    assert advice.facilities[0].wall_seconds > 12 * HOUR
    (curve,) = advice.stays
    assert curve.chosen.wall_seconds == pytest.approx(32 * HOUR), "the group of a day"


TRACES = [
    ("anl-theta-2022-ge128nodes", (128, 256), 0.15),
    ("anl-theta-2021", (2, 128), 0.15),
    ("kth-sp2-1996", (1, 8), 0.15),
    ("cea-curie-2012", (1, 128), 0.05),
    ("unilu-gaia-2014", (1, 12), 0.02),
]


@pytest.mark.parametrize(("name", "procs", "off"), TRACES, ids=[name for name, _, _ in TRACES])
def test_promise_of_the_first_half_of_a_real_trace_holds_in_the_second(
    name: str, procs: tuple[int, int], off: float
) -> None:
    found = next((p for p in data.candidates(f"traces/{name}.csv.gz") if p.exists()), None)
    if found is None:
        pytest.skip(f"traces/{name}.csv.gz is not under {data.root()}: set FEDQUEUE_DATA to the folder that has it")
    curve = stay_curve(name, read_log(found).of_shape(procs), overhead=60.0, most=2 * 86_400.0)
    assert curve is not None
    assert curve.check is not None
    assert curve.check.achieved == pytest.approx(curve.check.promised, abs=off)
    assert curve.check.achieved >= 0.85 * curve.check.best, "and nothing would have been much better"
