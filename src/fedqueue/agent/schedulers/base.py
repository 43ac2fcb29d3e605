"""What the agent asks of a batch scheduler, what it may be told, and what a facility says of it in its config.

An adapter calls the scheduler's own commands and reads their answers; it keeps nothing between calls. Three rules
hold for every one of them, each learnt from a scheduler that broke it:

    missing is never completed      an id that the scheduler does not know is absent from `poll`
    a failed poll is never a        what could not be asked raises SchedulerUnreachableError, and says nothing of
    failed job                      the jobs
    unknown output is a state       a word that we do not know becomes phase "unknown", never an exception

Whether a job did its work is not for the scheduler to say: only the job's own result file is success.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, isfinite
from pathlib import Path
from typing import Annotated, Literal, Protocol

from fedqueue.errors import FedQueueError
from fedqueue.forecasting.state import Listed
from fedqueue.plugins import plugins
from fedqueue.protocol.codec import at_least, more_than

NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,59}")  # what every scheduler takes as it is and none cuts short
OUTPUT = "output.txt"  # in the job's folder: what the job printed, all its incarnations one after the other

Phase = Literal["waiting", "running", "ended", "unknown"]
Outcome = Literal["completed", "failed", "cancelled", "timeout", "preempted", "node_fail", "unknown"]


class SchedulerError(FedQueueError):
    """The scheduler of a facility did not do what was asked."""


class SubmitRefusedError(SchedulerError):
    """The scheduler said no: there is no such job. `transient`: the same request may be taken later."""

    def __init__(self, reason: str, transient: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient


class SchedulerUnreachableError(SchedulerError):
    """It could not be asked, or did not answer in time. After `submit` the job may or may not exist: `find` it."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job. stdout and stderr are appended to `folder`/output.txt."""

    name: str  # unique at this facility: by it a job is found again
    script: Path
    folder: Path  # exists already
    wall_seconds: float  # each scheduler rounds up to what it can keep
    after: str | None = None  # id of a job; this one is eligible when that one has ended, however it ended

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name must be a letter, then letters, digits and '-', 60 at most, found {self.name!r}")
        for name in ("script", "folder"):
            path = str(getattr(self, name))
            if not path.startswith("/") or "\n" in path:
                raise ValueError(f"{name} must be an absolute path on one line, found {path!r}")
        if not (isfinite(self.wall_seconds) and self.wall_seconds > 0):
            raise ValueError(f"wall_seconds must be more than 0, found {self.wall_seconds}")

    @property
    def output(self) -> Path:
        return self.folder / OUTPUT


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A job as its scheduler sees it. Times are epoch seconds of the scheduler's clock, None where it has none.

    `incarnation` counts from 0; a job that was requeued and waits again has the number of the run to come, and its
    times are those of that run. Two incarnations may be alive at once: the scheduler can lose sight of the first.
    """

    phase: Phase
    reason: str = ""  # the scheduler's own words
    never_starts: str | None = None  # why it waits in vain
    bad_luck: bool = False  # it waits in vain, and another like it need not
    held: str | None = None  # who keeps it from starting, and what releases it, if a person does
    name: str | None = None  # of the job with this id; not ours: a scheduler that lost its newest jobs gives ids again
    eligible_at: float | None = None  # when it could first have started: no hold, no dependency
    started_at: float | None = None
    ended_at: float | None = None  # when the scheduler noticed: late after an outage
    incarnation: int = 0
    outcome: Outcome | None = None  # once ended
    exit_code: int | None = None  # 128 + N when signal N ended it

    def __post_init__(self) -> None:
        if (self.outcome is not None) != (self.phase == "ended"):
            raise ValueError(f"outcome belongs to phase ended, found {self.outcome!r} with phase {self.phase!r}")


class Scheduler(Protocol):
    """Every call returns or raises within the time-out of its settings. Who inherits from it, and has nothing to say of
    starts to come or of the jobs of others, leaves the last three as they are."""

    kind: str

    def submit(self, request: JobRequest) -> str:
        """The scheduler's id of the new job. Raises SubmitRefusedError or SchedulerUnreachableError."""

    def find(self, name: str) -> str | None:
        """The id of our job of this name, waiting, running or recently ended."""

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        """Every job of these that the scheduler knows. Raises SchedulerUnreachableError when it could not be asked."""

    def cancel(self, job_id: str) -> None:
        """Ask for its end; no error if it is gone already. The end shows in `poll`, some seconds later."""

    def estimate(self, wall_seconds: float) -> float | None:
        """Seconds until a job of ours would start if it were submitted now, by the scheduler's own plan and clock.
        None: it has none, or plans only jobs that it has."""
        return None

    def planned(self, job_id: str) -> float | None:
        """Seconds from when this job of ours, which waits, could first have started to when it is planned to start,
        both by the scheduler's clock. None: there is no plan, or it waits no more."""
        return None

    def listing(self) -> Mapping[str, Listed] | None:
        """All jobs, of everybody, that wait or run. None: it does not say."""
        return None


