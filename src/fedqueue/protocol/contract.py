"""The contract: what crosses a process border between coordinator, agent and job, each thing defined once.

`Order`, `Assignment`, `Standing` and `Receipt` go the whole way, from a strategy's command to the job's files and back.
The rest wraps them for one border: what a coordinator answers, and the files between an agent and a job. What agents
say is in reports.py. All of it is written and read by codec.py.

Clocks of different machines may disagree by minutes, so no time of day crosses between machines. A cutoff is on the
run clock at the coordinator, in so many seconds on the wire, and on the clock of the shared file system at a facility.

Jobs import this file: Python 3.9 and the standard library alone.
"""

from __future__ import annotations

import re
from dataclasses import field
from math import inf, isfinite
from typing import Final, Literal, Optional, Tuple

from fedqueue.errors import ProtocolError
from fedqueue.protocol.codec import at_least, inline, later, message, more_than

JobId = str
"""Facility plus sequence number, as in "aurora/3"."""

UpdateKey = Tuple[JobId, int, int]
"""Which update: of this job, in this attempt, this part."""

Purpose = Literal["train", "warm_up", "evaluate"]

Scaling = Literal["none", "inverse"]
"""Learning rate against steps: the same for all, or eta_base * E_min / E."""

WALL_TIME: Final = "wall time exceeded"
"""The reason that is given when the scheduler ended a job at its limit begins so: a strategy then asks for more."""

REASON_LENGTH: Final = 500
MOST_REPORTS: Final = 1000  # in one poll
MOST_ORDERS: Final = 100
"""In one answer, and open at a facility: a scheduler is not flooded, whoever asks."""
MOST_METRICS: Final = 100
MOST_PARTS: Final = 100_000
"""Of a job that stays."""
BIGGEST: Final = 2**53
"""No larger does a computer count."""

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SEQUENCE: Final = re.compile(r"0|[1-9][0-9]{0,14}")


def job_id(facility: str, sequence: int) -> JobId:
    return f"{facility}/{sequence}"


def facility_of(job: JobId) -> str:
    return job.rpartition("/")[0]


def sequence_of(job: JobId) -> int:
    return int(job.rpartition("/")[2])


# Checks -------------------------------------------------------------------------------------------------


def bad(owner: object, name: str, want: str) -> ProtocolError:
    return ProtocolError(f"{type(owner).__name__}.{name} must be {want}, found {getattr(owner, name)!r}")


def seconds(owner: object, *names: str) -> None:
    """Each named field is a finite number of seconds, zero or more."""
    for name in names:
        if not 0 <= getattr(owner, name) < inf:
            raise bad(owner, name, "finite and 0 or more")


