"""How much work fits: pure arithmetic over seconds, steps and rates, which strategies, simulator and jobs share.

Jobs import this file: Python 3.9 and the standard library alone.
"""

from __future__ import annotations

from math import floor, inf
from typing import Literal, NamedTuple

from fedqueue.protocol.contract import Assignment, Standing

ROUNDING = 1e-9
"""Steps: a budget that holds a whole number of steps but for the last bit holds that number."""

GUARD = 1e-6
"""Seconds kept free before a cutoff when steps are fitted to it, so that rounding never makes a job miss it."""


IDLE_ROUNDS = 2.0  # a model comes at every cutoff; if none does, something is wrong

Further = Literal["take", "wait", "leave"]


class Binding(NamedTuple):
    """What a job takes from standing work."""

    steps: int
    learning_rate: float
    train_budget: float  # seconds of training until it must hand in
    cutoff: float  # the one it aims at
    cutoff_index: int  # cutoff = next_cutoff + cutoff_index * round_length


def train_budget(until_cutoff: float, reserved: float, overhead: float, floor_seconds: float) -> float:
    """J: what is left of the time until the cutoff after the wait and what surrounds training; the floor at the least.

    >>> train_budget(10.0, reserved=4.5, overhead=0.0, floor_seconds=0.5)
    5.5
    """
    return max(floor_seconds, until_cutoff - reserved - overhead)


def steps_within(seconds: float, steps_per_second: float, min_steps: int) -> int:
    """E = floor(c * J), and never less than `min_steps`.

    >>> steps_within(5.5, steps_per_second=155 / 5.5, min_steps=10)
    155
    """
    return max(min_steps, floor(steps_per_second * seconds + ROUNDING))


def scaled_rate(base_rate: float, steps: int, least_steps: int, scaling: str) -> float:
    """eta = eta_base * E_min / E for "inverse", or eta_base for "none".

    >>> scaled_rate(0.003, steps=100, least_steps=50, scaling="inverse")
    0.0015
    """
    return base_rate * min(least_steps, steps) / steps if scaling == "inverse" else base_rate


def linger_until(standing: Standing, now: float, *, stays: bool = False, stayed: bool = False) -> float | None:
    """Until when a job that could take its work now should wait for a newer version; None: it takes what there is.

    A model is made at every cutoff. Work taken just before one is stale when it comes back, a whole round later;
    waiting a moment, with the nodes held, brings the new model and still nearly a whole round. A job that stays waits
    whenever the least steps do not fit before the cutoff, and would fit into a round once its model has come: it has
    many rounds before it. If they would not, the next model would find it waiting again. One that `stayed` has no
    start-up to come.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1, patience=1.0)
    >>> linger_until(work, now=39.5), linger_until(work, now=33.0)
    (41.0, None)
    >>> linger_until(work, now=38.2), linger_until(work, now=38.2, stays=True)
    (None, 41.0)
    >>> from dataclasses import replace
    >>> linger_until(replace(work, overhead=8.5), now=38.2, stays=True)
    """
    until_cutoff = standing.next_cutoff - now
    least = _least_seconds(standing, stayed=stayed)
    near = abs(until_cutoff) < standing.patience or (stays and 0 <= until_cutoff < least)
    if stays and least + standing.patience >= standing.round_length:
        return None
    return standing.next_cutoff + standing.patience if near else None


def _least_seconds(standing: Standing, *, stayed: bool = False) -> float:
    """From taking work to the arrival of an update with the least steps."""
    overhead = standing.overhead
    if stayed and standing.stay_overhead is not None:
        overhead = standing.stay_overhead
    return standing.min_steps / standing.steps_per_second + overhead + GUARD


def binding(standing: Standing, started_at: float, ends_at: float = inf, *, stayed: bool = False) -> Binding:
    """What a job that started at `started_at` takes: steps until the first cutoff it can be of use for. It must hand in
    by `ends_at`. One that `stayed` has no start-up to come.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1)
    >>> binding(work, started_at=33.0).steps            # 40 - 33 - 1 = 6 seconds of training
    59
    >>> binding(work, started_at=39.5).cutoff_index     # too close to this cutoff, so it aims at the next
    1
    """
    least_seconds = _least_seconds(standing, stayed=stayed)
    missed = standing.next_cutoff - started_at - least_seconds
    index = -floor(missed / standing.round_length) if missed < 0 else 0
    cutoff = standing.next_cutoff + standing.round_length * index
    least_train = standing.min_steps / standing.steps_per_second
    seconds = max(0.0, min(cutoff - started_at - (least_seconds - least_train), ends_at - started_at))
    steps = steps_within(seconds, standing.steps_per_second, standing.min_steps)
    least = steps if standing.least_steps is None else standing.least_steps
    rate = scaled_rate(standing.learning_rate, steps, least, standing.lr_scaling)
    return Binding(steps, rate, seconds, cutoff, index)


def further_work(standing: Standing, number: int, base_version: int | None, now: float, ends_at: float) -> Further:
    """What the job of this number does, which stays and has handed in what it made of `base_version`.

    It leaves if a later job has started, or if the least steps do not fit before `ends_at`, when it must have handed
    in. It waits for a version that is newer than its last, and where `linger_until` says so.

    >>> work = Standing(version=3, next_cutoff=50.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1, patience=1.0, from_job=4)
    >>> [further_work(work, 4, base, now=41.0, ends_at=60.0) for base in (2, 3)]
    ['take', 'wait']
    >>> further_work(work, 3, 2, now=41.0, ends_at=60.0), further_work(work, 4, 2, now=49.5, ends_at=60.0)
    ('leave', 'wait')
    """
    if number < standing.from_job or ends_at - now < standing.min_steps / standing.steps_per_second:
        return "leave"
    until = linger_until(standing, now, stays=True, stayed=True)
    is_newer = base_version is None or standing.version > base_version
    return "take" if is_newer and (until is None or now >= until) else "wait"


def idle_limit(stay: float, standing: Standing | None) -> float:
    """Seconds without work after which a job that stays gives its nodes back: as ordered, and two rounds at the least,
    since rounds may have become longer, with what it may have to wait for a model at the end of each.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1)
    >>> idle_limit(6.0, work), idle_limit(6.0, None)
    (20.0, 6.0)
    """
    return stay if standing is None else max(stay, IDLE_ROUNDS * (standing.round_length + standing.patience))


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


def bind(standing: Standing, started_at: float, ends_at: float = inf, *, stayed: bool = False) -> Assignment:
    """What a job that starts now takes from the standing work: steps until the first cutoff it can be of use for.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1)
    >>> bind(work, started_at=33.0).steps      # 40 - 33 - 1 = 6 seconds of training
    59
    >>> bind(work, started_at=39.5).cutoff     # too close to this cutoff, so it aims at the next
    50.0
    """
    found = binding(standing, started_at, ends_at, stayed=stayed)
    return Assignment(
        base_version=standing.version,
        steps=found.steps,
        learning_rate=found.learning_rate,
        train_budget=found.train_budget,
        cutoff=found.cutoff,
    )
