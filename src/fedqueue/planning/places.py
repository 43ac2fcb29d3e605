"""A facility as the planner sees it: its settings, the history of its queue, and the jobs in it that look like ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, inf, sqrt
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np

from fedqueue.config import Config, FacilitySettings, FixedQueue
from fedqueue.errors import DataError
from fedqueue.history.joblog import JobLog
from fedqueue.history.requests import ENOUGH, ByRequest, by_request
from fedqueue.planning.stays import LEAD, StayCurve, known_waits, stay_curve
from fedqueue.sim.queues import Queue, Recorded, make_queue

LEAST: Final = 10
"""Jobs that a shape must have at all."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Place:
    settings: FacilitySettings
    log: JobLog | None = None  # None: waits are drawn from the config's queue
    file: Path | None = None  # where the log lies
    procs: tuple[int, int] | None = None  # of jobs like ours; None: any
    per_node: int = 1  # processors that the log counts for a node
    factor: float = 1.0  # how many times longer jobs wait than they did

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def overhead(self) -> float:
        """Seconds around the training of a job that are known beforehand, transfers of the model left out."""
        return self.settings.startup_seconds + 2 * self.settings.latency_seconds

    @cached_property
    def jobs(self) -> ByRequest:
        """Those of the history that are of our size."""
        assert self.log is not None
        return by_request(self.log.of_shape(self.procs))

    @cached_property
    def stays(self) -> StayCurve | None:
        """How much of the time it would train, by the wall time of jobs that stay; None: its history does not say."""
        if self.log is None:
            return None
        lead = LEAD if self.settings.max_jobs > 1 else 0.0
        most, log = self.most_wall_seconds, self.log.of_shape(self.procs)
        return stay_curve(self.name, log, overhead=self.overhead, factor=self.factor, most=most, lead=lead)

    @cached_property
    def known_waits(self) -> list[tuple[float, float]]:
        """What its history tells a strategy whose jobs stay."""
        return known_waits(self.jobs, self.factor) if self.log is not None else []

    @property
    def most_wall_seconds(self) -> float:
        """That a job may ask for."""
        scheduler = self.settings.scheduler
        limits = (self.settings.max_wall_seconds, scheduler.max_wall_seconds if scheduler is not None else None)
        return min((limit for limit in limits if limit is not None), default=inf)

    def queue(self, *, start: int, seed: int, folder: str) -> Queue:
        """Of a simulation that begins at this starting point."""
        if self.log is None:
            settings = self.settings.queue or FixedQueue(delay=0.0)
            queue = make_queue(settings, facility=self.name, seed=seed + start, folder=Path(folder))
            return queue if self.factor == 1 else _Longer(queue, self.factor)
        luck = np.random.default_rng((seed, crc32(self.name.encode()), start))
        first = float(self.log.submit[0])  # of the whole log, so that all sizes of a facility begin at the same moment
        length = float(self.log.submit[-1]) - first + 1.0
        begin = float(luck.random()) * length
        return Recorded(jobs=self.jobs, first=first, length=length, start=begin, factor=self.factor)

    def typical_wait(self, wall_seconds: float, config: Config) -> float:
        """Seconds: the median of the history, or what the config's queue gives on average."""
        if self.log is not None:
            return self.jobs.like(wall_seconds).quantile(0.5) * self.factor
        return self.queue(start=0, seed=config.run.seed, folder=config.folder).mean(wall_seconds)

    def with_nodes(self, nodes: int, scaling: float) -> Place:
        """The same facility with jobs of another size: they train faster, and wait as jobs of that size did."""
        if nodes == self.settings.nodes:
            return self
        speed = self.settings.steps_per_second
        settings = replace(
            self.settings,
            nodes=nodes,
            steps_per_second=None if speed is None else speed * (nodes / self.settings.nodes) ** scaling,
        )
        procs = None if self.procs is None else alike(nodes * self.per_node)
        return replace(self, settings=settings, procs=procs)


class _Longer:
    """A queue whose waits are so many times longer."""

    def __init__(self, queue: Queue, factor: float) -> None:
        self._queue, self._factor = queue, factor

    def delay(self, number: int, attempt: int, at: float, wall_seconds: float) -> float:
        return self._queue.delay(number, attempt, at, wall_seconds) * self._factor

    def mean(self, wall_seconds: float) -> float:
        return self._queue.mean(wall_seconds) * self._factor


def alike(procs: int) -> tuple[int, int]:
    """Processors of jobs that count as being of this size: up to a factor of sqrt(2) more or less.

    >>> alike(1), alike(8)
    ((1, 1), (6, 11))
    """
    return ceil(procs / sqrt(2)), floor(procs * sqrt(2))


def jobs_alike(log: JobLog, procs: tuple[int, int] | None) -> int:
    return len(log.of_shape(procs))


def sizes(log: JobLog) -> str:
    """What there is, for a hint: the sizes that have enough jobs, with how many."""
    found = []
    size = 1
    while size <= int(log.procs.max()):
        low, high = alike(size)
        count = jobs_alike(log, (low, high))
        if count >= ENOUGH:
            found.append(f"{low if low == high else f'{low}-{high}'} ({count:,})")
        size *= 2
    return ", ".join(found) if found else f"none with {ENOUGH} jobs or more"


def check_shape(place: Place) -> None:
    """Refuse a place whose history knows too little of its jobs."""
    assert place.log is not None
    count = jobs_alike(place.log, place.procs)
    if count < LEAST:
        low, high = place.procs or (0, 0)
        raise DataError(
            f"{place.file}: has {count} jobs of {low}-{high} processors, which is what {place.settings.nodes} "
            f"nodes of {place.name} are taken for; {LEAST} are needed; sizes with enough jobs: {sizes(place.log)}; "
            f"change facility.{place.name}.nodes, or say --per-node {place.name}=PROCESSORS"
        )