def last_line(text: str) -> str:
    """What a command said in the end, for messages of one line.

    >>> last_line("sbatch: error: a\\nsbatch: error: b\\n\\n")
    'sbatch: error: b'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# Settings, one dataclass a kind; read from TOML ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    kind: Literal["slurm"] = "slurm"
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    memory: str | None = None  # of a node, as sbatch --mem takes it
    constraint: str | None = None
    reservation: str | None = None
    extra: list[str] = field(default_factory=list)  # further options of sbatch, as they are
    conf: str | None = None  # SLURM_CONF
    bin: str | None = None  # folder of the commands; None: on PATH
    min_wall_seconds: float = 60.0
    max_wall_seconds: float | None = None
    timeout_seconds: float = 30.0  # of each call; a Slurm without its controller takes 18 s to say so
    kill_delay_seconds: float = 30.0  # from SIGTERM to SIGKILL when a job is cancelled: KillWait of slurm.conf

    def __post_init__(self) -> None:
        at_least(self, 1, "nodes", "tasks_per_node", "cpus_per_task")
        at_least(self, 0, "gpus_per_node")
        _check_limits(self)


@dataclass(frozen=True, kw_only=True)
class PbsSettings:
    kind: Literal["pbs"] = "pbs"
    queue: str | None = None
    account: str | None = None
    nodes: int = 1  # chunks of the select statement
    cpus_per_node: int = 1
    gpus_per_node: int | None = None
    memory: str | None = None  # of a node, such as "16gb"
    place: str | None = None  # such as "scatter"
    extra: list[str] = field(default_factory=list)  # further options of qsub, as they are
    bin: str | None = None
    min_wall_seconds: float = 60.0
    max_wall_seconds: float | None = None
    timeout_seconds: float = 30.0
    kill_delay_seconds: float = 10.0  # from SIGTERM to SIGKILL when a job is cancelled: kill_delay of the queue

    def __post_init__(self) -> None:
        at_least(self, 1, "nodes", "cpus_per_node")
        at_least(self, 0, "gpus_per_node")
        _check_limits(self)


@dataclass(frozen=True, kw_only=True)
class SgeSettings:
    kind: Literal["sge"] = "sge"
    queue: str | None = None
    project: str | None = None
    parallel_environment: str | None = None
    slots: int = 1  # of the parallel environment
    extra: list[str] = field(default_factory=list)  # further options of qsub, as they are
    root: str | None = None  # SGE_ROOT
    cell: str | None = None  # SGE_CELL
    environment: dict[str, str] = field(default_factory=dict)  # further variables for its commands
    bin: str | None = None
    min_wall_seconds: float = 60.0
    max_wall_seconds: float | None = None
    timeout_seconds: float = 30.0
    kill_delay_seconds: float = 60.0  # until SIGKILL when a job is cancelled: notify of the queue

    def __post_init__(self) -> None:
        at_least(self, 1, "slots")
        if self.slots > 1 and self.parallel_environment is None:
            raise ValueError(f"slots of {self.slots} needs parallel_environment, which is not set")
        _check_limits(self)


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """This machine as a facility: no daemon, first come, first served."""

    kind: Literal["local"] = "local"
    slots: int = 1  # jobs that run at once
    extra_waits: list[float] = field(default_factory=list)  # the j-th job waits extra_waits[j % len] seconds longer
    folder: str | None = None  # of the job records, on a local disk; None: under the agent's home
    min_wall_seconds: float = 1.0
    max_wall_seconds: float | None = None
    kill_delay_seconds: float = 5.0  # from SIGTERM to SIGKILL when a job is cancelled

    def __post_init__(self) -> None:
        at_least(self, 1, "slots")
        if any(not 0 <= wait < float("inf") for wait in self.extra_waits):
            raise ValueError(f"extra_waits must be 0 or more, found {self.extra_waits}")
        _check_limits(self)


def _from_outside() -> list[type]:
    return [scheduler.Settings for scheduler in plugins("schedulers").values()]


SchedulerSettings = Annotated[SlurmSettings | PbsSettings | SgeSettings | LocalSettings, _from_outside]
"""Or what a scheduler from outside has: its `kind`, `min_wall_seconds` and `max_wall_seconds` are used."""

GRANULARITY = {"slurm": 60.0, "pbs": 1.0, "sge": 1.0}  # seconds in which wall time is counted


def clamp_wall(seconds: float, settings: SchedulerSettings) -> float:
    """The wall time to ask for: within the site's limits, in whole minutes for Slurm, in whole seconds for the others.

    >>> [clamp_wall(61, settings) for settings in (SlurmSettings(), SlurmSettings(max_wall_seconds=100), PbsSettings())]
    [120.0, 60.0, 61.0]
    """
    step = GRANULARITY.get(settings.kind)
    wanted = max(seconds, settings.min_wall_seconds)
    if step is not None:
        wanted = ceil(wanted / step) * step
    if settings.max_wall_seconds is None:
        return wanted
    most = settings.max_wall_seconds
    return min(wanted, most if step is None else floor(most / step) * step)


def longest_wall(seconds: float, settings: SchedulerSettings) -> float:
    """The most wall time that may be asked for, if it must not be more than these seconds; 0: none.

    >>> longest_wall(119, SlurmSettings()), longest_wall(119, SlurmSettings(min_wall_seconds=90))
    (60.0, 0.0)
    """
    step = GRANULARITY.get(settings.kind)
    whole = seconds if step is None else floor(seconds / step) * step
    asked = clamp_wall(whole, settings)
    return asked if asked <= seconds else 0.0


def _check_limits(settings: SchedulerSettings) -> None:
    more_than(settings, 0, "min_wall_seconds", "kill_delay_seconds")
    least = max(settings.min_wall_seconds, GRANULARITY.get(settings.kind, 0.0))
    at_least(settings, least, "max_wall_seconds")
    if not isinstance(settings, LocalSettings):
        more_than(settings, 0, "timeout_seconds")
