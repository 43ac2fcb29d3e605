"""The virtual-time driver: a heap of things to come, and the same engine and strategies as everywhere else.

A job's life: submitted -> eligible -> started (binds its work, if it has none yet) -> trained -> ended -> its update
travels -> arrived. At equal times, what happens to jobs comes before models, and models before timers: an update
that arrives at the very second of the cutoff has met it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from fedqueue.config import Config, FaultSettings
from fedqueue.engine import Engine, Listener
from fedqueue.protocol.contract import WALL_TIME, Assignment, Receipt, UpdateKey, facility_of
from fedqueue.protocol.messages import (
    Aggregate,
    AssignWork,
    CancelJob,
    Command,
    Event,
    FacilityJoined,
    FacilityLeft,
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
    RunStarted,
    SetTimer,
    StopRun,
    SubmitJob,
    SubmitRefused,
    TimerFired,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
    finite_or_none,
)
from fedqueue.protocol.plan import FacilityProfile, Plan
from fedqueue.protocol.strategies import STRATEGIES, Strategy
from fedqueue.sim.faults import JobFault
from fedqueue.sim.learning import Learning, Training
from fedqueue.sim.site import AT_SCHEDULER, Course, SimJob, Site

JOBS, MODELS, TIMERS = range(3)  # what comes first at equal times


def make_plan(config: Config, sites: Sequence[Site], data_sizes: Sequence[int] | None) -> Plan:
    """What the strategy is told of a simulated run."""
    run = config.run
    by_size = run.data_weights == "size" and data_sizes is not None
    weights = [n / sum(data_sizes) for n in data_sizes] if by_size and data_sizes else [1 / len(sites)] * len(sites)
    return Plan(
        facilities=tuple(
            FacilityProfile(
                name=site.name,
                data_weight=weight,
                steps_per_second=None if run.warm_up else site.settings.steps_per_second,
                first_delay=None if run.warm_up else site.settings.first_delay,
                true_mean_delay=site.true_mean_delay,
                max_jobs=site.settings.max_jobs,
                nodes=site.settings.nodes,
                most_wall_seconds=site.settings.max_wall_seconds,
                known_waits=tuple(site.settings.known_waits),
            )
            for site, weight in zip(sites, weights, strict=True)
        ),
        round_length=run.round_length,
        rounds=run.rounds,
        seconds=run.seconds,
        learning_rate=run.learning_rate,
        stop_at_score=run.stop_at_score,
        failures=config.failures,
        trust=config.trust,
    )


def make_strategy(config: Config, plan: Plan) -> Strategy:
    return STRATEGIES[config.run.strategy](plan, config.options())


class Simulation:
    """One run in virtual time. Build it, then call `run` once."""

    def __init__(
        self,
        config: Config,
        sites: Sequence[Site],
        learning: Learning,
        strategy: Strategy,
        listeners: Sequence[Listener] = (),
        aggregate_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """`aggregate_seconds` says for each version how long it takes; None: as the config says."""
        self._config = config
        self._aggregate_seconds = aggregate_seconds or (lambda version: config.simulator.aggregate_seconds)
        self._learning = learning
        self._sites = {site.name: site for site in sites}
        self._engine = Engine(strategy, self, listeners)
        self._acts: dict[type, Callable[[Any], None]] = {
            SubmitJob: self._submit_job,
            AssignWork: self._assign_work,
            PostWork: self._post_work,
            CancelJob: self._cancel_job,
            SetTimer: self._set_timer,
            Aggregate: self._aggregate,
            Record: self._record,
            StopRun: self._stop_run,
        }
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ticket = count()
        self._now = 0.0
        self._stopped = False

    def run(self) -> float:
        """Until the strategy stops it, or nothing is left to happen. Returns the virtual seconds it took."""
        for fault in self._config.fault:
            if fault.kind == "outage" and fault.at is not None:
                for site in self._sites.values():
                    if fault.facility in ("*", site.name):
                        self._at(fault.at, JOBS, self._leave, site, fault.loses_jobs)
                        if fault.seconds is not None:
                            self._at(fault.at + fault.seconds, JOBS, self._return, site)
        for site in self._sites.values():
            self._tell_cap(site)
        self._tell(RunStarted(at=0.0))
        heap = self._heap
        while heap and not self._stopped:
            self._now, _, _, act, args = heappop(heap)
            act(*args)
        return self._now

    # Commands -------------------------------------------------------------------------------------------

    def act(self, command: Command) -> None:
        self._acts[type(command)](command)

    def _submit_job(self, command: SubmitJob) -> None:
        order = command.order
        site = self._sites[order.facility]
        limit, left = site.settings.queue_limit, site.cap_left()
        if site.away:
            self._soon(SubmitRefused(at=self._now, job_id=order.job_id, reason="out of reach", transient=True))
        elif limit is not None and site.at_scheduler() >= limit:
            reason = f"the queue limit of {limit} jobs is reached"
            self._soon(SubmitRefused(at=self._now, job_id=order.job_id, reason=reason, transient=True))
        elif left is not None and order.wall_seconds > left.seconds:
            reason = f"the cap on node-hours leaves {max(0.0, left.seconds):.0f} s"
            self._soon(SubmitRefused(at=self._now, job_id=order.job_id, reason=reason, transient=left.when_idle > 0))
        else:
            job = site.accept(order, self._now)
            if left is not None:
                self._at(self._now, JOBS, self._tell_cap, site)
            self._soon(JobSubmitted(at=self._now, job_id=order.job_id))
            before = site.jobs.get(order.after) if order.after is not None else None
            if before is None or before.state not in AT_SCHEDULER:
                self._reach_scheduler(site, job)

    def _assign_work(self, command: AssignWork) -> None:
        site = self._sites[facility_of(command.job_id)]
        job = site.jobs.get(command.job_id)
        if job is not None:  # otherwise it was refused
            job.work, job.binds_itself = command.assignment, False
            job.work_staged_at = self._now + site.transfer_seconds(self._learning.megabytes)
            if job.state == "staying":
                self._at(self._now, JOBS, self._take_further, site, job, job.key)

    def _post_work(self, command: PostWork) -> None:
        site = self._sites[command.facility]
        on_site_at = site.stage(command.standing, self._now, self._learning.megabytes)
        for job in site.lingering():
            if job.state == "staying":
                self._at(on_site_at, JOBS, self._take_further, site, job, job.key)
            else:
                self._at(on_site_at, JOBS, self._take_work, site, job, job.attempt)

    def _cancel_job(self, command: CancelJob) -> None:
        site = self._sites[facility_of(command.job_id)]
        job = site.jobs.get(command.job_id)
        if job is not None and job.order.stay is not None and job.state in ("running", "staying"):
            self._at(self._now, JOBS, self._leave_nodes, site, job, job.attempt)
        elif job is not None:
            del site.jobs[job.id]
            self._release(site, job)
            self._close(site, job)
            self._at(self._now, JOBS, self._tell_cap, site)
            self._learning.forget(job.key)

    def _set_timer(self, command: SetTimer) -> None:
        self._at(max(command.at, self._now), TIMERS, self._ring, command.key)

    def _aggregate(self, command: Aggregate) -> None:
        agreement = self._learning.aggregate(command)
        ready_at = self._now + self._aggregate_seconds(command.to_version)
        self._at(ready_at, MODELS, self._model_ready, command.to_version, agreement)

    def _record(self, command: Record) -> None:
        if command.kind == "fate" and command.facts["fate"] != "aggregated":
            facts = command.facts
            self._learning.forget((str(facts["job"]), int(facts["attempt"] or 0), int(facts.get("part") or 0)))

    def _stop_run(self, command: StopRun) -> None:
        self._stopped = True

    # What comes of them ---------------------------------------------------------------------------------

    def _reach_scheduler(self, site: Site, job: SimJob) -> None:
        seconds = site.submit_seconds(job)
        if seconds > 0:
            self._at(self._now + seconds, JOBS, self._become_eligible, site, job)
        else:
            self._become_eligible(site, job, early=-seconds)

    def _become_eligible(self, site: Site, job: SimJob, early: float = 0.0) -> None:
        """`early`: so long before now by a recorded scheduler's clock, which may count in whole seconds."""
        job.eligible_at = self._now - early
        starts_at = max(self._now, job.eligible_at + site.wait(job, self._now))
        self._at(starts_at, JOBS, self._start, site, job, job.attempt)

    def _start(self, site: Site, job: SimJob, attempt: int) -> None:
        if job.state != "waiting" or job.attempt != attempt or job.eligible_at is None:
            return
        job.state, job.started_at = "lingering", self._now
        if job.work is None and not site.staged:  # it was ordered ahead, and gets its work when we hear of it
            job.state, job.handed_in_at = "staying", self._now
            self._report(site, self._started(job, self._now, None))
            self._stay(site, job)
            return
        until = site.linger_until(job, self._now) if job.binds_itself else None
        if until is None:
            self._take_work(site, job, attempt)
        else:
            self._at(until, JOBS, self._take_work, site, job, attempt)

    def _take_work(self, site: Site, job: SimJob, attempt: int) -> None:
        """The job has started; here it goes on to train."""
        if job.state != "lingering" or job.attempt != attempt or job.started_at is None or job.eligible_at is None:
            return
        job.state = "running"
        if job.binds_itself:
            job.work_staged_at, job.work = site.take_work(job, self._now)
        assert job.work is not None
        ago = site.news_seconds(job)
        started = self._started(job, self._now + ago, job.work if job.binds_itself else None, ago)
        if ago > 0:
            self._at(started.at, JOBS, self._report, site, started)
        else:
            self._report(site, started)
        self._train(site, job, job.work, site.faults.of(job.number, attempt))

    def _started(self, job: SimJob, at: float, bound: Assignment | None, ago: float = 0.0) -> JobStarted:
        assert job.started_at is not None
        assert job.eligible_at is not None
        return JobStarted(
            at=at,
            job_id=job.id,
            attempt=job.attempt,
            admission_delay=job.started_at - job.eligible_at,
            bound=bound,
            lingered=self._now - job.started_at,
            ago=ago,
        )

    def _take_further(self, site: Site, job: SimJob, key: UpdateKey) -> None:
        """There may be work for a job that stays."""
        if job.state != "staying" or job.key != key:
            return
        if job.binds_itself:
            does, look_again = site.further_work(job, self._now)
            if does == "leave":
                self._leave_nodes(site, job, job.attempt)
            elif does == "wait" and look_again is not None and look_again > self._now:
                self._at(look_again, JOBS, self._take_further, site, job, key)
            if does != "take":
                return
            job.work_staged_at, job.work = site.take_work(job, self._now)
        elif job.work_staged_at > self._now:  # its agent brings it when the model is there
            self._at(job.work_staged_at, JOBS, self._take_further, site, job, key)
            return
        assert job.work is not None
        job.state = "running"
        job.waited = max(0.0, self._now - job.handed_in_at)
        self._report(
            site,
            WorkTaken(
                at=self._now,
                job_id=job.id,
                attempt=job.attempt,
                part=job.part,
                bound=job.work if job.binds_itself else None,
                waited=job.waited,
                ahead=site.ahead_steps(job),
                ahead_seconds=site.ahead_steps(job) / site.speed_of(job),
            ),
        )
        self._train(site, job, job.work, {})

    def _train(self, site: Site, job: SimJob, work: Assignment, strikes: Mapping[JobFault, FaultSettings]) -> None:
        """From here to its next hand-in, or to what strikes it: a job that stays, at any moment of its stay."""
        assert job.started_at is not None
        assert job.eligible_at is not None
        attempt, stays = job.attempt, job.order.stay is not None
        course = site.course(job, work, self._now, job.started_at - job.eligible_at)
        struck_at = self._now
        if strikes:
            end = site.ends_at(job) if stays else course.ends_at
            struck_at += (end - self._now) * site.faults.when(job.number, attempt)
        if stays and ("preempt" in strikes or "fail" in strikes):
            self._follow_course(site, job, work, course, frozenset(strikes))
        if "preempt" in strikes:
            self._at(struck_at, JOBS, self._preempt, site, job, attempt)
        elif "fail" in strikes:
            self._at(struck_at, JOBS, self._fail, site, job, attempt, "failed (simulated)", strikes["fail"].transient)
        elif course.hits_wall and job.part > 0:
            self._leave_nodes(site, job, attempt)
        elif "hang" in strikes or course.hits_wall:
            wall_end = job.started_at + site.wall_of(job)
            self._at(wall_end, JOBS, self._fail, site, job, attempt, WALL_TIME, True)
        else:
            self._follow_course(site, job, work, course, frozenset(strikes))

    def _follow_course(
        self, site: Site, job: SimJob, work: Assignment, course: Course, strikes: frozenset[str]
    ) -> None:
        training = Training(
            key=job.key,
            facility=site.index,
            number=job.number,
            work=work,
            steps=course.steps,
            ahead=course.ahead,
            stays=job.order.stay is not None,
        )
        self._learning.foresee(training)
        self._at(course.ends_at, JOBS, self._end, site, job, training, course, strikes)

    def _preempt(self, site: Site, job: SimJob, attempt: int) -> None:
        if job.state in ("running", "staying") and job.attempt == attempt:
            held = self._release(site, job)
            self._learning.end(job.key)
            job.attempt, job.state = attempt + 1, "waiting"
            if job.order.stay is not None:
                job.part, job.work, job.binds_itself = 0, None, True
            self._report(
                site,
                JobRequeued(at=self._now, job_id=job.id, attempt=job.attempt, reason="preempted", held_seconds=held),
            )
            self._become_eligible(site, job)

    def _fail(self, site: Site, job: SimJob, attempt: int, reason: str, transient: bool) -> None:
        if job.state in ("running", "staying") and job.attempt == attempt:
            del site.jobs[job.id]
            self._learning.end(job.key)
            self._close(site, job)
            self._report(site, self._failure(site, job, reason, transient))

    def _end(self, site: Site, job: SimJob, training: Training, course: Course, strikes: frozenset[str]) -> None:
        """Of an update; and of the job, unless it stays."""
        key = job_id, attempt, part = training.key
        if job.state != "running" or job.key != key:
            return
        samples = self._learning.train(training)
        if "corrupt" in strikes:
            self._learning.corrupt(key)
        receipt = Receipt(
            job_id=job_id,
            attempt=attempt,
            part=part,
            ahead=course.ahead,
            base_version=training.work.base_version,
            steps_done=course.steps,
            train_seconds=course.train_seconds,
            admission_delay=course.admission_delay,
            samples=samples,
        )
        stays = job.order.stay is not None
        if not stays:
            self._give_back(site, job, steps=course.steps, seconds=course.train_seconds)
        arrives_at = self._now + site.return_seconds(job, self._learning.megabytes)
        job.on_the_way += 1
        for _ in range(2 if "duplicate" in strikes else 1):
            self._at(arrives_at, JOBS, self._arrive, site, job, receipt)
        if stays:
            job.part += 1
            job.handed_in_at, job.binds_itself = self._now, True
            self._stay(site, job)

    def _stay(self, site: Site, job: SimJob) -> None:
        """It has its nodes and nothing to do: more work is there, or comes, or it leaves."""
        job.state = "staying"
        self._at(self._now, JOBS, self._take_further, site, job, job.key)
        self._at(site.idle_until(job), JOBS, self._leave_nodes, site, job, job.attempt, job.part)

    def _leave_nodes(self, site: Site, job: SimJob, attempt: int, idle_at: int | None = None) -> None:
        """A job that stays ends: it is of no more use, or idle at this part, or cancelled."""
        busy = idle_at is not None and (job.state != "staying" or job.part != idle_at)
        if idle_at is not None and not busy and (later := site.idle_until(job)) > self._now:  # rounds became longer
            self._at(later, JOBS, self._leave_nodes, site, job, attempt, idle_at)
            return
        if job.state in ("running", "staying") and job.attempt == attempt and not busy:
            self._learning.end(job.key)
            self._give_back(site, job)
            self._remove_settled(site, job)

    def _give_back(self, site: Site, job: SimJob, *, steps: int = 0, seconds: float = 0.0) -> None:
        idle, job.state = job.state == "staying", "ended"
        held = self._release(site, job)
        self._free_chained(site, job)
        self._report(
            site,
            JobEnded(
                at=self._now,
                job_id=job.id,
                attempt=job.attempt,
                steps_done=steps,
                train_seconds=seconds,
                held_seconds=held,
                parts=1 if job.order.stay is None else job.part,
                idle_seconds=max(0.0, self._now - job.handed_in_at) if idle else 0.0,
            ),
        )

    def _arrive(self, site: Site, job: SimJob, receipt: Receipt) -> None:
        if job.state == "gone":  # lost on the way
            return
        if receipt.key not in job.misfits:  # otherwise the same comes again
            job.misfits[receipt.key] = self._learning.misfit(receipt.key)
            job.on_the_way -= 1
            self._remove_settled(site, job)
        reason = job.misfits[receipt.key]
        if reason is None:
            norm = self._learning.norm(receipt.key) if self._config.trust.clip else None
            self._report(site, UpdateArrived(at=self._now, receipt=replace(receipt, norm=norm)))
        else:
            job_id, attempt, part = receipt.key
            self._report(site, UpdateRejected(at=self._now, job_id=job_id, attempt=attempt, part=part, reason=reason))

    @staticmethod
    def _remove_settled(site: Site, job: SimJob) -> None:
        if job.state == "ended" and not job.on_the_way:
            site.jobs.pop(job.id, None)

    def _failure(self, site: Site, job: SimJob, reason: str, transient: bool) -> JobFailed:
        return JobFailed(
            at=self._now,
            job_id=job.id,
            attempt=job.attempt,
            reason=reason,
            transient=transient,
            held_seconds=self._release(site, job),
        )

    def _release(self, site: Site, job: SimJob) -> float:
        """Its nodes are free. Returns for how many seconds this attempt has held them."""
        held = self._now - job.started_at if job.started_at is not None else 0.0
        site.used += held * site.settings.nodes
        job.started_at = None
        return held

    def _close(self, site: Site, job: SimJob) -> None:
        job.state = "gone"
        self._free_chained(site, job)

    def _free_chained(self, site: Site, ended: SimJob) -> None:
        for job in site.jobs.values():
            if job.order.after == ended.id and job.state == "waiting" and job.eligible_at is None:
                self._reach_scheduler(site, job)

    def _leave(self, site: Site, loses_jobs: bool) -> None:
        site.outages += 1
        if site.outages == 1:
            self._tell(FacilityLeft(at=self._now, facility=site.name))
        if loses_jobs:
            for job in list(site.jobs.values()):
                site.held.append(self._failure(site, job, "lost in the outage", True))
                job.state = "gone"
                self._learning.forget(job.key)
                self._learning.end(job.key)
            site.jobs.clear()

    def _return(self, site: Site) -> None:
        site.outages -= 1
        if site.away:
            return
        self._tell_cap(site)
        self._tell(FacilityJoined(at=self._now, facility=site.name))
        held, site.held = site.held, []
        for event in held:
            self._tell(replace(event, at=self._now))

    def _model_ready(self, version: int, agreement: float | None) -> None:
        self._tell(ModelReady(at=self._now, version=version, agreement=agreement))
        metrics = self._learning.score(version)
        if metrics is not None:
            self._tell(ModelScored(at=self._now, version=version, metrics=finite_or_none(metrics)))
        needed: set[int] = set()
        for site in self._sites.values():
            needed.update(job.work.base_version for job in site.jobs.values() if job.work is not None)
            needed.update(standing.version for _, standing in site.staged)
        self._learning.keep(version, needed)

    def _ring(self, key: str) -> None:
        self._tell(TimerFired(at=self._now, key=key))

    # The heap -------------------------------------------------------------------------------------------

    def _at(self, at: float, rank: int, act: Callable[..., None], *args: Any) -> None:
        heappush(self._heap, (at, rank, next(self._ticket), act, args))

    def _soon(self, event: Event) -> None:
        self._at(self._now, JOBS, self._tell, event)

    def _report(self, site: Site, event: Event) -> None:
        """Something happened at a facility: known at once, or when it is in reach again."""
        if site.away:
            site.held.append(event)
        else:
            if site.told_left is not None:  # who hears that a job is over knows what that leaves
                self._tell_cap(site)
            self._tell(event)

    def _tell_cap(self, site: Site) -> None:
        """Of node-hours, if the facility has one and what it leaves has changed."""
        left = site.cap_left()
        if left != site.told_left and not site.away:
            site.told_left = left
            self._tell(NodeHoursTold(at=self._now, facility=site.name, left=left))

    def _tell(self, event: Event) -> None:
        self._engine.advance(event)
