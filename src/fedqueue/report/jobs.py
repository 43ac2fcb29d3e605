"""What became of every job that a scheduler took, as a view of a run's state: told what took effect, it can be asked at
any time, while the run goes on and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fedqueue.protocol.contract import JobId
from fedqueue.protocol.messages import (
    CancelJob,
    Command,
    Event,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
)
from fedqueue.protocol.state import JobState, RunState

Outcome = Literal["ended", "failed", "requeued", "open"]
"""How a stretch of running stopped; open: the run was over first."""

Bar = Literal["waiting", "lingering", "training", "upload"]
Mark = Literal["requeued", "failed"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job, and the wait before it."""

    eligible_at: float
    started_at: float
    stopped_at: float
    held_seconds: float  # that its nodes were held; by its own clock, once it has stopped
    admission_delay: float
    lingered: float  # seconds it held its nodes before it took its work
    outcome: Outcome
    pauses: tuple[tuple[float, float], ...] = ()  # from and until when it held them between two parts without work
    idle_seconds: float = 0.0  # that it held them without work, in all


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """One job that a scheduler took."""

    job_id: JobId
    facility: str
    submitted_at: float
    closed_at: float  # its update arrived, or it failed, or the run was over
    expected_delay: float | None  # the forecast it was ordered with
    attempts: tuple[Attempt, ...]
    waits_since: float | None  # in the queue, again or still, when it closed
    failed: bool
    steps: int  # done

    def bars(self) -> Iterator[tuple[Bar, float, float]]:
        """What it was doing, from when until when. Of a job that stays, each part that it trained is one."""
        known = self.submitted_at
        for attempt in self.attempts:
            yield "waiting", max(attempt.eligible_at, known), attempt.started_at
            working_at = min(attempt.started_at + attempt.lingered, attempt.stopped_at)
            if attempt.lingered > 0:
                yield "lingering", attempt.started_at, working_at
            for since, until in attempt.pauses:
                yield "training", working_at, max(working_at, since)
                yield "lingering", max(working_at, since), until
                working_at = until
            yield "training", working_at, attempt.stopped_at
            known = attempt.stopped_at
        if self.waits_since is not None:
            yield "waiting", self.waits_since, self.closed_at
        elif self.closed_at > known:
            yield "upload", known, self.closed_at

    def marks(self) -> Iterator[tuple[Mark, float]]:
        for attempt in self.attempts:
            if attempt.outcome == "requeued":
                yield "requeued", attempt.stopped_at
        if self.failed:
            yield "failed", self.closed_at


@dataclass(slots=True)
class _Started:
    """An attempt, as it goes."""

    eligible_at: float
    started_at: float
    admission_delay: float
    lingered: float
    stopped_at: float | None = None
    held_seconds: float | None = None
    outcome: Outcome = "open"
    pauses: list[tuple[float, float]] = field(default_factory=list)
    idle_seconds: float = 0.0


@dataclass(slots=True)
class _Known:
    """A job, as it goes."""

    job: JobState
    submitted_at: float | None = None
    closed_at: float | None = None
    failed: bool = False
    steps: int = 0
    attempts: dict[int, _Started] = field(default_factory=dict)

    def reported(self, end: float) -> ReportedJob:
        """As it is now, at `end`."""
        assert self.submitted_at is not None
        closed_at = end if self.closed_at is None else self.closed_at
        attempts = tuple(self._attempt(self.attempts[n], end, closed_at) for n in sorted(self.attempts))
        waits_since: float | None = self.submitted_at
        if attempts:
            last = attempts[-1]
            waits_since = last.stopped_at if last.outcome == "requeued" else None
            if self.job.stays:  # it holds its nodes after its last update, too
                closed_at = max(closed_at, last.stopped_at)
        return ReportedJob(
            job_id=self.job.order.job_id,
            facility=self.job.order.facility,
            submitted_at=self.submitted_at,
            closed_at=closed_at,
            expected_delay=self.job.order.expected_delay,
            attempts=attempts,
            waits_since=waits_since,
            failed=self.failed,
            steps=self.steps,
        )

    @staticmethod
    def _attempt(found: _Started, end: float, closed_at: float) -> Attempt:
        stopped_at = min(end, closed_at) if found.stopped_at is None else found.stopped_at
        return Attempt(
            eligible_at=found.eligible_at,
            started_at=found.started_at,
            stopped_at=max(stopped_at, found.started_at),
            held_seconds=end - found.started_at if found.held_seconds is None else found.held_seconds,
            admission_delay=found.admission_delay,
            lingered=found.lingered,
            outcome=found.outcome,
            pauses=tuple(found.pauses),
            idle_seconds=found.idle_seconds,
        )


