"""What happens (events) and what we want (commands): the only words a strategy hears and says.

Events are past tense and carry `at`, seconds on the run clock. Commands are imperative.
All are frozen, keyword-only and checked when made, so that nothing inside has to check again.

>>> JobStarted(at=12.5, job_id="aurora/3", attempt=0, admission_delay=2.5).admission_delay
2.5
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final, Literal, get_args

from fedqueue.errors import ProtocolError
from fedqueue.protocol.codec import build, later, message
from fedqueue.protocol.contract import Assignment, JobId, Order, Receipt, Standing, UpdateKey, bad, count, seconds

Rule = Literal["add_deltas", "mix_models"]
"""How updates change a model: w + sum(weight * (trained - base)), or w + sum(weight * (trained - w))."""

Scalar = str | int | float | bool | None

RecordKind = Literal["fate", "failure", "suspended", "rejoined", "ignored", "retry"]

Fate = Literal["aggregated", "rejected", "expired", "after_end"]
"""How an update ends: each has exactly one."""


# Events -------------------------------------------------------------------------------------------------


@message
class _Event:
    at: float  # seconds on the run clock

    def __post_init__(self) -> None:
        seconds(self, "at")


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
        seconds(self, "at", "admission_delay", "lingered", "ago")
        count(self, "attempt")


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
    part: int = later(default=0)

    def __post_init__(self) -> None:
        seconds(self, "at", "train_seconds", "held_seconds")
        count(self, "attempt", "steps_done", "part")


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
    part: int = later(default=0)

    @property
    def key(self) -> UpdateKey:
        return self.job_id, self.attempt, self.part


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
    part: int = later(default=0)

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight >= 0):
            raise bad(self, "weight", "finite and 0 or more")

    @property
    def key(self) -> UpdateKey:
        return self.job_id, self.attempt, self.part


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


# Reading the ledger -------------------------------------------------------------------------------------

_KINDS: Final[dict[str, type]] = {cls.__name__: cls for cls in (*get_args(Event), *get_args(Command))}


def parse(kind: str, fields: Mapping[str, Any]) -> Event | Command:
    """The message of this kind with these JSON fields, as `codec.encode` wrote them.

    >>> parse("TimerFired", {"at": 10.0, "key": "cutoff/0"})
    TimerFired(at=10.0, key='cutoff/0')
    """
    if kind not in _KINDS:
        raise ProtocolError(f"unknown message kind {kind!r}")
    made: Event | Command = build(_KINDS[kind], fields)
    return made
