"""Theorem 1 of the paper, as arithmetic: both bounds on the squared gradient norm, and the conditions on the rate.

    as the paper states it, with constants C0 and C1 that it does not give:
        mean over r < R of |grad F(w_r)|^2  <=  C0 * D / (eta E_min R) + C1 * eta E_max (L^2 tau^2 + G^2 + sigma^2)
        if eta <= 1 / (8 L E_max)

    with every constant given, from a proof that docs/theorem.md writes out:
        mean over r < R of |grad F(w_r)|^2  <=  30/11 * [ D / (h R) + H/h * ( X G^2 + 128/15 (L H)^2 G^2
                                                + L eta sigma^2 + (94/45 + 64/15 tau^2) L^2 H eta sigma^2 ) ]
        if L H <= 1/8 and L H tau <= 1/4

D is F(w_0) - F*, and eta the base rate. A *stride* is learning rate times steps of an update: h is the least of a run,
H the greatest. X is the mean over rounds of the squared imbalance: how far the shares that facilities have in a round
are from their data weights. Who measured all this is not asked here: see theorem_measure.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Final, Literal

import numpy as np

Of = Literal["stated", "proof", "explicit"]
"""What a condition belongs to: the theorem, a step of its proof that is in no condition, or the explicit bound."""

EXPLICIT: Final = 30 / 11  # what stands before the explicit bound
_RATES: Final = 2000  # tried from the greatest down, over twelve powers of ten


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the bounds are made of, as far as one run shows it."""

    smoothness: float  # L, of every facility's objective
    noise: float  # sigma^2, of one step's gradient, at the facility where it is greatest
    dissimilarity: float  # G
    gap: float  # F(w_0) - F*
    staleness: int  # tau_max
    least_steps: int  # E_min, over all updates
    most_steps: int  # E_max
    rate: float  # eta_base
    least_stride: float  # h
    most_stride: float  # H

    def at_rate(self, rate: float) -> Constants:
        """The same with another base rate: who waits how long and does how many steps does not hang on it."""
        times = rate / self.rate
        return replace(self, rate=rate, least_stride=times * self.least_stride, most_stride=times * self.most_stride)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """`left` must not be above `right`."""

    of: Of
    text: str
    left: float
    right: float
    rate: float | None  # the greatest base rate with which it would hold; None: that is not what it asks of

    @property
    def holds(self) -> bool:
        return self.left <= self.right


# The bounds ---------------------------------------------------------------------------------------------


def stated_bound(found: Constants, rounds: int, first: float = 1.0, second: float = 1.0) -> float:
    """The right side of the theorem; `first` and `second` are C0 and C1.

    >>> found = Constants(smoothness=2.0, noise=0.5, dissimilarity=1.0, gap=3.0, staleness=1, least_steps=10,
    ...     most_steps=50, rate=0.001, least_stride=0.01, most_stride=0.02)
    >>> round(stated_bound(found, 100), 6)  # 3 / (0.001 * 10 * 100) + 0.001 * 50 * (4 + 1 + 0.5)
    3.275
    """
    travelled, fixed = _stated_terms(found)
    return first * travelled / rounds + second * fixed


def _stated_terms(found: Constants) -> tuple[float, float]:
    """What is divided by the rounds, and what is not."""
    drift = (found.smoothness * found.staleness) ** 2
    return (
        found.gap / (found.rate * found.least_steps),
        found.rate * found.most_steps * (drift + found.dissimilarity**2 + found.noise),
    )


def explicit_bound(found: Constants, rounds: int, imbalance: float) -> float:
    """The right side with explicit constants; `imbalance` is X, the mean of its squares over these rounds."""
    travelled, fixed = _explicit_terms(found, imbalance)
    return travelled / rounds + fixed


def _explicit_terms(found: Constants, imbalance: float) -> tuple[float, float]:
    L, H, rate = found.smoothness, found.most_stride, found.rate
    error = (
        (imbalance + 128 / 15 * (L * H) ** 2) * found.dissimilarity**2
        + L * rate * found.noise
        + (94 / 45 + 64 / 15 * found.staleness**2) * L**2 * H * rate * found.noise
    )
    return EXPLICIT * found.gap / found.least_stride, EXPLICIT * H / found.least_stride * error


