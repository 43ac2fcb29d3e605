"""The wait of a job by the wall time that it asks for, learned from the waits of one facility's jobs.

    log(wait + 1 s) = level + power * log(wall) + what is special about wall times near this one

Before anything was seen, the level is the first delay that is expected, and the power a mild one. Each wait moves all
three, as far as their prior spreads allow (Gaussian process regression, older waits counting less). So one wait at one
wall time says "about the same for any other", several at several say how much longer a longer job waits, and many say
where the facility's steps are, such as a limit between a short queue and a long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import exp, log, log2
from typing import Final

from fedqueue.protocol.predict.base import Forecast
from fedqueue.protocol.predict.logspace import LogErrors, to_log

POWER: Final = 0.5
"""The wait grows as wall^POWER until something is known. At recorded systems the mean wait grows by 0.5 to 0.9."""
POWER_SD: Final = 1.0
LEVEL_SD: Final = 1.0
"""Small: if the first, longer job waits much longer than was expected of a short one, a short one is tried."""
LOCAL_SD, LOCAL_OCTAVES = 0.4, 2.0  # how far one wall time may differ from the line, and how far that reaches
NOISE_SD: Final = 0.8  # of one wait about what is expected of it, to begin with ...
NOISE_COUNT: Final = 4.0  # ... as sure as if so many waits had said so
NEWEST: Final = 64  # waits that are kept
ERRORS: Final = 24  # of the newest, that shape the quantiles
FADE: Final = 0.93  # what a wait counts for, with each later one
KNOWN: Final = 0.25  # what a wait counts for that was known beforehand: of other people's jobs
NEAR: Final = 2  # groups an octave: waits at nearly the same wall time are taken together


class WaitByWall:
    """Told (wall time, wait) of every job that started; asked for the wait at any wall time.

    >>> waits = WaitByWall(usual_wall=600.0, first=60.0)
    >>> [round(waits.forecast(wall).quantile(0.5)) for wall in (600.0, 4800.0)]
    [60, 172]
    >>> for _ in range(5): waits.observe(4800.0, 6000.0)
    >>> [round(waits.forecast(wall).quantile(0.5), -2) for wall in (600.0, 4800.0)]
    [100.0, 6000.0]
    """

    __slots__ = ("_fit", "_level", "_origin", "_seen", "longest")

    def __init__(
        self, usual_wall: float, first: float | None = None, known: Iterable[tuple[float, float]] = ()
    ) -> None:
        """`first` is the wait expected at the usual wall time; None: about as long as that. `known` are waits of the
        past, as (wall time, wait)."""
        self._origin = log2(usual_wall)
        self._level = to_log(usual_wall if first is None else first)
        self.longest = 0.0  # wall time of which a wait is known
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=NEWEST)  # octaves, log wait, count
        self._fit: _Fit | None = None
        for wall_seconds, wait in known:
            self._add(wall_seconds, wait, KNOWN)

    def observe(self, wall_seconds: float, wait: float) -> None:
        """A job that asked for so much started after so long."""
        self._seen = deque(((x, y, FADE * count) for x, y, count in self._seen), maxlen=NEWEST)
        self._add(wall_seconds, wait, 1.0)

    def forecast(self, wall_seconds: float, waiting: Iterable[tuple[float, float]] = ()) -> Forecast:
        """The wait of a job that asks for so much. `waiting` are jobs that have not started, as (wall time, waited so
        far): one that has waited longer than was expected of it counts as if it started now."""
        if self._fit is None:
            self._fit = _Fit(self._seen, self._origin, self._level)
        fit = self._fit
        overdue = [(log2(wall), to_log(waited), 1.0) for wall, waited in waiting]
        overdue = [(x, y, count) for x, y, count in overdue if y > max(0.0, fit.at(x))]
        found = fit.forecast(log2(wall_seconds))
        if not overdue:
            return found
        worried = _Fit([*self._seen, *overdue], self._origin, self._level)
        return found.lifted(worried.forecast(log2(wall_seconds)), 0.0)

    def _add(self, wall_seconds: float, wait: float, count: float) -> None:
        self._seen.append((log2(wall_seconds), to_log(wait), count))
        self.longest = max(self.longest, wall_seconds)
        self._fit = None


class _Fit:
    """Log wait by octave, through what was seen."""

    def __init__(self, seen: Iterable[tuple[float, float, float]], origin: float, level: float) -> None:
        self._origin, self._level = origin, level
        seen = list(seen)
        groups: dict[int, list[tuple[float, float, float]]] = {}
        for one in seen:
            groups.setdefault(round(NEAR * one[0]), []).append(one)
        counts = [sum(count for _, _, count in group) for group in groups.values()]
        self._places = [_mean(group, 0, n) for group, n in zip(groups.values(), counts, strict=True)]
        values = [_mean(group, 1, n) for group, n in zip(groups.values(), counts, strict=True)]
        squares = sum(
            count * (y - value) ** 2
            for group, value in zip(groups.values(), values, strict=True)
            for _, y, count in group
        )
        noise = (NOISE_COUNT * NOISE_SD**2 + squares) / (NOISE_COUNT + sum(counts))
        rows = [
            [self._alike(a, b) + (noise / n if i == j else 0.0) for j, b in enumerate(self._places)]
            for i, (a, n) in enumerate(zip(self._places, counts, strict=True))
        ]
        surprises = [value - self._prior(x) for x, value in zip(self._places, values, strict=True)]
        self._pull = _solve(rows, surprises)
        self._errors = LogErrors(ERRORS)
        for x, y, _ in seen[-ERRORS:]:
            self._errors.add(y - self.at(x))

    def forecast(self, x: float) -> Forecast:
        return self._errors.around(self.at(x), 0.0)

    def at(self, x: float) -> float:
        return self._prior(x) + sum(
            pull * self._alike(x, place) for pull, place in zip(self._pull, self._places, strict=True)
        )

    def _prior(self, x: float) -> float:
        return self._level + POWER * log(2) * (x - self._origin)

    def _alike(self, a: float, b: float) -> float:
        """How far a surprise at one wall time is one at another: the covariance of what is not known."""
        slope = (POWER_SD * log(2)) ** 2 * (a - self._origin) * (b - self._origin)
        return LEVEL_SD**2 + slope + LOCAL_SD**2 * exp(-abs(a - b) / LOCAL_OCTAVES)


def _mean(group: list[tuple[float, float, float]], column: int, total: float) -> float:
    return sum(one[column] * one[2] for one in group) / total


def _solve(rows: list[list[float]], right: list[float]) -> list[float]:
    """x of rows @ x = right, for a symmetric positive matrix: no pivots are needed. `rows` is used up.

    >>> _solve([[2.0, 1.0], [1.0, 3.0]], [5.0, 10.0])
    [1.0, 3.0]
    """
    size, right = len(rows), list(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            right[j] -= factor * right[i]
            for k in range(i, size):
                rows[j][k] -= factor * rows[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (right[i] - sum(rows[i][k] * found[k] for k in range(i + 1, size))) / rows[i][i]
    return found
