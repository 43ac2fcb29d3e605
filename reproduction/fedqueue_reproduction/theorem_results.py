"""What runs make of Theorem 1: both sides of it over the rounds, what holds, and the file that keeps it.

    {"command": "...", "date": "...", "machine": {...}, "cases": [
    {"name": "digits", "label": "...", "rate": 0.1, ..., "runs": [{"seed": 1, ...}], "found": {...}},
    ...]}

A line is one case at one rate. `runs` is what was measured; `found` follows from it and is not read again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from fedqueue.errors import ConfigError, StorageError
from fedqueue.files import writing
from fedqueue.protocol.codec import read
from fedqueue.runs import rounded
from fedqueue_reproduction.theorem import (
    Condition,
    Constants,
    Of,
    conditions,
    explicit_bound,
    rounds_needed,
    stated_bound,
)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What one run showed."""

    seed: int
    rounds: int
    constants: Constants
    mean_smoothness: float  # L of F alone
    searched: float  # L by the search at some models; `constants` has the greater of this and `secant`
    secant: float  # L by what gradients changed between models that follow each other, along local training too
    least_gap: float  # F(w_0) - the least loss seen: from below, as the gap of `constants` is from above
    greatest_move: float  # |w_(r+1) - w_r|, the greatest
    empty_rounds: int  # without an update
    unfounded: int  # rounds t with an earlier s of which |grad F(w_s)|^2 > 2 |grad F(w_t)|^2 + 2 L^2 tau^2
    least_discount: float  # phi at the greatest staleness
    data_weights: list[float]
    mean_shares: list[float]  # what each facility had in the rounds, on average
    first_gradient: float  # |grad F(w_0)|^2
    greatest_gradient: float  # of any model
    last_gradient: float
    score: float
    at: list[int]  # R of the points below
    measured: list[float]  # mean of |grad F(w_r)|^2 over r < R
    used: list[int]  # rounds with an update among them
    measured_used: list[float]  # mean over these alone
    imbalance: list[float]  # mean over these of its squares


@dataclass(frozen=True, kw_only=True)
class Span:
    """A figure over the seeds."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Span:
        return cls(mean=fmean(values), least=min(values), most=max(values))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A condition over the seeds."""

    of: Of
    text: str
    left: Span
    right: Span
    held: int  # in so many runs
    rate: float | None  # the greatest that meets it in all of them


