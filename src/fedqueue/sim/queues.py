"""How long a simulated job waits.

Every draw is keyed by (seed, facility, number of the job at that facility), so the j-th job of a facility has the
same luck under every strategy, and a comparison of strategies compares nothing else. A job that asks for more wall
time may wait longer, if the queue is set so: with the same luck.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, sqrt
from pathlib import Path
from typing import Literal, Protocol
from zlib import crc32

import numpy as np

from fedqueue import data
from fedqueue.config import FixedQueue, LognormalQueue, QueueSettings, SpikeQueue, StepQueue, TraceQueue
from fedqueue.errors import DataError
from fedqueue.history.joblog import JobLog
from fedqueue.history.read import read_log
from fedqueue.history.requests import ENOUGH, ByRequest, by_request

BLOCK = 1024

Spread = Literal["log", "seconds"]


class Queue(Protocol):
    def delay(self, number: int, attempt: int, at: float, wall_seconds: float) -> float:
        """Seconds that this job waits if it becomes eligible at this second; attempts after 0 were requeued."""

    def mean(self, wall_seconds: float) -> float:
        """Of jobs that ask for so much, before anything changes the queue: what the predictor `static` is given."""


def make_queue(settings: QueueSettings, *, facility: str, seed: int, folder: Path) -> Queue:
    draws = Draws(seed, facility)
    match settings:
        case FixedQueue():
            return Fixed(settings.delay)
        case TraceQueue():
            return _of_trace(settings, draws, folder)
        case LognormalQueue() | StepQueue() | SpikeQueue():
            return Lognormal(settings, draws)


class Draws:
    """Standard normal numbers by job number, made in blocks as they are needed, and dropped behind."""

    def __init__(self, seed: int, facility: str) -> None:
        self._key = (seed, crc32(facility.encode()))
        self._rewind()

    def _rewind(self) -> None:
        self._stream = np.random.default_rng(self._key)
        self._block: list[float] = []
        self._begin = 0  # number of the first job in the block

    def normal(self, number: int, attempt: int) -> float:
        if attempt:
            return float(np.random.default_rng((*self._key, number, attempt)).standard_normal())
        if number < self._begin:
            self._rewind()
        while number >= self._begin + len(self._block):
            self._begin += len(self._block)
            self._block = self._stream.standard_normal(BLOCK).tolist()
        return self._block[number - self._begin]

    def uniform(self) -> float:
        """One number for the whole run."""
        return float(np.random.default_rng((*self._key, 1)).random())


class Fixed:
    def __init__(self, delay: float) -> None:
        self._delay = delay

    def delay(self, number: int, attempt: int, at: float, wall_seconds: float) -> float:
        return self._delay

    def mean(self, wall_seconds: float) -> float:
        return self._delay


class Lognormal:
    """Lognormal waits; the mean may change for good (step) or for a while (spike)."""

    def __init__(self, settings: LognormalQueue | StepQueue | SpikeQueue, draws: Draws) -> None:
        self._settings = settings
        self._draws = draws

    def delay(self, number: int, attempt: int, at: float, wall_seconds: float) -> float:
        settings = self._settings
        usual = lognormal(self._mean_at(at), settings.rho, settings.spread, self._draws.normal(number, attempt))
        return usual * self._longer(wall_seconds)

    def mean(self, wall_seconds: float) -> float:
        return self._settings.mean * self._longer(wall_seconds)

    def _longer(self, wall_seconds: float) -> float:
        """How many times longer a job waits that asks for so much, than one that asks for the usual wall time."""
        usual = self._settings.usual_wall_seconds
        return 1.0 if usual is None else float((wall_seconds / usual) ** self._settings.wall_power)

    def _mean_at(self, at: float) -> float:
        match self._settings:
            case StepQueue(mean=mean, mean_after=after, change_at=change_at):
                return after if at >= change_at else mean
            case SpikeQueue(mean=mean) as spike:
                since = at - spike.spike_at
                if spike.every is not None and since >= 0:
                    since %= spike.every
                return mean * spike.factor if 0 <= since < spike.spike_seconds else mean
            case plain:
                return plain.mean


def lognormal(mean: float, rho: float, spread: Spread, normal: float) -> float:
    """A lognormal number with this mean; rho is the sd of its logarithm, or its own sd in seconds.

    >>> lognormal(3.0, 0.0, "log", 1.7)
    3.0
    """
    sigma = rho if spread == "log" else sqrt(log(1 + (rho / mean) ** 2))
    return mean * exp(sigma * normal - sigma * sigma / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Waits that were recorded: a job that becomes eligible at t waits as long as the next one like it; the log
    begins anew at its end."""

    jobs: ByRequest
    first: float  # second at which the log begins
    length: float  # seconds that it covers
    start: float  # how far into it the run begins
    speed_up: float = 1.0  # so many seconds of the log pass, and waits shrink, in one of the run
    factor: float = 1.0  # how many times longer jobs wait than they did

    def delay(self, number: int, attempt: int, at: float, wall_seconds: float) -> float:
        alike = self.jobs.like(wall_seconds * self.speed_up)
        moment = self.first + (self.start + at * self.speed_up) % self.length
        found = bisect_left(alike.submits, moment)
        return alike.waits[found % len(alike.waits)] / self.speed_up * self.factor

    def mean(self, wall_seconds: float) -> float:
        return self.jobs.like(wall_seconds * self.speed_up).mean / self.speed_up * self.factor


def _of_trace(settings: TraceQueue, draws: Draws, folder: Path) -> Recorded:
    jobs = read_trace(data.find_log(settings.file, folder), settings)
    first = jobs.whole.submits[0]
    length = jobs.whole.submits[-1] - first + 1.0
    start = draws.uniform() * length if settings.start is None else settings.start
    return Recorded(jobs=jobs, first=first, length=length, start=start, speed_up=settings.speed_up)


def read_trace(path: Path, shape: TraceQueue) -> ByRequest:
    """The jobs of this shape, from a log of any format we read."""
    jobs = _log_of(path).of_shape(shape.procs, shape.max_requested)
    if not len(jobs):
        raise DataError(f"{path}: {_log_of(path).none_like(shape.procs, shape.max_requested)}")
    found = by_request(jobs, grouped=shape.by_requested)
    if shape.by_requested and not found.groups:
        raise DataError(f"{path}: by_requested needs {ENOUGH} jobs that asked for about the same; leave it out")
    return found


def _log_of(path: Path) -> JobLog:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return _unchanged_log(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _unchanged_log(path: Path, modified: int, size: int) -> JobLog:
    """Facilities and seeds share traces: each is read once, as long as the file stays as it is."""
    return read_log(path)
