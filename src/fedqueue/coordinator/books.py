"""What the ledger of a real run says is open: orders, standing work, timers, models, updates.

The books are told every event with its commands, live and when a ledger is read again, and act on nothing. A
coordinator that was killed reads its ledger into new books and knows what is still to be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedqueue.metrics import finite
from fedqueue.protocol.messages import (
    Aggregate,
    Assignment,
    AssignWork,
    CancelJob,
    Command,
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    FacilityLeft,
    JobEnded,
    JobFailed,
    JobId,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelReady,
    ModelScored,
    Order,
    PostWork,
    Receipt,
    Record,
    RunPaused,
    RunResumed,
    RunStarted,
    SetTimer,
    Standing,
    StopRun,
    SubmitJob,
    SubmitRefused,
    TimerFired,
    UpdateArrived,
    UpdateRejected,
    facility_of,
    sequence_of,
)

UpdateKey = tuple[JobId, int]
"""Job and attempt."""

KEPT_POSTS = 64
"""Standing works remembered at a facility: a job that took an older one is not told which cutoff it aimed at."""


OLDEST_POSTS = 3
"""Of those, the oldest: one of them may be what lies at a facility that has long been away."""


Phase = Literal["ordered", "queued", "running", "handing in"]


@dataclass(slots=True)
class OpenJob:
    """An order that has not come to its end."""

    order: Order
    assignment: Assignment | None = None
    attempt: int = 0
    taken: bool = False  # the facility has it at its scheduler
    phase: Phase = "ordered"
    since: float = 0.0  # run clock, of that phase

    @property
    def sequence(self) -> int:
        return sequence_of(self.order.job_id)

    def enter(self, phase: Phase, at: float) -> None:
        self.phase, self.since = phase, at


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Why a facility gets no work."""

    reason: str
    until: float | None  # run clock; None: until somebody says `fedqueue join`


@dataclass(slots=True)
class FacilityBook:
    jobs: dict[int, OpenJob] = field(default_factory=dict)  # by sequence number
    ordered: int = 0  # orders given so far
    posts: dict[int, Standing] = field(default_factory=dict)  # by number, newest last
    posted: int = 0  # the number of the newest; 0: none
    told: int | None = None  # the newest that it was told of, since we started; None: not known
    away: bool = False
    away_since: float = 0.0  # run clock
    drained: bool = False
    held_back: HeldBack | None = None
    refusal: str | None = None  # why its scheduler did not take the newest order


