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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fedqueue.protocol.cap import CapLeft
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
    NodeHoursTold,
    PostWork,
    Record,
    RolledBack,
    RunPaused,
    RunResumed,
    RunStarted,
    Scalar,
    SetTimer,
    StopRequested,
    StopRun,
    SubmitJob,
    SubmitRefused,
    TimerFired,
    UpdateArrived,
    UpdateRejected,
    UpdatesUnusable,
    UpdatesWithdrawn,
    WorkTaken,
)

Phase = Literal["ordered", "queued", "running", "ended"]
"""ordered: we want it. queued: its scheduler has it. running: it has its nodes. ended: it has handed in, and its update
is on its way. A job that is over keeps the phase in which that happened."""

PartKey = tuple[int, int]
"""Which update of a job: in this attempt, this part."""

PHASES: Final = ("ordered", "queued", "running", "ended")

Status = Literal["active", "left", "drained", "suspended", "out"]
"""active: may have work. left: out of reach, may come back. drained: asked to stop. suspended: comes back by
itself. out: failed for good; comes back when someone makes it join."""

JOB: Final[dict[tuple[str, type, str], Phase | None]] = {
    # phase, event, its attempt against the newest that is known: the next phase; None: the job is over
    ("ordered", JobSubmitted, "same"): "queued",
    ("ordered", JobStarted, "same"): "running",
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

STAYING: Final[dict[tuple[str, type, str], Phase | None]] = {
    # of a job that stays: an update does not end it, also not one of an attempt that was superseded
    **JOB,
    ("running", WorkTaken, "same"): "running",
    **{
        (phase, event, age): phase if phase == "ended" or age == "older" else "running"
        for phase in PHASES
        for event in (UpdateArrived, UpdateRejected)
        for age in ("same", "older")
    },
}
"""As JOB. In the phase "ended" the job is over when all that it handed in has arrived or was rejected."""

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
    attempt: int = 0
    wall_seconds: float = 0.0  # asked of its scheduler, as far as anybody said
    started_at: float | None = None  # when its newest attempt took its work
    held_since: float | None = None  # when that one got its nodes; None: it has none
    clock_stood: bool = False  # the run clock did while it was out: its age is not known
    out_of_reach: bool = False  # its facility was, for a while: when we heard of it says little about when it was
    # Of a job that stays:
    part: int = 0  # newest that it took or was given
    taken_at: float | None = None  # when it took that; None: it has not, or nobody knows
    works: dict[PartKey, tuple[Assignment, float | None]] = field(default_factory=dict)
    """Work of the parts before that, until they are settled, and when each was taken."""
    settled: set[PartKey] = field(default_factory=set)  # arrived or rejected
    settled_at: float | None = None  # the newest of them
    parts: int | None = None  # that it handed in, once it has ended
    idle_seconds: float = 0.0  # that it has held its nodes without work, in all its attempts
    is_over: bool = False  # nothing more comes of it

    @property
    def stays(self) -> bool:
        return self.order.stay is not None

    @property
    def awaits_work(self) -> bool:
        """It has its nodes and nothing to do: it stays, and what it was given has arrived, or it was given nothing."""
        if self.order.stay is None or self.phase != "running":
            return False
        return self.assignment is None or (self.attempt, self.part) in self.settled

    def idle_at(self, at: float) -> float:
        """Seconds that it has held its nodes without work until then: since its last update arrived, too."""
        since = self.out_of_work_since
        return self.idle_seconds + (0.0 if since is None else max(0.0, at - since))

    @property
    def out_of_work_since(self) -> float | None:
        """None: it is at work, as far as anybody knows, or holds no nodes."""
        if not self.awaits_work:
            return None
        return self.since if self.settled_at is None else max(self.since, self.settled_at)

    def work_of(self, part: PartKey) -> tuple[Assignment | None, float | None]:
        """What this part was given, and when it took it on the run clock; None: nobody knows."""
        if part == (self.attempt, self.part):
            return self.assignment, self.taken_at
        return self.works.get(part, (None, None))

    def turn_to(self, part: PartKey, work: Assignment | None, taken_at: float | None) -> None:
        """Remember what it was given until now, if that is not settled yet."""
        if self.assignment is not None and (key := (self.attempt, self.part)) not in self.settled:
            self.works[key] = self.assignment, self.taken_at
        (self.attempt, self.part), self.assignment, self.taken_at = part, work, taken_at

    @property
    def sequence(self) -> int:
        return sequence_of(self.order.job_id)

    @property
    def taken(self) -> bool:
        """Its facility has it at its scheduler."""
        return self.phase != "ordered"

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
    longest_wait: float = 0.0  # of its jobs that have started, from the order on
    cap_left: CapLeft | None = None  # of its node-hours, as was told last; None: there is no cap, or nobody said
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
        self.work: tuple[Assignment | None, float | None] = None, None  # of the part that it settled, and when taken
        self.started = False
        self.paused = False  # an operator said so
        self.hindrance = ""  # what keeps the run from going on until somebody mends it
        self.stopped: str | None = None
        self.newest = 0  # version
        self.making: dict[int, Aggregate] = {}  # asked for and not made, by version
        self.updates: dict[UpdateKey, Receipt] = {}  # arrived, and not yet part of a model or settled otherwise
        self.kept: dict[UpdateKey, Receipt] = {}  # part of a model, and may be asked for again
        self.taken_back: set[int] = set()  # versions
        self._copies: set[int] = set()  # versions that are an earlier one again
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

    def open_or_cancelled(self, job_id: JobId) -> JobState | None:
        facility = self.facilities.get(facility_of(job_id))
        return None if facility is None else facility.jobs.get(job_id) or facility.cancelled.get(job_id)

    def due(self) -> tuple[float, str] | None:
        """The timer that fires first."""
        first = min(self._timers, default=None)
        return None if first is None else (first[0], first[2])

    def timer(self, key: str) -> float | None:
        """When the first timer fires whose key begins like this."""
        return min((at for at, _, found in self._timers if found.startswith(key)), default=None)

    @property
    def progress(self) -> int:
        """How many models were made that count: those that were taken back do not."""
        return self.newest - len(self.taken_back | self._copies)

    def versions_needed(self) -> set[int]:
        """Versions that a job, standing work, an update or a model to be made refers to."""
        needed = {self.newest}
        for facility in self.facilities.values():
            needed.update(standing.version for standing in facility.posts.values())
            for job in facility.jobs.values():
                if job.assignment is not None:
                    needed.add(job.assignment.base_version)
                needed.update(work.base_version for work, _ in job.works.values())
        needed.update(receipt.base_version for receipt in self.held_updates().values())
        needed.update(command.from_version for command in self.making.values())
        return needed

    def held_updates(self) -> dict[UpdateKey, Receipt]:
        """Updates whose tensors may be asked for."""
        return {**self.kept, **self.updates} if self.kept else self.updates

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

    def _move(
        self, job_id: JobId, event: Event, attempt: int | None, part: int | None = None, parts: int | None = None
    ) -> JobState | None:
        """The job, in its new phase or over; None: the event changes nothing about it. The event settles `part`, or
        says that there are so many `parts`."""
        facility = self.facilities.get(facility_of(job_id))
        if facility is None:
            return None
        jobs = facility.jobs
        job = jobs.get(job_id)
        if job is None:
            jobs = facility.cancelled
            if (job := jobs.get(job_id)) is None:
                return None
        age = "same" if attempt is None or attempt == job.attempt else "newer" if attempt > job.attempt else "older"
        stays = job.order.stay is not None
        phase: Phase | Literal["as it was"] | None
        phase = (STAYING if stays else JOB).get((job.phase, type(event), age), "as it was")
        if phase == "as it was":
            return None
        if stays:
            self.work = job.assignment, job.taken_at
            if part is not None and attempt is not None:
                if (attempt, part) in job.settled:
                    return None
                job.settled.add((attempt, part))
                job.settled_at = event.at
                self.work = job.work_of((attempt, part))
                job.works.pop((attempt, part), None)
            if parts is not None:
                job.parts = parts
            if phase == "ended" and all((job.attempt, n) in job.settled for n in range(job.parts or 0)):
                phase = None
        if phase is None:
            del jobs[job_id]
            job.is_over = True
        elif job.phase != phase or age == "newer":
            job.phase, job.since = phase, event.at
        if age == "newer":
            assert attempt is not None
            if stays:
                job.turn_to((attempt, 0), None, None)
            job.attempt = attempt
        self.job = job
        return job

    def _job_submitted(self, event: JobSubmitted) -> bool:
        job = self._move(event.job_id, event, event.attempt)
        if job is None:
            return False
        self.facilities[job.order.facility].refusal = None
        job.wall_seconds = event.wall_seconds or job.wall_seconds
        return True

    def _job_started(self, event: JobStarted) -> bool:
        job = self._move(event.job_id, event, event.attempt)
        if job is None:
            return False
        job.started_at = job.taken_at = event.at - event.ago
        job.since = job.held_since = job.started_at - event.lingered
        facility = self.facilities[job.order.facility]
        facility.longest_wait = max(facility.longest_wait, job.since - job.ordered_at)
        job.assignment = event.bound or job.assignment
        job.idle_seconds += event.lingered
        return True

    def _work_taken(self, event: WorkTaken) -> bool:
        job = self.open_or_cancelled(event.job_id)
        if job is None:
            return False
        given = event.bound is None and event.part == job.part and job.assignment is not None and job.taken_at is None
        if not (given or event.part > job.part):
            return False
        if self._move(event.job_id, event, event.attempt) is None:
            return False
        job.idle_seconds += event.idle_seconds
        taken_at = event.at - event.ago
        if given:
            job.taken_at = taken_at
        else:
            job.turn_to((event.attempt, event.part), event.bound, taken_at)
        return True

    def _job_requeued(self, event: JobRequeued) -> bool:
        job = self._move(event.job_id, event, event.attempt)
        if job is None:
            return False
        job.started_at = job.taken_at = job.held_since = None
        return True

    def _job_ended(self, event: JobEnded) -> bool:
        job = self._move(event.job_id, event, event.attempt, parts=event.parts)
        if job is None:
            return False
        job.held_since = None
        job.idle_seconds += event.idle_seconds
        return True

    def _job_failed(self, event: JobFailed) -> bool:
        return self._move(event.job_id, event, event.attempt) is not None

    def _update_rejected(self, event: UpdateRejected) -> bool:
        return self._move(event.job_id, event, event.attempt, event.part) is not None

    def _submit_refused(self, event: SubmitRefused) -> bool:
        job = self._move(event.job_id, event, None)
        if job is None:
            return False
        self.facilities[job.order.facility].refusal = event.reason
        return True

    def _update_arrived(self, event: UpdateArrived) -> bool:
        receipt = event.receipt
        job = self._move(receipt.job_id, event, receipt.attempt, receipt.part)
        if job is None:
            return False
        if receipt.part:  # before, it started up
            job.idle_seconds += receipt.turn_seconds
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
        self._clock_stood()
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
        self._clock_stood()
        return True

    def _clock_stood(self) -> None:
        for facility in self.facilities.values():
            for job in (*facility.jobs.values(), *facility.cancelled.values()):
                job.clock_stood = True

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

    def _updates_withdrawn(self, event: UpdatesWithdrawn) -> bool:
        """The strategy settles them one by one: fates are records of its."""
        return event.facility in self.facilities

    def _updates_unusable(self, event: UpdatesUnusable) -> bool:
        """The strategy asks for the model without them."""
        command = self.making.get(event.version)
        return command is not None and any(facility_of(share.job_id) == event.facility for share in command.weights)

    def _node_hours_told(self, event: NodeHoursTold) -> bool:
        facility = self.facilities.get(event.facility)
        if facility is None:
            return False
        before, facility.cap_left = facility.cap_left, event.left
        return before != event.left

    def _model_ready(self, event: ModelReady) -> bool:
        if event.version != self.newest + 1 or event.version not in self.making:
            return False
        self.newest = event.version
        command, held = self.making.pop(event.version), self.held_updates()
        self.kept = {key: held[key] for key in command.keep if key in held}
        for share in command.weights:
            self.updates.pop(share.key, None)
        return True

    def _rolled_back(self, event: RolledBack) -> bool:
        """The strategy asks for the next model, which is the old one."""
        if not 0 <= event.version < self.newest:
            return False
        last = max([self.newest, *self.making])
        self.taken_back.update(range(event.version + 1, last + 1))
        self._copies.add(last + 1)
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
        job = facility.jobs[order.job_id] = JobState(order, self.at, wall_seconds=order.wall_seconds, since=self.at)
        facility.ordered += 1
        return job

    def _assign_work(self, command: AssignWork) -> JobState | None:
        job = self.open_job(command.job_id)
        if job is not None and job.stays:
            job.turn_to((job.attempt, command.part), command.assignment, None)
        elif job is not None:
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
                self.updates.pop(_key_of(facts), None)
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


def _key_of(facts: Mapping[str, Scalar]) -> UpdateKey:
    return str(facts["job"]), int(facts["attempt"] or 0), int(facts.get("part") or 0)


class Outcomes:
    """What a run has made so far: a view, which grows with the run."""

    def __init__(self, state: RunState, first_model: str) -> None:
        self.models = {0: first_model}  # version -> digest
        self.moments: dict[int, tuple[str, ...]] = {}  # version -> digests, where the server's optimizer has some
        self.scores: dict[int, float | None] = {}  # of the versions that were scored; None: it is not a number
        self.verdicts: dict[UpdateKey, str | None] = {}  # of all handed in: why it was rejected; None: it was taken
        state.views.append(self)

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        match told:
            case UpdateArrived(receipt=receipt):
                self.verdicts[receipt.key] = None
            case UpdateRejected(reason=reason):
                self.verdicts[told.key] = reason
            case Record(kind="fate", facts=facts) if facts["fate"] == "rejected":  # also of one that had been taken
                self.verdicts[_key_of(facts)] = str(facts["reason"])
            case ModelReady(version=version, digest=digest, moments=moments):
                self.models[version] = digest
                if moments:
                    self.moments[version] = moments
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
    RolledBack: RunState._rolled_back,
    CoordinatorResumed: RunState._coordinator_resumed,
    TimerFired: RunState._timer_fired,
    FacilityJoined: RunState._facility_joined,
    FacilityLeft: RunState._facility_left,
    FacilityDrained: RunState._facility_drained,
    ForecastIssued: RunState._forecast_issued,
    NodeHoursTold: RunState._node_hours_told,
    JobSubmitted: RunState._job_submitted,
    SubmitRefused: RunState._submit_refused,
    JobStarted: RunState._job_started,
    WorkTaken: RunState._work_taken,
    JobRequeued: RunState._job_requeued,
    JobEnded: RunState._job_ended,
    JobFailed: RunState._job_failed,
    UpdateArrived: RunState._update_arrived,
    UpdateRejected: RunState._update_rejected,
    UpdatesWithdrawn: RunState._updates_withdrawn,
    UpdatesUnusable: RunState._updates_unusable,
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
