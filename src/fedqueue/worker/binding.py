"""Which job this process is, and what it is to do: assigned beforehand, or taken from the standing work when it starts.

Part of the worker: Python 3.9 and the standard library. Times are those of the shared file system (filetime.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from fedqueue import PROTOCOL
from fedqueue.filetime import FileClock
from fedqueue.protocol.binding_rule import StandingWork, fit, linger_until
from fedqueue.worker.distributed import Ranks
from fedqueue.worker.handin import (
    FILE_PATIENCE,
    POLL_SECONDS,
    ParticipateError,
    describe,
    field,
    read_json,
    read_text,
    say,
    write_json,
)

DRY_RUN_FOLDER = "fedqueue-dry-run"
DRY_RUN_KEYS = ("model", "steps", "learning_rate", "seconds")


class Assignment(NamedTuple):
    """`messages.Assignment` for Python 3.9, with the model's file instead of a cutoff."""

    base_version: int
    steps: int
    learning_rate: float
    train_budget: float | None  # seconds of training; None: steps alone decide
    model: Path

    @classmethod
    def read(cls, record: Mapping[str, Any], model: str, where: object) -> Assignment:
        budget = record.get("train_budget")
        found = cls(
            base_version=field(record, "base_version", int, where),
            steps=field(record, "steps", int, where),
            learning_rate=field(record, "learning_rate", float, where),
            train_budget=None if budget is None else field(record, "train_budget", float, where),
            model=Path(model),
        )
        if found.steps < 1 or found.learning_rate <= 0:
            raise ParticipateError(f"{where}: steps and learning_rate must be above 0, found {dict(record)}")
        return found


class Job(NamedTuple):
    """What the order and the environment say."""

    job_id: str
    facility: str
    round: int
    attempt: int
    purpose: str
    folder: Path  # this attempt's own: a second incarnation has another
    state_dir: Path
    nodes: int
    entered_at: float  # when the script asked for work
    started_at: float  # when the batch script began
    wall_seconds: float
    standing: Path | None  # where to take work from, if none is assigned
    assignment: Assignment | None
    clock: FileClock

    @property
    def wall_left(self) -> float:
        """Seconds until the scheduler ends the job."""
        return self.started_at + self.wall_seconds - self.clock.now()


def this_job(environment: Mapping[str, str]) -> Job | None:
    """The job that the batch script names; None outside one."""
    entered = time.monotonic()
    named = environment.get("FEDQUEUE_JOB")
    if not named:
        return None
    folder = Path(named)
    try:
        attempt = int(environment.get("FEDQUEUE_ATTEMPT", ""))
    except ValueError as error:
        raise ParticipateError(
            "FEDQUEUE_JOB is set but FEDQUEUE_ATTEMPT is not a number; start jobs by job.sh"
        ) from error
    where = folder / "order.json"
    order = read_json(where, entered + FILE_PATIENCE)
    if order.get("protocol") not in (PROTOCOL, PROTOCOL - 1):
        spoken = f"{PROTOCOL} or {PROTOCOL - 1}"
        raise ParticipateError(f"{where}: protocol must be {spoken}, found {order.get('protocol')!r}")
    assigned, nodes = order.get("assignment"), order.get("nodes")
    assignment = None
    if assigned is not None:
        record = field(order, "assignment", dict, where)
        assignment = Assignment.read(record, field(order, "model", str, where), where)
    started = folder / f"attempt-{attempt}" / "started"
    read_text(started, entered + FILE_PATIENCE)
    clock = FileClock(started.parent)
    return Job(
        job_id=field(order, "job_id", str, where),
        facility=field(order, "facility", str, where),
        round=field(order, "round", int, where),
        attempt=attempt,
        purpose=field(order, "purpose", str, where),
        folder=started.parent,
        state_dir=_made(Path(field(order, "state_dir", str, where))),
        nodes=count_nodes(environment) if nodes is None else field(order, "nodes", int, where),
        entered_at=clock.now() - (time.monotonic() - entered),
        started_at=started.stat().st_mtime,
        wall_seconds=field(order, "wall_seconds", float, where),
        standing=None if assignment else Path(field(order, "standing", str, where)),
        assignment=assignment,
        clock=clock,
    )


def dry_run_job(settings: Mapping[str, Any] | None, ranks: Ranks) -> Job:
    """A job of its own making, to try a script outside a facility."""
    if settings is None:
        raise ParticipateError(
            "this is not a FedQueue job (FEDQUEUE_JOB is not set); to try the script here, use "
            'fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 100, "learning_rate": 1e-3})'
        )
    unknown = [key for key in settings if key not in DRY_RUN_KEYS]
    if unknown:
        raise ParticipateError(f"dry_run: there is no {unknown[0]!r}; use {', '.join(DRY_RUN_KEYS)}")
    record = {"base_version": 0, "train_budget": settings.get("seconds"), **settings}
    model = os.path.abspath(os.fspath(settings.get("model", "")))
    if not os.path.isfile(model):
        raise ParticipateError(f"dry_run: model must name a safetensors file, found {settings.get('model')!r}")
    home, attempt = Path.cwd() / DRY_RUN_FOLDER, 0
    state_dir = _made(home / "state")
    while ranks.first:
        try:
            (home / f"attempt-{attempt}").mkdir()
            break
        except FileExistsError:
            attempt += 1
    clock = FileClock(home)
    return Job(
        job_id="dry-run/0",
        facility="dry-run",
        round=0,
        attempt=attempt,
        purpose="train",
        folder=home / f"attempt-{attempt}",
        state_dir=state_dir,
        nodes=1,
        entered_at=clock.now(),
        started_at=clock.now(),
        wall_seconds=inf,
        standing=None,
        assignment=Assignment.read(record, model, "dry_run"),
        clock=clock,
    )


