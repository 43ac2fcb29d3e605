"""What every strategy shares, so that its own file holds only its algorithm.

`Strategy.handle` takes an event and answers with commands. What is open it reads from a `RunState`, which is told both.
It treats failures the same way for all, sees that each update meets one fate, and calls a few hooks that a strategy
fills in:

    begin         the run starts
    idle          a facility may have work, and why: start, arrival, failure, rejoin
    started       a job began to run
    arrived       an update came that is new and usable
    model_ready   a version can be named in assignments
    scored        a model newer than all that have one has a score
    agreed        how far the updates of the newest model agree, if that was asked for
    timer         one of the strategy's own timers fired
    lost          do not count on this facility for now
    withdrawn     updates of a facility that arrived, and are in no model yet, must not be used
    resumed       the coordinator was down; the run clock stood still, so what the strategy holds is right
    rolled_back   models were taken back; a version that is an earlier one again was asked for

Nothing here reads a clock, draws a random number or touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple

from fedqueue.protocol.aggregation import Norms, Say, Update
from fedqueue.protocol.budget import wall_request
from fedqueue.protocol.contract import WALL_TIME, Assignment, JobId, Order, Receipt, UpdateKey, facility_of, job_id
from fedqueue.protocol.messages import (
    Aggregate,
    AggregationRule,
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
    Guard,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelReady,
    ModelScored,
    NodeHoursTold,
    Record,
    RecordKind,
    RolledBack,
    RunPaused,
    RunResumed,
    RunStarted,
    Scalar,
    ServerStep,
    SetTimer,
    Share,
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
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.predict import Forecast
from fedqueue.protocol.state import JobState, RunState
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.strategies.staying import AT_ONCE, StayOptions, head_start, stay_at, wait_at

Why = Literal["start", "arrival", "failure", "rejoin"]

MOST_STRETCH = 64.0  # of the wall time asked for, after jobs that ran into their limit


class Ingredient(NamedTuple):
    """An update on its way into a model."""

    update: Update
    staleness: int
    weight: float  # there
    clip: float  # of its change, the part that counts


TAKEN_BACK = "it was trained from model {}, which was taken back"
STRETCH = 1.5  # wall time asked for steps that nothing bounds in time, over what they should take
NO_WAIT = Forecast(0.0, ((0.5, 0.0),))


class Strategy:
    """Decides. Subclasses fill in the hooks; nobody else calls them."""

    name: ClassVar[str]
    Options: ClassVar[type]
    variation_of: ClassVar[str] = ""  # the strategy whose orders it gives; it differs in what is made of models alone
    shares_moments: ClassVar[bool] = False  # of Adam, where its jobs stay and the config says nothing else
    keeps_variates: ClassVar[bool] = False  # its jobs have control variates (SCAFFOLD): in simulations alone
    observes_starts: ClassVar[bool] = False  # delays count when a job starts, not when its update arrives
    has_cutoffs: ClassVar[bool] = False  # what has arrived is used at a timer, even if nothing more arrives
    sums_several: ClassVar[bool] = False  # each model is of the updates of several facilities: these may be masked
    binds_late: ClassVar[bool] = False  # jobs take their work themselves, from what is posted

    def __init__(self, plan: Plan, options: Any) -> None:
        self.plan = plan
        self.options = options
        self.now = 0.0
        self.round_length = plan.round_length  # seconds; strategies with a timer may have another
        self.made = 0  # newest version asked for
        self._newest_scored = -1  # version
        self.state = RunState([profile.name for profile in plan.facilities])
        predictor = getattr(options, "predictor", "ewma")
        smoothing = getattr(options, "smoothing", 0.5)
        self.facilities = {
            p.name: Facility(p, self.state.facilities[p.name], predictor, smoothing, plan.round_length)
            for p in plan.facilities
        }
        self._ready_at = 0.0  # the newest version
        self._ending = False
        self._end_reason = "time is up"
        self._making: dict[int, list[Ingredient]] = {}  # what each version that is being made is made of
        self._unsettled: dict[UpdateKey, Update] = {}
        self._say = Say({p.name: p.data_weight for p in plan.facilities}, plan.round_length)
        self._norms = Norms(plan.trust.clip)
        trust = plan.trust
        self._guard = None if trust.rule == "mean" else Guard(rule=trust.rule, hostile=trust.hostile)
        self._out: list[Command] = []
        self._stays: StayOptions = options if isinstance(options, StayOptions) else StayOptions()

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

    def scored(self, score: float | None) -> None:
        pass

    def agreed(self, agreement: float | None) -> None:
        pass

    def resumed(self) -> None:
        pass

    def rolled_back(self) -> None:
        pass

    def lost(self, facility: Facility) -> None:
        pass

    def withdrawn(self, facility: Facility, updates: Sequence[Update]) -> None:
        pass

    def missed(self, facility: Facility, cutoff: float) -> bool:
        """Whether the cutoff that an update aimed at has gone by."""
        return False

    def order_ahead(self, facility: Facility) -> None:
        """A job that stays comes to its end: order the one after it, which has no work yet."""
        self.submit(facility, None, round=self.ready)

    @property
    def stay_lead(self) -> float:
        """Of all delays, the share that the head start of a job after one that stays covers; see `head_start`."""
        return self._stays.stay_lead

    @property
    def idle_seconds(self) -> float | None:
        """A job that stays gives its nodes back after so long without work; None: at the end of its wall time."""
        return None

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
        """Facilities that may have work and are available."""
        if self.holding:
            return []
        return [f for f in self.facilities.values() if f.status == "active" and self.available(f)]

    def available(self, facility: Facility) -> bool:
        """It has no job out, or one that stays and has nothing to do."""
        return not facility.jobs or (not self.binds_late and self._idle_job(facility) is not None)

    @staticmethod
    def _idle_job(facility: Facility) -> JobState | None:
        """The newest job that stays and waits for work."""
        for job in reversed(facility.jobs.values()):
            if job.awaits_work:
                return job
        return None

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
        """Give work to a job that stays and has none, or order one, and bind its work unless that binds itself.

        It asks for the wall time of `at_most` seconds of training, or of what its steps should take and some more. If
        jobs stay, it asks for that much longer. Never for more than the cap on node-hours leaves; if that is too little
        to be of use, it orders nothing.
        """
        stay = self._stay_seconds(facility)
        if assignment is not None and stay is not None and self._assign_further(facility, assignment):
            return
        if self._lacks_node_hours(facility, assignment):
            return
        if at_most is not None:
            train_seconds = at_most
        elif facility.steps_per_second is not None and assignment is not None:
            train_seconds = STRETCH * assignment.steps / facility.steps_per_second
        else:
            train_seconds = 4 * self.plan.round_length if stay is None else stay
        if stay is not None:  # not less than one round would need
            train_seconds = max(stay, train_seconds)
        order = Order(
            job_id=job_id(facility.name, facility.state.ordered),
            facility=facility.name,
            round=round,
            wall_seconds=self._wall(facility, train_seconds),
            expected_delay=expected_delay,
            purpose="train" if facility.steps_per_second is not None else "warm_up",
            after=after,
            replaces=facility.replaces,
            stay=None if stay is None else facility.patience * (self.idle_seconds or stay),
        )
        facility.replaces = None
        self.want(SubmitJob(order=order))
        if assignment is not None:
            facility.newest_steps = assignment.steps
            self.want(AssignWork(job_id=order.job_id, assignment=assignment))

    def _lacks_node_hours(self, facility: Facility, assignment: Assignment | None) -> bool:
        """Whether no useful job fits under the cap on node-hours. Then the facility idles until more is left, which
        what is under way may give back; where even all of that would be too little, it is out."""
        if facility.state.cap_left is None:
            facility.lacks = None
            return False
        needed = self._least_wall(facility, assignment)
        facility.lacks = needed if facility.cap_left < needed else None
        self._see_if_spent(facility)
        return facility.lacks is not None

    def _see_if_spent(self, facility: Facility) -> None:
        if self._is_spent(facility):
            self.set_timer(f"spent/{facility.name}", self.now)  # not within another decision

    @staticmethod
    def _is_spent(facility: Facility) -> bool:
        left = facility.state.cap_left
        if facility.status != "active" or facility.jobs or left is None or facility.lacks is None:
            return False
        return left.when_idle < facility.lacks

    def _least_wall(self, facility: Facility, assignment: Assignment | None) -> float:
        """Seconds that the shortest useful job asks for: for its work, or for the least steps where these may be fewer.
        What nobody has seen yet (a speed, a start-up) may take no time."""
        steps: int = getattr(self.options, "min_steps", 1)
        if assignment is not None and assignment.train_budget is None:
            steps = assignment.steps
        elif assignment is None and not self.binds_late:
            steps = facility.newest_steps or steps
        speed = facility.steps_per_second
        least = wall_request(0.0 if speed is None else steps / speed, facility.overhead, facility.stretch)
        return min(max(least, facility.outlasted), facility.site_limit)

    def _assign_further(self, facility: Facility, assignment: Assignment) -> bool:
        """Whether a job of the facility has this work now, or will ask for work when it starts."""
        job = self._idle_job(facility)
        for other in [j for j in facility.jobs.values() if j.awaits_work]:
            if other is not job or not self._fits(facility, other, assignment):
                self.want(CancelJob(job_id=other.order.job_id))
        if job is None or job.order.job_id not in facility.jobs:
            return bool(facility.jobs)
        part = 0 if job.assignment is None else job.part + 1
        facility.newest_steps = assignment.steps
        self.want(AssignWork(job_id=job.order.job_id, assignment=assignment, part=part))
        return True

    def _fits(self, facility: Facility, job: JobState, work: Assignment) -> bool:
        """Whether what is left of its wall time is enough for the work, as far as anybody knows."""
        if job.held_since is None or facility.steps_per_second is None:
            return True
        needed = work.steps / facility.steps_per_second if work.train_budget is None else work.train_budget
        return self.now + needed + facility.overhead <= job.held_since + job.wall_seconds

    def _stay_seconds(self, facility: Facility) -> float | None:
        """Wall time of a job that stays; None: jobs hand in once."""
        stay = self._stays.stay
        if stay == "off":
            return None
        most, length = facility.most_wall, self.round_length
        ends_at = inf if self.plan.seconds is None else self.plan.seconds
        if stay != "auto":
            return min(stay, most, ends_at)
        most, wall_of = min(most, max(length, ends_at - self.now)), partial(self._wall, facility)
        return stay_at(facility, wall_of, length, most=most, lead=self.stay_lead, now=self.now)

    def _time_next(self, facility: Facility, job: JobState, held_since: float) -> None:
        """The next job is ordered ahead of the end of this one, which stays, by what a job like that should wait."""
        stay = self._stay_seconds(facility)
        if stay is None or not 0 < self.stay_lead < AT_ONCE:
            return
        wait = wait_at(facility, self.now)(self._wall(facility, stay))
        ends_at = held_since + job.wall_seconds
        self.set_timer(f"follow/{job.order.job_id}", max(self.now, ends_at - head_start(wait, self.stay_lead)))

    def _release(self, facility: Facility) -> None:
        """Jobs that stay and wait for work get none any more. (Those that take it themselves are told by what lies
        there; they may have taken some by now.)"""
        if self.binds_late:
            return
        for job in [j for j in facility.jobs.values() if j.awaits_work]:
            self.want(CancelJob(job_id=job.order.job_id))

    def _wall(self, facility: Facility, train_seconds: float) -> float:
        asked = wall_request(train_seconds, facility.overhead, facility.stretch, facility.startup_allowance)
        if facility.stretch < MOST_STRETCH:  # the site may give more than was asked for, and that was not enough
            asked = max(asked, 2 * facility.outlasted)
        return min(asked, facility.most_wall)

    def set_timer(self, key: str, at: float) -> None:
        self.want(SetTimer(key=key, at=at))

    def aggregate(
        self,
        weighed: Iterable[tuple[Update, float]],
        rule: AggregationRule = "add_deltas",
        *,
        again: Sequence[tuple[Update, float]] = (),
        keep: Iterable[Update] = (),
        agreement: bool = False,
        step: ServerStep | None = None,
        variates: float | None = None,
        full: float | None = None,
    ) -> None:
        """Ask for the next version from these updates; it can be named once it is ready. `again` are updates of earlier
        models, which were kept, and `keep` what may be asked for again. `full`: the weight of one fresh update, where
        updates count as they come and not at a cutoff; a facility's say is then bounded here."""
        weighed = [(update, weight) for update, weight in weighed if update.receipt.key in self._unsettled]
        if full is not None and self.bounds_say:
            weighed = [(u, self._say.allow(u.arrived_at, u.facility, weight, full=full)) for u, weight in weighed]
        command = Aggregate(
            from_version=self.made,
            to_version=self.made + 1,
            rule=rule,
            weights=tuple([self._share(*one, again=True) for one in again] + [self._share(*one) for one in weighed]),
            keep=tuple([update.receipt.key for update in keep]),
            agreement=agreement,
            step=step,
            variates=variates,
            guard=self._guard,
        )
        self.want(command)
        clips = {share.key: share.clip for share in command.weights}
        self._making[command.to_version] = [
            Ingredient(u, u.staleness(self.made), weight, clips[u.receipt.key]) for u, weight in weighed
        ]
        self.made += 1

    def too_few(self, facilities: Iterable[str]) -> bool:
        """Whether the sum of their updates would show too much of one: masked ones are summed among several."""
        return self.plan.trust.masked and 0 < len(set(facilities)) < self.plan.trust.least_members

    @property
    def bounds_say(self) -> bool:
        """Whether a facility's updates together count no more than its data weight allows."""
        return self.plan.trust.say == "bounded"

    def _share(self, update: Update, weight: float, again: bool = False) -> Share:
        job, attempt, part = update.receipt.key
        clip = self._norms.part(update.receipt.norm, update.length)
        return Share(job_id=job, attempt=attempt, part=part, weight=weight, again=again, clip=clip)

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
                for update, *_ in ingredients:
                    self.settle(update, "after_end", reason=f"model {version} was not made before the run ended")
            for update in list(self._unsettled.values()):
                self.settle(update, "after_end")
            for facility in self.facilities.values():
                for job in list(facility.jobs):
                    self.want(CancelJob(job_id=job))
            self.want(StopRun(reason=reason))

    def forecast(self, facility: Facility) -> Forecast:
        return facility.issued or facility.predictor.forecast(self.now)

    def next_wait(self, facility: Facility) -> Forecast:
        """What comes before the next work of this facility begins: nothing, if a job waits for it."""
        return NO_WAIT if self._idle_job(facility) is not None else self.forecast(facility)

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

    def _rolled_back(self, event: RolledBack) -> None:
        """The next model is that version again. What was made of models that are taken back is of no use: it would
        bring back what they had learned. Jobs that stay go on, and take the model that comes."""
        version = Aggregate(from_version=event.version, to_version=self.made + 1, rule="add_deltas", weights=())
        self.want(version)
        self._making[version.to_version] = []
        self.made += 1
        making = self._keys_in_making()
        for facility in self.facilities.values():
            gone = [
                update
                for key, update in self._unsettled.items()
                if update.facility == facility.name and key not in making and self._is_taken_back(update.receipt)
            ]
            for update in gone:
                self.settle(update, "expired", reason=TAKEN_BACK.format(update.receipt.base_version))
            if gone:
                self.withdrawn(facility, gone)
        for facility in self.facilities.values():
            for job in list(facility.jobs.values()):
                stays_on = job.stays and job.phase == "running"
                if job.assignment is not None and not stays_on and job.assignment.base_version in self.state.taken_back:
                    self.want(CancelJob(job_id=job.order.job_id))
            self.lost(facility)
        self.rolled_back()

    def _is_taken_back(self, receipt: Receipt) -> bool:
        return receipt.base_version in self.state.taken_back

    def _keys_in_making(self) -> set[UpdateKey]:
        return {update.receipt.key for made_of in self._making.values() for update, *_ in made_of}

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
        self._ready_at = self.now
        self.agreed(event.agreement)
        for update, staleness, weight, clip in self._making.pop(event.version):
            clipped: dict[str, Scalar] = {} if clip == 1 else {"clip": clip}
            self.settle(update, "aggregated", staleness=staleness, weight=weight, version=event.version, **clipped)
            if self.plan.trust.masked:
                self.facilities[update.facility].suspensions = 0
        if self.plan.rounds is not None and self.state.progress >= self.plan.rounds:
            self.stop("all rounds done")
        elif self._ending and not self._making:
            self.stop(self._end_reason)
        else:
            self.model_ready()
            self._stop_if_nobody_is_left()

    def _model_scored(self, event: ModelScored) -> None:
        target = self.plan.stop_at_score
        score = event.metrics.get("score")
        if event.version > self._newest_scored:  # not repeated, and not one that newer ones have overtaken
            self._newest_scored = event.version
            self.scored(score)
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
        elif kind == "spent":
            facility = self.facilities[rest]
            if self._is_spent(facility):
                left, lacks = facility.state.cap_left, facility.lacks
                assert left is not None
                reason = f"its cap on node-hours leaves {max(0.0, left.when_idle):.0f} s for a job"
                self._suspend(facility, f"{reason}, and the shortest useful one takes {lacks:.0f} s", for_good=True)
                facility.lacks = lacks
        elif kind == "follow":
            facility = self.facilities[facility_of(rest)]
            alone = len(facility.jobs) == 1 and rest in facility.jobs and facility.profile.max_jobs > 1
            if alone and facility.status == "active" and not self.holding:
                self.order_ahead(facility)
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

    def _updates_withdrawn(self, event: UpdatesWithdrawn) -> None:
        facility = self.facilities[event.facility]
        making = self._keys_in_making()
        waiting = [u for key, u in self._unsettled.items() if u.facility == facility.name and key not in making]
        for update in waiting:
            self.settle(update, "rejected", reason=event.reason)
        self.withdrawn(facility, waiting)
        self._stop_if_nobody_is_left()

    def _updates_unusable(self, event: UpdatesUnusable) -> None:
        """The model is asked for once more, and the others count as if these had brought no change."""
        facility, command = self.facilities[event.facility], self.state.making[event.version]
        gone = [i.update for i in self._making[event.version] if i.update.facility == facility.name]
        self.want(
            replace(
                command,
                weights=tuple(share for share in command.weights if facility_of(share.job_id) != facility.name),
                keep=tuple(key for key in command.keep if facility_of(key[0]) != facility.name),
            )
        )
        self._making[event.version] = [i for i in self._making[event.version] if i.update not in gone]
        for update in gone:
            self.settle(update, "rejected", reason=event.reason)
        self.withdrawn(facility, gone)
        if event.blamed and facility.status == "active":
            self._suspend(facility, event.reason, for_good=False)

    def _forecast_issued(self, event: ForecastIssued) -> None:
        self.facilities[event.facility].issued = Forecast(event.mean, event.quantiles)

    def _node_hours_told(self, event: NodeHoursTold) -> None:
        facility = self.facilities[event.facility]
        if facility.lacks is None or facility.cap_left < facility.lacks:
            self._see_if_spent(facility)
        elif facility.status == "out":
            self._rejoin(facility)
        elif not facility.jobs:
            self._offer(facility, "rejoin")

    def _rejoin(self, facility: Facility) -> None:
        facility.lacks = None
        self._works_again(facility)
        self._offer(facility, "rejoin")

    def _works_again(self, facility: Facility) -> None:
        if facility.status != "active":
            self.record("rejoined", facility=facility.name)

    def _suspend(self, facility: Facility, reason: str, *, for_good: bool) -> None:
        policy = self.plan.failures
        facility.suspensions += 1
        facility.lacks = None
        if for_good or facility.suspensions > policy.max_suspensions:
            until = None
        else:
            until = self.now + policy.suspend_seconds * 2 ** min(facility.suspensions - 1, 20)
            self.set_timer(f"rejoin/{facility.name}/{facility.suspensions}", until)
        self.record("suspended", facility=facility.name, reason=reason, until=until)
        self.lost(facility)
        self._stop_if_nobody_is_left()

    def _stop_if_nobody_is_left(self) -> None:
        for facility in self.facilities.values():
            if facility.jobs or facility.status not in ("out", "drained"):
                return
        to_come = self._making or (self.has_cutoffs and self._unsettled)
        if not to_come:
            self.stop("no facility is left")

    # Events: jobs ---------------------------------------------------------------------------------------

    def _job_submitted(self, event: JobSubmitted) -> None:
        facility, job = self._touched()
        if job.wall_seconds < job.order.wall_seconds:
            facility.site_limit = job.wall_seconds

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
        if job.stays:
            facility.waits.observe(job.wall_seconds, event.admission_delay)
        if self.observes_starts:
            facility.predictor.observe(self.now, event.admission_delay)
        if facility.status == "active" and not self._ending:
            if job.held_since is not None and job.stays:
                self._time_next(facility, job, job.held_since)
            self.started(facility, job)
        if job.stays:  # it may have started without work
            self._offer(facility, "arrival")

    def _work_taken(self, event: WorkTaken) -> None:
        facility, _ = self._touched()
        if event.bound is not None:
            facility.newest_steps = event.bound.steps
            if event.waited > 0 and event.bound.base_version == self.ready:
                facility.learn_delivery(max(0.0, self.now - event.ago - self._ready_at))

    def _job_requeued(self, event: JobRequeued) -> None:
        if event.attempt > self.plan.failures.max_requeues:
            self.want(CancelJob(job_id=event.job_id))
            self._failure(event.job_id, event.attempt, f"requeued {event.attempt} times: {event.reason}", True)
            return
        facility, _ = self._touched()
        if facility.cap_left < 0:  # a shorter job may fit
            reason = "it waits again for its whole wall time, for which its cap on node-hours leaves too little"
            self.record("retry", job=event.job_id, reason=reason)
            self.want(CancelJob(job_id=event.job_id))
            facility.replaces, facility.lacks = event.job_id, 0.0

    def _job_ended(self, event: JobEnded) -> None:
        facility, job = self._touched()
        if event.parts == 0 and job.stays and job.assignment is not None:  # it left before its work came
            facility.patience = min(2 * facility.patience, MOST_STRETCH)
        if (event.attempt, event.parts - 1) not in job.settled:  # otherwise its arrival has told
            facility.measure(event.steps_done, event.train_seconds)
        if job.order.job_id not in facility.jobs:  # it is over: all that it handed in has arrived
            if facility.status == "drained" and not facility.jobs:
                self.lost(facility)
            self._offer(facility, "arrival")
            self._stop_if_nobody_is_left()

    def _job_failed(self, event: JobFailed) -> None:
        facility, _ = self._touched()
        if event.reason.startswith(WALL_TIME) and facility.startup_allowance is not None:
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
        if reason.startswith(WALL_TIME):
            facility.stretch = min(2 * facility.stretch, MOST_STRETCH)
        self.record("failure", job=job, attempt=attempt, reason=reason, transient=transient)
        if not transient:
            self._suspend(facility, reason, for_good=True)
        elif facility.status == "active" and facility.failures >= self.plan.failures.max_attempts:
            self._suspend(facility, f"{facility.failures} failures in a row, the last: {reason}", for_good=False)
        else:
            self._offer(facility, "failure")
        if facility.status != "active":
            self._release(facility)
        if facility.status == "drained" and not facility.jobs:
            self.lost(facility)
        self._stop_if_nobody_is_left()

    def _update_arrived(self, event: UpdateArrived) -> None:
        receipt = event.receipt
        facility, job = self._touched()
        work, taken_at = self.state.work if job.stays else (job.assignment, job.taken_at)
        given = work.base_version if work is not None else min(receipt.base_version, self.ready)
        if receipt.base_version != given:
            return self._reject(receipt.key, f"it says version {receipt.base_version}, not {given}")
        if self._ending:
            return self._record_fate(receipt.key, "after_end")
        if not self.observes_starts:
            facility.predictor.observe(self.now, receipt.admission_delay)
        if job.phase != "ended":
            facility.measure(receipt.steps_done, receipt.train_seconds)
        if taken_at is not None and not job.out_of_reach:
            trained = receipt.train_seconds * (1 - receipt.ahead / max(1, receipt.steps_done))
            learn = facility.learn_stay_overhead if receipt.part else facility.learn_overhead
            learn(self.now - taken_at - trained)
            if receipt.turn_seconds and not receipt.part:
                facility.handed_in_first(self.now - taken_at - trained - receipt.turn_seconds)
        facility.failures = 0
        if not self.plan.trust.masked:  # else only its part in a model tells that it is well
            facility.suspensions = 0
        facility.stretch, facility.outlasted = 1.0, 0.0
        if facility.status in ("suspended", "out"):
            self._works_again(facility)
        if self._is_taken_back(receipt):
            self._record_fate(receipt.key, "expired", reason=TAKEN_BACK.format(receipt.base_version))
            self._offer(facility, "arrival")
            return self._stop_if_nobody_is_left()
        cutoff = work.cutoff if work is not None else None
        deferred = cutoff is not None and self.missed(facility, cutoff)
        rate = self.plan.learning_rate if work is None else work.learning_rate
        update = Update(
            receipt, facility.name, self.now, cutoff is not None, deferred, length=rate * receipt.steps_done
        )
        if receipt.norm is not None:
            self._norms.seen(facility.name, receipt.norm, update.length)
        self._unsettled[receipt.key] = update
        self.arrived(facility, update)
        if facility.status != "active":
            self._release(facility)
        self._offer(facility, "arrival")
        self._stop_if_nobody_is_left()
        return None

    # ----------------------------------------------------------------------------------------------------

    def _offer(self, facility: Facility, why: Why) -> None:
        if not self.holding and facility.status == "active" and self.available(facility):
            self.idle(facility, why)

    def _touched(self) -> tuple[Facility, JobState]:
        """The job that this event is about."""
        job = self.state.job
        assert job is not None
        return self.facilities[job.order.facility], job

    def _record_fate(self, key: UpdateKey, fate: Fate, /, **facts: Scalar) -> None:
        job, attempt, part = key
        which: dict[str, Scalar] = {"job": job, "attempt": attempt}
        if part:
            which["part"] = part
        self.want(Record(kind="fate", facts={**which, "fate": fate, **facts}))

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
    RolledBack: Strategy._rolled_back,
    CoordinatorResumed: Strategy._coordinator_resumed,
    FacilityJoined: Strategy._facility_joined,
    FacilityLeft: Strategy._facility_withdrew,
    FacilityDrained: Strategy._facility_withdrew,
    ForecastIssued: Strategy._forecast_issued,
    NodeHoursTold: Strategy._node_hours_told,
    JobSubmitted: Strategy._job_submitted,
    SubmitRefused: Strategy._submit_refused,
    JobStarted: Strategy._job_started,
    WorkTaken: Strategy._work_taken,
    JobRequeued: Strategy._job_requeued,
    JobEnded: Strategy._job_ended,
    JobFailed: Strategy._job_failed,
    UpdateArrived: Strategy._update_arrived,
    UpdateRejected: Strategy._update_rejected,
    UpdatesWithdrawn: Strategy._updates_withdrawn,
    UpdatesUnusable: Strategy._updates_unusable,
    ModelReady: Strategy._model_ready,
    ModelScored: Strategy._model_scored,
    TimerFired: Strategy._timer_fired,
}
