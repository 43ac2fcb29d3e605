"""What an agent and a coordinator say to each other when the agent polls; no numbers but durations cross between them.

Clocks of different machines may disagree by minutes. So a report says how long ago something happened, and an answer
says in how many seconds a cutoff comes; each side turns that into its own clock once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from fedqueue.protocol.checks import at_least, more_than
from fedqueue.protocol.messages import (
    Assignment,
    Event,
    ForecastIssued,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelScored,
    Standing,
    SubmitRefused,
    job_id,
)

REASON_LENGTH: Final = 500
MOST_REPORTS: Final = 1000  # in one poll
MOST_TROUBLES: Final = 10  # in one poll
MOST_ATTEMPTS: Final = 10_000
MOST_METRICS: Final = 100
MOST_LEVELS: Final = 100
MOST_UNSCORED: Final = 100
SOURCE_LENGTH: Final = 100
MOST_CUTOFFS: Final = 1_000_000
"""A job that aims further ahead aims at nothing."""
MOST_SECONDS: Final = 366 * 86400.0
"""No job waits, runs or is reported later than that; a clock that was wrong says more, and counts as this."""
MOST_POLL_SECONDS: Final = 3600.0
"""Between two polls. At the end of a run the coordinator waits for three more, so that everybody hears of it."""


def one_line(text: str) -> str:
    """What a facility says, fit for a terminal and a log: no line breaks, no control characters.

    >>> one_line("it fell\\n\\x1b[2Jdown")
    'it fell ?[2Jdown'
    """
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _seconds(value: float) -> float:
    return min(value, MOST_SECONDS)


def _reason(owner: Any) -> None:
    if len(owner.reason) > REASON_LENGTH:
        raise ValueError(f"reason must be {REASON_LENGTH} characters at most, found {len(owner.reason)}")


def _job(owner: Any) -> None:
    at_least(owner, 0, "sequence", "attempt")
    if owner.attempt > MOST_ATTEMPTS:
        raise ValueError(f"attempt must be {MOST_ATTEMPTS} at most, found {owner.attempt}")


@dataclass(frozen=True, kw_only=True)
class Submitted:
    kind: Literal["submitted"] = "submitted"
    n: int
    sequence: int

    def __post_init__(self) -> None:
        at_least(self, 0, "sequence")


@dataclass(frozen=True, kw_only=True)
class Refused:
    kind: Literal["refused"] = "refused"
    n: int
    sequence: int
    reason: str
    transient: bool

    def __post_init__(self) -> None:
        at_least(self, 0, "sequence")
        _reason(self)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a job took from the standing work of this number."""

    standing: int
    cutoff_index: int  # it aims at the standing work's next cutoff plus so many round lengths
    base_version: int
    steps: int
    learning_rate: float
    train_budget: float

    def __post_init__(self) -> None:
        at_least(self, 0, "standing", "cutoff_index", "base_version", "train_budget")
        at_least(self, 1, "steps")
        more_than(self, 0, "learning_rate")
        if self.cutoff_index > MOST_CUTOFFS:
            raise ValueError(f"cutoff_index must be {MOST_CUTOFFS} at most, found {self.cutoff_index}")

    def assignment(self, posted: Standing | None) -> Assignment:
        """On the run clock; without the standing work nobody knows which cutoff it aims at."""
        cutoff = None
        if posted is not None and posted.version == self.base_version:
            cutoff = posted.next_cutoff + self.cutoff_index * posted.round_length
        return Assignment(
            base_version=self.base_version,
            steps=self.steps,
            learning_rate=self.learning_rate,
            train_budget=_seconds(self.train_budget),
            cutoff=cutoff,
        )


@dataclass(frozen=True, kw_only=True)
class Started:
    kind: Literal["started"] = "started"
    n: int
    sequence: int
    attempt: int
    admission_delay: float
    ago: float
    lingered: float = 0.0
    bound: Bound | None = None

    def __post_init__(self) -> None:
        _job(self)
        at_least(self, 0, "admission_delay", "ago", "lingered")


