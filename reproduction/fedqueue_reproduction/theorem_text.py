"""What `fedqueue bound --theorem` found, for a person at a terminal of 80 columns: tables, then plain words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from fedqueue.cli import terminal
from fedqueue_reproduction.theorem_results import CaseFigures, Span
from fedqueue_reproduction.wording import count, scientific

CONSTANTS: Final = (
    ("L", "smoothness", "below", "of every F_k"),
    ("L of F alone", "mean_smoothness", "below", ""),
    ("sigma^2", "noise", "below", "of a step"),
    ("G", "dissimilarity", "below", "of the F_k"),
    ("D", "gap", "above", "F(w_0) - F*"),
    ("tau_max", "staleness", "exact", ""),
    ("E_min", "least_steps", "exact", "fewest steps"),
    ("E_max", "most_steps", "exact", "most steps"),
    ("h", "least_stride", "exact", "least rate x steps"),
    ("H", "most_stride", "exact", "most rate x steps"),
)
"""Symbol, figure, the side that it is estimated from, what it is."""

_OF: Final = {"stated": "the theorem", "proof": "its proof", "explicit": "explicit"}


def show(everything: Sequence[CaseFigures]) -> None:
    """On standard output; prose is wrapped to the terminal."""
    say = partial(terminal.console().print, markup=False)
    for one in everything:
        _show_case(one)
        for sentence in verdict(one):
            say(sentence)
        if one.departures:
            say(f"Beside the theorem: {'; '.join(one.departures)}.")
        say()
    say(
        "known from below: the greatest that was seen at the models of these runs; at others it may be more, and the "
        "bounds with it, so a bound that is made of it is optimistic. L: the greatest change of a gradient per length, "
        "found by a search at some models, and between models that follow each other. sigma^2: over batches at the "
        "same models. G: at every model. known from above: F* is taken for the least loss there can be. exact: as the "
        "ledger has it. X: mean squared imbalance of the shares that facilities have in a round. docs/theorem.md has "
        "the proofs."
    )


def _show_case(one: CaseFigures) -> None:
    seeds = [run.seed for run in one.runs]
    which = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    title = f"{one.label}: rate {scientific(one.rate)}, {one.rounds} rounds, {count(len(seeds), 'seed')} ({which})"
    rows: list[tuple[str, ...]] = [
        (f"{symbol}  {what}".strip(), *_span(one.span(name)), side) for symbol, name, side, what in CONSTANTS
    ]
    imbalance = Span.of([run.imbalance[-1] for run in one.runs])
    rows.append(("X  imbalance", *_span(imbalance), "exact"))
    terminal.show_table(title, ("constant", "mean", "least", "most", "known from"), rows)
    rows = [
        (
            judged.text,
            _OF[judged.of],
            scientific(judged.left.mean),
            scientific(judged.right.mean).replace("never", "-"),
            "yes" if judged.held == len(one.runs) else f"in {judged.held} of {len(one.runs)}" if judged.held else "no",
            "any" if judged.rate is None else scientific(judged.rate).replace("never", "any"),
        )
        for judged in one.conditions
    ]
    terminal.show_table("Conditions", ("condition", "of", "left", "right", "holds", "rate that meets it"), rows)
    rows = []
    for place in _rows(one.at):
        measured, stated, explicit = one.measured[place].mean, one.stated[place], one.explicit[place]
        times = (_times(stated, measured), _times(explicit, measured))
        rows.append((f"{one.at[place]:,}", *map(scientific, (measured, stated, explicit)), *times))
    heads = ("R", "measured", "stated", "explicit", "stated/measured", "explicit/measured")
    terminal.show_table("Mean of |grad F|^2 over R rounds, and its bounds (stated: C0 = C1 = 1)", heads, rows)


def _span(found: Span) -> tuple[str, str, str]:
    return scientific(found.mean), scientific(found.least), scientific(found.most)


def _rows(at: Sequence[int]) -> list[int]:
    """The places of 1, 10, 100 ... as nearly as there are points, and of the last."""
    wanted, power = [], 1
    while power < at[-1]:
        wanted.append(min(range(len(at)), key=lambda place, goal=power: abs(at[place] - goal)))  # type: ignore[misc]
        power *= 10
    return sorted({*wanted, len(at) - 1})


def _times(bound: float, measured: float) -> str:
    return scientific(bound / measured) if measured > 0 else "-"


def verdict(one: CaseFigures) -> list[str]:
    """What follows, a sentence each."""
    measured, stated, explicit = one.measured[-1].mean, one.stated[-1], one.explicit[-1]
    if one.holds("stated"):
        said = ["The theorem's condition on the rate holds."]
    else:
        said = [
            f"The theorem's condition on the rate does not hold; it would at {scientific(one.allowed_rate or 0.0)}."
        ]
    if one.least_constant > 1:
        said.append(
            f"The stated bound with C0 = C1 = 1 is broken: what was measured is up to {scientific(one.least_constant)} "
            "times as much, so the constants must be at least that."
        )
    else:
        said.append(
            f"With C0 = C1 = 1 the stated bound holds, and is {scientific(stated / measured)} times what was measured "
            f"after {one.at[-1]:,} rounds. {_worth(stated, one.level, one.rounds_stated)}"
        )
    if one.holds("explicit"):
        said.append(
            f"The explicit bound {'holds' if one.is_above else 'is broken'}: it is {scientific(explicit / measured)} "
            f"times what was measured. {_worth(explicit, one.level, one.rounds_explicit)}"
        )
    else:
        rate = min(judged.rate or 0.0 for judged in one.conditions if judged.of == "explicit")
        said.append(f"The explicit bound is not proved at this rate; it would be at {scientific(rate)}.")
    return said


def _worth(bound: float, level: float, rounds: float) -> str:
    if bound <= level:
        return f"It says something: no squared gradient of the run is above {scientific(level)}."
    if rounds == float("inf"):
        when = "no rate that it allows and no number of rounds would change that"
    else:
        when = f"at the best rate that it allows it would after {scientific(rounds)} rounds"
    return f"It says nothing: it is {scientific(bound / level)} times the greatest squared gradient of the run; {when}."
