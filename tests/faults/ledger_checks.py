"""What must hold of every run, whatever was done to its processes; read from its ledger and its files alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.contract import Receipt, UpdateKey, sequence_of
from fedqueue.protocol.messages import (
    Aggregate,
    CancelJob,
    Event,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelReady,
    ModelScored,
    Record,
    SetTimer,
    StopRun,
    SubmitJob,
    TimerFired,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
    parse,
)
from fedqueue.runs import replay
from tests.faults.worker import read_values, step_of

T = TypeVar("T")
GRACE_SECONDS = 0.5  # that an agent of these tests gives a job's result to show
Step = Callable[[str, int, int, int], float]
"""What the update of (job, attempt, part) adds to the value at a place."""
Values = np.ndarray[Any, np.dtype[np.float64]]


class Story:
    """A ledger, read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[tuple[Event, list[Any]]] = []
        with LedgerReader(folder / FILE) as reader:
            self.meta = reader.meta
            for event, recorded in reader.steps():
                self.steps.append((event, [parse(kind, json.loads(text)) for kind, text in recorded]))

    def events(self, kind: type[T]) -> list[T]:
        return [event for event, _ in self.steps if isinstance(event, kind)]

    def commands(self, kind: type[T]) -> list[T]:
        return [command for _, commands in self.steps for command in commands if isinstance(command, kind)]

    @property
    def fates(self) -> list[tuple[UpdateKey, str]]:
        records = [record.facts for record in self.commands(Record) if record.kind == "fate"]
        return [((str(f["job"]), int(f["attempt"] or 0), int(f.get("part") or 0)), str(f["fate"])) for f in records]

    @property
    def receipts(self) -> dict[UpdateKey, Receipt]:
        return {e.receipt.key: e.receipt for e in self.events(UpdateArrived)}

    @property
    def versions(self) -> list[int]:
        return [event.version for event in self.events(ModelReady)]


class Home(NamedTuple):
    """Where an agent keeps what it has of one run."""

    path: Path
    facility: str
    scheduler: Path  # that its jobs go to
    names: str = "fq-*-"  # of its jobs there begin so, and end with a number

    @classmethod
    def of(cls, path: Path) -> Home:
        return cls(path, path.name, path / "scheduler")

    @classmethod
    def below(cls, site: Path, run: str) -> Home:
        """Of one run of a site that takes part in several."""
        path = site / "runs" / run
        journal = json.loads((path / "journal.jsonl").read_text().splitlines()[0])
        return cls(path, site.name, site / "scheduler", f"fq-{journal.get('id', journal.get('journal_id'))[:8]}-")


def check_run(folder: Path, homes: Iterable[Path | Home], *, rounds: int, step: Step = step_of) -> Story:
    """Everything; the first thing that does not hold is raised."""
    story = Story(folder)
    assert replay(folder) == len(story.steps)
    check_end(story, rounds)
    check_counts(story)
    check_fates(story)
    check_parts(story)
    check_timers(story)
    check_models(story, step)
    for home in homes:
        check_facility(story, home if isinstance(home, Home) else Home.of(home))
    return story


def check_end(story: Story, rounds: int) -> None:
    stops = story.commands(StopRun)
    assert len(stops) == 1, f"the run was stopped {len(stops)} times"
    assert story.versions == list(range(1, len(story.versions) + 1)), f"versions do not rise by one: {story.versions}"
    assert len(story.versions) >= rounds, f"{len(story.versions)} models, not {rounds}; it ended: {stops[0].reason}"
    asked = [command.to_version for command in story.commands(Aggregate)]
    assert asked[: len(story.versions)] == story.versions, f"asked for {asked}, made {story.versions}"
    assert (story.folder / "summary.json").exists()


