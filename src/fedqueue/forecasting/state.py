"""What a batch scheduler shows at a moment: who waits, who runs, and how long those who started had waited.

Told of every job by three events; from a log they are exact, from a live queue they are the differences of two
listings. What is not known changes nothing: an event of a job that was never submitted is ignored.

Whoever submits sees nothing that was submitted or started in the same second: a log does not say what came first, and
an order that somebody gave it later may tell of the future.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf, isfinite, isnan, log1p, nan
from typing import Final, Protocol

import numpy as np

from fedqueue.history.joblog import JobLog

MOST_JOBS: Final = 200_000  # waiting or running at once; beyond it the oldest is forgotten
RECENT: Final = 20  # newest starts whose waits are summed up
SMOOTHING: Final = 0.1  # weight of the newest log wait in its moving average
DAY: Final = 86_400.0

FEATURES: Final = (
    *("waiting", "waiting_procs", "waiting_area", "running", "running_procs", "running_area", "oldest_waiting"),
    *("procs", "requested", "hour", "weekday"),
    *("mean_log_wait", "last_log_wait", "last_start_age"),
    *("like_mean_log_wait", "like_last_log_wait", "like_last_start_age", "like_waiting"),
    *("recent_mean", "recent_max", "recent_median"),
)
"""Names of what `SchedulerState.features` gives. An area is processors times requested seconds; `like` is about jobs of
the same power of two of processors; `recent` about the log waits of the newest starts."""


@dataclass(frozen=True, slots=True)
class _Job:
    at: float  # submission
    procs: int
    requested: float  # nan: unknown


@dataclass(slots=True)
class _Waits:
    """Log waits of jobs that started, as a moving average."""

    mean: float = nan
    last: float = nan
    at: float = -inf

    def add(self, at: float, value: float) -> None:
        self.mean = value if isnan(self.mean) else (1 - SMOOTHING) * self.mean + SMOOTHING * value
        self.last, self.at = value, at

    def age(self, at: float) -> float:
        return at - self.at if isfinite(self.at) else nan


@dataclass(slots=True)
class _Crowd:
    """How many, how many processors, and how much they asked for."""

    jobs: int = 0
    procs: int = 0
    area: float = 0.0

    def add(self, job: _Job, sign: int) -> None:
        self.jobs += sign
        self.procs += sign * job.procs
        self.area = self.area + sign * _area(job) if self.jobs else 0.0  # rounding does not pile up


class SchedulerState:
    """Memory is bounded by the jobs that wait or run, and those by `most`.

    >>> state = SchedulerState()
    >>> state.submitted("a", 0.0, procs=4, requested=60.0)
    >>> state.submitted("b", 5.0, procs=2, requested=60.0)
    >>> state.started("a", 7.0)
    7.0
    >>> dict(zip(FEATURES, state.features(8.0, procs=4, requested=60.0)))["oldest_waiting"]
    3.0
    """

    def __init__(self, epoch: float | None = None, *, most: int = MOST_JOBS) -> None:
        self._epoch = epoch or 0.0  # unknown: hours count from second 0, off by a constant
        self._most = most
        self._waiting: dict[Hashable, _Job] = {}
        self._running: dict[Hashable, _Job] = {}
        self._order: deque[tuple[float, Hashable]] = deque()  # submissions; those that wait no longer are skipped
        self._new: list[_Job] = []  # submitted in the newest second: they wait, and are not seen yet
        self._wait, self._run = _Crowd(), _Crowd()
        self._like_waiting: dict[int, int] = {}
        self._all = _Waits()
        self._like: dict[int, _Waits] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)

    def submitted(self, job: Hashable, at: float, procs: int, requested: float) -> None:
        if job in self._waiting or job in self._running:
            return
        self._show(at)
        if len(self._waiting) >= self._most:
            self._forget_oldest()
        self._waiting[job] = found = _Job(at, procs, requested)
        self._new.append(found)
        self._order.append((at, job))
        if len(self._order) > 2 * len(self._waiting) + 64:
            self._order = deque(entry for entry in self._order if self._is_waiting(entry))

    def started(self, job: Hashable, at: float) -> float | None:
        """The wait, in seconds; None if nothing is known of the job."""
        found = self._leave(job)
        if found is None:
            return None
        if len(self._running) >= self._most:
            self.ended(next(iter(self._running)), at)
        self._running[job] = found
        self._run.add(found, 1)
        wait = max(0.0, at - found.at)
        value = log1p(wait)
        self._all.add(at, value)
        self._like.setdefault(_power(found.procs), _Waits()).add(at, value)
        self._recent.append(value)
        return wait

    def ended(self, job: Hashable, at: float) -> None:
        """It ran, or it was withdrawn while it waited."""
        found = self._running.pop(job, None)
        if found is None:
            self._leave(job)
        else:
            self._run.add(found, -1)

    def waited(self, job: Hashable, at: float) -> float | None:
        """How long a job has waited so far; None: it does not wait."""
        found = self._waiting.get(job)
        return None if found is None else max(0.0, at - found.at)

    def features(self, at: float, procs: int, requested: float) -> list[float]:
        """Of a job that is about to be submitted, in the order of `FEATURES`; nan: not known yet."""
        self._show(at)
        while self._order and not self._is_waiting(self._order[0]):
            self._order.popleft()
        clock, power = at + self._epoch, _power(procs)
        like, recent = self._like.get(power, _NONE), sorted(self._recent)
        return [
            *(self._wait.jobs, self._wait.procs, self._wait.area, self._run.jobs, self._run.procs, self._run.area),
            at - self._order[0][0] if self._order else 0.0,
            *(procs, requested, clock % DAY / 3600.0, clock // DAY % 7.0),
            *(self._all.mean, self._all.last, self._all.age(at)),
            *(like.mean, like.last, like.age(at), self._like_waiting.get(power, 0)),
            *((sum(recent) / len(recent), recent[-1], recent[len(recent) // 2]) if recent else (nan, nan, nan)),
        ]

    def _show(self, at: float) -> None:
        """What was submitted before this second is seen from now on."""
        if self._new and self._new[0].at < at:
            for job in self._new:
                self._wait.add(job, 1)
                self._like_waiting[_power(job.procs)] = self._like_waiting.get(_power(job.procs), 0) + 1
            self._new.clear()

    def _leave(self, job: Hashable) -> _Job | None:
        found = self._waiting.pop(job, None)
        if found is not None:
            self._show(inf)
            self._wait.add(found, -1)
            self._like_waiting[_power(found.procs)] -= 1
        return found

    def _is_waiting(self, entry: tuple[float, Hashable]) -> bool:
        at, job = entry
        found = self._waiting.get(job)
        return found is not None and found.at == at

    def _forget_oldest(self) -> None:
        while self._order:
            entry = self._order.popleft()
            if self._is_waiting(entry):
                self._leave(entry[1])
                return


_NONE: Final = _Waits()


def _area(job: _Job) -> float:
    return 0.0 if isnan(job.requested) else job.procs * job.requested


def _power(procs: int) -> int:
    """1 -> 1, 2 to 3 -> 2, 4 to 7 -> 3: processors by their power of two."""
    return int(procs).bit_length()


# Where the events come from ------------------------------------------------------------------------------------


class Watcher(Protocol):
    """Whoever is told what the jobs of a machine do."""

    def submitted(self, job: Hashable, at: float, procs: int, requested: float) -> None: ...

    def started(self, job: Hashable, at: float) -> object: ...

    def ended(self, job: Hashable, at: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A job in a listing of the queue."""

    submitted: float
    procs: int
    requested: float  # nan: unknown
    started: float | None = None  # None: it waits


