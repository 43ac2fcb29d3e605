"""How long a job that stays should ask for, by a facility's history; and what that advice would have been worth.

The history is replayed with one staying job after the other: each waits as the next recorded job that asked for about
as much. (The mean wait of recorded jobs would promise too little: people submit many jobs at once, at busy times.) To
check what is promised so, it is promised by the first half of the history, and replayed in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Final

from fedqueue.history.joblog import JobLog
from fedqueue.history.requests import ByRequest, by_request
from fedqueue.protocol.predict.base import Spread, quantile_of
from fedqueue.protocol.strategies.staying import GOOD_ENOUGH, StayOptions
from fedqueue.sim.queues import Queue, Recorded

LEAD: Final = StayOptions().stay_lead
SHORTEST: Final = 600.0  # seconds of wall time that is worth staying for
STARTS: Final = 4  # moments of the history at which a replay begins, evenly over it ...
MOST_JOBS: Final = 2000  # ... and for how many wall times each goes on, or to where it began
MANY: Final = 100  # recorded jobs that a wall time must have to be advised, if any has
SEEN: Final = 25  # newest waits that decide how far ahead the next job is ordered
ROWS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of a group's waits that a config is given
MOST_ROWS: Final = 60


@dataclass(frozen=True, slots=True)
class StayPoint:
    """Jobs that ask for about so much wall time."""

    wall_seconds: float
    jobs: int  # of the history that are like them
    wait_median: float
    wait_mean: float
    share: float  # of the facility's time that it would train


@dataclass(frozen=True, slots=True)
class StayCheck:
    """What would have come of the advice of the first half of a history in the second."""

    wall_seconds: float  # the advice
    promised: float  # share of the time training, by the first half
    achieved: float  # in the second
    best_wall_seconds: float  # that was best in the second, as it turned out
    best: float
    shares: tuple[tuple[float, float, float], ...]  # (wall time, promised, achieved) of all that both halves know


@dataclass(frozen=True, slots=True)
class StayCurve:
    facility: str
    points: tuple[StayPoint, ...]  # wall times rising
    chosen: StayPoint  # the shortest that is nearly the best
    check: StayCheck | None  # None: the halves of the history have too few jobs


def stay_curve(
    facility: str, log: JobLog, *, overhead: float = 0.0, factor: float = 1.0, most: float = inf, lead: float = LEAD
) -> StayCurve | None:
    """Of the jobs of one size; None: too few are known to have asked for about the same. `factor` is how many times
    longer jobs wait than they did, `overhead` what a job holds its nodes for beside training, `most` the most wall time
    that it may ask for."""
    whole = _History(log, by_request(log), overhead, factor, lead)
    points = whole.points([wall for wall in whole.walls if max(SHORTEST, 2 * overhead) <= wall <= most])
    if not points:
        return None
    middle = float(log.submit[0] + log.submit[-1]) / 2
    halves = [log.only(which) for which in (log.submit < middle, log.submit >= middle)]
    check = _check([_History(half, by_request(half), overhead, factor, lead) for half in halves], points)
    return StayCurve(facility, points, _nearly_best(points), check)


def known_waits(jobs: ByRequest, factor: float) -> list[tuple[float, float]]:
    """(wall time, wait) that stand for a history: quantiles of each group, all levels mixed, seconds rounded."""
    groups = [jobs.groups[octave] for octave in sorted(jobs.groups)][-MOST_ROWS // len(ROWS) :]
    return [
        (group.about or 0.0, round(group.quantile(ROWS[(turn + i) % len(ROWS)]) * factor, 1))
        for turn in range(len(ROWS))
        for i, group in enumerate(groups)
    ]


@dataclass(frozen=True, slots=True)
class _History:
    log: JobLog
    jobs: ByRequest
    overhead: float
    factor: float
    lead: float

    @property
    def walls(self) -> list[float]:
        """Wall times that it knows of."""
        return [group.about for _, group in sorted(self.jobs.groups.items()) if group.about is not None]

    def points(self, walls: Sequence[float]) -> tuple[StayPoint, ...]:
        found = []
        for wall in walls:
            alike = self.jobs.like(wall)
            median, mean = alike.quantile(0.5) * self.factor, alike.mean * self.factor
            found.append(StayPoint(wall, len(alike.waits), median, mean, self._share(wall)))
        return tuple(found)

    def _share(self, wall: float) -> float:
        first, length = float(self.log.submit[0]), float(self.log.submit[-1] - self.log.submit[0]) + 1.0
        starts = [length * i / STARTS for i in range(STARTS)]
        queues = [Recorded(jobs=self.jobs, first=first, length=length, start=s, factor=self.factor) for s in starts]
        seconds = min(length, MOST_JOBS * wall)
        return fmean(replay(queue, wall, seconds, lead=self.lead, lost=self.overhead) for queue in queues)


def _nearly_best(points: Sequence[StayPoint]) -> StayPoint:
    """The shortest, of those that enough jobs speak for."""
    points = [point for point in points if point.jobs >= MANY] or points
    enough = GOOD_ENOUGH * max(point.share for point in points)
    return next(point for point in points if point.share >= enough)


def _check(halves: Sequence[_History], points: Sequence[StayPoint]) -> StayCheck | None:
    walls = [point.wall_seconds for point in points if all(point.wall_seconds in half.walls for half in halves)]
    if not walls:
        return None
    promised, achieved = (half.points(walls) for half in halves)
    advice = _nearly_best(promised)
    best = max(achieved, key=lambda point: point.share)
    return StayCheck(
        wall_seconds=advice.wall_seconds,
        promised=advice.share,
        achieved=achieved[walls.index(advice.wall_seconds)].share,
        best_wall_seconds=best.wall_seconds,
        best=best.share,
        shares=tuple((p.wall_seconds, p.share, a.share) for p, a in zip(promised, achieved, strict=True)),
    )


def replay(queue: Queue, wall_seconds: float, length: float, *, lead: float = LEAD, lost: float = 0.0) -> float:
    """The share of so many seconds that is training, with one staying job after the other. The next is ordered ahead of
    the end of this one by the wait that `lead` of the newest stayed under, or at once; this one ends when the next has
    started. `lost` seconds of each are not training."""
    seen, trained = Spread(SEEN), 0.0
    start = queue.delay(0, 0, 0.0, wall_seconds)
    seen.add(start)
    while start < length:
        ends = start + wall_seconds
        ordered = max(start, ends - (quantile_of(seen.sorted, lead) if lead else 0.0))
        wait = queue.delay(0, 0, ordered, wall_seconds)
        seen.add(wait)
        following = max(ordered + wait, start + 1.0)  # never a second job in the same moment
        trained += max(0.0, min(ends, following, length) - start - lost)
        start = following
    return trained / length