class Jobs:
    """Of a run: those that are over as they were, and those that are open as they are."""

    def __init__(self, state: RunState) -> None:
        self.over: list[ReportedJob] = []
        """In the order in which they ended."""
        self._open: dict[JobId, _Known] = {}
        state.views.append(self)

    def open(self, now: float) -> list[ReportedJob]:
        return [known.reported(now) for known in self._open.values() if known.submitted_at is not None]

    def all(self, now: float) -> list[ReportedJob]:
        return sorted([*self.over, *self.open(now)], key=lambda job: (job.submitted_at, job.job_id))

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        tell = _TOLD.get(type(told))
        if tell is None or job is None:
            return
        known = self._open.get(job.order.job_id)
        if known is None:
            if not isinstance(told, SubmitJob):
                return
            known = self._open[job.order.job_id] = _Known(job)
        tell(known, told)
        at = told.at if isinstance(told, Event) else None
        if isinstance(told, SubmitRefused):
            del self._open[job.order.job_id]
        elif job.is_over:
            assert at is not None
            if known.closed_at is None:
                known.closed_at = at
            del self._open[job.order.job_id]
            if known.submitted_at is None:
                known.submitted_at = known.job.ordered_at
            self.over.append(known.reported(at))


def _submitted(known: _Known, event: JobSubmitted) -> None:
    known.submitted_at = event.at


def _started(known: _Known, event: JobStarted) -> None:
    started_at = event.at - event.ago - event.lingered
    if known.submitted_at is None:
        known.submitted_at = event.at
    known.attempts[event.attempt] = _Started(
        eligible_at=started_at - event.admission_delay,
        started_at=started_at,
        admission_delay=event.admission_delay,
        lingered=event.lingered,
        idle_seconds=event.lingered,
    )


def _took(known: _Known, event: WorkTaken) -> None:
    attempt = known.attempts.get(event.attempt)
    if attempt is not None:
        until = event.at - event.ago
        attempt.pauses.append((until - event.idle_seconds, until))
        attempt.idle_seconds += event.idle_seconds


def _stop(known: _Known, attempt: int, at: float, held: float, outcome: Outcome) -> None:
    found = known.attempts.get(attempt)
    if found is not None and found.stopped_at is None:
        found.stopped_at, found.held_seconds, found.outcome = at, held, outcome


def _requeued(known: _Known, event: JobRequeued) -> None:
    _stop(known, event.attempt - 1, event.at, event.held_seconds, "requeued")  # the event names the one that waits now


def _ended(known: _Known, event: JobEnded) -> None:
    _stop(known, event.attempt, event.at, event.held_seconds, "ended")
    if event.attempt in known.attempts:
        known.attempts[event.attempt].idle_seconds += event.idle_seconds
    if not known.job.stays:
        known.steps = event.steps_done


def _failed(known: _Known, event: JobFailed) -> None:
    _stop(known, event.attempt, event.at, event.held_seconds, "failed")
    known.closed_at, known.failed = event.at, True


def _rejected(known: _Known, event: UpdateRejected) -> None:
    known.closed_at, known.failed = event.at, not known.job.stays


def _arrived(known: _Known, event: UpdateArrived) -> None:
    receipt = event.receipt
    if not known.job.stays:
        known.closed_at = event.at
        return
    known.closed_at = event.at if known.job.is_over else None
    known.steps += receipt.steps_done
    if receipt.part and receipt.attempt in known.attempts:
        known.attempts[receipt.attempt].idle_seconds += receipt.turn_seconds


def _nothing(known: _Known, told: Any) -> None:
    pass


_TOLD: Final[dict[type, Callable[[_Known, Any], None]]] = {
    SubmitJob: _nothing,
    SubmitRefused: _nothing,
    CancelJob: _nothing,
    JobSubmitted: _submitted,
    JobStarted: _started,
    WorkTaken: _took,
    JobRequeued: _requeued,
    JobEnded: _ended,
    JobFailed: _failed,
    UpdateRejected: _rejected,
    UpdateArrived: _arrived,
}
