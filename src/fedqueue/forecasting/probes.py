"""Which jobs of a queue's past stand for ours: one a round, one at a time, as the published algorithm has it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

WARM_UP_SHARE: Final = 0.2  # of the probes that count for nothing: the forecaster learns ...
WARM_UP_LEAST: Final = 150  # ... but at least so many, or half if there are fewer than twice as many


def probe_jobs(submits: Sequence[float], waits: Sequence[float], round_length: float) -> Iterator[tuple[float, int]]:
    """(start of the round, place of the job). The probe of a round is the first job submitted in it; the next round
    with a probe begins when that job has started, so the wait of every earlier probe is known by then.

    >>> list(probe_jobs([0.0, 5.0, 12.0, 47.0], [4.0, 1.0, 20.0, 8.0], 10.0))
    [(0.0, 0), (10.0, 2), (40.0, 3)]
    """
    begin, number = submits[0], 0
    while (found := bisect_left(submits, begin + number * round_length)) < len(submits):
        own = math.floor((submits[found] - begin) / round_length)  # rounds without a job of the shape have no probe
        number = max(number, own)
        yield begin + number * round_length, found
        started = submits[found] + waits[found]
        number = max(number + 1, math.ceil((started - begin) / round_length))


def default_warm_up(probes: int) -> int:
    """How many of the first probes are left out.

    >>> default_warm_up(2000), default_warm_up(500), default_warm_up(80)
    (400, 150, 40)
    """
    return min(max(int(WARM_UP_SHARE * probes), WARM_UP_LEAST), probes // 2)
