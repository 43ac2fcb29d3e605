"""How much work fits between a job's start and a cutoff: the arithmetic that strategies, simulator and jobs share.

Jobs run it too, so this file is pure, needs the standard library alone and works with Python 3.9.
"""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from fedqueue.protocol.contract import Standing

ROUNDING = 1e-9
"""Steps: a budget that holds a whole number of steps but for the last bit holds that number."""

GUARD = 1e-6
"""Seconds kept free before a cutoff when steps are fitted to it, so that rounding never makes a job miss it."""


class Fit(NamedTuple):
    """What a job takes from standing work."""

    steps: int
    learning_rate: float
    train_budget: float  # seconds of training until it must hand in
    cutoff: float  # the one it aims at
    cutoff_index: int  # cutoff = next_cutoff + cutoff_index * round_length


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


def linger_until(standing: Standing, now: float) -> float | None:
    """Until when a job that could take its work now should wait for a newer version; None: it takes what there is.

    A model is made at every cutoff. Work taken just before one is stale when it comes back, a whole round later;
    waiting a moment, with the nodes held, brings the new model and still nearly a whole round.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1, patience=1.0)
    >>> linger_until(work, now=39.5), linger_until(work, now=33.0)
    (41.0, None)
    """
    near = abs(standing.next_cutoff - now) < standing.patience
    return standing.next_cutoff + standing.patience if near else None


def fit(standing: Standing, started_at: float) -> Fit:
    """What a job that started at `started_at` takes: steps until the first cutoff it can be of use for.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1)
    >>> fit(work, started_at=33.0).steps            # 40 - 33 - 1 = 6 seconds of training
    59
    >>> fit(work, started_at=39.5).cutoff_index     # too close to this cutoff, so it aims at the next
    1
    """
    least_seconds = standing.min_steps / standing.steps_per_second + standing.overhead + GUARD
    missed = standing.next_cutoff - started_at - least_seconds
    index = -floor(missed / standing.round_length) if missed < 0 else 0
    cutoff = standing.next_cutoff + standing.round_length * index
    seconds = cutoff - started_at - standing.overhead - GUARD
    steps = steps_within(seconds, standing.steps_per_second, standing.min_steps)
    least = steps if standing.least_steps is None else standing.least_steps
    rate = scaled_rate(standing.learning_rate, steps, least, standing.lr_scaling)
    return Fit(steps, rate, seconds, cutoff, index)
