"""What goes wrong with simulated jobs: keyed by job number, so that every strategy meets the same faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from zlib import crc32

import numpy as np

from fedqueue.config import FaultSettings

JobFault = Literal["fail", "preempt", "hang", "corrupt", "duplicate"]


class Faults:
    """The faults of one facility's jobs."""

    def __init__(self, settings: Sequence[FaultSettings], *, facility: str, seed: int) -> None:
        self._settings = [f for f in settings if f.facility in ("*", facility) and f.kind != "outage"]
        self._key = (seed, crc32(facility.encode()), 2)

    def of(self, number: int, attempt: int) -> dict[JobFault, FaultSettings]:
        """The faults that strike this attempt of this job. One named by number strikes its first attempt only."""
        if not self._settings:
            return {}
        struck: dict[JobFault, FaultSettings] = {}
        luck = np.random.default_rng((*self._key, number, attempt)).random(len(self._settings))
        for fault, draw in zip(self._settings, luck.tolist(), strict=True):
            by_number = fault.jobs is not None and attempt == 0 and number in fault.jobs
            if by_number or (fault.probability is not None and draw < fault.probability):
                struck[fault.kind] = fault  # type: ignore[index]  # "outage" was left out above
        return struck

    def when(self, number: int, attempt: int) -> float:
        """How far through its run a fault strikes a job, between 0 and 1."""
        return float(np.random.default_rng((*self._key, number, attempt, 1)).random())
