"""How much work fits: pure arithmetic over seconds, steps and rates. What jobs compute as well is in `fit`."""

from __future__ import annotations

from fedqueue.fit import GUARD, ROUNDING, fit, linger_until, scaled_rate, steps_within
from fedqueue.messages import Assignment, Standing

__all__ = [
    "GUARD",
    "ROUNDING",
    "bind",
    "linger_until",
    "scaled_rate",
    "steps_within",
    "train_budget",
    "wall_request",
]


def train_budget(until_cutoff: float, expected_delay: float, margin: float, floor_seconds: float) -> float:
    """J = T - q-hat - delta, and never less than the floor.

    >>> train_budget(10.0, expected_delay=2.5, margin=2.0, floor_seconds=0.5)
    5.5
    """
    return max(floor_seconds, until_cutoff - expected_delay - margin)


def wall_request(train_seconds: float, overhead: float, stretch: float) -> float:
    """Wall time to ask for: what training should take, stretched, plus what surrounds it."""
    return train_seconds * stretch + overhead + 1.0


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