def shares(strides: Sequence[tuple[int, float, float]], facilities: int) -> list[float]:
    """What each facility has of a round: `strides` are (facility, weight, stride) of its updates.

    >>> [round(share, 3) for share in shares([(0, 0.6, 0.01), (1, 0.4, 0.01)], 3)]
    [0.6, 0.4, 0.0]
    """
    each = [0.0] * facilities
    for facility, weight, stride in strides:
        each[facility] += weight * stride
    total = sum(each)
    return [one / total for one in each]


def imbalance(each: Sequence[float], data_weights: Sequence[float]) -> float:
    """How far shares are from data weights, 0 to 2.

    >>> round(imbalance([0.6, 0.4], [0.5, 0.5]), 6)
    0.2
    """
    return sum(abs(share - weight) for share, weight in zip(each, data_weights, strict=True))


# The conditions -----------------------------------------------------------------------------------------


def conditions(found: Constants, rounds: int) -> list[Condition]:
    """Every condition on the rate, in the order of `Of`. Those of the proof have the smallest constants that its own
    inequalities leave: c1 = 1/2, c3 = 4, c7 = 2 c3."""
    L, tau, per_rate = found.smoothness, found.staleness, found.most_stride / found.rate
    stated = _over(1, 8 * L * found.most_steps)
    whole = _over(1, found.least_steps * L * sqrt(8 * tau * rounds))
    falls = _over(1, 16 * found.least_steps * L**2 * tau * rounds)
    return [
        Condition(of="stated", text="eta <= 1 / (8 L E_max)", left=found.rate, right=stated, rate=stated),
        Condition(of="proof", text="eta <= 1 / (E_min L sqrt(8 tau R))", left=found.rate, right=whole, rate=whole),
        Condition(of="proof", text="eta <= 1 / (16 E_min L^2 tau R)", left=found.rate, right=falls, rate=falls),
        Condition(
            of="explicit", text="L H <= 1/8", left=L * found.most_stride, right=1 / 8, rate=_over(1, 8 * L * per_rate)
        ),
        Condition(
            of="explicit",
            text="L H tau <= 1/4",
            left=L * found.most_stride * tau,
            right=1 / 4,
            rate=_over(1, 4 * L * per_rate * tau),
        ),
    ]


def _over(number: float, by: float) -> float:
    """Nothing is asked of the rate where there is no staleness, or no curvature."""
    return number / by if by > 0 else inf


# What a bound is worth ----------------------------------------------------------------------------------


def least_constant(measured: float, bound: float) -> float:
    """What C0 = C1 must be at least, if the bound with both at 1 is to be above what was measured."""
    return measured / bound


def rounds_needed(found: Constants, level: float, imbalance: float | None = None) -> float:
    """The fewest rounds after which a bound is below `level` with the best rate that its conditions allow: the stated
    bound with C0 = C1 = 1, or with an `imbalance` the explicit one. Infinite: it never is.

    >>> found = Constants(smoothness=1.0, noise=0.0, dissimilarity=1.0, gap=0.5, staleness=0, least_steps=1,
    ...     most_steps=1, rate=0.01, least_stride=0.01, most_stride=0.01)
    >>> round(rounds_needed(found, 0.1))  # 4 * D * G^2 / level^2
    200
    >>> rounds_needed(found, 0.1, imbalance=0.5)
    inf
    """
    terms: Callable[[Constants], tuple[float, float]]
    if imbalance is None:
        of: Of = "stated"
        terms = _stated_terms
    else:
        of, share = "explicit", imbalance
        terms = lambda constants: _explicit_terms(constants, share)  # noqa: E731
    most = min(one.right / one.left * found.rate for one in conditions(found, 1) if one.of == of and one.left > 0)
    fewest = inf
    for rate in np.geomspace(min(most, 1e6), min(most, 1e6) * 1e-12, _RATES):
        travelled, fixed = terms(found.at_rate(float(rate)))
        if fixed < level:
            fewest = min(fewest, travelled / (level - fixed))
    return fewest
