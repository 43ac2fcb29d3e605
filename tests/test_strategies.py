"""What must hold for every strategy, whatever queues and faults do: found by hypothesis, not by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedqueue.config import Config, FacilitySettings, parse
from fedqueue.protocol.contract import UpdateKey, facility_of
from fedqueue.protocol.messages import (
    Aggregate,
    AssignWork,
    CancelJob,
    Command,
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    FacilityLeft,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelReady,
    PostWork,
    Record,
    RolledBack,
    RunPaused,
    RunResumed,
    StopRequested,
    StopRun,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
    UpdatesUnusable,
    UpdatesWithdrawn,
    WorkTaken,
)
from fedqueue.protocol.predict import PREDICTORS
from fedqueue.protocol.predict.base import RESERVE_RULES
from fedqueue.protocol.strategies.rounds import LEAST_TRUST
from fedqueue.sim.learning import Learning
from fedqueue.sim.simulation import JOBS, Simulation, make_plan, make_strategy
from fedqueue.sim.site import SimJob, Site
from tests.conftest import STRATEGY_NAMES, Trace, config_of, trace_of

SHARE = st.floats(0, 0.5)
ABSENT = st.just(0.7) | st.floats(0, 0.95)
CLOSING = (JobFailed, SubmitRefused, UpdateRejected)
REPEATABLE = (
    JobSubmitted,
    SubmitRefused,
    JobStarted,
    JobRequeued,
    JobEnded,
    JobFailed,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
    ModelReady,
)

OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "fedqueue": st.fixed_dictionaries(
        {},
        optional={
            "predictor": st.sampled_from([*PREDICTORS, "conformal/rolling-quantile"]),
            "smoothing": st.floats(0, 1),
            "rule": st.sampled_from(RESERVE_RULES),
            "margin": st.floats(0, 5),
            "late_rate": st.floats(0, 1),
            "decay": st.sampled_from(["harmonic", "exponential", "none"]),
            "beta": st.floats(0, 3),
            "lr_scaling": st.sampled_from(["inverse", "none"]),
            "close": st.sampled_from(["timer", "early"]),
            "overlap": st.booleans(),
            "max_staleness": st.none() | st.integers(0, 3),
            "absent": ABSENT,
        },
    ),
    "jit": st.fixed_dictionaries(
        {},
        optional={
            "round_length": st.floats(1, 15),
            "pipeline": st.sampled_from(["timed", "independent", "chain", "off"]),
            "lead": st.floats(0, 1),
            "patience": st.floats(0, 1),
            "wall": st.sampled_from(["longest", "forecast"]),
            "rounds": st.sampled_from(["fixed", "forecast", "auto"]),
            "between": st.sampled_from(["wait", "train", "auto"]),
            "min_steps": st.integers(1, 30),
            "absent": ABSENT,
            "busy": st.floats(0, 1),
            "predictor": st.sampled_from(["ewma", "combined"]),
            "lr_scaling": st.sampled_from(["inverse", "none"]),
            "max_staleness": st.none() | st.integers(0, 3),
        },
    ),
    "fedavg": st.fixed_dictionaries({"steps": st.integers(1, 200)}),
    "fedprox": st.fixed_dictionaries({"steps": st.integers(1, 200), "proximal": st.floats(0, 1)}),
    "fedadam": st.fixed_dictionaries({"steps": st.integers(1, 200), "rate": st.floats(0.001, 1)}),
    "scaffold": st.fixed_dictionaries({"steps": st.integers(1, 200)}),
    "fadas": st.fixed_dictionaries(
        {"steps": st.integers(1, 200), "buffer": st.integers(1, 6), "threshold": st.integers(1, 4)}
    ),
    "fedasync": st.fixed_dictionaries({"steps": st.integers(1, 200), "exponent": st.floats(0, 2)}),
    "fedbuff": st.fixed_dictionaries({"steps": st.integers(1, 200), "buffer": st.integers(1, 6)}),
    "fedcompass": st.fixed_dictionaries({"min_steps": st.integers(1, 30), "max_steps": st.integers(30, 200)}),
}

STAYS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"stay": "off"}),
    st.fixed_dictionaries({"stay": st.just("auto") | st.floats(0.5, 200)}, optional={"stay_lead": st.floats(0, 1)}),
)

QUEUES = st.one_of(
    st.fixed_dictionaries({"kind": st.just("fixed"), "delay": st.floats(0, 30)}),
    st.fixed_dictionaries({"kind": st.just("lognormal"), "mean": st.floats(0.1, 10), "rho": st.floats(0, 1.5)}),
    st.fixed_dictionaries(
        {"kind": st.just("step"), "mean": st.just(2.0), "mean_after": st.floats(0.1, 30), "change_at": st.floats(0, 80)}
    ),
)

FACILITY = st.fixed_dictionaries(
    {"steps_per_second": st.floats(0.5, 50), "queue": QUEUES},
    optional={
        "slowdown": st.floats(0.5, 8),
        "accrue": st.floats(0, 1),
        "startup_seconds": st.floats(0, 2),
        "megabytes_per_second": st.floats(0.5, 10),
        "latency_seconds": st.floats(0, 1),
        "queue_limit": st.integers(1, 2),
        "max_jobs": st.integers(1, 3),
        "nodes": st.integers(1, 4),
    },
)

FAULT = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["preempt", "hang", "corrupt", "duplicate"]), "probability": SHARE},
        optional={"facility": st.sampled_from(["f0", "f1", "*"])},
    ),
    st.fixed_dictionaries(
        {"kind": st.just("fail"), "probability": SHARE, "transient": st.booleans(), "facility": st.just("f0")}
    ),
    st.fixed_dictionaries(
        {"kind": st.just("outage"), "at": st.floats(0, 100), "facility": st.sampled_from(["f0", "f1", "*"])},
        optional={"seconds": st.floats(0.1, 60), "loses_jobs": st.booleans()},
    ),
)


LENGTH = st.one_of(
    st.fixed_dictionaries({"rounds": st.integers(1, 15), "seconds": st.floats(1, 400)}),
    st.fixed_dictionaries({"rounds": st.integers(1, 15)}),
    st.fixed_dictionaries({"seconds": st.floats(1, 400)}),
)


@st.composite
def configs(draw: st.DrawFn, strategy: str, *, faults: bool = True, outages_end: bool = False) -> Config:
    facilities = draw(st.lists(FACILITY, min_size=2, max_size=4))
    tree: dict[str, Any] = {
        "run": {
            "strategy": strategy,
            "seed": draw(st.integers(0, 2**32)),
            **draw(LENGTH),
            "warm_up": draw(st.booleans()),
        },
        "task": {"name": "timing"},
        "strategy": {strategy: draw(OPTIONS[strategy]) | draw(STAYS)},
        "facility": [{"name": f"f{i}", **f} for i, f in enumerate(facilities)],
        "fault": draw(st.lists(FAULT, max_size=3)) if faults else [],
        "simulator": {"aggregate_seconds": draw(st.sampled_from([0.0, 0.5, 12.0]))},
        "failures": {"suspend_seconds": draw(st.floats(1, 50)), "max_suspensions": draw(st.integers(0, 3))},
    }
    if outages_end:
        tree["fault"] = [{"seconds": 60.0, **f} if f["kind"] == "outage" else f for f in tree["fault"]]
    return parse(tree)


def run(
    config: Config, bend: tuple[float, float] | None = None, operator: Sequence[Event] = ()
) -> tuple[Trace, str | None]:
    """The trace of a run and why it stopped; `bend` (t, extra) makes jobs that would start after t start later, and
    `operator` events happen besides."""
    sites: list[Site] = [
        Site(i, f, config, config.run.seed) if bend is None else Bent(i, f, config, *bend)
        for i, f in enumerate(config.facility)
    ]
    strategy = make_strategy(config, make_plan(config, sites, None))
    trace: Trace = []

    def listen(event: Event, commands: Sequence[Command]) -> None:
        trace.append((event, list(commands)))
        assert len(trace) < 200_000, "the run does not end"

    simulation = Simulation(config, sites, Judging(config), strategy, [listen])
    for event in operator:
        simulation._at(event.at, JOBS, simulation._tell, event)
    simulation.run()
    return trace, strategy.stopped


class Judging(Learning):
    """Nothing is trained, and yet models have scores, and their updates agree more or less."""

    def __init__(self, config: Config) -> None:
        super().__init__(1.0)
        self._rng = random.Random(config.run.seed)

    def aggregate(self, command: Aggregate) -> float | None:
        return self._rng.choice((None, 0.05, 0.2, 0.9)) if command.agreement else None

    def score(self, version: int) -> dict[str, float] | None:
        return {"score": self._rng.choice((0.5, 0.5, 0.5, 0.9, nan))} if self._rng.random() < 0.8 else None


class Bent(Site):
    """Where jobs that would start after a moment start later."""

    def __init__(self, index: int, settings: FacilitySettings, config: Config, after: float, extra: float) -> None:
        super().__init__(index, settings, config, config.run.seed)
        self._after, self._extra = after, extra

    def wait(self, job: SimJob, at: float) -> float:
        seconds = super().wait(job, at)
        return seconds + self._extra if at + seconds > self._after else seconds


def trust_of(config: Config) -> float:
    return getattr(config.options(), "absent", 0.0)


def longest_trust(absent: float) -> int:
    """Rounds after which the update of an absent facility is forgotten."""
    return sum(1 for n in range(1, 1000) if absent**n >= LEAST_TRUST)


def check_invariants(trace: Trace, absent: float = 0.0) -> None:
    """`absent`: the trust in the last updates of facilities that have none."""
    fates: Counter[tuple[object, ...]] = Counter()
    arrived: set[UpdateKey] = set()
    aggregated: Counter[UpdateKey] = Counter()
    used_in: dict[UpdateKey, int] = {}  # the model that an update was new in, by the version it was made from
    kept: set[UpdateKey] = set()  # that may be asked for again
    ready, made, submitted, seen_at = 0, 0, set(), 0.0
    for event, commands in trace:
        assert event.at >= seen_at, "the run clock runs backwards"
        seen_at = event.at
        if isinstance(event, ModelReady):
            assert event.version == ready + 1, "versions rise by one"
            ready = event.version
        if isinstance(event, UpdateArrived):
            arrived.add(event.receipt.key)
        back_to = event.version if isinstance(event, RolledBack) else None  # the first model that is asked for then
        for command in commands:
            if isinstance(command, SubmitJob):
                assert command.order.job_id not in submitted, "a job id is used once"
                submitted.add(command.order.job_id)
            elif isinstance(command, AssignWork):
                assert command.assignment.base_version <= ready, "only ready versions are assigned"
            elif isinstance(command, PostWork):
                assert command.standing.version <= ready
            elif isinstance(command, Aggregate):
                assert command.to_version == made + 1
                assert command.from_version == (made if back_to is None else back_to)
                made, back_to = made + 1, None
                fresh = [s.key for s in command.weights if not s.again]
                aggregated.update(fresh)
                used_in |= dict.fromkeys(fresh, command.from_version)
                total = sum(s.weight for s in command.weights)
                assert total <= 1 + 1e-9
                stand_ins = [s.key for s in command.weights if s.again]
                assert set(stand_ins) <= kept, "what is used again was kept"
                whose = [facility_of(key[0]) for key in stand_ins]
                assert len(whose) == len(set(whose)), "one stands in for a facility"
                assert not {facility_of(key[0]) for key in fresh} & set(whose), "nobody who is there has a stand-in"
                assert fresh or not stand_ins, "no model is made of stand-ins alone"
                assert [s.key for s in command.weights] == [*stand_ins, *fresh], "what is new comes last"
                oldest = max((command.from_version - used_in[key] for key in stand_ins), default=0)
                assert oldest <= longest_trust(absent), "it is older than it may be"
                kept = set(command.keep)
                assert kept <= set(used_in), "only what was in a model is kept"
            elif isinstance(command, Record) and command.kind == "fate":
                fates[command.facts["job"], command.facts["attempt"], command.facts.get("part", 0)] += 1
                if command.facts["fate"] == "aggregated":
                    assert isinstance(event, ModelReady)
                    assert command.facts["version"] == event.version, "aggregated into a model that is not there"
    assert all(n == 1 for n in aggregated.values()), "an update is aggregated at most once"
    assert all(n == 1 for n in fates.values()), "an update has one fate"
    assert set(aggregated) <= arrived, "only what arrived is aggregated"
    stopped = any(isinstance(c, StopRun) for _, commands in trace for c in commands)
    if stopped:
        assert arrived <= set(fates), "no update vanishes"


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_run_ends_and_every_update_has_one_fate(strategy: str, data: st.DataObject) -> None:
    config = data.draw(configs(strategy))
    trace, stopped = run(config)
    check_invariants(trace, trust_of(config))
    if not any(fault.kind == "outage" and fault.seconds is None for fault in config.fault):
        assert stopped is not None, "it waits for something that never comes"


SLOW_LINK = st.fixed_dictionaries(
    {
        "steps_per_second": st.sampled_from([5.0, 10.0]),
        "slowdown": st.sampled_from([1.0, 2.0, 4.0]),
        "latency_seconds": st.sampled_from([0.5, 1.0]),
        "max_jobs": st.integers(1, 3),
        "queue": st.just({"kind": "lognormal", "mean": 1.0, "rho": 0.8}),
    }
)


@pytest.mark.parametrize("strategy", [name for name in STRATEGY_NAMES if name != "jit"])
@given(
    seed=st.integers(0, 1000),
    stay=st.floats(1.5, 12),
    seconds=st.sampled_from([0.5, 2.0]),
    facilities=st.lists(SLOW_LINK, min_size=1, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_a_job_that_ends_before_the_work_it_was_given_reaches_it_holds_up_nobody(
    strategy: str, seed: int, stay: float, seconds: float, facilities: list[dict[str, Any]]
) -> None:
    steps = {"fedcompass": {"min_steps": 3, "max_steps": 30}, "fedqueue": {"min_steps": 3}}
    tree = {
        "run": {"strategy": strategy, "seed": seed, "rounds": 10, "round_length": 5.0},
        "task": {"name": "timing"},
        "strategy": {strategy: {**steps.get(strategy, {"steps": 5}), "stay": stay}},
        "facility": [{"name": f"f{i}", **f} for i, f in enumerate(facilities)],
        "simulator": {"aggregate_seconds": seconds},
    }
    trace, stopped = run(parse(tree))
    check_invariants(trace)
    assert stopped == "all rounds done"


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data(), moment=st.floats(0, 120), extra=st.floats(0.01, 50))
@settings(max_examples=60, deadline=None)
def test_nothing_before_t_depends_on_delays_after_t(
    strategy: str, data: st.DataObject, moment: float, extra: float
) -> None:
    config = data.draw(configs(strategy))
    straight, _ = run(config)
    bent, _ = run(config, bend=(moment, extra))
    assert [s for s in straight if s[0].at < moment] == [s for s in bent if s[0].at < moment]


@st.composite
def operators(draw: st.DrawFn) -> list[Event]:
    """Pauses, faults that are mended, drains, rejoins, stops and restarts of the coordinator."""
    events: list[Event] = []
    for at in draw(st.lists(st.floats(0, 150), max_size=4)):
        name = draw(st.sampled_from(["f0", "f1"]))
        kind = draw(
            st.sampled_from(["pause", "fault", "drain", "join", "restart", "leave", "revoke", "stop", "rollback"])
        )
        if kind == "pause":
            events += [RunPaused(at=at), RunResumed(at=at + draw(st.floats(0, 20)))]
        elif kind == "fault":
            mended_at = at + draw(st.floats(0, 20))
            events += [RunPaused(at=at, reason="a file is missing"), RunResumed(at=mended_at, mended=True)]
        elif kind == "stop":
            events.append(StopRequested(at=at))
        elif kind == "rollback":
            events.append(RolledBack(at=at, version=draw(st.integers(0, 4))))
        elif kind == "restart":
            events.append(CoordinatorResumed(at=at, down_seconds=100.0))
        elif kind == "revoke":
            events += [FacilityLeft(at=at, facility=name), UpdatesWithdrawn(at=at, facility=name, reason="revoked")]
            events.append(FacilityJoined(at=at + 5.0, facility=name))
        elif kind == "leave":
            events += [FacilityLeft(at=at, facility=name), FacilityJoined(at=at + 5.0, facility=name)]
        else:
            events.append((FacilityDrained if kind == "drain" else FacilityJoined)(at=at, facility=name))
    return events


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data(), operator=operators())
@settings(max_examples=100, deadline=None)
def test_operators_may_do_what_they_like(strategy: str, data: st.DataObject, operator: list[Event]) -> None:
    # An operator who calls back a facility that is gone for good has a run that waits for it for good.
    config = data.draw(configs(strategy, outages_end=True))
    trace, _ = run(config, operator=operator)
    check_invariants(trace, trust_of(config))
    limit = {f.name: f.max_jobs for f in config.facility}
    stays = config.options().stay != "off"
    overlaps = strategy == "jit" or stays or getattr(config.options(), "overlap", False)
    out: dict[str, set[str]] = {name: set() for name in limit}
    for event, commands in trace:
        closed = getattr(event, "job_id", None) if isinstance(event, CLOSING) else None
        if isinstance(event, UpdateArrived) and not stays:
            closed = event.receipt.job_id
        elif isinstance(event, JobEnded) and stays:
            closed = event.job_id
        for jobs in out.values():
            jobs.discard(str(closed))
        for command in commands:
            if isinstance(command, CancelJob):
                out[facility_of(command.job_id)].discard(command.job_id)
            elif isinstance(command, SubmitJob):
                out[command.order.facility].add(command.order.job_id)
        for name, jobs in out.items():
            assert len(jobs) <= (limit[name] if overlaps else 1), "more jobs out than allowed"


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_same_events_bring_the_same_commands_again_and_repeated_ones_change_nothing(
    strategy: str, data: st.DataObject
) -> None:
    config = data.draw(configs(strategy))
    trace, _ = run(config)
    sites = [Site(i, f, config, config.run.seed) for i, f in enumerate(config.facility)]
    fresh = make_strategy(config, make_plan(config, sites, None))
    for event, commands in trace:
        assert list(fresh.handle(event)) == commands
        if isinstance(event, REPEATABLE):
            again = fresh.handle(event)
            assert all(isinstance(c, Record) and c.kind == "ignored" for c in again), "delivery may be at-least-once"


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_facility_starves_when_nothing_fails(strategy: str, data: st.DataObject) -> None:
    config = data.draw(configs(strategy, faults=False))
    trace, _ = run(config)
    jobs = Counter(c.order.facility for _, commands in trace for c in commands if isinstance(c, SubmitJob))
    assert set(jobs) == {f.name for f in config.facility}
    # Whoever is free is given work again before the run goes on for long: jobs follow arrivals.
    back = Counter(e.receipt.job_id.split("/")[0] for e, _ in trace if isinstance(e, UpdateArrived))
    if strategy in ("fedasync", "fedbuff") and config.options().stay == "off":
        assert all(jobs[name] >= back[name] for name in jobs)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data(), disorder=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_disordered_repeated_and_lost_events_never_break_the_books(
    strategy: str, data: st.DataObject, disorder: Any
) -> None:
    """Events of a real run, shuffled nearby, doubled and dropped: no exception, nothing used twice."""
    config = data.draw(configs(strategy))
    trace, _ = run(config)
    events = [e for e, _ in trace for _ in range(disorder.choice((0, 1, 1, 1, 2)))]
    events = [e for _, e in sorted(enumerate(events), key=lambda pair: pair[0] + disorder.uniform(0, 4))]
    sites = [Site(i, f, config, config.run.seed) for i, f in enumerate(config.facility)]
    fresh = make_strategy(config, make_plan(config, sites, None))
    aggregated: Counter[UpdateKey] = Counter()
    made = 0
    for event in events:
        for command in fresh.handle(event):
            if isinstance(command, Aggregate):
                assert command.from_version in (made, made - 1)  # or the same again, after a failure
                made = command.to_version
                aggregated.update(s.key for s in command.weights if not s.again)
    assert all(n == 1 for n in aggregated.values())


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data(), chance=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_model_that_cannot_be_made_with_somebodys_updates_is_made_without_them(
    strategy: str, data: st.DataObject, chance: Any
) -> None:
    config = data.draw(configs(strategy))
    trace, _ = run(config)
    sites = [Site(i, f, config, config.run.seed) for i, f in enumerate(config.facility)]
    fresh = make_strategy(config, make_plan(config, sites, None))
    fates: Counter[UpdateKey] = Counter()

    def settled(commands: Sequence[Command]) -> dict[UpdateKey, str]:
        facts = [c.facts for c in commands if isinstance(c, Record) and c.kind == "fate"]
        found = {(str(f["job"]), int(f["attempt"] or 0), int(f.get("part") or 0)): str(f["fate"]) for f in facts}
        fates.update(list(found))
        return found

    for event, _ in trace:
        commands = fresh.handle(event)
        settled(commands)
        for made in [c for c in commands if isinstance(c, Aggregate) and c.weights]:
            while made.weights and chance.random() < 0.3:
                name = facility_of(chance.choice(made.weights).job_id)
                unusable = UpdatesUnusable(at=event.at, version=made.to_version, facility=name, reason="too large")
                found = fresh.handle(unusable)
                gone = {s.key for s in made.weights if facility_of(s.job_id) == name and not s.again}
                assert settled(found) == dict.fromkeys(gone, "rejected")
                (again,) = [c for c in found if isinstance(c, Aggregate)]
                rest = tuple(s for s in made.weights if facility_of(s.job_id) != name)
                assert (again.to_version, again.weights) == (made.to_version, rest)
                again_too = [c for c in fresh.handle(unusable) if not isinstance(c, Record)]
                assert not again_too, "it is said twice"
                made = again
    assert not fates or max(fates.values()) == 1


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_events_of_the_same_instant_break_no_strategy(strategy: str) -> None:
    """A clock may be coarse, or stand still for a while."""
    config = config_of(strategy)
    sites = [Site(i, f, config, config.run.seed) for i, f in enumerate(config.facility)]
    fresh = make_strategy(config, make_plan(config, sites, None))
    for event, _ in trace_of(config):
        fresh.handle(replace(event, at=0.0))


def test_jobs_see_the_same_delays_under_every_strategy() -> None:
    delays: dict[str, dict[str, float]] = {}
    for strategy in STRATEGY_NAMES:
        config = parse(
            {
                "run": {"strategy": strategy, "rounds": 8, "seed": 5},
                "strategy": {strategy: {"stay": "off"}},
                "task": {"name": "timing"},
                "facility": [
                    {"name": n, "steps_per_second": 10.0, "queue": {"kind": "lognormal", "mean": 3.0, "rho": 0.9}}
                    for n in ("a", "b")
                ],
            }
        )
        starts = [e for e, _ in run(config)[0] if isinstance(e, JobStarted)]
        delays[strategy] = {e.job_id: e.admission_delay for e in starts}
    common = set.intersection(*(set(d) for d in delays.values()))
    assert len(common) >= 4
    for job in common:
        assert max(d[job] for d in delays.values()) == pytest.approx(min(d[job] for d in delays.values()))
