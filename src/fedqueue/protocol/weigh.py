"""What an update is worth once the model has moved on: discounts (phi, s), weights, and the sum they make."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import exp
from typing import Literal, TypeVar

K = TypeVar("K", bound=Hashable)

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


def model_factors(current: K, shares: Sequence[tuple[float, K, K]], rule: str) -> dict[K, float]:
    """The whole models that enter the sum for the next model, each once, with their factors (which sum to one).

    Models are known by keys of the caller's choosing. `shares` are (weight, trained, base), oldest first.
    Rule "add_deltas": current + sum of weight * (trained - base).
    Rule "mix_models": current + sum of weight * (trained - current).
    The order is that of the sum: it decides the last bits. A model whose factor is zero is left out.

    >>> model_factors("v3", [(0.25, "a", "v3"), (0.5, "b", "v2")], "add_deltas")
    {'v3': 0.75, 'a': 0.25, 'v2': -0.5, 'b': 0.5}
    """
    if rule not in ("add_deltas", "mix_models"):
        raise ValueError(f"rule must be 'add_deltas' or 'mix_models', found {rule!r}")
    factors = {current: 1.0}
    for weight, trained, base in shares:
        start = base if rule == "add_deltas" else current
        for model, share in ((start, -weight), (trained, weight)):
            factors[model] = factors.get(model, 0.0) + share
    return {model: factor for model, factor in factors.items() if factor != 0.0}


def statistic_factors(current: K, shares: Sequence[tuple[float, K]], rule: str, *, from_first: bool) -> dict[K, float]:
    """The models whose running statistics are averaged for the next one, with factors of 0 to 1 that sum to one.

    `shares` are (weight, trained), oldest first. What layers measured is averaged over what was handed in, by weight.
    Rule "mix_models" mixes the current model's in, as it does with parameters, unless that is the first model of the
    run (`from_first`), whose statistics nobody measured.

    >>> statistic_factors("v3", [(0.25, "a"), (0.25, "b")], "add_deltas", from_first=False)
    {'a': 0.5, 'b': 0.5}
    >>> statistic_factors("v3", [(0.25, "a")], "mix_models", from_first=False)
    {'v3': 0.75, 'a': 0.25}
    """
    total = sum(weight for weight, _ in shares)
    if total <= 0:
        return {current: 1.0}
    rest = max(0.0, 1.0 - total) if rule == "mix_models" and not from_first else 0.0
    factors = {current: rest} if rest > 0 else {}
    for weight, trained in shares:
        if weight > 0:
            factors[trained] = factors.get(trained, 0.0) + weight / (total + rest)
    return factors
