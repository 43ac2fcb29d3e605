"""What agents say: polls, the reports in them, and hand-ins; the events that reports stand for, and what is believed.

A report says how long ago something happened, since clocks of different machines may disagree by minutes; the rest of
the contract is in contract.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field, replace
from itertools import pairwise
from math import inf
from typing import Any, Final, Literal, TypeVar

from fedqueue.protocol.cap import CapLeft
from fedqueue.protocol.codec import at_least, body, inline, later, message, more_than
from fedqueue.protocol.contract import (
    MOST_PARTS,
    MOST_REPORTS,
    REASON_LENGTH,
    Assignment,
    Bound,
    Spent,
    Standing,
    Trained,
    check_metrics,
    job_id,
    one_line,
)
from fedqueue.protocol.messages import (
    Event,
    ForecastIssued,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelScored,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
)
from fedqueue.protocol.state import FacilityState, JobState

T = TypeVar("T")

MOST_TROUBLES: Final = 10  # in one poll
MOST_ATTEMPTS: Final = 10_000
MOST_LEVELS: Final = 100
MOST_UNSCORED: Final = 100
SOURCE_LENGTH: Final = 100
MOST_SECONDS: Final = 366 * 86400.0
"""No job waits, runs or is reported later than that; a clock that was wrong says more, and counts as this."""
MOST_POLL_SECONDS: Final = 3600.0
"""Between two polls. At the end of a run the coordinator waits for three more, so that everybody hears of it."""


def _seconds(value: float) -> float:
    return min(value, MOST_SECONDS)


def _reason(owner: Any) -> None:
    if len(owner.reason) > REASON_LENGTH:
        raise ValueError(f"reason must be {REASON_LENGTH} characters at most, found {len(owner.reason)}")


def _job(owner: Any) -> None:
    at_least(owner, 0, "sequence", "attempt")
    if owner.attempt > MOST_ATTEMPTS:
        raise ValueError(f"attempt must be {MOST_ATTEMPTS} at most, found {owner.attempt}")


def _part(owner: Any) -> None:
    at_least(owner, 0, "part")
    if owner.part > MOST_PARTS:
        raise ValueError(f"part must be {MOST_PARTS} at most, found {owner.part}")


@message
class Submitted:
    kind: Literal["submitted"] = "submitted"
    n: int
    sequence: int
    wall_seconds: float | None = later(default=None)  # of a job that stays, if it asked for another than was ordered

    def __post_init__(self) -> None:
        at_least(self, 0, "sequence")
        more_than(self, 0, "wall_seconds")


@message
class Refused:
    kind: Literal["refused"] = "refused"
    n: int
    sequence: int
    reason: str
    transient: bool

    def __post_init__(self) -> None:
        at_least(self, 0, "sequence")
        _reason(self)


@message
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


@message
class Took:
    """A job that stays took the work of its next part."""

    kind: Literal["took"] = "took"
    n: int
    sequence: int
    attempt: int
    part: int
    waited: float
    ago: float
    ahead: int = 0
    bound: Bound | None = None
    ahead_seconds: float = later(default=0.0)

    def __post_init__(self) -> None:
        _job(self)
        _part(self)
        at_least(self, 0, "waited", "ago", "ahead", "ahead_seconds")


@message
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


@message
class Ended:
    kind: Literal["ended"] = "ended"
    n: int
    sequence: int
    attempt: int
    steps_done: int
    train_seconds: float
    held_seconds: float
    parts: int = later(default=1)
    idle_seconds: float = later(default=0.0)

    def __post_init__(self) -> None:
        _job(self)
        at_least(self, 0, "steps_done", "train_seconds", "held_seconds", "parts", "idle_seconds")
        if self.parts > MOST_PARTS:
            raise ValueError(f"parts must be {MOST_PARTS} at most, found {self.parts}")


@message
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


@message
class Lost:
    """A part that a job handed in will never come: its file is gone, or does not arrive as it is."""

    kind: Literal["lost"] = "lost"
    n: int
    sequence: int
    attempt: int
    part: int
    reason: str

    def __post_init__(self) -> None:
        _job(self)
        _part(self)
        _reason(self)


@message
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


@message
class ForecastMade:
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


Report = Submitted | Refused | Started | Took | Requeued | Ended | Failed | Lost | Scored | ForecastMade


@message
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


@message
class Unscored:
    """A model that the facility cannot score, and why; it has tried."""

    version: int
    reason: str

    def __post_init__(self) -> None:
        at_least(self, 0, "version")
        _reason(self)


@message
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
    run: str = later(default="")  # the one it belongs to; empty: not said
    cap_left: CapLeft | None = later(default=None)  # of its node-hours; None: there is no cap, or it was not said
    mask_key: str = later(default="")  # public; empty: it masks nothing

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
        if self.mask_key and not re.fullmatch(r"[0-9a-f]{64}", self.mask_key):
            raise ValueError("mask_key must be 64 hexadecimal digits")


@message
class Handin:
    """What comes with an update whose bytes are all there."""

    trained: Trained = inline()
    admission_delay: float
    part: int = later(default=0)
    run: str = later(default="")
    turn_seconds: float = later(default=0.0)
    spent: Spent | None = later(default=None)
    masked: bool = later(default=False)  # its bytes stay where they are until a group is there to mask them for

    def __post_init__(self) -> None:
        at_least(self, 0, "admission_delay", "turn_seconds")
        _part(self)


_EVENTS: Final[dict[type, Callable[..., Event]]] = {
    Submitted: JobSubmitted,
    Refused: SubmitRefused,
    Started: JobStarted,
    Took: WorkTaken,
    Requeued: JobRequeued,
    Ended: JobEnded,
    Failed: JobFailed,
    Lost: UpdateRejected,
}


def event_of(report: Report, facility: str, at: float, posts: dict[int, Standing]) -> Event:
    """The event that a facility's report stands for."""
    if isinstance(report, Scored):
        return ModelScored(at=at, version=report.version, metrics=report.metrics)
    if isinstance(report, ForecastMade):
        return report.event(facility, at)
    facts = {name: _fit(value) for name, value in body(report).items() if name not in ("kind", "n", "sequence")}
    if isinstance(report, Started | Took) and report.bound is not None:
        facts["bound"] = _assignment(report.bound, posts.get(report.bound.standing))
    return _EVENTS[type(report)](at=at, job_id=job_id(facility, report.sequence), **facts)


