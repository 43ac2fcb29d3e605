"""What happens (events) and what we want (commands): the only words a strategy hears and says.

Events are past tense and carry `at`, seconds on the run clock. Commands are imperative.
All are frozen, keyword-only and checked when made, so that nothing inside has to check again.

>>> JobStarted(at=12.5, job_id="aurora/3", attempt=0, admission_delay=2.5).admission_delay
2.5
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, Final, Literal, get_args

from fedqueue.errors import ProtocolError
from fedqueue.protocol.cap import CapLeft
from fedqueue.protocol.codec import build, later, message
from fedqueue.protocol.contract import (
    Assignment,
    JobId,
    Order,
    Receipt,
    Standing,
    UpdateKey,
    bad,
    count,
    positive,
    seconds,
)

AggregationRule = Literal["add_deltas", "mix_models"]
"""How updates change a model: w + sum(weight * (trained - base)), or w + sum(weight * (trained - w))."""

Scalar = str | int | float | bool | None


@message
class ServerStep:
    """A step of the server's own optimizer, Adam, with what the rule would add to the model as its gradient d:

    m <- beta1 * m + (1 - beta1) * d;   v <- beta2 * v + (1 - beta2) * d^2;   w <- w + rate * m / (sqrt(v) + epsilon)

    The moments m and v of each version are kept beside it; before the first, m is 0 and v is epsilon^2.
    """

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    largest: bool = False  # the largest v so far divides, not the newest (AMSGrad)

    def __post_init__(self) -> None:
        positive(self, "rate", "epsilon")

    @property
    def moments(self) -> int:
        """How many tensors are kept for each parameter."""
        return 3 if self.largest else 2


@message
class Guard:
    """How the changes of several facilities are combined when some may lie; without one, by their weighted mean.

    median: of each parameter. trimmed: the mean without the least and the greatest of each. krum: the mean of those
    that stand together. `hostile` is the share of facilities that may lie, rounded up, and fewer than half of them.
    """

    rule: Literal["median", "trimmed", "krum"]
    hostile: float = 0.25


RecordKind = Literal["fate", "failure", "suspended", "rejoined", "ignored", "retry", "overdue"]

Fate = Literal["aggregated", "rejected", "expired", "after_end"]
"""How an update ends: each has exactly one."""


# Events -------------------------------------------------------------------------------------------------


@message
class _Event:
    at: float  # seconds on the run clock

    def __post_init__(self) -> None:
        if not 0 <= self.at < inf:
            raise bad(self, "at", "finite and 0 or more")


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
class RolledBack(_Event):
    """The operator takes back every model after this version: the next one is this version again."""

    version: int


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
class NodeHoursTold(_Event):
    """What the cap on a facility's node-hours leaves, whenever that changes."""

    facility: str
    left: CapLeft | None = None  # None: there is no cap


@message
class JobSubmitted(_Event):
    job_id: JobId
    attempt: int = 0
    wall_seconds: float | None = later(default=None)  # asked of the scheduler in the end; None: as ordered, or not said


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
class WorkTaken(_Event):
    """A job that stays handed in a part, or started without work, and took the work of its next one."""

    job_id: JobId
    attempt: int
    part: int  # that it took; 0: its first, which was not there when it started
    bound: Assignment | None = None  # from the standing work; None: what was assigned
    waited: float = 0.0  # seconds that it held its nodes since it handed in
    ahead: int = 0  # steps that it did meanwhile, from its own weights
    ago: float = 0.0  # as in JobStarted
    ahead_seconds: float = later(default=0.0)  # that those steps took

    def __post_init__(self) -> None:
        seconds(self, "at", "waited", "ago", "ahead_seconds")
        count(self, "attempt", "part", "ahead")

    @property
    def idle_seconds(self) -> float:
        """Of those that it waited."""
        return max(0.0, self.waited - self.ahead_seconds)


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
    parts: int = later(default=1)  # updates that this attempt handed in; steps and seconds above are of the last one
    idle_seconds: float = later(default=0.0)  # that it held its nodes after the last one; what it did then is lost

    def __post_init__(self) -> None:
        seconds(self, "at", "train_seconds", "held_seconds", "idle_seconds")
        count(self, "attempt", "steps_done", "parts")


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


@message
class UpdatesWithdrawn(_Event):
    """Whatever of this facility has arrived and is in no model, nor in one that is being made, must not be used."""

    facility: str
    reason: str


@message
class UpdatesUnusable(_Event):
    """The model of this version, which was asked for, cannot be made with the updates of this facility."""

    version: int
    facility: str
    reason: str
    blamed: bool = later(default=False)  # it kept others from being in a model: it is left alone for a while


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
    agreement: float | None = later(default=None)
    """How far its updates agree: |sum of w*Delta|^2 over the sum of w*|Delta|^2, with weights that sum to one. 1: all
    are the same; 1/n: n equal ones are at right angles. None: nobody asked, or there were fewer than two."""
    moments: tuple[str, ...] = later(default=())  # sha256 of the files with the moments of the server's optimizer


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
    | RolledBack
    | CoordinatorResumed
    | FacilityJoined
    | FacilityLeft
    | FacilityDrained
    | ForecastIssued
    | NodeHoursTold
    | JobSubmitted
    | SubmitRefused
    | JobStarted
    | WorkTaken
    | JobRequeued
    | JobEnded
    | JobFailed
    | UpdateArrived
    | UpdateRejected
    | UpdatesWithdrawn
    | UpdatesUnusable
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
    """Binds work to a job: when it is ordered, or to one that stays when it has handed in."""

    job_id: JobId
    assignment: Assignment
    part: int = later(default=0)


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
    again: bool = later(default=False)  # it was in an earlier model, and stands in for its facility, which is absent
    clip: float = later(default=1.0)  # of the change that it makes, the part that counts

    def __post_init__(self) -> None:
        if not 0 <= self.weight < inf:
            raise bad(self, "weight", "finite and 0 or more")
        if not 0 <= self.clip <= 1:
            raise bad(self, "clip", "from 0 to 1")

    @property
    def key(self) -> UpdateKey:
        return self.job_id, self.attempt, self.part


@message
class Aggregate:
    """Make `to_version` from `from_version` and these updates, oldest first. No updates: the model stays."""

    from_version: int
    to_version: int
    rule: AggregationRule
    weights: tuple[Share, ...]
    keep: tuple[UpdateKey, ...] = later(default=())  # of these and earlier updates, those that may be asked for again
    agreement: bool = later(default=False)  # say with the model how far the updates agree
    step: ServerStep | None = later(default=None)  # parameters take this step; None: the rule is all
    variates: float | None = later(default=None)
    """The server's control variate moves by so much of the weighted mean of how those of the facilities moved: the
    share of those who are back, by data weight. None: there are no control variates."""
    guard: Guard | None = later(default=None)  # None: changes are summed by their weights


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
