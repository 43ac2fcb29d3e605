"""Strategies side by side over the same seeds: means, spreads and paired differences.

Every seed gives each strategy the same queues, faults, data and first model, so differences are taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import atan, cos, pi, sin, sqrt
from statistics import fmean, stdev
from typing import Any

Summary = Mapping[str, Any]


@cache
def t95(degrees: int) -> float:
    """Student's t, two-sided 95 %, by halving the range in which it lies: exact, and without scipy.

    >>> [round(t95(degrees), 6) for degrees in (1, 4, 31, 100)]
    [12.706205, 2.776445, 2.039513, 1.983972]
    """
    low, high = 1.9, 13.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _share_within(middle, degrees) < 0.95 else (low, middle)
    return middle


def _share_within(t: float, degrees: int) -> float:
    """Of Student's distribution, between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd = atan(t / sqrt(degrees)), degrees % 2 == 1
    term = cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 if odd else 1, degrees - 2, 2):
        term *= k / (k + 1) * cos(angle) ** 2
        total += term
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds. `sd` needs two values; `half_width` is of its 95 % interval."""

    count: int  # seeds with a value
    mean: float | None
    sd: float | None
    half_width: float | None


def estimate(values: Sequence[float | None]) -> Estimate:
    """Of the values that exist.

    >>> estimate([1.0, 3.0, None]).mean
    2.0
    """
    known = [v for v in values if v is not None]
    if not known:
        return Estimate(0, None, None, None)
    if len(known) == 1:
        return Estimate(1, known[0], None, None)
    sd = stdev(known)
    return Estimate(len(known), fmean(known), sd, t95(len(known) - 1) * sd / sqrt(len(known)))


def figure(summary: Summary, key: str) -> float | None:
    """One figure by its dotted key; targets such as time_to.0.95 keep their point.

    >>> figure({"time_to": {"0.95": 16.7}}, "time_to.0.95")
    16.7
    """
    head, _, rest = key.partition(".")
    value = summary[head] if not rest else summary[head][rest]
    return None if value is None else float(value)


def estimates(runs: Mapping[str, Sequence[Summary]], key: str) -> dict[str, Estimate]:
    """A figure of every strategy."""
    return {strategy: estimate([figure(s, key) for s in summaries]) for strategy, summaries in runs.items()}


def paired(runs: Mapping[str, Sequence[Summary]], key: str, against: str) -> dict[str, Estimate]:
    """Strategy minus `against`, over the seeds in which both have the figure."""
    reference = {s["seed"]: figure(s, key) for s in runs[against]}
    result = {}
    for strategy, summaries in runs.items():
        if strategy != against:
            pairs = [(figure(s, key), reference[s["seed"]]) for s in summaries]
            result[strategy] = estimate([a - b for a, b in pairs if a is not None and b is not None])
    return result