def _fit(value: Any) -> Any:
    """All numbers with a decimal point are seconds, all texts are for people."""
    if isinstance(value, float):
        return _seconds(value)
    return one_line(value) if isinstance(value, str) else value


def _assignment(bound: Bound, posted: Standing | None) -> Assignment:
    """On the run clock; without the standing work nobody knows which cutoff it aims at."""
    cutoff = None
    if posted is not None and posted.version == bound.work.base_version:
        cutoff = posted.next_cutoff + bound.cutoff_index * posted.round_length
    return replace(bound.work, train_budget=_seconds(bound.work.train_budget or 0.0), cutoff=cutoff)


# What is believed of it -----------------------------------------------------------------------------------
# What a facility says of itself is bounded by what the coordinator saw: when it ordered, what it ordered, when it
# heard. A number that cannot be true counts as the largest that can. Nothing honest is larger, but for jobs that were
# out while the run clock stood still: of those no age is known, and only the limits of the contract hold.

MOST_NODES: Final = 100_000
MOST_SAMPLES: Final = 1 << 20
"""In one step."""
AHEAD: Final = 4
"""A job that stays does so many times its work ahead, at the most that counts."""
BEYOND: Final = 10.0
"""A wait may be forecast so many times as long as any that was seen, or as a round."""


def plausible(event: Event, job: JobState | None, standing: Standing | None = None) -> Event:
    """The event with nothing in it that cannot be. `job`: that it is about; `standing`: what it says it took."""
    if job is None:
        return event
    age = inf if job.clock_stood else max(0.0, event.at - job.ordered_at)
    match event:
        case JobStarted():
            ago = min(event.ago, age)
            lingered = min(event.lingered, age - ago if age < inf else inf)
            delay = min(event.admission_delay, age - ago - lingered if age < inf else inf)
            bound = _bound(event.bound, job, standing)
            return replace(event, ago=ago, lingered=lingered, admission_delay=max(0.0, delay), bound=bound)
        case WorkTaken():
            most = _most_ahead(job.assignment)
            return replace(
                _within(event, age, "ago", "waited", "ahead_seconds"),
                bound=_bound(event.bound, job, standing),
                ahead=min(event.ahead, most),
            )
        case JobEnded():
            steps = _most_steps(job.assignment, event.steps_done)
            ended = _within(event, age, "train_seconds", "held_seconds", "idle_seconds")
            taken = job.part + 1 if event.attempt == job.attempt else event.parts
            return replace(ended, steps_done=min(event.steps_done, steps), parts=min(event.parts, taken))
        case JobFailed() | JobRequeued():
            return _within(event, age, "held_seconds")
        case UpdateArrived(receipt=receipt):
            work, _ = job.work_of((receipt.attempt, receipt.part))
            steps = min(receipt.steps_done, _most_steps(work, receipt.steps_done))
            told = replace(
                _within(receipt, age, "train_seconds", "admission_delay", "turn_seconds"),
                steps_done=steps,
                ahead=min(receipt.ahead, steps),
                samples=min(receipt.samples, MOST_SAMPLES * steps),
                nodes=min(receipt.nodes, MOST_NODES),
            )
            return replace(event, receipt=told)
    return event


def plausible_forecast(event: ForecastIssued, facility: FacilityState, round_length: float) -> ForecastIssued:
    """A wait that is beyond all that was seen is not believed."""
    waiting = [event.at - job.ordered_at for job in facility.jobs.values() if job.started_at is None]
    most = BEYOND * max([facility.longest_wait, round_length, *waiting])
    quantiles = tuple((level, min(seconds, most)) for level, seconds in event.quantiles)
    return replace(event, mean=min(event.mean, most), quantiles=quantiles)


def _within(told: T, most: float, *names: str) -> T:
    bounded: Any = {name: min(getattr(told, name), most) for name in names}
    made: T = replace(told, **bounded)  # type: ignore[type-var]
    return made


def _most_ahead(work: Assignment | None) -> int:
    return AHEAD * (100 if work is None else max(100, work.steps))


def _most_steps(work: Assignment | None, said: int) -> int:
    """Of an update; those that were done ahead are among them."""
    return said if work is None else work.steps + _most_ahead(work)


def _bound(work: Assignment | None, job: JobState, standing: Standing | None) -> Assignment | None:
    """No more steps than what was posted gives in the whole wall time that was ordered."""
    if work is None or standing is None:
        return work
    most = max(standing.min_steps, int(standing.steps_per_second * job.order.wall_seconds))
    return replace(work, steps=min(work.steps, most))
