"""What an update is worth once the model has moved on: discounts (phi, s) and weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Literal

Decay = Literal["harmonic", "exponential", "none"]


def discount(staleness: int, decay: Decay, beta: float) -> float:
    """phi(tau): 1 when fresh.

    >>> discount(2, "harmonic", beta=0.5)
    0.5
    """
    if decay == "harmonic":
        return 1.0 / (1.0 + beta * staleness)
    if decay == "exponential":
        return exp(-beta * staleness)
    return 1.0


def polynomial_discount(staleness: int, exponent: float) -> float:
    """s(tau) = (1 + tau)^-a, as the asynchronous baselines use it.

    >>> polynomial_discount(3, exponent=1.0)
    0.25
    """
    return float((1 + staleness) ** -exponent)


def normalised(raw: Sequence[float]) -> list[float]:
    """Weights that sum to one: raw / S. Empty or all-zero input has no such weights and gives zeros.

    >>> normalised([1.0, 3.0])
    [0.25, 0.75]
    """
    total = sum(raw)
    return [value / total for value in raw] if total > 0 else [0.0 for _ in raw]
