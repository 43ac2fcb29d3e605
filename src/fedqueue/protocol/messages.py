"""What happens (events) and what we want (commands): the only words a strategy hears and says.

Events are past tense and carry `at`, seconds on the run clock. Commands are imperative.
All are frozen, keyword-only and checked when made, so that nothing inside has to check again.

>>> JobStarted(at=12.5, job_id="aurora/3", attempt=0, admission_delay=2.5).admission_delay
2.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal, TypeVar, dataclass_transform

from fedqueue.errors import ProtocolError

T = TypeVar("T")

JobId = str
"""Facility plus sequence number, as in "aurora/3"."""

Rule = Literal["add_deltas", "mix_models"]
"""How updates change a model: w + sum(weight * (trained - base)), or w + sum(weight * (trained - w))."""

Purpose = Literal["train", "warm_up"]

Scaling = Literal["none", "inverse"]
"""Learning rate against steps: the same for all, or eta_base * E_min / E."""

Scalar = str | int | float | bool | None

RecordKind = Literal["fate", "failure", "suspended", "rejoined", "ignored", "retry"]

Fate = Literal["aggregated", "rejected", "expired", "after_end"]
"""How an update ends: each has exactly one."""

WALL_TIME: Final = "wall time exceeded"
"""The reason a driver gives when the scheduler ended a job at its limit: a strategy then asks for more."""


def job_id(facility: str, sequence: int) -> JobId:
    return f"{facility}/{sequence}"


def facility_of(job: JobId) -> str:
    return job.rpartition("/")[0]


def sequence_of(job: JobId) -> int:
    return int(job.rpartition("/")[2])


def _bad(message: object, name: str, want: str) -> ProtocolError:
    return ProtocolError(f"{type(message).__name__}.{name} must be {want}, found {getattr(message, name)!r}")


def _seconds(message: object, *names: str) -> None:
    """Each named field is a finite number of seconds, zero or more."""
    for name in names:
        value = getattr(message, name)
        if not (isfinite(value) and value >= 0):
            raise _bad(message, name, "finite and 0 or more")


def _count(message: object, *names: str) -> None:
    for name in names:
        if getattr(message, name) < 0:
            raise _bad(message, name, "0 or more")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[T]) -> type[T]:
    """The shape of every message, and of what messages carry."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


# What messages carry ------------------------------------------------------------------------------------


@message
class Order:
    """Our request for a job: what to ask of the scheduler. The work itself is an `Assignment`."""

    job_id: JobId
    facility: str
    round: int
    wall_seconds: float  # wall time to request
    expected_delay: float | None = None  # q-hat when it was ordered; None: nothing was forecast
    purpose: Purpose = "train"
    after: JobId | None = None  # chained: eligible when this job has ended
    replaces: JobId | None = None  # the failed job it stands in for

    def __post_init__(self) -> None:
        if not (isfinite(self.wall_seconds) and self.wall_seconds > 0):
            raise _bad(self, "wall_seconds", "finite and more than 0")
        _count(self, "round")


@message
class Assignment:
    """Which model to start from, how many steps, at which rate, and until when."""

    base_version: int
    steps: int
    learning_rate: float
    train_budget: float | None = None  # stop training after so many seconds (J); None: steps alone decide
    cutoff: float | None = None  # the cutoff it aims at, run clock; None: it aims at none

    def __post_init__(self) -> None:
        _count(self, "base_version")
        if self.steps < 1:
            raise _bad(self, "steps", "1 or more")
        if not (isfinite(self.learning_rate) and self.learning_rate > 0):
            raise _bad(self, "learning_rate", "finite and more than 0")
        if self.train_budget is not None:
            _seconds(self, "train_budget")


