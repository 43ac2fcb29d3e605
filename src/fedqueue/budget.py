"""How much work fits: pure arithmetic over seconds, steps and rates."""

from __future__ import annotations

from math import floor

from fedqueue.messages import Assignment, Scaling, Standing

ROUNDING = 1e-9
"""Steps: a budget that holds a whole number of steps but for the last bit holds that number."""

GUARD = 1e-6
"""Seconds kept free before a cutoff when steps are fitted to it, so that rounding never makes a job miss it."""


def train_budget(until_cutoff: float, expected_delay: float, margin: float, floor_seconds: float) -> float:
    """J = T - q-hat - delta, and never less than the floor.

    >>> train_budget(10.0, expected_delay=2.5, margin=2.0, floor_seconds=0.5)
    5.5
    """
    return max(floor_seconds, until_cutoff - expected_delay - margin)


def steps_within(seconds: float, steps_per_second: float, min_steps: int) -> int:
    """E = floor(c * J), and never less than `min_steps`.

    >>> steps_within(5.5, steps_per_second=155 / 5.5, min_steps=10)
    155
    """
    return max(min_steps, floor(steps_per_second * seconds + ROUNDING))


def scaled_rate(base_rate: float, steps: int, least_steps: int, scaling: Scaling) -> float:
    """eta = eta_base * E_min / E, or eta_base.

    >>> scaled_rate(0.003, steps=100, least_steps=50, scaling="inverse")
    0.0015
    """
    return base_rate * min(least_steps, steps) / steps if scaling == "inverse" else base_rate


def wall_request(train_seconds: float, overhead: float, stretch: float) -> float:
    """Wall time to ask for: what training should take, stretched, plus what surrounds it."""
    return train_seconds * stretch + overhead + 1.0


def linger_until(standing: Standing, started_at: float) -> float | None:
    """Until when a job that starts now should wait for a newer version; None: it takes what there is.

    A model is made at every cutoff. Work taken just before one is stale when it comes back, a whole round later;
    waiting a moment, with the nodes held, brings the new model and still nearly a whole round.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1, patience=1.0)
    >>> linger_until(work, started_at=39.5), linger_until(work, started_at=33.0)
    (41.0, None)
    """
    near = abs(standing.next_cutoff - started_at) < standing.patience
    return standing.next_cutoff + standing.patience if near else None


def bind(standing: Standing, started_at: float) -> Assignment:
    """What a job that starts now takes from the standing work: steps until the first cutoff it can be of use for.

    >>> work = Standing(version=3, next_cutoff=40.0, round_length=10.0, steps_per_second=10.0,
    ...                 overhead=1.0, min_steps=10, learning_rate=0.1)
    >>> bind(work, started_at=33.0).steps      # 40 - 33 - 1 = 6 seconds of training
    59
    >>> bind(work, started_at=39.5).cutoff     # too close to this cutoff, so it aims at the next
    50.0
    """
    cutoff = standing.next_cutoff
    least_seconds = standing.min_steps / standing.steps_per_second + standing.overhead + GUARD
    missed = cutoff - started_at - least_seconds
    if missed < 0:
        cutoff += standing.round_length * -floor(missed / standing.round_length)
    seconds = cutoff - started_at - standing.overhead - GUARD
    steps = steps_within(seconds, standing.steps_per_second, standing.min_steps)
    least = steps if standing.least_steps is None else standing.least_steps
    return Assignment(
        base_version=standing.version,
        steps=steps,
        learning_rate=scaled_rate(standing.learning_rate, steps, least, standing.lr_scaling),
        train_budget=seconds,
        cutoff=cutoff,
    )
