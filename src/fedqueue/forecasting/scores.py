"""How good a forecast was: figures over the waits that came true. U is the time set aside for the wait, J = T - U.

All of them take arrays of one length, in seconds; a job is late if its wait is above its U.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CANDIDATES: Final = 2000  # margins that are tried at the most, evenly among the errors


def late_rate(limits: Floats, waits: Floats) -> float:
    """Share of jobs whose wait was above its U."""
    return float(np.mean(waits > limits))


def budget(limits: Floats, round_length: float) -> float:
    """Mean J/T, whether or not the job was late.

    >>> budget(np.array([2.0, 12.0]), 10.0)
    0.4
    """
    return float(np.mean(np.maximum(0.0, round_length - limits))) / round_length


def on_time_budget(limits: Floats, waits: Floats, round_length: float) -> float:
    """Mean J/T, where that of a late job is 0.

    >>> on_time_budget(np.array([2.0, 4.0]), np.array([1.0, 9.0]), 10.0)
    0.4
    """
    return float(np.mean(np.where(waits <= limits, np.maximum(0.0, round_length - limits), 0.0))) / round_length


def budget_at(limits: Floats, waits: Floats, round_length: float, late: float) -> float:
    """Mean J/T with log(1 + U) shifted by the one number, chosen in hindsight, that leaves this share late."""
    shift = _exceeded_by(np.log1p(waits) - np.log1p(limits), late)
    return budget(np.maximum(0.0, np.expm1(np.log1p(limits) + shift)), round_length)


def margin_budget_at(expected: Floats, waits: Floats, round_length: float, late: float) -> float:
    """Mean J/T with U = q-hat + margin, the margin in seconds chosen in hindsight to leave this share late."""
    return budget(np.maximum(0.0, expected + _exceeded_by(waits - expected, late)), round_length)


def _exceeded_by(errors: Floats, share: float) -> float:
    """The least value that at most this share of the errors is above."""
    return float(np.sort(errors)[len(errors) - 1 - int(share * len(errors) + 1e-9)])


def best_margin(expected: Floats, waits: Floats, round_length: float) -> float:
    """The most on-time J/T that U = q-hat + margin reaches with any one margin, chosen in hindsight. A q-hat of 0
    everywhere gives the best constant U."""
    errors = waits - expected
    order = np.argsort(errors)
    errors, expected, waits = errors[order], expected[order], waits[order]
    tried = np.unique(np.linspace(0, len(errors) - 1, min(len(errors), CANDIDATES)).astype(int))
    best = round_length * float(np.mean(waits == 0))  # U = 0 for all
    for place in tried.tolist():
        margin = errors[place]
        useful = np.maximum(0.0, round_length - np.maximum(0.0, expected + margin))
        on_time = errors <= margin
        on_time |= waits == 0  # U is never below 0
        best = max(best, float(np.mean(np.where(on_time, useful, 0.0))))
    return best / round_length
