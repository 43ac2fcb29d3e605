"""What every strategy shares, so that its own file holds only its algorithm.

`Strategy.handle` takes an event and answers with commands. It keeps the books (which jobs are out, which
facility may have work, which update has met its fate), treats failures the same way for all, and calls a few
hooks that a strategy fills in:

    begin         the run starts
    idle          a facility may have work, and why: start, arrival, failure, rejoin
    started       a job began to run
    arrived       an update came that is new and usable
    model_ready   a version can be named in assignments
    timer         one of the strategy's own timers fired
    lost          do not count on this facility for now
    resumed       the coordinator was down; the run clock stood still, so what the strategy holds is right

Nothing here reads a clock, draws a random number or touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

from fedqueue.protocol.admit import Update
from fedqueue.protocol.budget import wall_request
from fedqueue.protocol.contract import WALL_TIME, Assignment, JobId, Order, facility_of, job_id
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
    Fate,
    ForecastIssued,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelReady,
    ModelScored,
    Record,
    RecordKind,
    Rule,
    RunPaused,
    RunResumed,
    RunStarted,
    Scalar,
    SetTimer,
    Share,
    StopRequested,
    StopRun,
    SubmitJob,
    SubmitRefused,
    TimerFired,
    UpdateArrived,
    UpdateRejected,
)
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.predict import Forecast
from fedqueue.protocol.strategies.roster import Facility, Job

Why = Literal["start", "arrival", "failure", "rejoin"]

MOST_STRETCH = 64.0  # of the wall time asked for, after jobs that ran into their limit
Ingredient = tuple[Update, int, float]
"""An update on its way into a model, with its staleness and its weight there."""

STRETCH = 1.5  # wall time asked for steps that nothing bounds in time, over what they should take


class Strategy:
    """Decides. Subclasses fill in the hooks; nobody else calls them."""

    name: ClassVar[str]
    Options: ClassVar[type]
    observes_starts: ClassVar[bool] = False  # delays count when a job starts, not when its update arrives
    has_cutoffs: ClassVar[bool] = False  # what has arrived is used at a timer, even if nothing more arrives

    def __init__(self, plan: Plan, options: Any) -> None:
        self.plan = plan
        self.options = options
        self.now = 0.0
        self.ready = 0  # newest version that assignments may name
        self.made = 0  # newest version asked for
        self.stopped: str | None = None  # why
        predictor = getattr(options, "predictor", "ewma")
        smoothing = getattr(options, "smoothing", 0.5)
        self.facilities = {p.name: Facility(p, predictor, smoothing) for p in plan.facilities}
        self._paused = False  # an operator said so
        self._hindered = False  # the driver waits until a fault is mended
        self._ending = False
        self._end_reason = "time is up"
        self._making: dict[int, list[Ingredient]] = {}  # what each version that is being made is made of
        self._unsettled: dict[tuple[JobId, int], Update] = {}
        self._out: list[Command] = []

    def handle(self, event: Event) -> Sequence[Command]:
        """The only way in: what happened goes in, what we want comes out."""
        self.now = event.at
        self._out = []
        if self.stopped is None:
            _HANDLERS[type(event)](self, event)
        elif isinstance(event, UpdateArrived):
            self._after_end(event)
        return self._out

    # Hooks ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for facility in self.free():
            self.idle(facility, "start")

    def idle(self, facility: Facility, why: Why) -> None:
        raise NotImplementedError

    def arrived(self, facility: Facility, update: Update) -> None:
        raise NotImplementedError

    def started(self, facility: Facility, job: Job) -> None:
        pass

    def model_ready(self) -> None:
        pass

    def timer(self, key: str) -> None:
        pass

    def resumed(self) -> None:
        pass

    def lost(self, facility: Facility) -> None:
        pass

    def missed(self, job: Job) -> bool:
        """Whether the cutoff that this job aimed at has gone by; asked only of jobs that aimed at one."""
        return False

    # What strategies say --------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """No new order is given now: the run is paused, about to end, or over."""
        return self._paused or self._hindered or self._ending or self.stopped is not None

    def free(self) -> list[Facility]:
        """Facilities that may have work and have no job out."""
        if self.holding:
            return []
        return [f for f in self.facilities.values() if f.status == "active" and not f.jobs]

    def submit(
        self,
        facility: Facility,
        assignment: Assignment | None,
        *,
        round: int,
        at_most: float | None = None,
        after: JobId | None = None,
        expected_delay: float | None = None,
    ) -> None:
        """Order a job, and bind its work unless it binds itself when it starts.

        It asks for the wall time of `at_most` seconds of training, or of what its steps should take and some more.
        """
        if at_most is not None:
            train_seconds = at_most
        elif facility.steps_per_second is not None and assignment is not None:
            train_seconds = STRETCH * assignment.steps / facility.steps_per_second
        else:
            train_seconds = 4 * self.plan.round_length
        order = Order(
            job_id=job_id(facility.name, facility.next_sequence),
            facility=facility.name,
            round=round,
            wall_seconds=self._wall(facility, train_seconds),
            expected_delay=expected_delay,
            purpose="train" if facility.steps_per_second is not None else "warm_up",
            after=after,
            replaces=facility.replaces,
        )
        facility.next_sequence += 1
        facility.replaces = None
        facility.jobs[order.job_id] = Job(order, assignment, self.now)
        self._out.append(SubmitJob(order=order))
        if assignment is not None:
            facility.newest_steps = assignment.steps
            self._out.append(AssignWork(job_id=order.job_id, assignment=assignment))

    def _wall(self, facility: Facility, train_seconds: float) -> float:
        asked = wall_request(train_seconds, facility.overhead, facility.stretch, facility.startup_allowance)
        if facility.stretch < MOST_STRETCH:  # the site may give more than was asked for, and that was not enough
            asked = max(asked, 2 * facility.outlasted)
        return asked

    def set_timer(self, key: str, at: float) -> None:
        self._out.append(SetTimer(key=key, at=at))

    def aggregate(self, weighed: Iterable[tuple[Update, float]], rule: Rule = "add_deltas") -> None:
        """Ask for the next version from these updates; it can be named once it is ready."""
        weighed = list(weighed)
        shares = tuple(
            Share(job_id=u.receipt.job_id, attempt=u.receipt.attempt, weight=weight) for u, weight in weighed
        )
        command = Aggregate(from_version=self.made, to_version=self.made + 1, rule=rule, weights=shares)
        self._out.append(command)
        self._making[command.to_version] = [(u, u.staleness(self.made), weight) for u, weight in weighed]
        self.made += 1

    def settle(self, update: Update, fate: Fate, **facts: Scalar) -> None:
        """The one fate of an update."""
        key = (update.receipt.job_id, update.receipt.attempt)
        del self._unsettled[key]
        self._record_fate(*key, fate, aimed=update.aimed, deferred=update.deferred, **facts)

    def record(self, kind: RecordKind, **facts: Scalar) -> None:
        self._out.append(Record(kind=kind, facts=facts))

    def stop(self, reason: str) -> None:
        """End the run; updates that nobody used are after the end."""
        if self.stopped is None:
            self.stopped = reason
            for version, ingredients in self._making.items():
                for update, _, _ in ingredients:
                    self.settle(update, "after_end", reason=f"model {version} was not made before the run ended")
            for update in list(self._unsettled.values()):
                self.settle(update, "after_end")
            for facility in self.facilities.values():
                self._out.extend(CancelJob(job_id=job) for job in facility.jobs)
            self._out.append(StopRun(reason=reason))

    def forecast(self, facility: Facility) -> Forecast:
        return facility.issued or facility.predictor.forecast(self.now)

    # Events: the run ------------------------------------------------------------------------------------

    def _run_started(self, event: RunStarted) -> None:
        if self.plan.seconds is not None:
            self.set_timer("end", self.plan.seconds)
        self.begin()

    def _run_paused(self, event: RunPaused) -> None:
        if event.reason:
            self._hindered = True
        else:
            self._paused = True

    def _run_resumed(self, event: RunResumed) -> None:
        if event.mended:
            self._hindered = False
        else:
            self._paused = False
        for facility in self.free():
            self._offer(facility, "rejoin")

    def _stop_requested(self, event: StopRequested) -> None:
        self._end("stopped by the operator")

    def _end(self, reason: str) -> None:
        """Give no more work; a model under way is waited for, but not one that cannot be made now. (Then the run clock
        stands still, so it is the operator who ends the run.)"""
        if not self._ending:
            self._ending, self._end_reason = True, reason
        if not self._making or self._hindered:
            self.stop(self._end_reason)

    def _coordinator_resumed(self, event: CoordinatorResumed) -> None:
        for facility in self.facilities.values():
            for job in facility.jobs.values():
                job.out_of_reach = True  # the run clock stood still, its facility's did not
        self.resumed()

    def _model_ready(self, event: ModelReady) -> None:
        if event.version != self.ready + 1 or event.version not in self._making:
            return self._ignore(f"version {event.version} was not waited for")  # it is repeated
        self.ready = event.version
        for update, staleness, weight in self._making.pop(event.version):
            self.settle(update, "aggregated", staleness=staleness, weight=weight, version=event.version)
        if self.plan.rounds is not None and self.ready >= self.plan.rounds:
            self.stop("all rounds done")
        elif self._ending and not self._making:
            self.stop(self._end_reason)
        else:
            self.model_ready()
            self._stop_if_nobody_is_left()
        return None

    def _model_scored(self, event: ModelScored) -> None:
        target = self.plan.stop_at_score
        score = event.metrics.get("score")
        if target is not None and score is not None and score >= target:
            self.stop("target reached")

    def _timer_fired(self, event: TimerFired) -> None:
        kind, _, rest = event.key.partition("/")
        if kind == "end":
            # Whatever else falls on this very second comes first; a model under way is waited for.
            if rest != "now":
                self.set_timer("end/now", self.now)
            else:
                self._end("time is up")
        elif kind == "rejoin":
            name, _, count = rest.rpartition("/")
            facility = self.facilities[name]
            if facility.status == "suspended" and int(count) == facility.suspensions:
                facility.failures = self.plan.failures.max_attempts - 1  # one more failure suspends it again
                self._rejoin(facility)
        elif kind == "retry":
            self._offer(self.facilities[rest], "failure")
        elif not self._ending:
            self.timer(event.key)

    # Events: facilities ---------------------------------------------------------------------------------

    def _facility_joined(self, event: FacilityJoined) -> None:
        facility = self.facilities.get(event.facility)
        if facility is None:
            return self._ignore(f"facility {event.facility} is not in the plan")
        if facility.status == "drained" and facility.away:  # a lost connection does not undo what an operator asked
            facility.away = False
            return None
        facility.failures = facility.suspensions = 0
        facility.away = False
        self._rejoin(facility)
        return None

    def _facility_left(self, event: FacilityLeft) -> None:
        self._withdraw(event.facility, "left")

    def _facility_drained(self, event: FacilityDrained) -> None:
        self._withdraw(event.facility, "drained")

    def _forecast_issued(self, event: ForecastIssued) -> None:
        if event.facility in self.facilities:
            self.facilities[event.facility].issued = Forecast(event.mean, event.quantiles)

    def _withdraw(self, name: str, status: Literal["left", "drained"]) -> None:
        facility = self.facilities.get(name)
        if facility is None or facility.status == status:
            return
        if status == "left":
            facility.away = True
            facility.issued = None  # nobody there will correct it
            for job in facility.jobs.values():
                job.out_of_reach = True
        if facility.status != "drained":
            facility.status = status
        if facility.away or not facility.jobs:  # what a drained facility has will come
            self.lost(facility)
        self._stop_if_nobody_is_left()

    def _rejoin(self, facility: Facility) -> None:
        if facility.status != "active":
            facility.status = "active"
            self.record("rejoined", facility=facility.name)
        self._offer(facility, "rejoin")

    def _suspend(self, facility: Facility, reason: str, *, for_good: bool) -> None:
        policy = self.plan.failures
        facility.suspensions += 1
        if for_good or facility.suspensions > policy.max_suspensions:
            facility.status = "out"
            until = None
        else:
            facility.status = "suspended"
            until = self.now + policy.suspend_seconds * 2 ** min(facility.suspensions - 1, 20)
            self.set_timer(f"rejoin/{facility.name}/{facility.suspensions}", until)
        self.record("suspended", facility=facility.name, reason=reason, until=until)
        self.lost(facility)
        self._stop_if_nobody_is_left()

    def _stop_if_nobody_is_left(self) -> None:
        gone = ("out", "drained")
        if all(f.status in gone and not f.jobs for f in self.facilities.values()):
            to_come = self._making or (self.has_cutoffs and self._unsettled)
            if not to_come:
                self.stop("no facility is left")

    # Events: jobs ---------------------------------------------------------------------------------------

    def _job_submitted(self, event: JobSubmitted) -> None:
        """Our own order, confirmed: the books have it since it was given."""

    def _submit_refused(self, event: SubmitRefused) -> None:
        facility, job = self._find(event.job_id, None)
        if facility is None or job is None:
            return
        del facility.jobs[event.job_id]
        facility.replaces = job.order.replaces
        if not event.transient:
            self.record("failure", job=event.job_id, reason=event.reason, transient=False)
            self._suspend(facility, event.reason, for_good=True)
        elif not facility.jobs:  # otherwise the end of a job at the facility brings the next try
            self.record("retry", job=event.job_id, reason=event.reason)
            wait = self.plan.failures.retry_seconds * 2 ** min(facility.refusals, 10)
            facility.refusals += 1
            self.set_timer(f"retry/{facility.name}", self.now + wait)

    def _job_started(self, event: JobStarted) -> None:
        facility, job = self._find(event.job_id, None)
        repeated = job is not None and event.attempt == job.attempt and job.started_at is not None
        if facility is None or job is None or event.attempt < job.attempt or repeated:
            return
        job.attempt = event.attempt
        job.started_at = self.now - event.ago
        facility.refusals = 0
        if event.bound is not None:
            job.assignment = event.bound
            facility.newest_steps = event.bound.steps
        if self.observes_starts:
            facility.predictor.observe(self.now, event.admission_delay)
        if facility.status == "active" and not self._ending:
            self.started(facility, job)

    def _job_requeued(self, event: JobRequeued) -> None:
        _, job = self._find(event.job_id, None)
        if job is None or event.attempt <= job.attempt:
            return
        job.attempt = event.attempt
        job.started_at = None
        job.ended = False
        if event.attempt > self.plan.failures.max_requeues:
            self._out.append(CancelJob(job_id=event.job_id))
            self._failure(event.job_id, event.attempt, f"requeued {event.attempt} times: {event.reason}", True)

    def _job_ended(self, event: JobEnded) -> None:
        facility, job = self._find(event.job_id, event.attempt)
        if facility is not None and job is not None and not job.ended:
            job.ended = True
            facility.measure(event.steps_done, event.train_seconds)

    def _job_failed(self, event: JobFailed) -> None:
        facility, _ = self._find(event.job_id, event.attempt)
        if facility is not None and event.reason == WALL_TIME and facility.startup_allowance is not None:
            facility.outlasted = event.held_seconds
        self._failure(event.job_id, event.attempt, event.reason, event.transient)

    def _update_rejected(self, event: UpdateRejected) -> None:
        self._reject(event.job_id, event.attempt, event.reason)

    def _reject(self, job: JobId, attempt: int, reason: str) -> None:
        if self._failure(job, attempt, reason, True):
            self._record_fate(job, attempt, "rejected", reason=reason)

    def _failure(self, job: JobId, attempt: int, reason: str, transient: bool) -> bool:
        """Close a job that brought nothing; try again, or leave its facility alone. False: it was closed before."""
        facility, known = self._find(job, attempt)
        if facility is None or known is None:
            self._ignore(f"{job} attempt {attempt} is not open")
            return False
        del facility.jobs[job]
        facility.failures += 1
        facility.replaces = job
        if reason == WALL_TIME:
            facility.stretch = min(2 * facility.stretch, MOST_STRETCH)
        self.record("failure", job=job, attempt=attempt, reason=reason, transient=transient)
        if not transient:
            self._suspend(facility, reason, for_good=True)
        elif facility.status == "active" and facility.failures >= self.plan.failures.max_attempts:
            self._suspend(facility, f"{facility.failures} failures in a row, the last: {reason}", for_good=False)
        else:
            self._offer(facility, "failure")
        if facility.status == "drained" and not facility.jobs:
            self.lost(facility)
        self._stop_if_nobody_is_left()
        return True

    def _update_arrived(self, event: UpdateArrived) -> None:
        receipt = event.receipt
        facility, job = self._find(receipt.job_id, receipt.attempt)
        if facility is None or job is None:
            return self._ignore(f"update of {receipt.job_id} attempt {receipt.attempt}: repeated or superseded")
        given = job.assignment.base_version if job.assignment is not None else min(receipt.base_version, self.ready)
        if receipt.base_version != given:
            return self._reject(receipt.job_id, receipt.attempt, f"it says version {receipt.base_version}, not {given}")
        if self._ending:
            return self._after_end(event)
        del facility.jobs[receipt.job_id]
        if not self.observes_starts:
            facility.predictor.observe(self.now, receipt.admission_delay)
        if not job.ended:
            facility.measure(receipt.steps_done, receipt.train_seconds)
        if job.started_at is not None and not job.out_of_reach:
            facility.learn_overhead(self.now - job.started_at - receipt.train_seconds)
        facility.failures = facility.suspensions = 0
        facility.stretch, facility.outlasted = 1.0, 0.0
        if facility.status in ("suspended", "out"):  # it works after all
            facility.status = "active"
            self.record("rejoined", facility=facility.name)
        aimed = job.assignment is not None and job.assignment.cutoff is not None
        update = Update(receipt, facility.name, self.now, aimed, aimed and self.missed(job))
        self._unsettled[receipt.job_id, receipt.attempt] = update
        self.arrived(facility, update)
        self._offer(facility, "arrival")
        self._stop_if_nobody_is_left()
        return None

    def _after_end(self, event: UpdateArrived) -> None:
        receipt = event.receipt
        facility, job = self._find(receipt.job_id, receipt.attempt)
        if facility is not None and job is not None:
            del facility.jobs[receipt.job_id]
            self._record_fate(receipt.job_id, receipt.attempt, "after_end")

    # Books ----------------------------------------------------------------------------------------------

    def _offer(self, facility: Facility, why: Why) -> None:
        if not self.holding and facility.status == "active" and not facility.jobs:
            self.idle(facility, why)

    def _find(self, job: JobId, attempt: int | None) -> tuple[Facility | None, Job | None]:
        """The open job of this id, if its current attempt is the one meant."""
        facility = self.facilities.get(facility_of(job))
        known = facility.jobs.get(job) if facility is not None else None
        if known is None or (attempt is not None and attempt != known.attempt):
            return None, None
        return facility, known

    def _record_fate(self, job: JobId, attempt: int, fate: Fate, /, **facts: Scalar) -> None:
        self.record("fate", job=job, attempt=attempt, fate=fate, **facts)

    def _ignore(self, what: str) -> None:
        self.record("ignored", what=what)


_HANDLERS: dict[type, Callable[[Strategy, Any], None]] = {
    RunStarted: Strategy._run_started,
    RunPaused: Strategy._run_paused,
    RunResumed: Strategy._run_resumed,
    StopRequested: Strategy._stop_requested,
    CoordinatorResumed: Strategy._coordinator_resumed,
    FacilityJoined: Strategy._facility_joined,
    FacilityLeft: Strategy._facility_left,
    FacilityDrained: Strategy._facility_drained,
    ForecastIssued: Strategy._forecast_issued,
    JobSubmitted: Strategy._job_submitted,
    SubmitRefused: Strategy._submit_refused,
    JobStarted: Strategy._job_started,
    JobRequeued: Strategy._job_requeued,
    JobEnded: Strategy._job_ended,
    JobFailed: Strategy._job_failed,
    UpdateArrived: Strategy._update_arrived,
    UpdateRejected: Strategy._update_rejected,
    ModelReady: Strategy._model_ready,
    ModelScored: Strategy._model_scored,
    TimerFired: Strategy._timer_fired,
}
