"""The Lemma's staleness bound, checked run by run.

Lemma 1: if gamma*T + delta >= max over k of rho_k * sqrt(2 log(K*R/epsilon)), where forecast errors of facility k are
rho_k-sub-Gaussian, then with probability 1 - epsilon or more no update of a run is staler than ceil(1 + gamma).
docs/protocol.md shows why ceil(gamma) is what the published rule gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Final

from fedqueue_reproduction.bound import lemma_bound, sharper_bound
from fedqueue_reproduction.error_distribution import reach
from fedqueue_reproduction.experiment import Cell
from fedqueue_reproduction.findings import Findings

GAMMA: Final = 0.2  # the paper's
EPSILON: Final = 0.05


@dataclass(frozen=True, slots=True)
class BoundCheck:
    """The runs of one cell against the bound. `given` and `needed` are both sides of the condition, in seconds."""

    runs: int
    most: int  # greatest staleness of any update
    above: int  # runs with an update staler than ceil(1 + gamma)
    above_sharper: int  # ... than ceil(gamma)
    given: float
    needed: float  # mean over the runs
    met: int  # runs whose errors meet the condition
    above_met: int  # of these, runs with an update staler than ceil(1 + gamma)
    above_sharper_met: int  # ... than ceil(gamma)


def bound_checks(found: Findings) -> list[tuple[Cell, BoundCheck]]:
    """Every cell that has a margin and whose runs kept their forecast errors."""
    checks = []
    for cell in found.experiment.cells():
        records = found.runs.of(cell.row.name, cell.setting)
        if any(record.get("errors") for record in records.values()):
            config = found.experiment.config_of(cell, min(records))
            options = config.options()
            margin = getattr(options, "margin", None)
            length = getattr(options, "round_length", None) or config.run.round_length
            one = None if margin is None else check_bound(records.values(), round_length=length, margin=margin)
            if one is not None:
                checks.append((cell, one))
    return checks


def check_bound(
    records: Iterable[Mapping[str, Any]],
    *,
    round_length: float,
    margin: float,
    gamma: float = GAMMA,
    epsilon: float = EPSILON,
) -> BoundCheck | None:
    """None without runs that have their forecast errors. The scale rho_k of a run is the standard deviation of its
    errors: the least that a sub-Gaussian scale can be, so the condition is judged generously."""
    given = gamma * round_length + margin
    checked = [(record["max_staleness"], needed(record, epsilon)) for record in records if record.get("errors")]
    if not checked:
        return None
    lemma, sharper = lemma_bound(gamma), sharper_bound(gamma)
    return BoundCheck(
        runs=len(checked),
        most=max(most for most, _ in checked),
        above=sum(most > lemma for most, _ in checked),
        above_sharper=sum(most > sharper for most, _ in checked),
        given=given,
        needed=fmean(least for _, least in checked),
        met=sum(least <= given for _, least in checked),
        above_met=sum(least <= given and most > lemma for most, least in checked),
        above_sharper_met=sum(least <= given and most > sharper for most, least in checked),
    )


def needed(record: Mapping[str, Any], epsilon: float = EPSILON) -> float:
    """The right side of the Lemma's condition, in seconds, with the errors and the rounds of this run.

    >>> round(needed({"errors": {"a": [1.0, -1.0]}, "rounds": 50}), 2)
    3.72
    """
    scale = max((pstdev(errors) for errors in record["errors"].values() if len(errors) > 1), default=0.0)
    return reach(scale, epsilon / max(len(record["errors"]) * record["rounds"], 1))
