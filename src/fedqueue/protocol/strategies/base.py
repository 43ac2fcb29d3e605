"""What every strategy shares, so that its own file holds only its algorithm.

`Strategy.handle` takes an event and answers with commands. What is open it reads from a `RunState`, which is told both.
It treats failures the same way for all, sees that each update meets one fate, and calls a few hooks that a strategy
fills in:

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
from fedqueue.protocol.contract import WALL_TIME, Assignment, JobId, Order, UpdateKey, job_id
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
from fedqueue.protocol.state import JobState, RunState
from fedqueue.protocol.strategies.roster import Facility

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
        self.made = 0  # newest version asked for
        self.state = RunState([profile.name for profile in plan.facilities])
        predictor = getattr(options, "predictor", "ewma")
        smoothing = getattr(options, "smoothing", 0.5)
        self.facilities = {
            p.name: Facility(p, self.state.facilities[p.name], predictor, smoothing) for p in plan.facilities
        }
        self._ending = False
        self._end_reason = "time is up"
        self._making: dict[int, list[Ingredient]] = {}  # what each version that is being made is made of
        self._unsettled: dict[UpdateKey, Update] = {}
        self._out: list[Command] = []

    def handle(self, event: Event) -> Sequence[Command]:
        """The only way in: what happened goes in, what we want comes out."""
        self.now = event.at
        self._out = []
        effective = self.state.happened(event)
        if self.stopped is not None:
            if effective and isinstance(event, UpdateArrived):
                self._record_fate(event.receipt.key, "after_end")
        elif effective:
            _HANDLERS[type(event)](self, event)
        else:
            self._ignore(event)
        return self._out

    # Hooks ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for facility in self.free():
            self.idle(facility, "start")

    def idle(self, facility: Facility, why: Why) -> None:
        raise NotImplementedError

    def arrived(self, facility: Facility, update: Update) -> None:
        raise NotImplementedError

    def started(self, facility: Facility, job: JobState) -> None:
        pass

    def model_ready(self) -> None:
        pass

    def timer(self, key: str) -> None:
        pass

    def resumed(self) -> None:
        pass

    def lost(self, facility: Facility) -> None:
        pass

    def missed(self, job: JobState) -> bool:
        """Whether the cutoff that this job aimed at has gone by; asked only of jobs that aimed at one."""
        return False

    # What strategies say --------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """The newest version that assignments may name."""
        return self.state.newest

    @property
    def stopped(self) -> str | None:
        """Why the run is over; None: it is not."""
        return self.state.stopped

    def want(self, command: Command) -> None:
        self._out.append(command)
        self.state.wanted(command)

    @property
    def holding(self) -> bool:
        """No new order is given now: the run is paused, about to end, or over."""
        return self.state.held or self._ending or self.stopped is not None

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
            job_id=job_id(facility.name, facility.state.ordered),
            facility=facility.name,
            round=round,
            wall_seconds=self._wall(facility, train_seconds),
            expected_delay=expected_delay,
            purpose="train" if facility.steps_per_second is not None else "warm_up",
            after=after,
            replaces=facility.replaces,
        )
        facility.replaces = None
        self.want(SubmitJob(order=order))
        if assignment is not None:
            facility.newest_steps = assignment.steps
            self.want(AssignWork(job_id=order.job_id, assignment=assignment))

    def _wall(self, facility: Facility, train_seconds: float) -> float:
        asked = wall_request(train_seconds, facility.overhead, facility.stretch, facility.startup_allowance)
        if facility.stretch < MOST_STRETCH:  # the site may give more than was asked for, and that was not enough
            asked = max(asked, 2 * facility.outlasted)
        return asked

    def set_timer(self, key: str, at: float) -> None:
        self.want(SetTimer(key=key, at=at))

    def aggregate(self, weighed: Iterable[tuple[Update, float]], rule: Rule = "add_deltas") -> None:
        """Ask for the next version from these updates; it can be named once it is ready."""
        weighed = list(weighed)
        shares = tuple(
            Share(job_id=u.receipt.job_id, attempt=u.receipt.attempt, weight=weight, part=u.receipt.part)
            for u, weight in weighed
        )
        command = Aggregate(from_version=self.made, to_version=self.made + 1, rule=rule, weights=shares)
        self.want(command)
        self._making[command.to_version] = [(u, u.staleness(self.made), weight) for u, weight in weighed]
        self.made += 1

    def settle(self, update: Update, fate: Fate, **facts: Scalar) -> None:
        """The one fate of an update."""
        key = update.receipt.key
        del self._unsettled[key]
        self._record_fate(key, fate, aimed=update.aimed, deferred=update.deferred, **facts)

    def record(self, kind: RecordKind, **facts: Scalar) -> None:
        self.want(Record(kind=kind, facts=facts))

    def stop(self, reason: str) -> None:
        """End the run; updates that nobody used are after the end."""
        if self.stopped is None:
            for version, ingredients in self._making.items():
                for update, _, _ in ingredients:
                    self.settle(update, "after_end", reason=f"model {version} was not made before the run ended")
            for update in list(self._unsettled.values()):
                self.settle(update, "after_end")
            for facility in self.facilities.values():
                for job in list(facility.jobs):
                    self.want(CancelJob(job_id=job))
            self.want(StopRun(reason=reason))

    def forecast(self, facility: Facility) -> Forecast:
        return facility.issued or facility.predictor.forecast(self.now)

    # Events: the run ------------------------------------------------------------------------------------

    def _run_started(self, event: RunStarted) -> None:
        if self.plan.seconds is not None:
            self.set_timer("end", self.plan.seconds)
        self.begin()

    def _run_resumed(self, event: RunResumed) -> None:
        for facility in self.free():
            self._offer(facility, "rejoin")

    def _stop_requested(self, event: StopRequested) -> None:
        self._end("stopped by the operator")

    def _end(self, reason: str) -> None:
        """Give no more work; a model under way is waited for, but not one that cannot be made now. (Then the run clock
        stands still, so it is the operator who ends the run.)"""
        if not self._ending:
            self._ending, self._end_reason = True, reason
        if not self._making or self.state.hindrance:
            self.stop(self._end_reason)

    def _coordinator_resumed(self, event: CoordinatorResumed) -> None:
        self.resumed()

    def _model_ready(self, event: ModelReady) -> None:
        for update, staleness, weight in self._making.pop(event.version):
            self.settle(update, "aggregated", staleness=staleness, weight=weight, version=event.version)
        if self.plan.rounds is not None and self.ready >= self.plan.rounds:
            self.stop("all rounds done")
        elif self._ending and not self._making:
            self.stop(self._end_reason)
        else:
            self.model_ready()
            self._stop_if_nobody_is_left()

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
        facility = self.facilities[event.facility]
        if facility.status == "drained" and facility.state.came_back:
            return  # a lost connection does not undo what an operator asked
        facility.failures = facility.suspensions = 0
        self._rejoin(facility)

    def _facility_withdrew(self, event: FacilityLeft | FacilityDrained) -> None:
        facility = self.facilities[event.facility]
        if facility.state.away:
            facility.issued = None  # nobody there will correct it
        if facility.state.away or not facility.jobs:  # what a drained facility has will come
            self.lost(facility)
        self._stop_if_nobody_is_left()

    def _forecast_issued(self, event: ForecastIssued) -> None:
        self.facilities[event.facility].issued = Forecast(event.mean, event.quantiles)

    def _rejoin(self, facility: Facility) -> None:
        self._works_again(facility)
        self._offer(facility, "rejoin")

    def _works_again(self, facility: Facility) -> None:
        if facility.status != "active":
            self.record("rejoined", facility=facility.name)

    def _suspend(self, facility: Facility, reason: str, *, for_good: bool) -> None:
        policy = self.plan.failures
        facility.suspensions += 1
        if for_good or facility.suspensions > policy.max_suspensions:
            until = None
        else:
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

    def _submit_refused(self, event: SubmitRefused) -> None:
        facility, job = self._touched()
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
        facility, job = self._touched()
        facility.refusals = 0
        if event.bound is not None:
            facility.newest_steps = event.bound.steps
        if self.observes_starts:
            facility.predictor.observe(self.now, event.admission_delay)
        if facility.status == "active" and not self._ending:
            self.started(facility, job)

    def _job_requeued(self, event: JobRequeued) -> None:
        if event.attempt > self.plan.failures.max_requeues:
            self.want(CancelJob(job_id=event.job_id))
            self._failure(event.job_id, event.attempt, f"requeued {event.attempt} times: {event.reason}", True)

    def _job_ended(self, event: JobEnded) -> None:
        self._touched()[0].measure(event.steps_done, event.train_seconds)

    def _job_failed(self, event: JobFailed) -> None:
        facility, _ = self._touched()
        if event.reason == WALL_TIME and facility.startup_allowance is not None:
            facility.outlasted = event.held_seconds
        self._failure(event.job_id, event.attempt, event.reason, event.transient)

    def _update_rejected(self, event: UpdateRejected) -> None:
        self._reject(event.key, event.reason)

    def _reject(self, key: UpdateKey, reason: str) -> None:
        job, attempt, _ = key
        self._failure(job, attempt, reason, True)
        self._record_fate(key, "rejected", reason=reason)

    def _failure(self, job: JobId, attempt: int, reason: str, transient: bool) -> None:
        """A job is over that brought nothing; try again, or leave its facility alone."""
        facility, _ = self._touched()
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

    def _update_arrived(self, event: UpdateArrived) -> None:
        receipt = event.receipt
        facility, job = self._touched()
        given = job.assignment.base_version if job.assignment is not None else min(receipt.base_version, self.ready)
        if receipt.base_version != given:
            return self._reject(receipt.key, f"it says version {receipt.base_version}, not {given}")
        if self._ending:
            return self._record_fate(receipt.key, "after_end")
        if not self.observes_starts:
            facility.predictor.observe(self.now, receipt.admission_delay)
        if job.phase != "ended":
            facility.measure(receipt.steps_done, receipt.train_seconds)
        if job.started_at is not None and not job.out_of_reach:
            facility.learn_overhead(self.now - job.started_at - receipt.train_seconds)
        facility.failures = facility.suspensions = 0
        facility.stretch, facility.outlasted = 1.0, 0.0
        if facility.status in ("suspended", "out"):
            self._works_again(facility)
        aimed = job.cutoff is not None
        update = Update(receipt, facility.name, self.now, aimed, aimed and self.missed(job))
        self._unsettled[receipt.key] = update
        self.arrived(facility, update)
        self._offer(facility, "arrival")
        self._stop_if_nobody_is_left()
        return None

    # ----------------------------------------------------------------------------------------------------

    def _offer(self, facility: Facility, why: Why) -> None:
        if not self.holding and facility.status == "active" and not facility.jobs:
            self.idle(facility, why)

    def _touched(self) -> tuple[Facility, JobState]:
        """The job that this event is about."""
        job = self.state.job
        assert job is not None
        return self.facilities[job.order.facility], job

    def _record_fate(self, key: UpdateKey, fate: Fate, /, **facts: Scalar) -> None:
        job, attempt, part = key
        self.record("fate", job=job, attempt=attempt, **({"part": part} if part else {}), fate=fate, **facts)

    def _ignore(self, event: Event) -> None:
        """It took no effect: it is repeated, or of an attempt that was superseded."""
        match event:
            case JobFailed(job_id=job, attempt=attempt) | UpdateRejected(job_id=job, attempt=attempt):
                what = f"{job} attempt {attempt} is not open"
            case UpdateArrived(receipt=receipt):
                what = f"update of {receipt.job_id} attempt {receipt.attempt}: repeated or superseded"
            case ModelReady(version=version):
                what = f"version {version} was not waited for"
            case FacilityJoined(facility=name):
                what = f"facility {name} is not in the plan"
            case _:
                return
        self.record("ignored", what=what)


def _nothing_to_decide(strategy: Strategy, event: Event) -> None:
    """The state has it."""


_HANDLERS: dict[type, Callable[[Strategy, Any], None]] = {
    RunStarted: Strategy._run_started,
    RunPaused: _nothing_to_decide,
    RunResumed: Strategy._run_resumed,
    StopRequested: Strategy._stop_requested,
    CoordinatorResumed: Strategy._coordinator_resumed,
    FacilityJoined: Strategy._facility_joined,
    FacilityLeft: Strategy._facility_withdrew,
    FacilityDrained: Strategy._facility_withdrew,
    ForecastIssued: Strategy._forecast_issued,
    JobSubmitted: _nothing_to_decide,
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
