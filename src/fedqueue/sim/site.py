"""A simulated facility: its queue, its machines, its link, its faults."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from pathlib import Path

from fedqueue.config import Config, FacilitySettings
from fedqueue.errors import ConfigError
from fedqueue.protocol.budget import ROUNDING, bind, linger_until
from fedqueue.protocol.contract import Assignment, JobId, Order, Standing, sequence_of
from fedqueue.protocol.messages import Event
from fedqueue.sim.faults import Faults
from fedqueue.sim.queues import make_queue, true_mean

AT_SCHEDULER = ("waiting", "lingering", "running")


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
    state: str = "waiting"  # waiting, lingering, running, ended (its update is on the way), gone

    misfit: str | None = None  # why its update could not be used

    @property
    def id(self) -> JobId:
        return self.order.job_id


@dataclass(frozen=True, slots=True)
class Course:
    """How one attempt of a job will run, if nothing strikes it."""

    attempt: int
    admission_delay: float
    steps: int
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
        self.true_mean_delay = true_mean(settings.queue, self.queue)
        self.speed = settings.steps_per_second / settings.slowdown
        self.jobs: dict[JobId, SimJob] = {}  # waiting, running, or with an update on the way
        self.outages = 0  # under way; they may overlap
        self.held: list[Event] = []  # what happened here while it was out of reach
        self.staged: list[tuple[float, Standing]] = []  # (on site since, standing work), oldest first

    @property
    def away(self) -> bool:
        return self.outages > 0

    def transfer_seconds(self, megabytes: float) -> float:
        rate = self.settings.megabytes_per_second
        return self.settings.latency_seconds + (megabytes / rate if rate is not None else 0.0)

    def at_scheduler(self) -> int:
        return sum(job.state in AT_SCHEDULER for job in self.jobs.values())

    def accept(self, order: Order, at: float) -> SimJob:
        job = SimJob(order, sequence_of(order.job_id), at)
        self.jobs[order.job_id] = job
        return job

    def lingering(self) -> list[SimJob]:
        return [job for job in self.jobs.values() if job.state == "lingering"]

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
        return staged_at, bind(standing, at)

    def linger_until(self, job: SimJob, at: float) -> float | None:
        """Until when a job that starts now waits for a newer model; None: it takes what there is."""
        return linger_until(self.standing(at)[1], at)

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
        delay = self.queue.delay(job.number, job.attempt, at)
        chained = job.order.after is not None and job.attempt == 0
        aged = self.settings.accrue * (at - job.submitted_at) if chained else 0.0
        return max(0.0, delay - aged)

    def course(self, job: SimJob, work: Assignment, at: float, delay: float) -> Course:
        """Of an attempt that starts now, after waiting `delay` seconds."""
        train_from = max(at + self.startup_of(job), job.work_staged_at)
        wall_end = (at if job.started_at is None else job.started_at) + self.wall_of(job)
        seconds = wall_end - train_from
        if work.train_budget is not None:
            seconds = min(seconds, work.train_budget)
        # The worker counts whole steps, and hands in what it has when its time is over.
        speed = self.speed_of(job)
        steps = min(work.steps, floor(max(0.0, seconds) * speed + ROUNDING))
        if steps < 1:
            return Course(job.attempt, delay, 0, 0.0, wall_end, True)
        return Course(job.attempt, delay, steps, steps / speed, train_from + steps / speed, False)
