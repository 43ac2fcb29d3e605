"""What a log says about waiting, in memory that does not grow with its length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from math import inf
from typing import Final

import numpy as np

from fedqueue.errors import DataError
from fedqueue.history.busy import Busy
from fedqueue.history.joblog import Floats, Ints, of_shape
from fedqueue.history.sketch import Sketch

SOON: Final = (60.0, 600.0, 3600.0)  # of which the share is told that starts within them
REQUESTS: Final = (600.0, 3600.0, 7200.0, 14_400.0, 43_200.0, 86_400.0, inf)  # up to so many seconds; then: unknown
SIZES: Final = 28  # powers of two
HOURS, DAYS = 24, 7
WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ENOUGH: Final = 20  # jobs, for an hour or a weekday to be called good or bad
_QUARTER: Final = 900  # seconds; zones differ by whole ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which jobs count."""

    procs: tuple[int, int] | None = None
    max_requested: float | None = None
    since: float | None = None  # Unix times of submission
    until: float | None = None

    def of(self, rows: Floats, base: float | None) -> Floats:
        """Those of the rows that count, with Unix times of submission where `base`, that of second 0, is known."""
        submit = rows[:, 0]
        which = of_shape(rows[:, 4], rows[:, 3], self.procs, self.max_requested)
        if self.since is not None or self.until is not None:
            if base is None:
                raise DataError("has no clock times, so --since and --until do not apply; say its --epoch if you know")
            which &= (submit + base >= (self.since or -inf)) & (submit + base < (self.until or inf))
        kept = rows[which]
        kept[:, 0] += base or 0.0
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Of some jobs; None: there is none."""

    jobs: int
    median: float | None
    p90: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeWaits(Waits):
    procs: tuple[int, int]
    requested: tuple[float, float] | None  # more than, at most; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    jobs: int
    first: float  # submission; Unix time if `clock`
    last: float
    clock: bool
    mean: float
    median: float
    p90: float
    p99: float
    longest: float
    within: dict[float, float]  # share that waited at most so many seconds
    peak: float  # processors in use in the busiest hour
    load: float | None  # share of that peak that was in use from the first submission to the last
    shapes: list[ShapeWaits]
    hours: list[Waits] = field(default_factory=list)  # by local hour of submission; empty without a clock
    weekdays: list[Waits] = field(default_factory=list)
    week: list[list[float | None]] = field(default_factory=list)  # median wait by weekday and hour


class Summariser:
    """Takes chunks of jobs; `zone` is that of hours and weekdays."""

    def __init__(self, zone: tzinfo | None, *, clock: bool) -> None:
        self._clock = clock
        self._offset = lru_cache(maxsize=65_536)(lambda quarter: _offset(zone, quarter * _QUARTER))
        self._shapes = Sketch(SIZES * (len(REQUESTS) + 1))
        self._week = Sketch(DAYS * HOURS if clock else 1)
        self._busy = Busy()
        self._jobs, self._total, self._longest = 0, 0.0, 0.0
        self._first, self._last = inf, -inf
        self._soon = np.zeros(len(SOON), dtype=np.int64)

    @property
    def jobs(self) -> int:
        return self._jobs

    def add(self, rows: Floats) -> None:
        """Rows with absolute times where there is a clock."""
        if not len(rows):
            return
        submit, wait, run, requested, procs = rows.T
        self._jobs += len(rows)
        self._total += float(wait.sum())
        self._longest = max(self._longest, float(wait.max()))
        self._first, self._last = min(self._first, float(submit.min())), max(self._last, float(submit.max()))
        self._soon += [int((wait <= limit).sum()) for limit in SOON]
        size = np.clip(np.log2(procs), 0, SIZES - 1).astype(np.int64)
        request = np.where(np.isnan(requested), len(REQUESTS), np.searchsorted(REQUESTS, requested))
        self._shapes.add(wait, size * (len(REQUESTS) + 1) + request)
        if self._clock:
            self._week.add(wait, self._hour_of_week(submit))
        self._busy.add(submit + wait, run, procs)

    def summary(self) -> Summary:
        assert self._jobs, "who asks has seen a job"
        whole, peak, span = self._shapes, self._busy.peak(), self._last - self._first
        median, p90, p99 = (whole.quantile(level) or 0.0 for level in (0.5, 0.9, 0.99))
        week = np.arange(DAYS * HOURS)
        by_hour, by_day = (self._week.merged(to) if self._clock else None for to in (week % HOURS, week // HOURS))
        return Summary(
            jobs=self._jobs,
            first=self._first,
            last=self._last,
            clock=self._clock,
            mean=self._total / self._jobs,
            median=median,
            p90=p90,
            p99=p99,
            longest=self._longest,
            within={limit: int(count) / self._jobs for limit, count in zip(SOON, self._soon, strict=True)},
            peak=peak,
            load=self._busy.work / (peak * span) if peak > 0 and span > 86_400 else None,
            shapes=list(self._by_shape()),
            hours=[_waits(by_hour, hour) for hour in range(HOURS)] if by_hour else [],
            weekdays=[_waits(by_day, day) for day in range(DAYS)] if by_day else [],
            week=[[self._week.quantile(0.5, day * HOURS + hour) for hour in range(HOURS)] for day in range(DAYS)]
            if self._clock
            else [],
        )

    def _by_shape(self) -> Iterator[ShapeWaits]:
        for size in range(SIZES):
            for place in range(len(REQUESTS) + 1):
                cell = size * (len(REQUESTS) + 1) + place
                found = _waits(self._shapes, cell)
                if found.jobs:
                    least = 0.0 if place == 0 else REQUESTS[place - 1]
                    yield ShapeWaits(
                        jobs=found.jobs,
                        median=found.median,
                        p90=found.p90,
                        procs=(2**size, 2 ** (size + 1) - 1),
                        requested=None if place == len(REQUESTS) else (least, REQUESTS[place]),
                    )

    def _hour_of_week(self, submit: Floats) -> Ints:
        quarters, place = np.unique(np.floor(submit / _QUARTER).astype(np.int64), return_inverse=True)
        offsets = np.array([self._offset(quarter) for quarter in quarters.tolist()])
        hours = np.floor((submit + offsets[place]) / 3600).astype(np.int64)
        found: Ints = (hours + 3 * HOURS) % (DAYS * HOURS)  # Unix time begins on a Thursday
        return found


def _offset(zone: tzinfo | None, at: float) -> float:
    """Seconds that local time is ahead of UTC."""
    try:
        moment = datetime.fromtimestamp(at, UTC).astimezone(zone)
    except (ValueError, OverflowError, OSError):
        return 0.0
    offset = moment.utcoffset()
    return offset.total_seconds() if offset is not None else 0.0


def _waits(sketch: Sketch, cell: int) -> Waits:
    return Waits(jobs=sketch.count(cell), median=sketch.quantile(0.5, cell), p90=sketch.quantile(0.9, cell))


def extremes(waits: list[Waits]) -> tuple[int, int] | None:
    """Places of the least and of the greatest waits, by median, then by the 90 % quantile; None: too few jobs."""
    ranked = sorted((one.median or 0.0, one.p90 or 0.0, place) for place, one in enumerate(waits) if one.jobs >= ENOUGH)
    return (ranked[0][2], ranked[-1][2]) if len(ranked) > 1 else None


def size_label(procs: tuple[int, int]) -> str:
    """
    >>> size_label((1, 1)), size_label((4, 7))
    ('1', '4-7')
    """
    return str(procs[0]) if procs[0] == procs[1] else f"{procs[0]}-{procs[1]}"


def request_label(requested: tuple[float, float] | None) -> str:
    """
    >>> request_label((0.0, 600.0)), request_label((86400.0, float("inf"))), request_label(None)
    ('to 10 min', 'over 24 h', 'unknown')
    """
    if requested is None:
        return "unknown"
    least, most = requested
    seconds = least if most == inf else most
    text = f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:g} h"
    return f"over {text}" if most == inf else f"to {text}"


def human(seconds: float | None) -> str:
    """
    >>> human(42.0), human(5400.0), human(200000.0), human(None)
    ('42 s', '1.5 h', '2.31 days', '-')
    """
    if seconds is None:
        return "-"
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= (2 if unit == "days" else 1) * size * 0.9999:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