@dataclass(frozen=True, kw_only=True)
class CaseFigures:
    """One case at one rate. The theorem is about expectations on one problem; it holds for the mean over several
    problems if it holds for each, so both sides are averaged over the seeds, each with its own constants."""

    name: str
    label: str
    about: str
    config: str
    changes: list[str]
    least_loss: float
    models: int
    draws: int
    chosen: bool  # whether the rate is the config's, and not the one that the condition allows
    departures: list[str]
    runs: list[RunFacts]

    @property
    def rate(self) -> float:
        return self.runs[0].constants.rate

    @property
    def rounds(self) -> int:
        return min(run.rounds for run in self.runs)

    @cached_property
    def at(self) -> list[int]:
        """R, where all runs have a point."""
        return sorted(set.intersection(*(set(run.at) for run in self.runs)))

    @cached_property
    def measured(self) -> list[Span]:
        return [Span.of([run.measured[run.at.index(r)] for run in self.runs]) for r in self.at]

    @cached_property
    def stated(self) -> list[float]:
        """With C0 = C1 = 1."""
        return [fmean(stated_bound(run.constants, r) for run in self.runs) for r in self.at]

    @cached_property
    def explicit(self) -> list[float]:
        return [fmean(_explicit(run, r) for run in self.runs) for r in self.at]

    @cached_property
    def conditions(self) -> list[Judged]:
        each = [conditions(run.constants, run.rounds) for run in self.runs]
        return [_judge(alike) for alike in zip(*each, strict=True)]

    def holds(self, of: Of) -> bool:
        """Whether all its conditions are met in every run."""
        return all(one.held == len(self.runs) for one in self.conditions if one.of == of)

    @property
    def allowed_rate(self) -> float | None:
        """What the theorem's own condition allows; None: any."""
        rates = [one.rate for one in self.conditions if one.of == "stated" and one.rate is not None]
        return min(rates) if isfinite(min(rates)) else None

    @property
    def least_constant(self) -> float:
        """What C0 = C1 must be at least for the stated bound to hold at every R."""
        return max(found.mean / bound for found, bound in zip(self.measured, self.stated, strict=True))

    @property
    def is_above(self) -> bool:
        """Whether the explicit bound is above what was measured at every R, over the rounds that have updates."""
        return all(
            bound >= fmean(run.measured_used[run.at.index(r)] for run in self.runs)
            for r, bound in zip(self.at, self.explicit, strict=True)
        )

    @property
    def level(self) -> float:
        """The greatest squared gradient norm of any model: a bound above it says nothing."""
        return fmean(run.greatest_gradient for run in self.runs)

    @property
    def rounds_stated(self) -> float:
        return max(rounds_needed(run.constants, run.greatest_gradient) for run in self.runs)

    @property
    def rounds_explicit(self) -> float:
        return max(rounds_needed(run.constants, run.greatest_gradient, run.imbalance[-1]) for run in self.runs)

    def span(self, name: str) -> Span:
        """Of a constant or of another figure, over the runs."""
        holders = [run.constants if hasattr(run.constants, name) else run for run in self.runs]
        return Span.of([float(getattr(holder, name)) for holder in holders])


def _explicit(run: RunFacts, rounds: int) -> float:
    place = run.at.index(rounds)
    return explicit_bound(run.constants, run.used[place], run.imbalance[place])


def _judge(alike: Sequence[Condition]) -> Judged:
    rates = [one.rate for one in alike if one.rate is not None]
    return Judged(
        of=alike[0].of,
        text=alike[0].text,
        left=Span.of([one.left for one in alike]),
        right=Span.of([one.right for one in alike]),
        held=sum(one.holds for one in alike),
        rate=min(rates) if rates else None,
    )


# The file -----------------------------------------------------------------------------------------------


def as_json(figures: CaseFigures) -> dict[str, Any]:
    """What a line has; floats with six digits, and null where there is no end."""
    tree = dataclasses.asdict(figures)
    tree["found"] = {
        "rate": figures.rate,
        "measured": figures.measured[-1].mean,
        "stated_bound": figures.stated[-1],
        "explicit_bound": figures.explicit[-1],
        "least_constant": figures.least_constant,
        "greatest_gradient": figures.level,
        "rounds_until_stated_bound_says_something": _finite(figures.rounds_stated),
        "rounds_until_explicit_bound_says_something": _finite(figures.rounds_explicit),
        "conditions": [
            {
                "of": one.of,
                "text": one.text,
                "left": one.left.mean,
                "right": _finite(one.right.mean),
                "held": one.held,
                "rate": _finite(one.rate),
            }
            for one in figures.conditions
        ],
    }
    made: dict[str, Any] = rounded(tree)
    return made


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def as_text(head: dict[str, Any], everything: Sequence[CaseFigures]) -> str:
    """A line a case and rate, so that a change of one is a change of one line."""
    lines = ",\n".join(json.dumps(as_json(figures), allow_nan=False) for figures in everything)
    return f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n'


def write(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def load(path: Path) -> tuple[dict[str, Any], list[CaseFigures]]:
    """Command, day and machine; and the cases."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        head = {name: tree[name] for name in ("command", "date", "machine")}
        lines = [{name: value for name, value in line.items() if name != "found"} for line in tree["cases"]]
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path}: is no result of `fedqueue bound --theorem`") from None
    return head, [read(CaseFigures, line, "") for line in lines]
