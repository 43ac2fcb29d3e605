"""Strategies side by side over the same seeds: means, spreads and paired differences.

Every seed gives each strategy the same queues, faults, data and first model, so differences are taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Final

Summary = Mapping[str, Any]

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom.
_T95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_Z95: Final = 1.959963984540054  # the normal value, which t comes to


def t95(degrees: int) -> float:
    """Student's t, two-sided 95 %. Beyond the table its expansion around the normal value is right to five decimals.

    >>> t95(4), round(t95(31), 3), round(t95(100), 3)
    (2.776, 2.04, 1.984)
    """
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z, n = _Z95, float(degrees)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


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
