"""Jobs that stay: how long to ask for, and when to ask for the next one. Every strategy may use it.

A job that stays hands in part after part. It waits in the queue once for many rounds; the longer it asks for, the more
of its facility's time is training, and the longer it may wait. When one runs, the next is ordered so that it starts as
this one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, Literal

from fedqueue.protocol.codec import share
from fedqueue.protocol.predict import Forecast
from fedqueue.protocol.strategies.roster import Facility

DOUBLING: Final = 2.0
"""From one wall time to choose from to the next; the first is the round length."""

AT_ONCE: Final = inf
"""As a lead: the next job is ordered as soon as one runs."""

GOOD_ENOUGH: Final = 0.97
"""Of the best share of time spent training: the shortest wall time that reaches this is asked for. Shorter jobs are
easier to place, lose less when they die, and give nodes back sooner."""

FIRST: Final = 8.0  # rounds that are asked for at most, while no wait is known
FURTHER: Final = 2.0  # times the longest wall time of which a wait is known: no forecast is trusted beyond


@dataclass(frozen=True, kw_only=True)
class StayOptions:
    """Options of every strategy."""

    stay: float | Literal["off", "auto"] = "off"
    """off: a job hands in once. Else seconds of wall time for a job that stays; auto: by the facility's own waits."""
    stay_lead: float = 0.5  # the share of delays that the head start of the next job covers

    def __post_init__(self) -> None:
        if not isinstance(self.stay, str) and not self.stay > 0:
            raise ValueError(f"stay must be more than 0, found {self.stay}")
        share(self, "stay_lead")


def choose_stay(
    wait_of: Callable[[float], Forecast], round_length: float, most: float, *, lead: float = 0.5, overhead: float = 0.0
) -> float:
    """Seconds to train for, `most` at the most: the shortest of the round length, twice that, ... whose share of time
    training is nearly the best. `wait_of` forecasts the wait of a job that asks for so many seconds of training.

    >>> calm, busy = Forecast(2.0, ((0.5, 2.0),)), Forecast(100.0, ((0.5, 100.0),))
    >>> choose_stay(lambda seconds: calm, 10.0, most=5000.0), choose_stay(lambda seconds: busy, 10.0, most=5000.0)
    (10.0, 160.0)
    >>> choose_stay(lambda seconds: calm if seconds < 50 else busy, 10.0, most=5000.0)
    10.0
    >>> choose_stay(lambda seconds: busy, 10.0, most=64.0)
    64.0
    """
    rungs = [min(round_length, most)]
    while rungs[-1] < most:
        rungs.append(min(DOUBLING * rungs[-1], most))
    shares = [training_share(wait_of(seconds), seconds, lead=lead, overhead=overhead) for seconds in rungs]
    enough = GOOD_ENOUGH * max(shares)
    return next(seconds for seconds, found in zip(rungs, shares, strict=True) if found >= enough)


def wait_at(facility: Facility, now: float) -> Callable[[float], Forecast]:
    """Forecasts the wait of a job there by the wall time that it asks for, by the waits so far and by those of its jobs
    that wait now."""
    waiting = [
        (job.wall_seconds, max(0.0, now - job.ordered_at))
        for job in facility.jobs.values()
        if job.started_at is None and job.order.after is None
    ]
    return lambda wall_seconds: facility.waits.forecast(wall_seconds, waiting)


def stay_at(
    facility: Facility, wall_of: Callable[[float], float], round_length: float, *, most: float, lead: float, now: float
) -> float:
    """Seconds to train for at a facility. `wall_of` says what wall time so many seconds of training need. A forecast is
    trusted up to a few times the longest wall time of which a wait is known."""
    wait, longest = wait_at(facility, now), facility.waits.longest
    return choose_stay(
        lambda seconds: wait(wall_of(seconds)),
        round_length,
        min(most, FURTHER * longest if longest else FIRST * round_length),
        lead=lead if facility.profile.max_jobs > 1 else 0.0,
        overhead=facility.overhead,
    )


def head_start(wait: Forecast, lead: float) -> float:
    """Seconds before the end of a job at which the next one is ordered: the wait that `lead` of the jobs stay under.
    0: it is ordered when that one has ended, or waits only from then on.

    >>> calm = Forecast(2.0, ((0.5, 1.0), (0.9, 5.0)))
    >>> head_start(calm, 0.9), head_start(calm, 0.0), head_start(calm, AT_ONCE)
    (5.0, 0.0, inf)
    """
    if lead in (0.0, AT_ONCE):
        return lead
    return wait.quantile(lead)


def training_share(wait: Forecast, seconds: float, *, lead: float = 0.5, overhead: float = 0.0) -> float:
    """Of a facility's time, the share that it trains, with jobs that train for so many seconds at the most.

    The next job is ordered while this one runs, ahead of its end by `head_start`, or at once, if that is longer. If it
    starts late, nobody trains in between; if it starts early, it takes over, and this one is shorter. `overhead` is
    what each job holds its nodes for and does not train.

    >>> half_and_half = Forecast(60.0, ((0.5, 20.0), (0.5, 100.0)))
    >>> training_share(half_and_half, 200.0)  # ordered 20 s before; half of the jobs come 80 s late: 200 of 240 s
    0.8333333333333334
    >>> training_share(half_and_half, 200.0, lead=0.0), training_share(half_and_half, 10.0)
    (0.7692307692307693, 0.16666666666666666)
    >>> training_share(Forecast(0.0, ((0.5, 0.0),)), 10.0, lead=AT_ONCE)  # the next job takes over before it trains
    0.0
    """
    ordered = min(seconds, head_start(wait, lead))
    points = wait.quantiles
    early = [max(0.0, ordered - q) for _, q in points]
    ahead = points[0][0] * early[0] + (1 - points[-1][0]) * early[-1]
    ahead += sum(
        (p1 - p0) * (a + b) / 2 for ((p0, _), (p1, _)), (a, b) in zip(pairwise(points), pairwise(early), strict=True)
    )
    late = max(0.0, wait.mean - ordered + ahead)
    trained = seconds - ahead
    return trained / (trained + late + overhead) if trained > 0 else 0.0