def tell_differences(
    watcher: Watcher, before: Mapping[Hashable, Listed], now: Mapping[Hashable, Listed], at: float
) -> None:
    """What happened between two listings of a live queue. A job that is gone has ended; when, nobody saw. One that was
    requeued has ended and is submitted anew."""
    again = [job for job in before if job in now and now[job].started is None and before[job].started is not None]
    for job in (*(job for job in before if job not in now), *again):
        watcher.ended(job, at)
    known = before.keys() - set(again)
    for job, listed in sorted(now.items(), key=lambda item: item[1].submitted):
        if job not in known:
            watcher.submitted(job, listed.submitted, listed.procs, listed.requested)
    fresh = ((listed.started, job) for job, listed in now.items() if listed.started is not None)
    for started, job in sorted(fresh, key=lambda pair: pair[0]):
        if job not in known or before[job].started is None:
            watcher.started(job, started)


class Kind(IntEnum):
    """In the order in which events of one second are told: whoever submits then sees no start of that second."""

    ENDED = 0
    SUBMITTED = 1
    STARTED = 2
    ENDED_AT_ONCE = 3  # a job that ran for no time


def events(log: JobLog) -> Iterator[tuple[Kind, int, float]]:
    """Everything that the jobs of a log did: (kind, place of the job, second). A job whose run time is not known is
    taken to run for what it requested."""
    starts = log.submit + log.wait
    runs = np.where(np.isnan(log.run), np.nan_to_num(log.requested), log.run)
    places = np.arange(len(log))
    ends = starts + runs
    over = np.where(ends > starts, Kind.ENDED, Kind.ENDED_AT_ONCE)
    kinds = np.concatenate([over, np.full(len(log), Kind.SUBMITTED), np.full(len(log), Kind.STARTED)])
    times = np.concatenate([ends, log.submit, starts])
    jobs = np.concatenate([places, places, places])
    order = np.lexsort((jobs, kinds, times))
    named = [Kind(number) for number in range(len(Kind))]
    for kind, job, at in zip(kinds[order].tolist(), jobs[order].tolist(), times[order].tolist(), strict=True):
        yield named[kind], job, at