class Books:
    """A listener: call it with each event and its commands."""

    def __init__(self, facilities: Sequence[str]) -> None:
        self.facilities = {name: FacilityBook() for name in facilities}
        self.at = 0.0  # run clock of the newest event
        self.events = 0
        self.started = False
        self.paused = False  # an operator said so
        self.hindrance = ""  # what keeps the run from going on until somebody mends it
        self.stopped: str | None = None
        self.resumed = 0  # how often a coordinator went on with the run
        self.models: dict[int, str] = {}  # version -> digest
        self.newest = 0  # version
        self.making: dict[int, Aggregate] = {}  # asked for and not made, by version
        self.updates: dict[UpdateKey, Receipt] = {}  # arrived, and not yet part of a model or settled otherwise
        self.verdicts: dict[UpdateKey, str | None] = {}  # of all handed in: why it was rejected; None: it was taken
        self.scores: dict[int, float | None] = {}  # of the versions that were scored; None: it is not a number
        self._timers: list[tuple[float, int, str]] = []
        self._ticket = 0

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        self.at = event.at
        self.events += 1
        self._happened(event)
        for command in commands:
            self._wanted(command)

    @property
    def held(self) -> bool:
        """Whether the run clock stands still and nobody gets new work."""
        return self.paused or bool(self.hindrance)

    def due(self) -> tuple[float, str] | None:
        """The timer that fires first."""
        first = min(self._timers, default=None)
        return None if first is None else (first[0], first[2])

    def timer(self, key: str) -> float | None:
        """When the first timer fires whose key begins like this."""
        return min((at for at, _, found in self._timers if found.startswith(key)), default=None)

    def job(self, job_id: JobId) -> OpenJob | None:
        book = self.facilities.get(facility_of(job_id))
        return book.jobs.get(sequence_of(job_id)) if book is not None else None

    @property
    def scored(self) -> set[int]:
        return set(self.scores)

    def versions_needed(self) -> set[int]:
        """Versions that a job, standing work, an update or a model to be made refers to."""
        needed = {self.newest}
        for book in self.facilities.values():
            needed.update(standing.version for standing in book.posts.values())
            needed.update(job.assignment.base_version for job in book.jobs.values() if job.assignment is not None)
        needed.update(receipt.base_version for receipt in self.updates.values())
        needed.update(command.from_version for command in self.making.values())
        return needed

    def unscored(self) -> list[int]:
        """Models that were passed over: older than the newest with a score, and without one."""
        newest = max(self.scored, default=0)
        return sorted(version for version in self.models if version < newest and version not in self.scored)

    def forget_posts(self, facility: str, before: int) -> None:
        """The facility works from post number `before` or a later one."""
        book = self.facilities[facility]
        for number in [n for n in book.posts if n < before and n != book.posted]:
            del book.posts[number]

    def _happened(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.started = True
            case RunPaused(reason=reason):
                if reason:
                    self.hindrance = reason
                else:
                    self.paused = True
            case RunResumed(mended=mended):
                if mended:
                    self.hindrance = ""
                else:
                    self.paused = False
            case CoordinatorResumed():
                self.resumed += 1
            case TimerFired(key=key):
                self._drop_timer(key)
            case FacilityJoined(facility=name) if name in self.facilities:
                book = self.facilities[name]
                if not book.away:
                    book.drained = False
                book.away = False
            case FacilityLeft(facility=name) if name in self.facilities:
                self.facilities[name].away, self.facilities[name].away_since = True, event.at
            case FacilityDrained(facility=name) if name in self.facilities:
                self.facilities[name].drained = True
            case JobSubmitted(job_id=job_id):
                if (job := self.job(job_id)) is not None:
                    job.taken = True
                    self.facilities[facility_of(job_id)].refusal = None
                    if job.phase == "ordered":
                        job.enter("queued", event.at)
            case JobStarted(job_id=job_id, attempt=attempt, bound=bound):
                job = self.job(job_id)
                if job is not None and attempt >= job.attempt:
                    if attempt > job.attempt or job.phase in ("ordered", "queued"):
                        job.enter("running", event.at - event.ago - event.lingered)
                    job.attempt = attempt
                    job.assignment = bound or job.assignment
            case JobRequeued(job_id=job_id, attempt=attempt):
                job = self.job(job_id)
                if job is not None and attempt > job.attempt:
                    job.attempt = attempt
                    job.enter("queued", event.at)
            case JobEnded(job_id=job_id, attempt=attempt):
                job = self.job(job_id)
                if job is not None and attempt == job.attempt and job.phase != "handing in":
                    job.enter("handing in", event.at)
            case SubmitRefused(job_id=job_id, reason=reason):
                if self._close(job_id, None):
                    self.facilities[facility_of(job_id)].refusal = reason
            case JobFailed(job_id=job_id, attempt=attempt):
                self._close(job_id, attempt)
            case UpdateRejected(job_id=job_id, attempt=attempt, reason=reason):
                if self._close(job_id, attempt):
                    self.verdicts[job_id, attempt] = reason
            case UpdateArrived(receipt=receipt):
                if self._close(receipt.job_id, receipt.attempt):
                    self.updates[receipt.job_id, receipt.attempt] = receipt
                    self.verdicts[receipt.job_id, receipt.attempt] = None
            case ModelReady(version=version, digest=digest):
                self._model_ready(version, digest)
            case ModelScored(version=version, metrics=metrics):
                self.scores[version] = finite(metrics.get("score"))

    def _wanted(self, command: Command) -> None:
        match command:
            case SubmitJob(order=order):
                book = self.facilities[order.facility]
                book.jobs[sequence_of(order.job_id)] = OpenJob(order, since=self.at)
                book.ordered += 1
            case AssignWork(job_id=job_id, assignment=assignment):
                if (job := self.job(job_id)) is not None:
                    job.assignment = assignment
            case PostWork(facility=name, standing=standing):
                book = self.facilities[name]
                book.posted += 1
                book.posts[book.posted] = standing
                if book.told is not None:  # nobody there has heard of those between
                    for number in [n for n in book.posts if book.told < n < book.posted]:
                        del book.posts[number]
                for number in sorted(book.posts)[OLDEST_POSTS:-KEPT_POSTS]:
                    del book.posts[number]
            case CancelJob(job_id=job_id):
                self._close(job_id, None)
            case SetTimer(key=key, at=at):
                self._ticket += 1
                self._timers.append((at, self._ticket, key))
            case Aggregate(to_version=version):
                self.making[version] = command
            case Record(kind="fate", facts=facts):
                if facts["fate"] != "aggregated":  # otherwise the model to be made needs it
                    self.updates.pop((str(facts["job"]), int(facts["attempt"] or 0)), None)
            case Record(kind="suspended", facts=facts):
                until = facts["until"]
                held_back = HeldBack(str(facts["reason"]), until if isinstance(until, float) else None)
                self.facilities[str(facts["facility"])].held_back = held_back
            case Record(kind="rejoined", facts=facts):
                self.facilities[str(facts["facility"])].held_back = None
            case StopRun(reason=reason):
                self.stopped = reason
                self.making.clear()  # what is not made now never will be

    def _model_ready(self, version: int, digest: str) -> None:
        self.models[version] = digest
        self.newest = max(self.newest, version)
        made = self.making.pop(version, None)
        if made is not None:
            for share in made.weights:
                self.updates.pop((share.job_id, share.attempt), None)

    def _close(self, job_id: JobId, attempt: int | None) -> bool:
        """An attempt that was superseded closes nothing."""
        job = self.job(job_id)
        if job is None or (attempt is not None and attempt != job.attempt):
            return False
        del self.facilities[facility_of(job_id)].jobs[job.sequence]
        return True

    def _drop_timer(self, key: str) -> None:
        mine = min((timer for timer in self._timers if timer[2] == key), default=None)
        if mine is not None:
            self._timers.remove(mine)
