"""Which job this process is, and what it is to do: assigned beforehand, or taken from the standing work when it starts.

Part of the worker: Python 3.9 and the standard library. Times are those of the shared file system (filetime.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from fedqueue import PROTOCOL
from fedqueue.errors import ConfigError
from fedqueue.filetime import FileClock
from fedqueue.protocol.binding_rule import fit, linger_until
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import (
    Assignment,
    AssignmentFile,
    Bound,
    BoundFile,
    Order,
    OrderFile,
    StandingFile,
)
from fedqueue.worker.distributed import Ranks
from fedqueue.worker.handin import (
    FILE_PATIENCE,
    POLL_SECONDS,
    ParticipateError,
    describe,
    read_file,
    read_object,
    read_text,
    say,
    write_file,
)

DRY_RUN_FOLDER = "fedqueue-dry-run"
DRY_RUN_KEYS = ("model", "steps", "learning_rate", "seconds")


class Job(NamedTuple):
    """What the order and the environment say."""

    order: Order
    attempt: int
    folder: Path  # this attempt's own: a second incarnation has another
    state_dir: Path
    nodes: int
    entered_at: float  # when the script asked for work
    started_at: float  # when the batch script began
    wall_seconds: float  # infinite outside a facility
    standing: Path | None  # where to take work from, if none is assigned
    assigned: AssignmentFile | None
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
    protocol = read_object(where, entered + FILE_PATIENCE).get("protocol")
    if protocol not in (PROTOCOL, PROTOCOL - 1):
        raise ParticipateError(f"{where}: protocol must be {PROTOCOL} or {PROTOCOL - 1}, found {protocol!r}")
    file = read_file(OrderFile, where)
    assigned = None
    if file.assignment is not None and file.model is not None:
        assigned = AssignmentFile(assignment=file.assignment, model=file.model)
    started = folder / f"attempt-{attempt}" / "started"
    read_text(started, entered + FILE_PATIENCE)
    clock = FileClock(started.parent)
    return Job(
        order=file.order,
        attempt=attempt,
        folder=started.parent,
        state_dir=_made(Path(file.state_dir)),
        nodes=count_nodes(environment) if file.nodes is None else file.nodes,
        entered_at=clock.now() - (time.monotonic() - entered),
        started_at=started.stat().st_mtime,
        wall_seconds=file.order.wall_seconds,
        standing=None if assigned else Path(file.standing),
        assigned=assigned,
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
    model = os.path.abspath(os.fspath(settings.get("model", "")))
    if not os.path.isfile(model):
        raise ParticipateError(f"dry_run: model must name a safetensors file, found {settings.get('model')!r}")
    chosen = {key: value for key, value in settings.items() if key in ("steps", "learning_rate")}
    try:
        wanted = {"base_version": 0, "train_budget": settings.get("seconds"), **chosen}
        assignment = read(Assignment, wanted, "dry_run")
    except ConfigError as error:
        raise ParticipateError(str(error)) from None
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
        order=Order(job_id="dry-run/0", facility="dry-run", round=0, wall_seconds=sys.float_info.max),
        attempt=attempt,
        folder=home / f"attempt-{attempt}",
        state_dir=state_dir,
        nodes=1,
        entered_at=clock.now(),
        started_at=clock.now(),
        wall_seconds=inf,
        standing=None,
        assigned=AssignmentFile(assignment=assignment, model=model),
        clock=clock,
    )


def take_work(job: Job, hurried: Callable[[], bool]) -> AssignmentFile:
    """For the first rank: the assignment, and a file of it for the others.

    `hurried` says that there is no time left to linger.
    """
    if (job.folder / "result.json").exists():
        raise ParticipateError(f"{job.order.job_id} has handed in already; a script takes part once")
    shared = job.folder / "assignment.json"
    if shared.exists():  # a launcher restarted the processes: the same job, so the same work
        return await_assignment(job)
    taken = job.assigned or _bind(job, hurried)
    _await_model(job, Path(taken.model), hurried)
    write_file(shared, taken)
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


def await_assignment(job: Job) -> AssignmentFile:
    """For the other ranks: what the first one took."""
    return read_file(AssignmentFile, job.folder / "assignment.json", time.monotonic() + job.wall_left)


def _bind(job: Job, hurried: Callable[[], bool]) -> AssignmentFile:
    assert job.standing is not None
    file = read_file(StandingFile, job.standing, time.monotonic() + FILE_PATIENCE)
    until = None if job.order.purpose == "evaluate" else linger_until(file.standing, job.entered_at)
    if until is not None:
        version = file.standing.version
        while job.clock.now() < until and not hurried():
            time.sleep(POLL_SECONDS)
            file = read_file(StandingFile, job.standing, time.monotonic() + until - job.clock.now())
            if file.standing.version > version or linger_until(file.standing, job.clock.now()) is None:
                break
    # The learned overhead has the start-up in it, which is over; so we count as if we had started that much earlier.
    bound_at = job.clock.now()
    startup = max(0.0, job.entered_at - job.started_at)
    found = fit(file.standing, bound_at - startup)
    work = Assignment(
        base_version=file.standing.version,
        steps=found.steps,
        learning_rate=found.learning_rate,
        train_budget=found.train_budget,
    )
    bound = Bound(
        standing=file.number,
        cutoff_index=found.cutoff_index,
        base_version=work.base_version,
        steps=work.steps,
        learning_rate=work.learning_rate,
        train_budget=found.train_budget,
    )
    record = BoundFile(bound=bound, bound_at=bound_at, lingered=bound_at - job.entered_at, startup_seconds=startup)
    write_file(job.folder / "bound.json", record)
    return AssignmentFile(assignment=work, model=file.model)


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
