"""How many processors ran at once, hour by hour, whatever the order in which jobs come."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np

from fedqueue.history.joblog import Floats

HOUR: Final = 3600.0


class Busy:
    """Keeps by how much the mean of each hour changes against the hour before: a number an hour in which a job starts
    or ends."""

    def __init__(self) -> None:
        self._changes: defaultdict[int, float] = defaultdict(float)
        self.work = 0.0  # processor seconds

    def add(self, start: Floats, run: Floats, procs: Floats) -> None:
        known = ~np.isnan(run)
        start, run, procs = start[known], run[known], procs[known]
        self.work += float(run @ procs)
        for moment, sign in ((start, 1.0), (start + run, -1.0)):
            hour = np.floor(moment / HOUR)
            passed = moment / HOUR - hour
            self._change(hour, sign * procs * (1 - passed))
            self._change(hour + 1, sign * procs * passed)

    def _change(self, hours: Floats, amounts: Floats) -> None:
        which, place = np.unique(hours.astype(np.int64), return_inverse=True)
        for hour, amount in zip(which.tolist(), np.bincount(place, amounts).tolist(), strict=True):
            self._changes[hour] += amount

    def peak(self) -> float:
        """The most that ran in any hour, on average over the hour: a machine has at least so many."""
        if not self._changes:
            return 0.0
        return max(0.0, float(np.cumsum([amount for _, amount in sorted(self._changes.items())]).max()))