@dataclass(frozen=True, kw_only=True)
class Requeued:
    kind: Literal["requeued"] = "requeued"
    n: int
    sequence: int
    attempt: int
    reason: str
    held_seconds: float = 0.0

    def __post_init__(self) -> None:
        _job(self)
        _reason(self)
        at_least(self, 0, "held_seconds")


@dataclass(frozen=True, kw_only=True)
class Ended:
    kind: Literal["ended"] = "ended"
    n: int
    sequence: int
    attempt: int
    steps_done: int
    train_seconds: float
    held_seconds: float

    def __post_init__(self) -> None:
        _job(self)
        at_least(self, 0, "steps_done", "train_seconds", "held_seconds")


@dataclass(frozen=True, kw_only=True)
class Failed:
    kind: Literal["failed"] = "failed"
    n: int
    sequence: int
    attempt: int
    reason: str
    transient: bool
    held_seconds: float = 0.0

    def __post_init__(self) -> None:
        _job(self)
        _reason(self)
        at_least(self, 0, "held_seconds")


@dataclass(frozen=True, kw_only=True)
class Scored:
    kind: Literal["scored"] = "scored"
    n: int
    version: int
    metrics: dict[str, float | None]

    def __post_init__(self) -> None:
        at_least(self, 0, "version")
        check_metrics(self.metrics)
        if "score" not in self.metrics:
            raise ValueError("metrics must have a score")


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """How long the next job of the facility should wait, as somebody there sees it."""

    kind: Literal["foreseen"] = "foreseen"
    n: int
    mean: float
    levels: list[float]  # probabilities
    seconds: list[float]  # the wait stays under these with them
    source: str

    def __post_init__(self) -> None:
        at_least(self, 0, "mean")
        if not 1 <= len(self.levels) <= MOST_LEVELS or len(self.seconds) != len(self.levels):
            raise ValueError(f"levels must be 1 to {MOST_LEVELS}, and as many as seconds")
        if any(a >= b for a, b in pairwise([0.0, *self.levels, 1.0])):
            raise ValueError("levels must be between 0 and 1, rising")
        if any(a > b for a, b in pairwise([0.0, *self.seconds])):
            raise ValueError("seconds must be 0 or more, and rise with the levels")
        if len(self.source) > SOURCE_LENGTH:
            raise ValueError(f"source must be {SOURCE_LENGTH} characters at most, found {len(self.source)}")

    def event(self, facility: str, at: float) -> ForecastIssued:
        return ForecastIssued(
            at=at,
            facility=facility,
            mean=_seconds(self.mean),
            quantiles=tuple(zip(self.levels, map(_seconds, self.seconds), strict=True)),
            source=one_line(self.source),
        )


Report = Submitted | Refused | Started | Requeued | Ended | Failed | Scored | Foreseen