def check_counts(story: Story) -> None:
    """Nothing is told twice: reports are numbered, and the ledger knows the newest."""
    orders = [command.order.job_id for command in story.commands(SubmitJob)]
    once(orders, "ordered")
    once([e.job_id for e in story.events(JobSubmitted)], "submitted")
    kinds: tuple[type[Any], ...] = (JobStarted, JobEnded, JobRequeued, JobFailed)
    for kind in kinds:
        once([(e.job_id, e.attempt) for e in story.events(kind)], kind.__name__)
    once([e.version for e in story.events(ModelScored)], "ModelScored")
    once([(e.job_id, e.attempt, e.part) for e in story.events(WorkTaken)], "WorkTaken")
    once([e.key for e in story.events(UpdateRejected)], "UpdateRejected")
    once([e.receipt.key for e in story.events(UpdateArrived)], "UpdateArrived")
    unknown = {key[0] for key in story.receipts} - set(orders)
    assert not unknown, f"updates of jobs that were never ordered: {unknown}"


def check_fates(story: Story) -> None:
    once([key for key, _ in story.fates], "fate")
    fates = dict(story.fates)
    for key in story.receipts:
        assert key in fates, f"the update of {key} has no fate"
    for event in story.events(UpdateRejected):
        key = event.key
        assert fates.get(key) == "rejected", f"{key} was rejected, and its fate is {fates.get(key)}"
    shares = [share for command in _made(story) for share in command.weights]
    used = [share.key for share in shares if not share.again]
    once(used, "aggregated")
    assert {share.key for share in shares} == set(used), "who stands in was in a model before"
    aggregated = {key for key, fate in fates.items() if fate == "aggregated"}
    assert set(used) == aggregated, f"aggregated by record {aggregated}, by command {set(used)}"
    assert aggregated <= set(story.receipts)


def check_parts(story: Story) -> None:
    """A job that stays and dies, or that its scheduler takes back, loses at most the part that it was training."""
    orders = {command.order.job_id: command.order for command in story.commands(SubmitJob)}
    parts: dict[tuple[str, int], set[int]] = {}  # that an attempt is known to have begun
    for taken in story.events(WorkTaken):
        parts.setdefault((taken.job_id, taken.attempt), {0}).add(taken.part)
    heard = set(story.receipts) | {event.key for event in story.events(UpdateRejected)}
    for job, attempt, part in heard:
        parts.setdefault((job, attempt), {0}).add(part)
    stopped = next(
        place for place, (_, commands) in enumerate(story.steps) if any(isinstance(c, StopRun) for c in commands)
    )
    cut_short: list[Any] = [e for e, _ in story.steps[:stopped] if isinstance(e, JobFailed | JobRequeued)]
    for event in cut_short:
        if orders[event.job_id].stay is None:
            continue
        attempt = event.attempt - isinstance(event, JobRequeued)
        begun = parts.get((event.job_id, attempt), set())
        lost = {part for part in begun if (event.job_id, attempt, part) not in heard}
        assert lost <= {max(begun, default=0)}, f"{event.job_id} attempt {attempt} lost {lost} of {begun}"


def check_timers(story: Story) -> None:
    """No timer fires before its second, whatever stood still meanwhile; and time never runs backwards."""
    due: dict[str, list[float]] = {}
    newest = 0.0
    for event, commands in story.steps:
        assert event.at >= newest, f"{type(event).__name__} at {event.at}, after something at {newest}"
        newest = event.at
        if isinstance(event, TimerFired):
            planned = due[event.key].pop(0)
            assert event.at >= planned, f"timer {event.key} fired at {event.at}, before {planned}"
        for command in commands:
            if isinstance(command, SetTimer):
                due.setdefault(command.key, []).append(command.at)
                due[command.key].sort()


def check_models(story: Story, step: Step) -> None:
    """The last model is the sum of what the ledger says was aggregated: nothing is missing, nothing is in it twice."""
    first = Path(story.meta["config"]["folder"]) / story.meta["config"]["model"]["initial"]
    models: dict[int, Values] = {0: np.array(read_values(str(first))[1], np.float64)}
    for command in _made(story):
        current = models[command.from_version]
        total = current.copy()
        for share in command.weights:
            base = models[story.receipts[share.key].base_version]
            trained = base + [step(*share.key, place) for place in range(len(base))]
            total += share.weight * (trained - (base if command.rule == "add_deltas" else current))
        models[command.to_version] = total
    digests = {event.version: event.digest for event in story.events(ModelReady)}
    for version, wanted in models.items():
        path = story.folder / "objects" / f"{digests.get(version, '')}.safetensors"
        if path.exists():
            _same(path, wanted, f"model {version}")
    _same(story.folder / "model.safetensors", models[max(models)], "the last model")


