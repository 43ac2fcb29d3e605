"""What a facility says of its scheduler, one dataclass a kind; read from TOML."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor
from typing import Annotated, Literal

from fedqueue.plugins import plugins
from fedqueue.protocol.checks import at_least, more_than


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


def _check_limits(settings: SchedulerSettings) -> None:
    more_than(settings, 0, "min_wall_seconds", "kill_delay_seconds")
    least = max(settings.min_wall_seconds, GRANULARITY.get(settings.kind, 0.0))
    at_least(settings, least, "max_wall_seconds")
    if not isinstance(settings, LocalSettings):
        more_than(settings, 0, "timeout_seconds")