def check_metrics(metrics: dict[str, float | None]) -> None:
    if len(metrics) > MOST_METRICS or any(len(name) > 100 or not name.isprintable() for name in metrics):
        raise ValueError(f"metrics must be {MOST_METRICS} at most, with names of 100 printable characters at most")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What keeps a facility from its work now, in the words of its agent."""

    reason: str
    seconds: float = 0.0  # since it began

    def __post_init__(self) -> None:
        _reason(self)
        at_least(self, 0, "seconds")

    def plain(self) -> Trouble:
        """Fit for a terminal."""
        return Trouble(reason=one_line(self.reason), seconds=_seconds(self.seconds))


@dataclass(frozen=True, kw_only=True)
class Unscored:
    """A model that the facility cannot score, and why; it has tried."""

    version: int
    reason: str

    def __post_init__(self) -> None:
        at_least(self, 0, "version")
        _reason(self)


@dataclass(frozen=True, kw_only=True)
class Poll:
    """What an agent sends."""

    journal: str  # of the agent's home: another one means that the old one was lost
    session: str  # of the agent's process
    generation: int  # counts the processes that held the home's lease: an older one is refused
    host: str = ""
    poll_seconds: float  # until it asks again
    standing: int = 0  # number of the standing work that lies at the facility
    open: list[int] = field(default_factory=list)  # jobs it is busy with
    newest: int | None = None  # number of its newest report: once that is here, `open` is all it has; None: not said
    reports: list[Report] = field(default_factory=list)
    leaving: bool = False  # it ends now; another may take its place
    troubles: list[Trouble] = field(default_factory=list)  # protocol 1 does not know of them
    unscored: list[Unscored] = field(default_factory=list)  # the newest of them
    stuck: bool = False  # it can do nothing at all for now: this is only to say so

    def __post_init__(self) -> None:
        for name in ("journal", "session"):
            text = getattr(self, name)
            if not (8 <= len(text) <= 64 and text.isalnum() and text.isascii()):
                raise ValueError(f"{name} must be 8 to 64 letters and digits, found {text[:64]!r}")
        if len(self.host) > 255 or not self.host.isprintable():
            raise ValueError("host must be 255 printable characters at most")
        at_least(self, 0, "generation", "standing", "newest")
        more_than(self, 0, "poll_seconds")
        if self.poll_seconds > MOST_POLL_SECONDS:
            raise ValueError(f"poll_seconds must be {MOST_POLL_SECONDS:g} at most, found {self.poll_seconds:g}")
        if len(self.unscored) > MOST_UNSCORED:
            raise ValueError(f"unscored must be {MOST_UNSCORED} at most")
        if len(self.reports) > MOST_REPORTS or len(self.open) > MOST_REPORTS:
            raise ValueError(f"reports must be {MOST_REPORTS} at most in one poll, and open jobs too")
        if len(self.troubles) > MOST_TROUBLES:
            raise ValueError(f"troubles must be {MOST_TROUBLES} at most in one poll")
        if self.stuck and self.reports:
            raise ValueError("stuck must be false in a poll with reports")
        numbers = [report.n for report in self.reports]
        if any(n < 1 for n in numbers) or numbers != sorted(set(numbers)):
            raise ValueError("reports must be numbered from 1 on, rising")


@dataclass(frozen=True, kw_only=True)
class Handin:
    """What comes with an update whose bytes are all there."""

    base_version: int
    steps_done: int
    train_seconds: float
    admission_delay: float
    samples: int = 0
    nodes: int = 1
    device: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(self, 0, "base_version", "steps_done", "train_seconds", "admission_delay", "samples")
        at_least(self, 1, "nodes")
        if len(self.device) > 200 or not self.device.isprintable():
            raise ValueError("device must be 200 printable characters at most")
        check_metrics(self.metrics)


def event_of(report: Report, facility: str, at: float, posts: dict[int, Standing]) -> Event:
    """The event that a facility's report stands for."""
    if isinstance(report, Scored):
        return ModelScored(at=at, version=report.version, metrics=report.metrics)
    if isinstance(report, Foreseen):
        return report.event(facility, at)
    job = job_id(facility, report.sequence)
    match report:
        case Submitted():
            return JobSubmitted(at=at, job_id=job)
        case Refused():
            return SubmitRefused(at=at, job_id=job, reason=one_line(report.reason), transient=report.transient)
        case Started():
            bound = report.bound
            return JobStarted(
                at=at,
                job_id=job,
                attempt=report.attempt,
                admission_delay=_seconds(report.admission_delay),
                bound=bound.assignment(posts.get(bound.standing)) if bound is not None else None,
                lingered=_seconds(report.lingered),
                ago=_seconds(report.ago),
            )
        case Requeued():
            return JobRequeued(
                at=at,
                job_id=job,
                attempt=report.attempt,
                reason=one_line(report.reason),
                held_seconds=_seconds(report.held_seconds),
            )
        case Ended():
            return JobEnded(
                at=at,
                job_id=job,
                attempt=report.attempt,
                steps_done=report.steps_done,
                train_seconds=_seconds(report.train_seconds),
                held_seconds=_seconds(report.held_seconds),
            )
        case Failed():
            return JobFailed(
                at=at,
                job_id=job,
                attempt=report.attempt,
                reason=one_line(report.reason),
                transient=report.transient,
                held_seconds=_seconds(report.held_seconds),
            )
