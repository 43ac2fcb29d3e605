"""A facility as the planner sees it: its settings, the history of its queue, and the jobs in it that look like ours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, floor, sqrt
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np

from fedqueue.config import Config, FacilitySettings, FixedQueue
from fedqueue.errors import DataError
from fedqueue.history.joblog import JobLog
from fedqueue.sim.queues import Queue, Recorded, make_queue, true_mean

ENOUGH: Final = 50
"""Jobs that a narrower choice of wall times must have."""
LEAST: Final = 10
"""Jobs that a shape must have at all."""
WALL_TIMES: Final = (3600.0, 7200.0, 14_400.0, 28_800.0, 43_200.0, 86_400.0, 172_800.0)
"""Seconds: a job that asks for less than one of these is compared with jobs that asked for at most so much."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Recorded waits of jobs of one shape. `first` and `span` are those of the whole log, so that all shapes of a
    facility can begin at the same moment."""

    submits: list[float]
    waits: list[float]
    first: float
    span: float
    max_requested: float | None  # None: whatever they asked for

    @property
    def mean(self) -> float:
        return sum(self.waits) / len(self.waits)

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.waits, share))


@dataclass(frozen=True, eq=False, kw_only=True)
class Place:
    settings: FacilitySettings
    log: JobLog | None = None  # None: waits are drawn from the config's queue
    file: Path | None = None  # where the log lies
    procs: tuple[int, int] | None = None  # of jobs like ours; None: any
    per_node: int = 1  # processors that the log counts for a node
    factor: float = 1.0  # how many times longer jobs wait than they did
    _found: dict[float | None, Waits] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def overhead(self) -> float:
        """Seconds around the training of a job that are known beforehand, transfers of the model left out."""
        return self.settings.startup_seconds + 2 * self.settings.latency_seconds

    def waits(self, wall_seconds: float) -> Waits:
        """Of jobs like ours that asked for at most about so much wall time: the closest choice that has enough."""
        assert self.log is not None
        for bound in (*(b for b in WALL_TIMES if b >= wall_seconds), None):
            if bound not in self._found:
                self._found[bound] = _waits(self.log, self.procs, bound)
            if len(self._found[bound].waits) >= ENOUGH:
                return self._found[bound]
        return self._found[None]

    def queue(self, wall_seconds: float, *, start: int, seed: int, folder: str) -> tuple[Queue, float]:
        """The queue of a simulation that begins at this starting point, and its mean wait."""
        if self.log is None:
            settings = self.settings.queue or FixedQueue(delay=0.0)
            queue = make_queue(settings, facility=self.name, seed=seed + start, folder=Path(folder))
            mean = true_mean(settings, queue)
            return (queue if self.factor == 1 else _Longer(queue, self.factor)), mean * self.factor
        waits = self.waits(wall_seconds)
        luck = np.random.default_rng((seed, crc32(self.name.encode()), start))
        queue = Recorded(
            submits=waits.submits,
            waits=waits.waits,
            first=waits.first,
            length=waits.span,
            start=float(luck.random()) * waits.span,
            factor=self.factor,
        )
        return queue, waits.mean * self.factor

    def typical_wait(self, wall_seconds: float, config: Config) -> float:
        """Seconds: the median of the history, or what the config's queue gives on average."""
        if self.log is not None:
            return self.waits(wall_seconds).quantile(0.5) * self.factor
        return self.queue(wall_seconds, start=0, seed=config.run.seed, folder=config.folder)[1]

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
        return replace(self, settings=settings, procs=procs, _found={})


class _Longer:
    """A queue whose waits are so many times longer."""

    def __init__(self, queue: Queue, factor: float) -> None:
        self._queue, self._factor = queue, factor

    def delay(self, number: int, attempt: int, at: float) -> float:
        return self._queue.delay(number, attempt, at) * self._factor


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


def _waits(log: JobLog, procs: tuple[int, int] | None, max_requested: float | None) -> Waits:
    like = log.of_shape(procs, max_requested)
    first = float(log.submit[0])
    span = float(log.submit[-1]) - first + 1.0
    return Waits(like.submit.tolist(), like.wait.tolist(), first, span, max_requested)
