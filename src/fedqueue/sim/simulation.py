"""The virtual-time driver: a heap of things to come, and the same engine and strategies as everywhere else.

A job's life: submitted -> eligible -> started (binds its work, if it has none yet) -> trained -> ended -> its update
travels -> arrived. At equal times, what happens to jobs comes before models, and models before timers: an update
that arrives at the very second of the cutoff has met it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from fedqueue.config import Config
from fedqueue.engine import Engine, Listener
from fedqueue.protocol.contract import WALL_TIME, Assignment, Receipt, facility_of
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
    finite_or_none,
)
from fedqueue.protocol.plan import FacilityProfile, Plan
from fedqueue.protocol.strategies import STRATEGIES, Strategy
from fedqueue.sim.learning import Learning
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
            )
            for site, weight in zip(sites, weights, strict=True)
        ),
        round_length=run.round_length,
        rounds=run.rounds,
        seconds=run.seconds,
        learning_rate=run.learning_rate,
        stop_at_score=run.stop_at_score,
        failures=config.failures,
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
        limit = site.settings.queue_limit
        if site.away:
            self._soon(SubmitRefused(at=self._now, job_id=order.job_id, reason="out of reach", transient=True))
        elif limit is not None and site.at_scheduler() >= limit:
            reason = f"the queue limit of {limit} jobs is reached"
            self._soon(SubmitRefused(at=self._now, job_id=order.job_id, reason=reason, transient=True))
        else:
            job = site.accept(order, self._now)
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

    def _post_work(self, command: PostWork) -> None:
        site = self._sites[command.facility]
        on_site_at = site.stage(command.standing, self._now, self._learning.megabytes)
        for job in site.lingering():
            self._at(on_site_at, JOBS, self._take_work, site, job, job.attempt)

    def _cancel_job(self, command: CancelJob) -> None:
        site = self._sites[facility_of(command.job_id)]
        job = site.jobs.pop(command.job_id, None)
        if job is not None:
            self._close(site, job)
            self._learning.forget((job.id, job.attempt))

    def _set_timer(self, command: SetTimer) -> None:
        self._at(max(command.at, self._now), TIMERS, self._ring, command.key)

    def _aggregate(self, command: Aggregate) -> None:
        self._learning.aggregate(command)
        ready_at = self._now + self._aggregate_seconds(command.to_version)
        self._at(ready_at, MODELS, self._model_ready, command.to_version)

    def _record(self, command: Record) -> None:
        if command.kind == "fate" and command.facts["fate"] != "aggregated":
            self._learning.forget((str(command.facts["job"]), int(command.facts["attempt"] or 0)))

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
        delay = job.started_at - job.eligible_at
        ago = site.news_seconds(job)
        started = JobStarted(
            at=self._now + ago,
            job_id=job.id,
            attempt=attempt,
            admission_delay=delay,
            bound=job.work if job.binds_itself else None,
            lingered=self._now - job.started_at,
            ago=ago,
        )
        if ago > 0:
            self._at(started.at, JOBS, self._report, site, started)
        else:
            self._report(site, started)
        course = site.course(job, job.work, self._now, delay)
        strikes = site.faults.of(job.number, attempt)
        struck_at = self._now + (course.ends_at - self._now) * (
            site.faults.when(job.number, attempt) if strikes else 1.0
        )
        if "preempt" in strikes:
            self._at(struck_at, JOBS, self._preempt, site, job, attempt)
        elif "fail" in strikes:
            self._at(struck_at, JOBS, self._fail, site, job, attempt, "failed (simulated)", strikes["fail"].transient)
        elif "hang" in strikes or course.hits_wall:
            wall_end = job.started_at + site.wall_of(job)
            self._at(wall_end, JOBS, self._fail, site, job, attempt, WALL_TIME, True)
        else:
            self._learning.foresee((job.id, attempt), site.index, job.number, job.work, course.steps)
            self._at(course.ends_at, JOBS, self._end, site, job, job.work, course, frozenset(strikes))

    def _preempt(self, site: Site, job: SimJob, attempt: int) -> None:
        if job.state == "running" and job.attempt == attempt:
            held = self._held(job)
            job.attempt, job.state, job.started_at = attempt + 1, "waiting", None
            self._report(
                site,
                JobRequeued(at=self._now, job_id=job.id, attempt=job.attempt, reason="preempted", held_seconds=held),
            )
            self._become_eligible(site, job)

    def _fail(self, site: Site, job: SimJob, attempt: int, reason: str, transient: bool) -> None:
        if job.state == "running" and job.attempt == attempt:
            del site.jobs[job.id]
            self._close(site, job)
            self._report(site, self._failure(job, reason, transient))

    def _end(self, site: Site, job: SimJob, work: Assignment, course: Course, strikes: frozenset[str]) -> None:
        attempt = course.attempt
        if job.state != "running" or job.attempt != attempt:
            return
        job.state = "ended"
        self._free_chained(site, job)
        key = (job.id, attempt)
        samples = self._learning.train(key, site.index, job.number, work, course.steps)
        if "corrupt" in strikes:
            self._learning.corrupt(key)
        receipt = Receipt(
            job_id=job.id,
            attempt=attempt,
            base_version=work.base_version,
            steps_done=course.steps,
            train_seconds=course.train_seconds,
            admission_delay=course.admission_delay,
            samples=samples,
        )
        self._report(
            site,
            JobEnded(
                at=self._now,
                job_id=job.id,
                attempt=attempt,
                steps_done=course.steps,
                train_seconds=course.train_seconds,
                held_seconds=self._held(job),
            ),
        )
        job.started_at = None  # its nodes are free
        arrives_at = self._now + site.return_seconds(job, self._learning.megabytes)
        for _ in range(2 if "duplicate" in strikes else 1):
            self._at(arrives_at, JOBS, self._arrive, site, job, receipt)

    def _arrive(self, site: Site, job: SimJob, receipt: Receipt) -> None:
        if job.state == "gone":  # lost on the way
            return
        if site.jobs.pop(receipt.job_id, None) is not None:  # otherwise the same comes again
            job.misfit = self._learning.misfit((receipt.job_id, receipt.attempt))
        reason = job.misfit
        if reason is None:
            self._report(site, UpdateArrived(at=self._now, receipt=receipt))
        else:
            self._report(
                site,
                UpdateRejected(at=self._now, job_id=receipt.job_id, attempt=receipt.attempt, reason=reason),
            )

    def _failure(self, job: SimJob, reason: str, transient: bool) -> JobFailed:
        return JobFailed(
            at=self._now,
            job_id=job.id,
            attempt=job.attempt,
            reason=reason,
            transient=transient,
            held_seconds=self._held(job),
        )

    def _held(self, job: SimJob) -> float:
        """Seconds that this attempt has held its nodes."""
        return self._now - job.started_at if job.started_at is not None else 0.0

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
                site.held.append(self._failure(job, "lost in the outage", True))
                job.state = "gone"
                self._learning.forget((job.id, job.attempt))
            site.jobs.clear()

    def _return(self, site: Site) -> None:
        site.outages -= 1
        if site.away:
            return
        self._tell(FacilityJoined(at=self._now, facility=site.name))
        held, site.held = site.held, []
        for event in held:
            self._tell(replace(event, at=self._now))

    def _model_ready(self, version: int) -> None:
        self._tell(ModelReady(at=self._now, version=version))
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
            self._tell(event)

    def _tell(self, event: Event) -> None:
        self._engine.advance(event)