def positive(owner: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(owner, name) < inf:
            raise bad(owner, name, "finite and more than 0")


def count(owner: object, *names: str) -> None:
    for name in names:
        if getattr(owner, name) < 0:
            raise bad(owner, name, "0 or more")


def _countable(owner: object, *names: str) -> None:
    """Each named number, if it is there, is whole, 0 or more, and no larger than a computer counts."""
    at_least(owner, 0, *names)
    for name in names:
        value = getattr(owner, name)
        if value is not None and value > BIGGEST:
            raise ValueError(f"{name} is too large")


def check_metrics(metrics: dict[str, Optional[float]]) -> None:
    if len(metrics) > MOST_METRICS or any(len(name) > 100 or not name.isprintable() for name in metrics):
        raise ValueError(f"metrics must be {MOST_METRICS} at most, with names of 100 printable characters at most")


def one_line(text: str) -> str:
    """What another machine says, fit for a terminal and a log: no line breaks, no control characters.

    >>> one_line("it fell\\n\\x1b[2Jdown")
    'it fell ?[2Jdown'
    """
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


# What goes the whole way --------------------------------------------------------------------------------


@message
class Order:
    """Our request for a job: what to ask of the scheduler. The work itself is an `Assignment`."""

    job_id: JobId
    facility: str
    round: int
    wall_seconds: float  # wall time to request
    expected_delay: Optional[float] = None  # q-hat when it was ordered; None: nothing was forecast
    purpose: Purpose = "train"
    after: Optional[JobId] = None  # chained: eligible when this job has ended
    replaces: Optional[JobId] = None  # the failed job it stands in for
    stay: Optional[float] = later(default=None)
    """None: it hands in once. Else it stays: it hands in part after part while its wall time lasts, and gives its
    nodes back after so many seconds without work."""

    def __post_init__(self) -> None:
        positive(self, "wall_seconds")
        count(self, "round")
        if self.stay is not None:
            positive(self, "stay")


@message
class Assignment:
    """Which model to start from, how many steps, at which rate, and until when."""

    base_version: int
    steps: int
    learning_rate: float
    train_budget: Optional[float] = None  # stop training after so many seconds (J); None: steps alone decide
    cutoff: Optional[float] = None  # the cutoff it aims at, run clock; None: it aims at none, or it is on its way

    def __post_init__(self) -> None:
        count(self, "base_version")
        if self.steps < 1:
            raise bad(self, "steps", "1 or more")
        positive(self, "learning_rate")
        if self.train_budget is not None:
            seconds(self, "train_budget")


@message
class Standing:
    """Work that waits at a facility for a job to start: all that `budget.binding` needs to make an assignment."""

    version: int
    next_cutoff: float  # on the clock of who holds it; further ones follow every round_length
    round_length: float
    steps_per_second: float
    overhead: float  # seconds of a job that are not training: start-up, hand-in, upload
    min_steps: int
    learning_rate: float
    lr_scaling: Scaling = "none"
    least_steps: Optional[int] = None  # E_min, for inverse scaling
    patience: float = 0.0  # seconds around a cutoff in which a job waits for the next version instead
    stay_overhead: Optional[float] = later(default=None)  # as overhead, of the parts after the first; None: the same
    from_job: int = later(default=0)  # jobs of a lower number take no more work: a later one has started
    ahead: bool = later(default=False)  # while a job that stays waits for its next model, it trains on from its own

    def __post_init__(self) -> None:
        count(self, "version", "from_job")
        seconds(self, "overhead", "patience")
        if self.stay_overhead is not None:
            seconds(self, "stay_overhead")
        positive(self, "round_length", "steps_per_second", "learning_rate")
        if not isfinite(self.next_cutoff):
            raise bad(self, "next_cutoff", "finite")
        if self.min_steps < 1:
            raise bad(self, "min_steps", "1 or more")


@message
class Privacy:
    """What a site asks of its jobs, for the sake of the data that they read."""

    unit: Literal["update", "records"]  # what is protected: all of the site's data, or each record
    clip: float
    noise: float

    def __post_init__(self) -> None:
        positive(self, "clip", "noise")


@message
class Mechanism:
    """Gaussian noise as an accountant sees it."""

    noise: float  # standard deviation over the furthest that what is protected can move the sum
    rate: float = 1.0  # the chance of a record to be in a batch; 1: all are
    count: int = 1  # how often

    def __post_init__(self) -> None:
        positive(self, "noise")
        if not 0 < self.rate <= 1:
            raise bad(self, "rate", "more than 0, and 1 at most")
        if not 1 <= self.count <= BIGGEST:
            raise bad(self, "count", "1 or more")


@message
class Spent:
    """What all that ever left a site says of its data at the most, as the site reckons: by (epsilon, delta)."""

    epsilon: float
    delta: float
    unit: Literal["update", "records"]

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= BIGGEST or not 0 < self.delta < 1:
            raise ValueError("epsilon must be 0 or more, and delta between 0 and 1")


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
    part: int = later(default=0)  # of a job that stays
    ahead: int = later(default=0)  # of its steps, those done before the base version was there, from its own weights
    turn_seconds: float = later(default=0.0)
    """Of a job that stays: from its start, or from taking the work of a further part, to its first step."""
    norm: Optional[float] = later(default=None)
    """How far it moves the parameters from its base (L2), as its receiver measured it; None: nobody did."""
    spent: Optional[Spent] = later(default=None)  # with it; None: its site keeps no account

    def __post_init__(self) -> None:
        count(self, "attempt", "base_version", "steps_done", "samples", "nodes", "part", "ahead")
        seconds(self, "train_seconds", "admission_delay", "turn_seconds")
        if self.norm is not None and not 0 <= self.norm < inf:
            raise bad(self, "norm", "finite and 0 or more")

    @property
    def key(self) -> UpdateKey:
        return self.job_id, self.attempt, self.part


@message
class ModelFile:
    """A version of the model, and the file that it is."""

    version: int
    sha256: str

    def __post_init__(self) -> None:
        _countable(self, "version")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError("sha256 must be 64 hexadecimal digits")


@message
class Address:
    """address.json of a run's folder: where its coordinator is, for facilities and for commands on its machine."""

    url: str
    certificate: Optional[str]  # PEM, where it is of the coordinator's own making
    run: str
    local: str  # the URL on its own machine
    port: int
    ca: Optional[str]  # the certificate's file there
    operator: Optional[str] = later(default=None)  # the file with the operator's credential, if it is elsewhere
    client: Optional[Tuple[str, str]] = later(default=None)  # files there, of the certificate to show and of its key


@message
class Invitation:
    """All that a facility needs to enrol; good once."""

    url: str
    token: str
    certificate: Optional[str]
    run: str  # tells runs apart, whatever their names; empty: a federation, with all its runs


# What a coordinator answers -----------------------------------------------------------------------------
# It may ask for work and offer models. It has no say in what runs at a facility, or where files go; so what it sends
# are numbers, digests and words from short lists, and an agent takes nothing else.


@message
class JobOrder:
    """An order as a facility gets it."""

    order: Order = inline()
    assignment: Optional[Assignment] = None  # None: the job takes standing work when it starts
    model: Optional[ModelFile] = None  # to begin with; comes with an assignment

    def __post_init__(self) -> None:
        order, work = self.order, self.assignment
        _countable(order, "round")
        for name in ("job_id", "after", "replaces"):
            facility, _, number = (getattr(order, name) or f"{order.facility}/0").rpartition("/")
            if facility != order.facility or not _SEQUENCE.fullmatch(number):
                raise ValueError(f"{name} must be of the facility, and end with a number")
        if order.purpose == "evaluate":
            raise ValueError("purpose must be train or warm_up: models are scored on request")
        if (work is None) != (self.model is None):
            raise ValueError("model must come with an assignment, and with nothing else")
        if work is not None:
            _countable(work, "base_version", "steps")
            if work.cutoff is not None:
                raise ValueError("cutoff is on the run clock, which a facility does not have")

    @property
    def sequence(self) -> int:
        return sequence_of(self.order.job_id)


@message
class PostedWork:
    """Standing work as a facility gets it; `next_cutoff` is in so many seconds, less than 0 if it has passed."""

    number: int
    model: ModelFile
    standing: Standing = inline()

    def __post_init__(self) -> None:
        _countable(self, "number")
        _countable(self.standing, "version", "min_steps", "least_steps", "from_job")
        more_than(self.standing, 0, "least_steps")


@message
class FurtherWork:
    """Work for a job that stays and has nothing to do: of this part, for this attempt of it."""

    sequence: int
    attempt: int
    part: int
    assignment: Assignment
    model: ModelFile

    def __post_init__(self) -> None:
        _countable(self, "sequence", "attempt", "part")
        _countable(self.assignment, "base_version", "steps")
        if self.assignment.cutoff is not None:
            raise ValueError("cutoff is on the run clock, which a facility does not have")


@message
class EvaluationRequest:
    """Score this model, please."""

    version: int
    model: ModelFile

    def __post_init__(self) -> None:
        _countable(self, "version")


@message
class MaskShare:
    """One update in a group, and how much it weighs there."""

    job_id: JobId
    attempt: int
    part: int
    weight: float

    def __post_init__(self) -> None:
        _countable(self, "attempt", "part")
        seconds(self, "weight")


@message
class MaskGroup:
    """Facilities whose updates are masked for each other, and summed to make a model: all of them, or none."""

    run: str
    version: int  # that is made
    updates: list[MaskShare]
    keys: dict[str, str]  # public, by facility

    def __post_init__(self) -> None:
        _countable(self, "version")
        if len(self.updates) > MOST_REPORTS or len(self.keys) > MOST_REPORTS:
            raise ValueError(f"updates must be {MOST_REPORTS} at most, and keys too")
        if {facility_of(share.job_id) for share in self.updates} != set(self.keys):
            raise ValueError("keys must be those of the facilities whose updates these are")
        if not all(_SHA256.fullmatch(key) for key in self.keys.values()):
            raise ValueError("keys must be 64 hexadecimal digits each")


@message
class Answer:
    """To a poll: what a facility shall do."""

    received: int  # number of the newest report that is here
    orders: list[JobOrder]
    cancel: list[int]  # numbers of jobs
    standing: Optional[PostedWork] = None
    evaluate: Optional[EvaluationRequest] = None
    over: Optional[str] = None  # why the run is over
    run: str = later(default="")  # which one, for who named it
    further: Optional[list[FurtherWork]] = later(default=None)  # None: there is none
    masked: bool = later(default=False)  # updates are handed in masked, when a group is there for them
    group: Optional[MaskGroup] = later(default=None)  # that waits for what this facility gives

    def __post_init__(self) -> None:
        _countable(self, "received")
        if max(len(self.orders), len(self.further or [])) > MOST_ORDERS or len(self.cancel) > MOST_REPORTS:
            raise ValueError(f"orders must be {MOST_ORDERS} at most, further too, and cancel {MOST_REPORTS}")


@message
class Verdict:
    """What became of an update."""

    status: Literal["accepted", "rejected", "checking"]
    reason: Optional[str] = None
    run: str = later(default="")


# The files between an agent and a job -------------------------------------------------------------------


@message
class OrderFile:
    """order.json: all that a job is told before it starts."""

    protocol: int
    standing: str  # the file to take work from, where none is assigned
    state_dir: str
    order: Order = inline()
    name: str = ""  # of the job at its scheduler
    nodes: Optional[int] = None  # None: as many as the scheduler says
    assignment: Optional[Assignment] = None
    model: Optional[str] = None  # its file; comes with an assignment
    run: str = later(default="")
    privacy: Optional[Privacy] = later(default=None)

    def __post_init__(self) -> None:
        if self.assignment is not None and self.model is None:
            raise ValueError("model must come with an assignment")


@message
class StandingFile:
    """standing.json: work for any job of the facility; `next_cutoff` is on the clock of its file system."""

    number: int
    model: str  # its file
    standing: Standing = inline()


@message
class AssignmentFile:
    """assignment.json: what the first process of a job took, for the others. further.json: what an agent has for a job
    that stays; its model is there."""

    model: str  # its file
    assignment: Assignment = inline()


@message
class Bound:
    """What a job took from the standing work of this number."""

    standing: int
    cutoff_index: int  # it aims at the standing work's next cutoff plus so many round lengths
    work: Assignment = inline()

    def __post_init__(self) -> None:
        _countable(self, "standing")
        if not 0 <= self.cutoff_index <= 1_000_000:  # a job that aims further ahead aims at nothing
            raise ValueError(f"cutoff_index must be 0 to 1000000, found {self.cutoff_index}")
        if self.work.train_budget is None:
            raise ValueError("train_budget must be there")


@message
class BoundFile:
    """bound.json: what a job took from standing work. When it did so, the file's own stamp says."""

    bound_at: float
    bound: Bound = inline()
    lingered: float = 0.0
    startup_seconds: float = 0.0


@message
class TakenFile:
    """taken.json: a job that stays took the work of a part that was not there when it started. When it did so, the
    file's own stamp says."""

    waited: float  # seconds since it handed in, or since it started
    ahead: int = 0  # steps that it trained on meanwhile, from its own weights
    bound: Optional[Bound] = None  # from standing work; None: what further.json says
    ahead_seconds: float = later(default=0.0)  # that those steps took

    def __post_init__(self) -> None:
        at_least(self, 0, "waited", "ahead", "ahead_seconds")


@message
class Trained:
    """What a job says of its work: to its agent with the update's file, and by that to the coordinator."""

    base_version: int
    steps_done: int
    train_seconds: float
    samples: int = 0
    nodes: int = 1
    device: str = ""  # empty: not said
    metrics: dict[str, Optional[float]] = field(default_factory=dict)  # None: it was not finite
    ahead: int = later(default=0)

    def __post_init__(self) -> None:
        at_least(self, 0, "base_version", "steps_done", "train_seconds", "samples", "ahead")
        at_least(self, 1, "nodes")
        if len(self.device) > 200 or not self.device.isprintable():
            raise ValueError("device must be 200 printable characters at most")
        check_metrics(self.metrics)


@message
class Result:
    """result.json: the job's own word that it is done. When it was, the file's own stamp says."""

    began_at: float
    finished_at: float
    stopped_by: str
    bytes: int
    sha256: str
    trained: Trained = inline()
    mechanisms: Optional[list[Mechanism]] = later(default=None)  # by which it was made private

    def __post_init__(self) -> None:
        if self.bytes > 0 and not _SHA256.fullmatch(self.sha256):  # without bytes it has metrics alone
            raise ValueError("sha256 must be 64 hexadecimal digits")