def check_facility(story: Story, home: Home) -> None:
    """What jobs handed in was heard of, unless another attempt took its place or the run was over; of jobs that stay,
    whatever became of them while it went on. And the scheduler was asked for no job twice."""
    path, facility, scheduler, of_this_run = home
    orders = {command.order.job_id: command.order for command in story.commands(SubmitJob)}
    wanted = set(orders)
    failed = {event.job_id for event in story.events(JobFailed)}
    heard = set(story.receipts) | {e.key for e in story.events(UpdateRejected)}
    settled = {key[0] for key in heard}
    open_at_end = wanted - settled - failed
    last = next(commands for _, commands in story.steps if any(isinstance(c, StopRun) for c in commands))
    ended_with_run = {command.job_id for command in last if isinstance(command, CancelJob)}
    for (job, attempt, part), result in results(home):
        assert job in wanted, f"{job} was run and never ordered"
        if (job, attempt, part) in heard:
            continue
        if orders[job].stay is not None:
            lived_on = job in failed and result.stat().st_mtime > ended_at(home, job) + GRACE_SECONDS
            assert job in ended_with_run or lived_on, f"part {part} of {job} attempt {attempt} was lost"
            continue
        superseded = (path / "jobs" / job.rpartition("/")[2] / f"attempt-{attempt + 1}").exists()
        if job not in open_at_end and not superseded:
            assert job in failed, f"the result of {job} attempt {attempt} was lost"
    names = [record.parent.name for record in scheduler.glob(f"jobs/{of_this_run}*/record.json")]
    once([name.rpartition("-")[2] for name in names if "-eval-" not in name], "at the scheduler")
    for name in names:
        if "-eval-" not in name:
            sequence = int(name.rpartition("-")[2])
            attempts = len(list(path.glob(f"jobs/{sequence}/attempt-*")))
            state = scheduler / "jobs" / name / "state.json"
            incarnations = json.loads(state.read_text())["incarnation"] + 1 if state.exists() else 0
            assert attempts <= incarnations, f"job {sequence} ran {attempts} times, scheduled {incarnations} times"
    numbers = {sequence_of(job) for job in wanted if job.startswith(f"{facility}/")}
    assert {int(job.name) for job in path.glob("jobs/[0-9]*")} <= numbers


def ended_at(home: Home, job: str) -> float:
    """As its scheduler says; a process whose shepherd was killed may live on."""
    state = next(home.scheduler.glob(f"jobs/{home.names}{sequence_of(job)}/state.json"), None)
    return inf if state is None else float(json.loads(state.read_text()).get("ended_at") or inf)


def results(home: Home) -> Iterator[tuple[UpdateKey, Path]]:
    """What the jobs of a facility say that they handed in."""
    for result in home.path.glob("jobs/[0-9]*/attempt-*/**/result.json"):
        number, attempt, *part = result.parent.relative_to(home.path / "jobs").parts
        key = int(attempt.partition("-")[2]), int(part[0].partition("-")[2]) if part else 0
        yield (f"{home.facility}/{number}", *key), result


def once(keys: Iterable[Any], what: str) -> None:
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice, f"{what} more than once: {twice}"


def _made(story: Story) -> list[Aggregate]:
    """The models that came of it; what is asked for when the run ends does not."""
    once([command.to_version for command in story.commands(Aggregate)], "asked for")
    return [command for command in story.commands(Aggregate) if command.to_version in story.versions]


def _same(path: Path, wanted: Values, what: str) -> None:
    found = np.array(read_values(str(path))[1], np.float64)
    worst = float(np.abs(found - wanted).max()) if found.shape == wanted.shape else float("inf")
    assert worst < 1e-4, f"{what} is not what was aggregated: it is off by {worst:g}"
