"""Jobs of a log by the wall time that they asked for: longer ones wait longer, and how much longer the log knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from statistics import fmean
from typing import Final

import numpy as np

from fedqueue.history.joblog import JobLog

HOUR: Final = 3600.0
ENOUGH: Final = 50
"""Jobs that a group must have: fewer say little about a wait."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Submissions and waits of some jobs of a log, in seconds, by submission."""

    submits: list[float]
    waits: list[float]
    about: float | None = None  # seconds of wall time that they asked for, up to a factor of sqrt(2); None: any

    @property
    def mean(self) -> float:
        return fmean(self.waits)

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.waits, share))


@dataclass(frozen=True, slots=True)
class ByRequest:
    """Jobs of a log in groups, each about twice the wall time of the one before: ..., 30 min, 1 h, 2 h, ..."""

    whole: Waits
    groups: Mapping[int, Waits]  # by octave; empty: all jobs are alike

    def like(self, wall_seconds: float) -> Waits:
        """Jobs like one that asks for so much: the nearest group, of two the one that asked for more."""
        if not self.groups:
            return self.whole
        wanted = octave(wall_seconds)
        if wanted in self.groups:
            return self.groups[wanted]
        return self.groups[min(self.groups, key=lambda found: (abs(found - wanted), -found))]


def octave(wall_seconds: float) -> int:
    """Doublings from an hour, to the nearest.

    >>> [octave(seconds) for seconds in (1200.0, 3000.0, 3600.0, 5000.0, 5200.0, 43_200.0)]
    [-2, 0, 0, 0, 1, 4]
    """
    return round(log2(wall_seconds / HOUR))


def by_request(log: JobLog, *, grouped: bool = True) -> ByRequest:
    """Groups that have enough jobs; jobs of which nobody knows what they asked for are in none."""
    groups: dict[int, Waits] = {}
    if grouped:
        known = log.only(log.requested > 0)
        octaves = np.rint(np.log2(known.requested / HOUR)).astype(np.int64)
        for number, count in zip(*np.unique(octaves, return_counts=True), strict=True):
            if count >= ENOUGH:
                groups[int(number)] = _waits(known.only(octaves == number), HOUR * 2.0 ** int(number))
    return ByRequest(_waits(log, None), groups)


def _waits(log: JobLog, about: float | None) -> Waits:
    return Waits(log.submit.tolist(), log.wait.tolist(), about)