@message
class Standing:
    """Work that waits at a facility for a job to start: all that `budget.bind` needs to make an assignment."""

    version: int
    next_cutoff: float  # run clock; further ones follow every round_length
    round_length: float
    steps_per_second: float
    overhead: float  # seconds of a job that are not training: start-up, hand-in, upload
    min_steps: int
    learning_rate: float
    lr_scaling: Scaling = "none"
    least_steps: int | None = None  # E_min, for inverse scaling
    patience: float = 0.0  # seconds around a cutoff in which a job waits for the next version instead

    def __post_init__(self) -> None:
        _count(self, "version")
        _seconds(self, "next_cutoff", "overhead", "patience")
        for name in ("round_length", "steps_per_second", "learning_rate"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise _bad(self, name, "finite and more than 0")
        if self.min_steps < 1:
            raise _bad(self, "min_steps", "1 or more")


@message
class Receipt:
    """What came back with an update, without its tensors."""

    job_id: JobId
    attempt: int
    base_version: int
    steps_done: int
    train_seconds: float
    admission_delay: float
    samples: int = 0
    nodes: int = 1
    device: str = ""  # as the worker names it; empty: not said
    digest: str = ""  # sha256 of the update's file; empty: it has none

    def __post_init__(self) -> None:
        _count(self, "attempt", "base_version", "steps_done", "samples", "nodes")
        _seconds(self, "train_seconds", "admission_delay")


# Events -------------------------------------------------------------------------------------------------


@message
class _Event:
    at: float  # seconds on the run clock

    def __post_init__(self) -> None:
        _seconds(self, "at")


@message
class RunStarted(_Event):
    pass


@message
class RunPaused(_Event):
    """From here the run clock stands still until `RunResumed`."""

    reason: str = ""  # what hinders the run until somebody mends it; empty: an operator said so


@message
class RunResumed(_Event):
    mended: bool = False  # what hindered the run; an operator's pause stays. False: an operator said so


@message
class StopRequested(_Event):
    """The operator ends the run; a model that is being made is waited for."""


@message
class CoordinatorResumed(_Event):
    down_seconds: float  # on the wall clock; the run clock stood still


@message
class FacilityJoined(_Event):
    facility: str


@message
class FacilityLeft(_Event):
    """Out of reach. Its jobs may go on, and their results may come when it joins again."""

    facility: str


@message
class FacilityDrained(_Event):
    """Gets no new job; what it has finishes."""

    facility: str


@message
class ForecastIssued(_Event):
    """A forecast made beside the driver; it stands in for the facility's own predictor until the next one."""

    facility: str
    mean: float
    quantiles: tuple[tuple[float, float], ...]  # (probability, seconds), rising
    source: str


@message
class JobSubmitted(_Event):
    job_id: JobId
    attempt: int = 0


@message
class SubmitRefused(_Event):
    """The scheduler did not take the job: it does not exist."""

    job_id: JobId
    reason: str
    transient: bool


@message
class JobStarted(_Event):
    """It runs and has its work: at once, or after it lingered for a model that was about to come."""

    job_id: JobId
    attempt: int
    admission_delay: float  # start minus eligible
    bound: Assignment | None = None  # what it took from the standing work, if that is how it got its work
    lingered: float = 0.0  # seconds it held its nodes before it took its work
    ago: float = 0.0  # seconds before `at` that it took its work, by its facility's clock: we heard of it later

    def __post_init__(self) -> None:
        _seconds(self, "at", "admission_delay", "lingered", "ago")
        _count(self, "attempt")


@message
class JobRequeued(_Event):
    """The scheduler took the job back into its queue; `attempt` is the one that waits now."""

    job_id: JobId
    attempt: int
    reason: str
    held_seconds: float = 0.0  # that its nodes were held by the attempt before


@message
class JobEnded(_Event):
    job_id: JobId
    attempt: int
    steps_done: int
    train_seconds: float
    held_seconds: float = 0.0  # that its nodes were held, by its own clock

    def __post_init__(self) -> None:
        _seconds(self, "at", "train_seconds", "held_seconds")
        _count(self, "attempt", "steps_done")


@message
class JobFailed(_Event):
    """No update will come of it. Transient: the same again may work. Permanent: someone has to act."""

    job_id: JobId
    attempt: int
    reason: str
    transient: bool
    held_seconds: float = 0.0  # that its nodes were held, by its own clock


@message
class UpdateArrived(_Event):
    receipt: Receipt


@message
class UpdateRejected(_Event):
    """It came, and cannot be used: not finite, wrong names or shapes, forged."""

    job_id: JobId
    attempt: int
    reason: str


def finite_or_none(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Metrics as they go on record: JSON has no word for NaN and infinity.

    >>> finite_or_none({"score": float("nan"), "loss": 0.5})
    {'score': None, 'loss': 0.5}
    """
    return {name: value if value is not None and isfinite(value) else None for name, value in metrics.items()}


@message
class ModelReady(_Event):
    version: int
    digest: str = ""  # sha256 of its file; empty: it has none


@message
class ModelScored(_Event):
    version: int
    metrics: Mapping[str, float | None]  # None: the number was not finite


@message
class TimerFired(_Event):
    key: str


Event = (
    RunStarted
    | RunPaused
    | RunResumed
    | StopRequested
    | CoordinatorResumed
    | FacilityJoined
    | FacilityLeft
    | FacilityDrained
    | ForecastIssued
    | JobSubmitted
    | SubmitRefused
    | JobStarted
    | JobRequeued
    | JobEnded
    | JobFailed
    | UpdateArrived
    | UpdateRejected
    | ModelReady
    | ModelScored
    | TimerFired
)


# Commands -----------------------------------------------------------------------------------------------


@message
class SubmitJob:
    order: Order


@message
class AssignWork:
    """Binds work to a job when it is ordered."""

    job_id: JobId
    assignment: Assignment


@message
class PostWork:
    """Lays work out at a facility, for any of its jobs to bind when it starts. Replaces what was posted."""

    facility: str
    standing: Standing


@message
class CancelJob:
    job_id: JobId


@message
class SetTimer:
    key: str
    at: float  # run clock


@message
class Share:
    """How much one update weighs in an aggregation."""

    job_id: JobId
    attempt: int
    weight: float

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight >= 0):
            raise _bad(self, "weight", "finite and 0 or more")


@message
class Aggregate:
    """Make `to_version` from `from_version` and these updates, oldest first. No updates: the model stays."""

    from_version: int
    to_version: int
    rule: Rule
    weights: tuple[Share, ...]


@message
class Record:
    """Something worth knowing later; a driver also frees the tensors of an update whose fate is recorded."""

    kind: RecordKind
    facts: Mapping[str, Scalar]


@message
class StopRun:
    reason: str


Command = SubmitJob | AssignWork | PostWork | CancelJob | SetTimer | Aggregate | Record | StopRun
