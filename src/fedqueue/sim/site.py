"""A simulated facility: its queue, its machines, its link, its faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf
from pathlib import Path
from typing import NamedTuple

from fedqueue.config import Config, FacilitySettings
from fedqueue.errors import ConfigError
from fedqueue.protocol.budget import ROUNDING, Further, bind, further_work, idle_limit, linger_until
from fedqueue.protocol.cap import CapLeft, cap_left
from fedqueue.protocol.contract import Assignment, JobId, Order, Standing, UpdateKey, sequence_of
from fedqueue.protocol.messages import Event
from fedqueue.sim.faults import Faults
from fedqueue.sim.queues import make_queue

AT_SCHEDULER = ("waiting", "lingering", "running", "staying")


@dataclass(slots=True)
class SimJob:
    """One job at a simulated scheduler."""

    order: Order
    number: int  # at its facility, from 0
    submitted_at: float
    work: Assignment | None = None
    binds_itself: bool = True  # at every start, from the standing work; else its work was assigned
    work_staged_at: float = 0.0  # when the model it was bound to is on site
    attempt: int = 0
    eligible_at: float | None = None  # None: chained to a job that has not ended
    started_at: float | None = None  # None: it holds no nodes
    state: str = "waiting"
    """waiting, lingering, running, staying (it handed in and waits for more work), ended (its update is on the way),
    gone."""
    part: int = 0  # that it is at, if it stays
    handed_in_at: float = 0.0  # the part before
    waited: float = 0.0  # seconds from then to its taking more work
    on_the_way: int = 0  # updates that have not arrived
    misfits: dict[UpdateKey, str | None] = field(default_factory=dict)  # of those that have: why one cannot be used

    @property
    def id(self) -> JobId:
        return self.order.job_id

    @property
    def key(self) -> UpdateKey:
        """Of the update that it is at."""
        return self.order.job_id, self.attempt, self.part


class Course(NamedTuple):
    """How one attempt of a job will run, if nothing strikes it."""

    attempt: int
    part: int
    admission_delay: float
    steps: int  # those done ahead of the model are among them
    ahead: int
    train_seconds: float
    ends_at: float
    hits_wall: bool  # the wall time is over before a single step is done


class Site:
    def __init__(self, index: int, settings: FacilitySettings, config: Config, seed: int) -> None:
        self.index = index
        self.name = settings.name
        self.settings = settings
        if settings.queue is None or settings.steps_per_second is None:
            lacks = "queue" if settings.queue is None else "steps_per_second"
            raise ConfigError(f"facility.{settings.name}.{lacks}: is missing; a simulation needs it")
        self.queue = make_queue(settings.queue, facility=settings.name, seed=seed, folder=Path(config.folder))
        self.faults = Faults(config.fault, facility=settings.name, seed=seed)
        stay = getattr(config.options(), "stay", "off")
        self.true_mean_delay = self.queue.mean(stay if isinstance(stay, float) else config.run.round_length)
        self.speed = settings.steps_per_second / settings.slowdown
        self.jobs: dict[JobId, SimJob] = {}  # waiting, running, or with an update on the way
        self.outages = 0  # under way; they may overlap
        self.held: list[Event] = []  # what happened here while it was out of reach
        self.staged: list[tuple[float, Standing]] = []  # (on site since, standing work), oldest first
        self.used = 0.0  # node-seconds, by what is over
        self.told_left: CapLeft | None = None  # of the cap on node-hours

    @property
    def away(self) -> bool:
        return self.outages > 0

    def transfer_seconds(self, megabytes: float) -> float:
        rate = self.settings.megabytes_per_second
        return self.settings.latency_seconds + (megabytes / rate if rate is not None else 0.0)

    def cap_left(self) -> CapLeft | None:
        """Of the cap on node-hours; None: there is none."""
        if self.settings.node_hours is None:
            return None
        walls = sum(job.order.wall_seconds for job in self.jobs.values() if job.state in AT_SCHEDULER)
        nodes = self.settings.nodes
        return cap_left(self.settings.node_hours, nodes, used=self.used, asked=walls * nodes)

    def at_scheduler(self) -> int:
        return sum(job.state in AT_SCHEDULER for job in self.jobs.values())

    def accept(self, order: Order, at: float) -> SimJob:
        job = SimJob(order, sequence_of(order.job_id), at)
        self.jobs[order.job_id] = job
        return job

    def lingering(self) -> list[SimJob]:
        """Jobs that take standing work when some is there."""
        return [job for job in self.jobs.values() if job.state in ("lingering", "staying") and job.binds_itself]

    def ends_at(self, job: SimJob) -> float:
        """By when a running job has to hand in."""
        assert job.started_at is not None
        return job.started_at + self.wall_of(job)

    def stage(self, standing: Standing, at: float, megabytes: float) -> float:
        """Standing work is on its way; its model travels only if the site does not have it or await it.
        Returns when it is on site."""
        newest = self.staged[-1] if self.staged else None
        known = newest is not None and newest[1].version == standing.version
        arrives_at = at + (self.settings.latency_seconds if known else self.transfer_seconds(megabytes))
        if newest is not None:
            arrives_at = max(arrives_at, newest[0])
        self.staged.append((arrives_at, standing))
        self.standing(at)  # drops what is superseded
        return arrives_at

    def standing(self, at: float) -> tuple[float, Standing]:
        """The newest standing work on site, or else the first that will be; and since (or from) when."""
        while len(self.staged) > 1 and self.staged[1][0] <= at:
            del self.staged[0]
        return self.staged[0]

    def submit_seconds(self, job: SimJob) -> float:
        """From our order to the scheduler's having it; for a chained job, from the end of the one before."""
        return 0.0

    def news_seconds(self, job: SimJob) -> float:
        """From a job's taking its work to our hearing of it."""
        return 0.0

    def return_seconds(self, job: SimJob, megabytes: float) -> float:
        """From the end of a job to the arrival of its update."""
        return self.transfer_seconds(megabytes)

    def take_work(self, job: SimJob, at: float) -> tuple[float, Assignment]:
        """What a job takes now from the standing work, and since when that has been on site."""
        staged_at, standing = self.standing(at)
        ends_at = self.ends_at(job) if job.order.stay is not None else inf
        return staged_at, bind(standing, at, ends_at, stayed=job.part > 0)

    def idle_until(self, job: SimJob) -> float:
        """Until when a job that stays and has handed in waits for work."""
        assert job.order.stay is not None
        limit = idle_limit(job.order.stay, self.staged[0][1] if self.staged else None)
        return min(job.handed_in_at + limit, self.ends_at(job))

    def further_work(self, job: SimJob, at: float) -> tuple[Further, float | None]:
        """What a job does that stays and has handed in; and when to look again, if nothing new comes before."""
        if not self.staged or self.staged[0][0] > at:
            return "wait", None
        standing = self.standing(at)[1]
        done = job.work.base_version if job.work is not None else None
        until = linger_until(standing, at, stays=True, stayed=job.part > 0)
        return further_work(standing, job.number, done, at, self.ends_at(job)), until

    def ahead_steps(self, job: SimJob) -> int:
        """That a job did while it waited for its next model."""
        ahead = job.part > 0 and self.staged and self.staged[0][1].ahead
        return floor(job.waited * self.speed_of(job) + ROUNDING) if ahead else 0

    def linger_until(self, job: SimJob, at: float) -> float | None:
        """Until when a job that starts now waits for a newer model; None: it takes what there is."""
        return linger_until(self.standing(at)[1], at, stays=job.order.stay is not None)

    def startup_of(self, job: SimJob) -> float:
        """Seconds from the start of a job to its first step."""
        return self.settings.startup_seconds

    def wall_of(self, job: SimJob) -> float:
        """Seconds after its start at which the scheduler ends it."""
        return job.order.wall_seconds

    def speed_of(self, job: SimJob) -> float:
        """Steps a second."""
        return self.speed

    def wait(self, job: SimJob, at: float) -> float:
        """Seconds until a job that becomes eligible now starts."""
        delay = self.queue.delay(job.number, job.attempt, at, job.order.wall_seconds)
        chained = job.order.after is not None and job.attempt == 0
        aged = self.settings.accrue * (at - job.submitted_at) if chained else 0.0
        return max(0.0, delay - aged)

    def course(self, job: SimJob, work: Assignment, at: float, delay: float) -> Course:
        """Of an attempt that starts now, after waiting `delay` seconds."""
        train_from = max(at + (self.startup_of(job) if job.part == 0 else 0.0), job.work_staged_at)
        wall_end = (at if job.started_at is None else job.started_at) + self.wall_of(job)
        seconds = wall_end - train_from
        if work.train_budget is not None:
            seconds = min(seconds, work.train_budget)
        # The worker counts whole steps, and hands in what it has when its time is over.
        speed = self.speed_of(job)
        steps = min(work.steps, floor(max(0.0, seconds) * speed + ROUNDING))
        if steps < 1:
            return Course(job.attempt, job.part, delay, 0, 0, 0.0, wall_end, True)
        ahead = self.ahead_steps(job)
        done = steps + ahead
        return Course(job.attempt, job.part, delay, done, ahead, done / speed, train_from + steps / speed, False)