def take_work(job: Job, hurried: Callable[[], bool]) -> Assignment:
    """For the first rank: the assignment, and a file of it for the others.

    `hurried` says that there is no time left to linger.
    """
    if (job.folder / "result.json").exists():
        raise ParticipateError(f"{job.job_id} has handed in already; a script takes part once")
    shared = job.folder / "assignment.json"
    if shared.exists():  # a launcher restarted the processes: the same job, so the same work
        return await_assignment(job)
    taken = job.assignment or _bind(job, hurried)
    _await_model(job, taken.model, hurried)
    write_json(shared, {**taken._asdict(), "model": str(taken.model)})
    return taken


def _await_model(job: Job, path: Path, hurried: Callable[[], bool]) -> None:
    """A model may still be on its way to the site: it travels while the job is in the queue."""
    told = False
    while not path.is_file():
        if job.wall_left < 0 or hurried():
            raise ParticipateError(f"{path}: the model did not come in time; look at the agent's log")
        if not told:
            say(f"waiting for the model {path.name}")
            told = True
        time.sleep(POLL_SECONDS)


def await_assignment(job: Job) -> Assignment:
    """For the other ranks: what the first one took."""
    where = job.folder / "assignment.json"
    record = read_json(where, time.monotonic() + job.wall_left)
    return Assignment.read(record, field(record, "model", str, where), where)


def _bind(job: Job, hurried: Callable[[], bool]) -> Assignment:
    assert job.standing is not None
    number, standing, model = _read_standing(job.standing, FILE_PATIENCE)
    until = None if job.purpose == "evaluate" else linger_until(standing, job.entered_at)
    if until is not None:
        version = standing.version
        while job.clock.now() < until and not hurried():
            time.sleep(POLL_SECONDS)
            number, standing, model = _read_standing(job.standing, until - job.clock.now())
            if standing.version > version or linger_until(standing, job.clock.now()) is None:
                break
    # The learned overhead has the start-up in it, which is over; so we count as if we had started that much earlier.
    bound_at = job.clock.now()
    startup = max(0.0, job.entered_at - job.started_at)
    found = fit(standing, bound_at - startup)
    record = {
        "standing": number,
        "cutoff_index": found.cutoff_index,
        "base_version": standing.version,
        "steps": found.steps,
        "learning_rate": found.learning_rate,
        "train_budget": found.train_budget,
        "bound_at": bound_at,
        "lingered": bound_at - job.entered_at,
        "startup_seconds": startup,
    }
    write_json(job.folder / "bound.json", record)
    return Assignment(standing.version, found.steps, found.learning_rate, found.train_budget, Path(model))


def _read_standing(path: Path, patience: float) -> tuple[int, StandingWork, str]:
    record = read_json(path, time.monotonic() + patience)
    least = record.get("least_steps")
    standing = StandingWork(
        version=field(record, "version", int, path),
        next_cutoff=field(record, "next_cutoff", float, path),
        round_length=field(record, "round_length", float, path),
        steps_per_second=field(record, "steps_per_second", float, path),
        overhead=field(record, "overhead", float, path),
        min_steps=field(record, "min_steps", int, path),
        learning_rate=field(record, "learning_rate", float, path),
        lr_scaling=field(record, "lr_scaling", str, path),
        least_steps=None if least is None else field(record, "least_steps", int, path),
        patience=field(record, "patience", float, path),
    )
    if min(standing.round_length, standing.steps_per_second) <= 0:
        raise ParticipateError(f"{path}: round_length and steps_per_second must be above 0")
    return field(record, "number", int, path), standing, field(record, "model", str, path)


def count_nodes(environment: Mapping[str, str]) -> int:
    """How many nodes the scheduler gave, as far as it says.

    >>> count_nodes({"SLURM_JOB_NUM_NODES": "4"})
    4
    """
    slurm, pbs = environment.get("SLURM_JOB_NUM_NODES", ""), environment.get("PBS_NODEFILE")
    if slurm.isdigit():
        return int(slurm)
    try:
        hosts = Path(pbs).read_text(encoding="utf-8").split() if pbs else []
    except OSError:
        hosts = []
    return len(set(hosts)) or 1


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParticipateError(f"{folder}: cannot be made: {describe(error)}") from error
    return folder
