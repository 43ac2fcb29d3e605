"""Runs a person can read from top to bottom. Renew them with `pytest tests/test_golden.py --update-golden` and read
the difference: it is what changed for the facilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from fedqueue.protocol import messages
from fedqueue.protocol.codec import body
from fedqueue.protocol.contract import Assignment, Receipt
from fedqueue.protocol.messages import (
    Aggregate,
    AssignWork,
    CancelJob,
    Command,
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    ForecastIssued,
    JobStarted,
    ModelScored,
    PostWork,
    Record,
    RecordKind,
    RunPaused,
    RunResumed,
    RunStarted,
    SetTimer,
    StopRequested,
    StopRun,
    SubmitJob,
    UpdateArrived,
    WorkTaken,
)
from fedqueue.protocol.plan import FacilityProfile, Plan
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.sim.learning import Learning
from fedqueue.sim.runner import simulate
from tests.conftest import ONE_A_ROUND, STRATEGY_NAMES, Trace, config_of, facility, trace_of

GOLDEN = Path(__file__).parent / "golden"

FIXED = [
    facility("east", queue={"kind": "fixed", "delay": 1.5}),
    facility("west", steps_per_second=4.0, queue={"kind": "fixed", "delay": 3.0}),
]
SPIKE = [
    facility("east", queue={"kind": "fixed", "delay": 1.5}),
    facility(
        "west",
        queue={"kind": "spike", "mean": 3.0, "rho": 0.0, "factor": 4.0, "spike_at": 8.0, "spike_seconds": 5.0},
    ),
]

"""Of just in time, so that a scenario shows one thing at a time."""

STAY: dict[str, dict[str, Any]] = {
    "jit": {},
    "fedqueue": {},
    "fedasync": {},
    "fedavg": {"steps": 20},
    "fedbuff": {"steps": 20, "buffer": 2},
    "fedcompass": {"min_steps": 10, "max_steps": 40},
}

SCENARIOS: dict[str, dict[str, Any]] = {
    **{f"{name}-calm": {"strategy": name, "facilities": FIXED, "rounds": 3} for name in STRATEGY_NAMES},
    **{
        f"{name}-failures": {
            "strategy": name,
            "facilities": FIXED,
            "rounds": 4,
            "seconds": 80.0,
            "faults": [
                {"kind": "fail", "facility": "east", "jobs": [1, 2]},
                {"kind": "preempt", "facility": "west", "jobs": [0]},
                {"kind": "corrupt", "facility": "west", "jobs": [1]},
                {"kind": "duplicate", "facility": "east", "jobs": [0]},
            ],
        }
        for name in STRATEGY_NAMES
    },
    "fedqueue-spike": {"strategy": "fedqueue", "facilities": SPIKE, "rounds": 4},
    "fedqueue-max-staleness": {
        "strategy": "fedqueue",
        "facilities": SPIKE,
        "rounds": 4,
        "options": {"max_staleness": 0},
    },
    "fedqueue-early": {"strategy": "fedqueue", "facilities": FIXED, "rounds": 3, "options": {"close": "early"}},
    "fedqueue-warm-up": {"strategy": "fedqueue", "facilities": FIXED, "rounds": 3, "warm_up": True},
    "fedqueue-suspended": {
        "strategy": "fedqueue",
        "facilities": FIXED,
        "rounds": 9,
        "faults": [{"kind": "fail", "facility": "east", "jobs": [0, 1, 2]}],
    },
    "jit-chain": {"strategy": "jit", "facilities": FIXED, "rounds": 3, "options": {"pipeline": "chain"}},
    "jit-queue-limit": {
        "strategy": "jit",
        "facilities": [FIXED[0], facility("west", queue_limit=1, queue={"kind": "fixed", "delay": 3.0})],
        "rounds": 3,
        "options": {"pipeline": "independent"},
    },
    **{
        f"{name}-stays": {
            "strategy": name,
            "facilities": FIXED,
            "rounds": 5,
            "seconds": 60.0,
            "options": {"stay": 24.0, **options},
        }
        for name, options in STAY.items()
    },
    "jit-stays-ahead": {
        "strategy": "jit",
        "facilities": [{**FIXED[0], "latency_seconds": 0.5}, {**FIXED[1], "latency_seconds": 1.0}],
        "rounds": 4,
        "options": {"stay": 24.0},
    },
    "jit-stays-absent": {
        "strategy": "jit",
        "facilities": FIXED,
        "rounds": 7,
        "options": {"stay": 24.0, "round_length": 4.0, "absent": 0.5},
        "faults": [{"kind": "outage", "facility": "west", "at": 9.5, "seconds": 100.0, "loses_jobs": True}],
    },
    "jit-stays-chain": {
        "strategy": "jit",
        "facilities": FIXED,
        "rounds": 5,
        "seconds": 60.0,
        "options": {"stay": 24.0, "pipeline": "chain"},
    },
    "jit-stays-cap": {  # 40 s for east: a job as it is wanted, then what is left
        "strategy": "jit",
        "facilities": [{**FIXED[0], "node_hours": 40.0 / 3600}, FIXED[1]],
        "seconds": 60.0,
        "options": {"stay": 24.0},
    },
    "jit-stays-failures": {
        "strategy": "jit",
        "facilities": FIXED,
        "seconds": 80.0,
        "options": {"stay": 24.0},
        "faults": [
            {"kind": "preempt", "facility": "east", "jobs": [0]},
            {"kind": "fail", "facility": "west", "jobs": [0]},
            {"kind": "corrupt", "facility": "west", "jobs": [1]},
            {"kind": "duplicate", "facility": "east", "jobs": [1]},
        ],
    },
    "fedavg-outage": {
        "strategy": "fedavg",
        "facilities": FIXED,
        "rounds": 3,
        "options": {"steps": 20},
        "faults": [{"kind": "outage", "facility": "west", "at": 4.0, "seconds": 12.0}],
    },
    "fedasync-gone-for-good": {
        "strategy": "fedasync",
        "facilities": FIXED,
        "rounds": 20,
        "faults": [{"kind": "fail", "facility": "*", "probability": 1.0, "transient": False}],
    },
}


def words(command: Command) -> str:
    match command:
        case SubmitJob(order=order):
            extra = f" after {order.after}" if order.after else ""
            extra += f" replacing {order.replaces}" if order.replaces else ""
            extra += " (warm-up)" if order.purpose == "warm_up" else ""
            extra += f", to stay unless idle for {order.stay:g} s" if order.stay is not None else ""
            return f"SubmitJob {order.job_id} for {order.wall_seconds:.2f} s{extra}"
        case AssignWork(job_id=job, assignment=work, part=part):
            return f"AssignWork {job}{part_of(part)}: {assignment(work)}"
        case PostWork(facility=name, standing=s):
            start = f"PostWork {name}: version {s.version}, cutoff {s.next_cutoff:g}, {s.steps_per_second:.4g} steps/s"
            return start + (f", from job {s.from_job} on" if s.from_job else "") + (", train ahead" if s.ahead else "")
        case CancelJob(job_id=job):
            return f"CancelJob {job}"
        case SetTimer(key=key, at=at):
            return f"SetTimer {key} at {at:.2f}"
        case Aggregate(from_version=old, to_version=new, weights=weights, step=step):
            shares = ", ".join(f"{s.job_id}{part_of(s.part)} x {s.weight:.3f}{' again' * s.again}" for s in weights)
            stepped = "" if step is None else f", by a step of {step.rate:.3g}"
            return f"Aggregate {old} -> {new}: {shares or 'nothing'}{stepped}"
        case Record(kind=kind, facts=facts):
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}
            return f"Record {kind}: " + ", ".join(f"{k} {v}" for k, v in shown.items())
        case StopRun(reason=reason):
            return f"StopRun: {reason}"


def part_of(part: int) -> str:
    return f" part {part}" if part else ""


def assignment(work: Assignment) -> str:
    until = "" if work.cutoff is None else f" until {work.cutoff:.2f}"
    return f"version {work.base_version}, {work.steps} steps at {work.learning_rate:.2g}{until}"


def happened(event: Event) -> str:
    details = body(event)
    details.pop("at")
    match event:
        case UpdateArrived(receipt=r):
            which = f"{r.job_id}#{r.attempt}{part_of(r.part)}"
            ahead = f", {r.ahead} of them ahead" if r.ahead else ""
            return f"UpdateArrived {which}: {r.steps_done} steps from version {r.base_version}{ahead}"
        case JobStarted(bound=bound) if bound is not None:
            waited = f"after {event.admission_delay:.2f} s" + (f" + {event.lingered:.2f} s" if event.lingered else "")
            return f"JobStarted {event.job_id}#{event.attempt} {waited}, takes {assignment(bound)}"
        case WorkTaken(bound=bound) if bound is not None:
            which = f"{event.job_id}#{event.attempt} part {event.part} after {event.waited:.2f} s"
            return f"WorkTaken {which}, takes {assignment(bound)}"
    for quiet in ("lingered", "ago", "digest", "reason", "mended"):  # said only where they say something
        if not details.get(quiet, True):
            del details[quiet]
    shown = (f"{k} {round(v, 3) if isinstance(v, float) else v}" for k, v in details.items() if v is not None)
    return f"{type(event).__name__} " + ", ".join(shown)


def text_of(trace: Trace) -> str:
    lines = []
    for event, commands in trace:
        lines.append(f"{event.at:8.2f}  {happened(event)}".rstrip())
        lines += [f"              -> {words(command)}" for command in commands]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_run_is_as_written_down(scenario: str, request: pytest.FixtureRequest) -> None:
    facts = dict(SCENARIOS[scenario])
    if facts["strategy"] == "jit":
        facts["options"] = ONE_A_ROUND | facts.get("options", {})
    compare(scenario, text_of(trace_of(config_of(**facts))), request)


class Late(Learning):
    """Late in training: scores stand still, and updates hardly agree; from version 14 on they do."""

    def aggregate(self, command: Aggregate) -> float | None:
        return None if not command.agreement else 0.1 if command.to_version < 14 else 0.9

    def score(self, version: int) -> dict[str, float]:
        return {"score": 0.5}


def test_rounds_by_rule_are_as_written_down(request: pytest.FixtureRequest) -> None:
    """They are short at first, grow late in training up to twice that, and shrink back."""
    sites = [{**site, "latency_seconds": 0.25} for site in FIXED]
    config = config_of(
        "jit", facilities=sites, rounds=20, options={"stay": "auto", "rounds": "auto", "min_steps": 5, "absent": 0.7}
    )
    trace: Trace = []
    simulate(config, learned=(Late(1.0), None), listeners=[lambda event, said: trace.append((event, list(said)))])
    compare("jit-rounds-auto", text_of(trace), request)


def test_operator_events_are_as_written_down(request: pytest.FixtureRequest) -> None:
    """Pause, drain, a refusal, a coordinator that was down, a forecast from outside, a facility that is revoked, a
    model that could not be made."""
    plan = Plan(
        facilities=tuple(
            FacilityProfile(name=name, data_weight=0.5, steps_per_second=10.0, first_delay=2.0)
            for name in ("east", "west")
        ),
        round_length=10.0,
        rounds=9,
        stop_at_score=0.9,
    )
    strategy = STRATEGIES["jit"](plan, STRATEGIES["jit"].Options(**ONE_A_ROUND))
    events: list[Event] = [
        RunStarted(at=0.0),
        ForecastIssued(at=1.0, facility="east", mean=4.0, quantiles=((0.5, 3.0), (0.9, 9.0)), source="boosting"),
        messages.SubmitRefused(at=1.5, job_id="west/0", reason="the queue is full", transient=True),
        JobStarted(
            at=2.0,
            job_id="east/0",
            attempt=0,
            admission_delay=2.0,
            bound=Assignment(base_version=0, steps=79, learning_rate=0.001, cutoff=10.0),
        ),
        messages.TimerFired(at=2.5, key="retry/west"),
        RunPaused(at=3.0),
        RunResumed(at=3.0),
        CoordinatorResumed(at=4.0, down_seconds=3600.0),
        UpdateArrived(
            at=9.0,
            receipt=Receipt(
                job_id="east/0", attempt=0, base_version=0, steps_done=79, train_seconds=6.5, admission_delay=2.0
            ),
        ),
        messages.UpdatesWithdrawn(at=9.5, facility="east", reason="east was revoked"),
        messages.TimerFired(at=10.0, key="cutoff/0"),
        RunPaused(at=10.5, reason="model 1 cannot be made: the disk is full; make room"),
        messages.ModelReady(at=10.5, version=1),
        RunResumed(at=10.5, mended=True),
        FacilityDrained(at=13.0, facility="west"),
        FacilityJoined(at=14.0, facility="nowhere"),
        ModelScored(at=15.0, version=1, metrics={"score": 0.95}),
    ]
    compare("operator", text_of([(event, list(strategy.handle(event))) for event in events]), request)


def test_stop_by_the_operator_is_as_written_down(request: pytest.FixtureRequest) -> None:
    """A model that is being made is waited for; the run did not end because its time was up."""
    profile = FacilityProfile(name="east", data_weight=1.0, steps_per_second=10.0, first_delay=2.0)
    plan = Plan(facilities=(profile,), round_length=10.0, seconds=90.0)
    strategy = STRATEGIES["fedqueue"](plan, STRATEGIES["fedqueue"].Options())
    events: list[Event] = [
        RunStarted(at=0.0),
        messages.TimerFired(at=10.0, key="cutoff/0"),
        StopRequested(at=10.5),
        StopRequested(at=11.0),
        messages.ModelReady(at=12.0, version=1),
    ]
    compare("stop", text_of([(event, list(strategy.handle(event))) for event in events]), request)


def test_models_that_are_taken_back_are_as_written_down(request: pytest.FixtureRequest) -> None:
    """West was bound to the model that is taken back, East hands in what it made of it."""
    names = ("east", "west")
    profiles = (FacilityProfile(name=n, data_weight=0.5, steps_per_second=10.0, first_delay=2.0) for n in names)
    strategy = STRATEGIES["fedqueue"](
        Plan(facilities=tuple(profiles), round_length=10.0, rounds=2), STRATEGIES["fedqueue"].Options()
    )
    receipt = Receipt(job_id="east/0", attempt=0, base_version=0, steps_done=60, train_seconds=6.0, admission_delay=2.0)
    later = replace(receipt, job_id="east/1", base_version=1)
    events: list[Event] = [
        RunStarted(at=0.0),
        UpdateArrived(at=8.0, receipt=receipt),
        UpdateArrived(at=8.5, receipt=replace(receipt, job_id="west/0")),
        messages.TimerFired(at=10.0, key="cutoff/0"),
        messages.ModelReady(at=10.5, version=1),
        UpdateArrived(at=18.0, receipt=later),
        messages.RolledBack(at=18.5, version=0),
        messages.RolledBack(at=18.5, version=3),
        messages.ModelReady(at=19.0, version=2),
        messages.TimerFired(at=20.0, key="cutoff/1"),
        messages.TimerFired(at=20.0, key="cutoff/2"),
        messages.ModelReady(at=20.5, version=3),
    ]
    compare("rolled-back", text_of([(event, list(strategy.handle(event))) for event in events]), request)


def test_what_would_stall_a_round_is_as_written_down(request: pytest.FixtureRequest) -> None:
    """South says for ever that its job waits; what west hands in cannot be summed. North alone is in the model."""
    profiles = (FacilityProfile(name=n, data_weight=1 / 3, steps_per_second=10.0) for n in ("north", "south", "west"))
    plan = Plan(facilities=tuple(profiles), round_length=10.0, rounds=2, overdue_seconds=30.0)
    strategy = STRATEGIES["fedavg"](plan, STRATEGIES["fedavg"].Options(steps=50))
    receipt = Receipt(
        job_id="north/0", attempt=0, base_version=0, steps_done=50, train_seconds=5.0, admission_delay=2.0
    )
    events: list[Event] = [
        RunStarted(at=0.0),
        messages.JobSubmitted(at=1.0, job_id="south/0"),
        UpdateArrived(at=8.0, receipt=receipt),
        UpdateArrived(at=9.0, receipt=replace(receipt, job_id="west/0")),
        messages.TimerFired(at=30.0, key="overdue/0/south"),
        messages.TimerFired(at=31.0, key="overdue/0/south"),
        messages.UpdatesUnusable(at=31.5, version=1, facility="west", reason="tensor 'w' is not finite once summed"),
        messages.ModelReady(at=32.0, version=1),
        UpdateArrived(at=33.0, receipt=replace(receipt, job_id="south/0")),
    ]
    compare("stalls", text_of([(event, list(strategy.handle(event))) for event in events]), request)


def compare(name: str, text: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing: run pytest with --update-golden, and read what it writes"
    assert text == path.read_text()


def test_every_kind_of_event_command_and_record_appears_in_some_golden_trace() -> None:
    everything = "".join(path.read_text() for path in GOLDEN.glob("*.txt"))
    for kind in (*get_args(messages.Event), *get_args(messages.Command)):
        assert f" {kind.__name__}" in everything, f"no golden trace shows {kind.__name__}"
    for record in get_args(RecordKind):
        assert f"Record {record}:" in everything, f"no golden trace shows a {record} record"
    for fate in get_args(messages.Fate):
        assert f"fate {fate}" in everything, f"no golden trace shows an update that was {fate}"


def test_golden_folder_holds_nothing_else() -> None:
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {
        *SCENARIOS,
        "jit-rounds-auto",
        "operator",
        "rolled-back",
        "stalls",
        "stop",
    }
