"""What is open in a run: its facilities, jobs, updates, models to be made and timers, as events and commands leave it.

One reducer for everybody who wants to know. It is told what happened and what is wanted, live and when a ledger is
read again, and acts on nothing. Where an event takes a job is in one table, `JOB`: what is not in it changes nothing.
Who wants to follow a run is one of its `views`: they are told only what took effect, so an event that is repeated, that
comes too late or that speaks of an attempt which the scheduler took back changes nothing anywhere.

    state = RunState(["north", "south"])
    state.views.append(tally)
    state(event, commands)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fedqueue.protocol.contract import Assignment, JobId, Order, Receipt, Standing, UpdateKey, facility_of, sequence_of
from fedqueue.protocol.messages import (
    Aggregate,
    AssignWork,
    CancelJob,
    Command,
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    FacilityLeft,
    ForecastIssued,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelReady,
    ModelScored,
    PostWork,
    Record,
    RunPaused,
    RunResumed,
    RunStarted,
    SetTimer,
    StopRequested,
    StopRun,
    SubmitJob,
    SubmitRefused,
    TimerFired,
    UpdateArrived,
    UpdateRejected,
)

Phase = Literal["ordered", "queued", "running", "ended"]
"""ordered: we want it. queued: its scheduler has it. running: it has its nodes. ended: it has handed in, and its update
is on its way. A job that is over keeps the phase in which that happened."""

PHASES: Final = ("ordered", "queued", "running", "ended")

Status = Literal["active", "left", "drained", "suspended", "out"]
"""active: may have work. left: out of reach, may come back. drained: asked to stop. suspended: comes back by
itself. out: failed for good; comes back when someone makes it join."""

JOB: Final[dict[tuple[str, type, str], Phase | None]] = {
    # phase, event, its attempt against the newest that is known: the next phase; None: the job is over
    ("ordered", JobSubmitted, "same"): "queued",
    ("ordered", JobStarted, "same"): "running",  # that it was submitted is still to be told
    ("queued", JobStarted, "same"): "running",
    ("ordered", JobEnded, "same"): "ended",
    ("queued", JobEnded, "same"): "ended",
    ("running", JobEnded, "same"): "ended",
    **{(phase, JobStarted, "newer"): "running" for phase in PHASES},
    **{(phase, JobRequeued, "newer"): "queued" for phase in PHASES},
    **{
        (phase, event, "same"): None
        for phase in PHASES
        for event in (SubmitRefused, JobFailed, UpdateArrived, UpdateRejected)
    },
}

KEPT_POSTS: Final = 64
"""Standing works remembered at a facility: a job that took an older one is not told which cutoff it aimed at."""
OLDEST_POSTS: Final = 3
"""Of those, the oldest: one of them may be what lies at a facility that has long been away."""


@dataclass(slots=True)
class JobState:
    """One order that is out. Times are of the run clock."""

    order: Order
    ordered_at: float
    assignment: Assignment | None = None
    phase: Phase = "ordered"
    since: float = 0.0  # of that phase
    taken: bool = False  # its facility has it at its scheduler
    attempt: int = 0
    started_at: float | None = None  # when its newest attempt took its work
    held_since: float | None = None  # when that one got its nodes; None: it has none
    out_of_reach: bool = False  # its facility was, for a while: when we heard of it says little about when it was

    @property
    def sequence(self) -> int:
        return sequence_of(self.order.job_id)

    @property
    def cutoff(self) -> float | None:
        """That it aims at."""
        return self.assignment.cutoff if self.assignment is not None else None


@dataclass(slots=True)
class FacilityState:
    name: str
    status: Status = "active"
    away: bool = False  # out of reach
    came_back: bool = False  # when it joined last, it had been out of reach; else somebody said that it shall join
    until: float | None = None  # it is suspended
    reason: str = ""  # why it is suspended or out
    refusal: str | None = None  # why its scheduler did not take the newest order
    jobs: dict[JobId, JobState] = field(default_factory=dict)  # open
    cancelled: dict[JobId, JobState] = field(default_factory=dict)  # not wanted any more, and maybe not over yet
    ordered: int = 0  # orders given so far
    posts: dict[int, Standing] = field(default_factory=dict)  # standing work by number, newest last
    posted: int = 0  # the number of the newest; 0: none

    def forget_posts(self, unneeded: Callable[[int], bool]) -> None:
        for number in [n for n in self.posts if unneeded(n) and n != self.posted]:
            del self.posts[number]


View = Callable[[Event | Command, JobState | None], None]
"""Told each event and command that took effect, with the job that it is about."""


class RunState:
    """Told by `happened` and `wanted`; a call does both for one step of a run."""

    def __init__(self, facilities: Sequence[str]) -> None:
        self.views: list[View] = []
        self.facilities = {name: FacilityState(name) for name in facilities}
        self.at = 0.0  # run clock of the newest event
        self.events = 0
        self.job: JobState | None = None  # that the newest event took somewhere
        self.started = False
        self.paused = False  # an operator said so
        self.hindrance = ""  # what keeps the run from going on until somebody mends it
        self.stopped: str | None = None
        self.newest = 0  # version
        self.making: dict[int, Aggregate] = {}  # asked for and not made, by version
        self.updates: dict[UpdateKey, Receipt] = {}  # arrived, and not yet part of a model or settled otherwise
        self._timers: list[tuple[float, int, str]] = []
        self._ticket = 0

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        self.happened(event)
        for command in commands:
            self.wanted(command)

    # Reading --------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether the run clock stands still and nobody gets new work."""
        return self.paused or bool(self.hindrance)

    def open_job(self, job_id: JobId) -> JobState | None:
        facility = self.facilities.get(facility_of(job_id))
        return facility.jobs.get(job_id) if facility is not None else None

    def due(self) -> tuple[float, str] | None:
        """The timer that fires first."""
        first = min(self._timers, default=None)
        return None if first is None else (first[0], first[2])

    def timer(self, key: str) -> float | None:
        """When the first timer fires whose key begins like this."""
        return min((at for at, _, found in self._timers if found.startswith(key)), default=None)

    def versions_needed(self) -> set[int]:
        """Versions that a job, standing work, an update or a model to be made refers to."""
        needed = {self.newest}
        for facility in self.facilities.values():
            needed.update(standing.version for standing in facility.posts.values())
            needed.update(job.assignment.base_version for job in facility.jobs.values() if job.assignment is not None)
        needed.update(receipt.base_version for receipt in self.updates.values())
        needed.update(command.from_version for command in self.making.values())
        return needed

    # What happened --------------------------------------------------------------------------------------

    def happened(self, event: Event) -> bool:
        """Whether it took effect. `job` is then the one it is about, if it is about one."""
        self.at = event.at
        self.events += 1
        self.job = None
        effective = _HAPPENED[type(event)](self, event)
        if effective:
            for view in self.views:
                view(event, self.job)
        return effective

    def _move(self, job_id: JobId, event: Event, attempt: int | None) -> JobState | None:
        """The job, in its new phase or over; None: the event changes nothing about it."""
        facility = self.facilities.get(facility_of(job_id))
        if facility is None:
            return None
        jobs = facility.cancelled if job_id in facility.cancelled else facility.jobs
        if (job := jobs.get(job_id)) is None:
            return None
        age = "same" if attempt is None or attempt == job.attempt else "newer" if attempt > job.attempt else "older"
        key = (job.phase, type(event), age)
        if key not in JOB:
            return None
        phase = JOB[key]
        if phase is None:
            del jobs[job_id]
        else:
            job.phase, job.since = phase, event.at
        if age == "newer":
            assert attempt is not None
            job.attempt = attempt
        self.job = job
        return job

    def _job_submitted(self, event: JobSubmitted) -> bool:
        job = self.open_job(event.job_id)
        if job is None or job.taken:
            return False
        job.taken = True
        self.facilities[job.order.facility].refusal = None
        self._move(event.job_id, event, event.attempt)
        self.job = job
        return True

    def _job_started(self, event: JobStarted) -> bool:
        job = self._move(event.job_id, event, event.attempt)
        if job is None:
            return False
        job.started_at = event.at - event.ago
        job.since = job.held_since = job.started_at - event.lingered
        job.assignment = event.bound or job.assignment
        return True

    def _job_requeued(self, event: JobRequeued) -> bool:
        job = self._move(event.job_id, event, event.attempt)
        if job is None:
            return False
        job.started_at = job.held_since = None
        return True

    def _job_ended(self, event: JobEnded) -> bool:
        job = self._move(event.job_id, event, event.attempt)
        if job is None:
            return False
        job.held_since = None
        return True

    def _job_failed(self, event: JobFailed | UpdateRejected) -> bool:
        return self._move(event.job_id, event, event.attempt) is not None

    def _submit_refused(self, event: SubmitRefused) -> bool:
        job = self._move(event.job_id, event, None)
        if job is None:
            return False
        self.facilities[job.order.facility].refusal = event.reason
        return True

    def _update_arrived(self, event: UpdateArrived) -> bool:
        receipt = event.receipt
        if self._move(receipt.job_id, event, receipt.attempt) is None:
            return False
        self.updates[receipt.key] = receipt
        return True

    def _run_started(self, event: RunStarted) -> bool:
        before, self.started = self.started, True
        return not before

    def _run_paused(self, event: RunPaused) -> bool:
        before = self.paused, self.hindrance
        if event.reason:
            self.hindrance = event.reason
        else:
            self.paused = True
        return before != (self.paused, self.hindrance)

    def _run_resumed(self, event: RunResumed) -> bool:
        before = self.paused, self.hindrance
        if event.mended:
            self.hindrance = ""
        else:
            self.paused = False
        return before != (self.paused, self.hindrance)

    def _coordinator_resumed(self, event: CoordinatorResumed) -> bool:
        """The run clock stood still, those of the facilities did not."""
        for facility in self.facilities.values():
            self._lose_sight(facility)
        return True

    @staticmethod
    def _lose_sight(facility: FacilityState) -> None:
        for job in facility.jobs.values():
            job.out_of_reach = True

    def _timer_fired(self, event: TimerFired) -> bool:
        mine = min((timer for timer in self._timers if timer[2] == event.key), default=None)
        if mine is None:
            return False
        self._timers.remove(mine)
        return True

    def _facility_joined(self, event: FacilityJoined) -> bool:
        """The strategy says whether it gets work again: `rejoined` is a record of its."""
        facility = self.facilities.get(event.facility)
        if facility is None:
            return False
        facility.came_back, facility.away = facility.away, False
        return True

    def _facility_left(self, event: FacilityLeft) -> bool:
        facility = self.facilities.get(event.facility)
        if facility is None or facility.away:
            return False
        facility.away = True
        self._lose_sight(facility)
        if facility.status != "drained":  # a lost connection does not undo what an operator asked
            facility.status = "left"
        return True

    def _facility_drained(self, event: FacilityDrained) -> bool:
        facility = self.facilities.get(event.facility)
        if facility is None or facility.status == "drained":
            return False
        facility.status = "drained"
        return True

    def _forecast_issued(self, event: ForecastIssued) -> bool:
        return event.facility in self.facilities

    def _model_ready(self, event: ModelReady) -> bool:
        if event.version != self.newest + 1 or event.version not in self.making:
            return False
        self.newest = event.version
        for share in self.making.pop(event.version).weights:
            self.updates.pop(share.key, None)
        return True

    def _told_to_others(self, event: StopRequested | ModelScored) -> bool:
        """It changes nothing that is open; the strategy may."""
        return True

    # What is wanted -------------------------------------------------------------------------------------

    def wanted(self, command: Command) -> None:
        job = _WANTED[type(command)](self, command)
        for view in self.views:
            view(command, job)

    def _submit_job(self, command: SubmitJob) -> JobState:
        order = command.order
        facility = self.facilities[order.facility]
        job = facility.jobs[order.job_id] = JobState(order, self.at, since=self.at)
        facility.ordered += 1
        return job

    def _assign_work(self, command: AssignWork) -> JobState | None:
        job = self.open_job(command.job_id)
        if job is not None:
            job.assignment = command.assignment
        return job

    def _post_work(self, command: PostWork) -> None:
        facility = self.facilities[command.facility]
        facility.posted += 1
        facility.posts[facility.posted] = command.standing
        if len(facility.posts) > OLDEST_POSTS + KEPT_POSTS:
            for number in sorted(facility.posts)[OLDEST_POSTS:-KEPT_POSTS]:
                del facility.posts[number]

    def _cancel_job(self, command: CancelJob) -> JobState | None:
        job = self.open_job(command.job_id)
        if job is not None:
            facility = self.facilities[job.order.facility]
            facility.cancelled[command.job_id] = facility.jobs.pop(command.job_id)
        return job

    def _set_timer(self, command: SetTimer) -> None:
        self._ticket += 1
        self._timers.append((command.at, self._ticket, command.key))

    def _aggregate(self, command: Aggregate) -> None:
        self.making[command.to_version] = command

    def _record(self, command: Record) -> JobState | None:
        facts = command.facts
        match command.kind:
            case "fate" if facts["fate"] != "aggregated":  # otherwise it is in the model that is ready
                key = str(facts["job"]), int(facts["attempt"] or 0), int(facts.get("part") or 0)
                self.updates.pop(key, None)
            case "failure":
                job = str(facts["job"])
                return self.facilities[facility_of(job)].cancelled.pop(job, None)
            case "suspended":
                facility, until = self.facilities[str(facts["facility"])], facts["until"]
                facility.status = "out" if until is None else "suspended"
                facility.until = None if until is None else float(until)
                facility.reason = str(facts["reason"])
            case "rejoined":
                facility = self.facilities[str(facts["facility"])]
                facility.status, facility.until, facility.reason = "active", None, ""
        return None

    def _stop_run(self, command: StopRun) -> None:
        self.stopped = command.reason
        self.making.clear()  # what is not made now never will be


