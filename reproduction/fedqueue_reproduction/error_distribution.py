"""How errors are spread, and how far that is from what Lemma 1 assumes: that they are sub-Gaussian.

An error e with mean 0 is rho-sub-Gaussian if E[exp(x e)] <= exp(x^2 rho^2 / 2) for all x. Then it is above u with a
chance of at most exp(-u^2 / (2 rho^2)). The variance is the least that rho^2 can be, and a Gaussian needs no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import erfc, log, log1p, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SIGMAS: Final = (2, 3, 4)  # standard deviations at which tails are compared with a Gaussian's
NEAR: Final = 1.5  # times the variance: up to here a proxy is near that of a Gaussian sample
FAR: Final = 3.0  # times the variance: from here it is not near in any sense
ROUNDING: Final = 1e-9
_GRID: Final = 256  # places at which the moment generating function is looked at before the best one is refined


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How errors are spread. rho squared is the least variance proxy that the sample fits, on the side of delays that
    are longer than forecast (lambda > 0), which is the side the proof uses."""

    errors: int
    mean: float  # the Lemma assumes 0
    sd: float
    rho: float
    proxy_ratio: float | None  # rho^2 / sd^2: 1 for a Gaussian; None: all errors are the same
    proxy_ratio_below: float | None  # the same for lambda < 0
    proxy_support: float | None  # about so many errors decide rho
    skewness: float | None
    excess_kurtosis: float | None
    tail_ratios: tuple[float, ...] | None  # share of errors above mean + 2, 3, 4 sd over the share of a Gaussian


def reach(rho: float, chance: float) -> float:
    """A rho-sub-Gaussian error is above this with at most this chance: sqrt(2 rho^2 log(1 / chance)).

    >>> round(reach(2.0, 0.05 / 200), 3)      # K R = 4 * 50, epsilon = 0.05
    8.146
    """
    return rho * sqrt(-2 * log(chance))


def exceeded_by(values: Floats, chance: float) -> float:
    """The least of the values that no more than this share of them is above; the greatest, if the share is under one.

    >>> exceeded_by(np.array([1.0, 2.0, 3.0, 4.0]), 0.25), exceeded_by(np.array([1.0, 2.0]), 0.01)
    (3.0, 2.0)
    """
    above = min(int(chance * len(values) + ROUNDING), len(values) - 1)
    return float(np.partition(values, len(values) - 1 - above)[len(values) - 1 - above])


def log_mgf(standard: Floats, at: float) -> float:
    """log of the mean of exp(at * z), without overflow, and without cancellation where it is small."""
    powers = at * standard
    top = float(powers.max())
    if top < 1:
        return log1p(max(float(np.expm1(powers).mean()), ROUNDING - 1))
    return top + log(float(np.exp(powers - top).mean()))


def variance_proxy(standard: Floats) -> tuple[float, float]:
    """The least s^2 with M(x) <= exp(x^2 s^2 / 2) for all x > 0, of values with mean 0 and variance 1; and about how
    many of them decide it (the effective number of terms of M at the x that asks for most).

    M(x) is at most exp(x * greatest), so beyond x = 2 * greatest nothing asks for more than the variance does: the
    range is bounded. A sample is bounded too, so its proxy is finite even where none exists: it is a lower bound.
    """
    top = float(standard.max())
    places = np.geomspace(2e-3 * top, 2 * top, _GRID)
    asked = [2 * log_mgf(standard, x) / x**2 for x in places]
    best = int(np.argmax(asked))
    x = _highest(lambda x: 2 * log_mgf(standard, x) / x**2, places[max(0, best - 1)], places[min(best + 1, _GRID - 1)])
    ratio = 2 * log_mgf(standard, x) / x**2
    if ratio <= 1:  # the limit at x = 0 is the variance
        return 1.0, float(len(standard))
    weights = np.exp(x * (standard - top))
    return ratio, float(weights.sum() ** 2 / (weights**2).sum())


def _highest(of: Callable[[float], float], low: float, high: float) -> float:
    """Golden section, for one hill."""
    golden = (sqrt(5) - 1) / 2
    for _ in range(40):
        first, second = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, second) if of(first) > of(second) else (first, high)
    return (low + high) / 2


def shape_of(values: Floats) -> Shape:
    """Mean, spread and tails; moments are those of the sample."""
    mean, sd = float(values.mean()), float(values.std())
    if sd <= ROUNDING * max(1.0, abs(mean)):  # a queue that always waits the same
        undefined = dict.fromkeys(
            ("proxy_ratio", "proxy_ratio_below", "proxy_support", "skewness", "excess_kurtosis", "tail_ratios")
        )
        return Shape(errors=len(values), mean=mean, sd=0.0, rho=0.0, **undefined)
    standard = (values - mean) / sd
    above, support = variance_proxy(standard)
    below, _ = variance_proxy(-standard)
    return Shape(
        errors=len(values),
        mean=mean,
        sd=sd,
        rho=sd * sqrt(above),
        proxy_ratio=above,
        proxy_ratio_below=below,
        proxy_support=support,
        skewness=float((standard**3).mean()),
        excess_kurtosis=float((standard**4).mean()) - 3,
        tail_ratios=tuple(float((standard > k).mean()) / gaussian_tail(k) for k in SIGMAS),
    )


def gaussian_tail(sigmas: float) -> float:
    """P(z > sigmas)."""
    return erfc(sigmas / sqrt(2)) / 2
