"""How much work fits: pure arithmetic over seconds, steps and rates. What jobs compute as well is in `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import floor, log
from typing import Final, Literal, get_args

from fedqueue.protocol.binding_rule import GUARD, ROUNDING, fit, linger_until, scaled_rate, steps_within
from fedqueue.protocol.contract import Assignment, Standing
from fedqueue.protocol.predict import Forecast

__all__ = [
    "GUARD",
    "LADDER",
    "ROUNDING",
    "RULES",
    "Rule",
    "bind",
    "busy_share",
    "choose_round_length",
    "linger_until",
    "longest_stay",
    "reserve",
    "scaled_rate",
    "steps_within",
    "train_budget",
    "wall_request",
]

Rule = Literal["paper", "late-rate", "newsvendor"]
"""How much of the time until a cutoff is set aside for the wait."""

RULES: Final[tuple[Rule, ...]] = get_args(Rule)

LADDER: Final = tuple(2.0**k for k in range(-2, 5))
"""The round lengths to choose from, over the one that is set."""

LEAST_ROUND: Final = 4.0  # round length over the greatest overhead, at the least


def train_budget(until_cutoff: float, reserved: float, overhead: float, floor_seconds: float) -> float:
    """J: what is left of the time until the cutoff after the wait and what surrounds training; the floor at the least.

    >>> train_budget(10.0, reserved=4.5, overhead=0.0, floor_seconds=0.5)
    5.5
    """
    return max(floor_seconds, until_cutoff - reserved - overhead)


def reserve(rule: Rule, forecast: Forecast, until_cutoff: float, *, margin: float, late_rate: float) -> float:
    """U, the seconds set aside for the wait; `until_cutoff` is without the overhead. A job is late if q is above U.

    paper: q-hat + delta. late-rate: the quantile that is exceeded with the probability `late_rate`. newsvendor: where
    (until_cutoff - U) * F(U) is greatest, the training time that can be expected to be back by the cutoff.

    >>> forecast = Forecast(3.0, ((0.5, 1.0), (0.9, 5.0), (0.95, 9.0)))
    >>> [reserve(rule, forecast, 10.0, margin=2.0, late_rate=0.05) for rule in RULES]
    [5.0, 9.0, 3.0]
    """
    if rule == "paper":
        return forecast.mean + margin
    if rule == "late-rate":
        return forecast.quantile(1 - late_rate)
    return _newsvendor(forecast, until_cutoff)


def _newsvendor(forecast: Forecast, until_cutoff: float) -> float:
    """F is linear between the quantiles, so that the best place on each piece is known; 0 before the first of them."""
    best, where = 0.0, max(0.0, until_cutoff)  # nothing fits: no time is left, and the caller's floor holds
    points = forecast.quantiles
    candidates = [(q, p) for p, q in points]
    for (p0, q0), (p1, q1) in pairwise(points):
        if p1 > p0 and q1 > q0:
            slope = (p1 - p0) / (q1 - q0)
            peak = (until_cutoff + q0 - p0 / slope) / 2
            if q0 < peak < q1:
                candidates.append((peak, p0 + slope * (peak - q0)))
    for seconds, share in candidates:
        if (until_cutoff - seconds) * share > best:
            best, where = (until_cutoff - seconds) * share, seconds
    return where


def busy_share(forecast: Forecast, round_length: float) -> float:
    """E[T / max(T, q)]: of a facility's time, the share that it trains, if every wait of more than a round costs the
    rounds that it lasts. q is spread evenly between the quantiles, and stays at the outermost beyond them.

    >>> round(busy_share(Forecast(2.0, ((0.25, 0.0), (0.75, 10.0), (0.9, 40.0))), 10.0), 4)
    0.8443
    """
    points = forecast.quantiles
    share = points[0][0] * _meets(points[0][1], points[0][1], round_length)
    for (p0, q0), (p1, q1) in pairwise(points):
        share += (p1 - p0) * _meets(q0, q1, round_length)
    return share + (1 - points[-1][0]) * _meets(points[-1][1], points[-1][1], round_length)


def _meets(low: float, high: float, length: float) -> float:
    """Mean of T / max(T, q) for q between two values."""
    if high <= length:
        return 1.0
    if high - low <= ROUNDING * high:
        return length / high
    start = max(low, length)
    return (start - low + length * log(high / start)) / (high - low)


def choose_round_length(base: float, forecasts: Sequence[Forecast], overhead: float, busy: float) -> float:
    """The shortest of LADDER * base at which facilities are busy for the share `busy` of the time on average, and that
    is at least four times the overhead; the longest, if none is.

    >>> calm, busy_queue = Forecast(2.0, ((0.5, 2.0),)), Forecast(100.0, ((0.5, 100.0),))
    >>> choose_round_length(10.0, [calm], 0.5, 0.9), choose_round_length(10.0, [calm, busy_queue], 0.5, 0.9)
    (2.5, 80.0)
    """
    for length in (base * factor for factor in LADDER):
        share = sum(busy_share(forecast, length) for forecast in forecasts)
        if share + ROUNDING >= busy * len(forecasts) and length >= LEAST_ROUND * overhead:
            return length
    return base * LADDER[-1]


def wall_request(train_seconds: float, overhead: float, stretch: float, startup: float | None = None) -> float:
    """Wall time to ask for: what training should take, stretched, plus what surrounds it. At a real facility (`startup`
    is the allowance for what nobody has seen yet) it may be what surrounds it that took too long: all is stretched.

    >>> wall_request(5.0, 20.0, 2.0), wall_request(5.0, 20.0, 2.0, startup=300.0)
    (31.0, 652.0)
    """
    if startup is None:
        return train_seconds * stretch + overhead + 1.0
    return (train_seconds + overhead + startup + 1.0) * stretch


def longest_stay(standing: Standing, earliest: float, latest: float) -> float:
    """Seconds that a job which starts between the two moments stays at the most, if the cutoffs are as posted; hand-in
    is not counted.

    A job stays until the cutoff that it aims at. That grows shorter the later it starts, until it starts too close to
    that cutoff to be of use there, or so close that it waits for the model made there: then it stays a round more.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1, patience=1.0)
    >>> longest_stay(work, 33.0, 36.0), longest_stay(work, 33.0, 39.0)
    (7.0, 12.0)
    """
    least = standing.min_steps / standing.steps_per_second
    turn = max(standing.patience, least + standing.overhead + GUARD)  # so long before a cutoff, the next is aimed at
    index = floor((earliest + turn - standing.next_cutoff) / standing.round_length) + 1  # the cutoff aimed at first
    aimed = standing.next_cutoff + max(0, index) * standing.round_length
    longest = standing.round_length + max(2 * standing.patience, least)
    return longest if latest >= aimed - turn else min(longest, aimed - earliest)


def bind(standing: Standing, started_at: float) -> Assignment:
    """What a job that starts now takes from the standing work: steps until the first cutoff it can be of use for.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1)
    >>> bind(work, started_at=33.0).steps      # 40 - 33 - 1 = 6 seconds of training
    59
    >>> bind(work, started_at=39.5).cutoff     # too close to this cutoff, so it aims at the next
    50.0
    """
    found = fit(standing, started_at)
    return Assignment(
        base_version=standing.version,
        steps=found.steps,
        learning_rate=found.learning_rate,
        train_budget=found.train_budget,
        cutoff=found.cutoff,
    )