class Outcomes:
    """What a run has made so far: a view, which grows with the run."""

    def __init__(self, state: RunState, first_model: str) -> None:
        self.models = {0: first_model}  # version -> digest
        self.scores: dict[int, float | None] = {}  # of the versions that were scored; None: it is not a number
        self.verdicts: dict[UpdateKey, str | None] = {}  # of all handed in: why it was rejected; None: it was taken
        state.views.append(self)

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        match told:
            case UpdateArrived(receipt=receipt):
                self.verdicts[receipt.key] = None
            case UpdateRejected(reason=reason):
                self.verdicts[told.key] = reason
            case ModelReady(version=version, digest=digest):
                self.models[version] = digest
            case ModelScored(version=version, metrics=metrics):
                self.scores[version] = metrics.get("score")

    def unscored(self) -> list[int]:
        """Models that were passed over: older than the newest with a score, and without one."""
        newest = max(self.scores, default=0)
        return sorted(version for version in self.models if version < newest and version not in self.scores)


_HAPPENED: Final[dict[type, Callable[[RunState, Any], bool]]] = {
    RunStarted: RunState._run_started,
    RunPaused: RunState._run_paused,
    RunResumed: RunState._run_resumed,
    StopRequested: RunState._told_to_others,
    CoordinatorResumed: RunState._coordinator_resumed,
    TimerFired: RunState._timer_fired,
    FacilityJoined: RunState._facility_joined,
    FacilityLeft: RunState._facility_left,
    FacilityDrained: RunState._facility_drained,
    ForecastIssued: RunState._forecast_issued,
    JobSubmitted: RunState._job_submitted,
    SubmitRefused: RunState._submit_refused,
    JobStarted: RunState._job_started,
    JobRequeued: RunState._job_requeued,
    JobEnded: RunState._job_ended,
    JobFailed: RunState._job_failed,
    UpdateArrived: RunState._update_arrived,
    UpdateRejected: RunState._job_failed,
    ModelReady: RunState._model_ready,
    ModelScored: RunState._told_to_others,
}

_WANTED: Final[dict[type, Callable[[RunState, Any], JobState | None]]] = {
    SubmitJob: RunState._submit_job,
    AssignWork: RunState._assign_work,
    PostWork: RunState._post_work,
    CancelJob: RunState._cancel_job,
    SetTimer: RunState._set_timer,
    Aggregate: RunState._aggregate,
    Record: RunState._record,
    StopRun: RunState._stop_run,
}
