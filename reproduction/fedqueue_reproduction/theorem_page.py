"""The section of the page about Theorem 1, from the result of `fedqueue bound --theorem`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from fedqueue_reproduction import theorem_results
from fedqueue_reproduction.tables import table
from fedqueue_reproduction.theorem_results import CaseFigures
from fedqueue_reproduction.wording import count, listed, scientific

RESULT: Final = "theorem.json"
PICTURE: Final = "theorem.png"
CAPTION: Final = (
    "Mean of |grad F|² over the first R rounds, and its bounds. Bands hold all seeds. A dashed bound is not proved "
    "there, since its condition on the rate is not met. In the shaded part a bound says nothing."
)

INTRODUCTION: Final = """\
**The bound on the gradient, beside what is measured.** In the paper: Theorem 1 (thm:main), which no experiment of it
looks at. [theorem.md](theorem.md) has its statement, how each constant is measured, where its proof has gaps, and the
proof of a bound with explicit constants. L, sigma² and G are the greatest that were seen at the models of these runs.
At other models they may be greater, so bounds are as low as they can be. The paper gives no values for C0 and C1; here
both are 1, and the *least constant* says what they must be at least."""


@dataclass(frozen=True)
class TheoremFindings:
    """A result file."""

    made: Mapping[str, Any]  # command, date, machine
    everything: list[CaseFigures]


def read_theorem(results_dir: Path) -> TheoremFindings | None:
    """None: it has not been run yet."""
    path = results_dir / RESULT
    return TheoremFindings(*theorem_results.load(path)) if path.exists() else None


def section(found: TheoremFindings, made: str, links: Mapping[str, str], image: Path) -> str:
    """`made` says when and on what; `links` leads to the folders of "experiments" and "results"."""
    everything = found.everything
    file = f"[theorem.toml]({links['experiments']}/theorem.toml), [results]({links['results']}/{RESULT})"
    parts = [
        "## Theorem 1",
        INTRODUCTION,
        f"`{found.made['command']}` ({file}): {made}",
        "\n".join(f"- **{one.label}** (`{one.name}`). {one.about}" for one in everything if one.chosen),
        *_sentences(everything),
        _bounds(everything),
        _constants(everything),
        "**Where the proof has gaps**, in the order of [theorem.md](theorem.md#where-the-proof-has-gaps):",
        _gaps(everything),
        f"![{CAPTION}]({image.as_posix()})\n\n*{CAPTION}*",
    ]
    return "\n\n".join(parts)


def _name(one: CaseFigures) -> str:
    return f"{one.label}, rate {scientific(one.rate)}"


def _sentences(everything: Sequence[CaseFigures]) -> list[str]:
    """What follows, in words."""
    return [said for said in (_on_rates(everything), _on_stated(everything), _on_explicit(everything)) if said]


def _on_rates(everything: Sequence[CaseFigures]) -> str:
    chosen = [one for one in everything if one.chosen]
    above = [one.rate / one.allowed_rate for one in chosen if one.allowed_rate and not one.holds("stated")]
    if not above:
        return ""
    met = listed([f"*{one.label}*" for one in chosen if one.holds("stated")]) or "none"
    said = (
        f"**The condition on the rate** holds with the rates of {met}. The rates at which the other models learn are "
        f"{scientific(min(above))} to {scientific(max(above))} times what it allows."
    )
    scores = []
    for one in chosen:
        again = next((other for other in everything if other.name == one.name and not other.chosen), None)
        if again is not None:
            scores.append(f"{100 * again.span('score').mean:.0f} instead of {100 * one.span('score').mean:.0f} %")
            scores[-1] += f" ({one.label})"
    return said + (f" At half of what it allows, scores after as many rounds are {listed(scores)}." if scores else "")


def _on_stated(everything: Sequence[CaseFigures]) -> str:
    said = ["**The bound as stated.**"]
    broken = [one for one in everything if one.holds("stated") and one.least_constant > 1]
    if broken:
        worst = max(one.least_constant for one in broken)
        said.append(
            f"With C0 = C1 = 1 it is broken in {_named(broken)}, where its condition holds: what is measured becomes "
            f"{scientific(worst)} times as much. With lower rates and more rounds the factor grows without end, so no "
            "constants save it: [theorem.md](theorem.md#a-case-in-which-it-cannot-hold) shows why."
        )
    others = [one for one in everything if one not in broken]
    if others:
        factors = [one.stated[-1] / one.measured[-1].mean for one in others]
        empty = [one.stated[-1] / one.level for one in others if one.stated[-1] > one.level]
        telling = [one for one in others if one.stated[-1] <= one.level]
        said.append(
            f"{'Elsewhere it' if broken else 'It'} is {scientific(min(factors))} to {scientific(max(factors))} times "
            "what is measured at the end of the run."
        )
        if empty:
            said.append(
                f"In {len(empty)} of {len(others)} it says nothing, since it is {scientific(min(empty))} to "
                f"{scientific(max(empty))} times the greatest squared gradient of any model in the run."
            )
        if telling:
            said.append(f"It says something in {_named(telling)}.")
    return " ".join(said)


def _on_explicit(everything: Sequence[CaseFigures]) -> str:
    proved = [one for one in everything if one.holds("explicit")]
    if not proved:
        return ""
    above = sum(one.is_above for one in proved)
    held = "all" if above == len(proved) else str(above)
    factors = [one.explicit[-1] / one.measured[-1].mean for one in proved]
    telling = [one for one in proved if one.explicit[-1] <= one.level]
    return (
        f"**The bound with explicit constants.** Its conditions are met in {len(proved)} of {len(everything)}, and it "
        f"holds in {held} of them: it is {scientific(min(factors))} to {scientific(max(factors))} times what is "
        "measured."
        + (f" It says something in {_named(telling)}." if telling else " It says nothing in any of them.")
        + " Where facilities have other shares than their data weights, X·G² keeps it high whatever the rate."
    )


def _named(some: Sequence[CaseFigures]) -> str:
    return listed([f"*{_name(one)}*" for one in some])


def _bounds(everything: Sequence[CaseFigures]) -> str:
    heads = ["", "rounds", "measured", "stated", "over measured", "least constant", "explicit", "over measured"]
    heads += ["greatest gradient²", "stated says something after", "explicit says something after"]
    rows = []
    for one in everything:
        measured, stated, explicit = one.measured[-1].mean, one.stated[-1], one.explicit[-1]
        rows.append(
            [
                _name(one),
                f"{one.rounds:,}",
                scientific(measured),
                _marked(scientific(stated), proved=one.holds("stated")),
                scientific(stated / measured),
                scientific(one.least_constant),
                _marked(scientific(explicit), proved=one.holds("explicit")),
                scientific(explicit / measured),
                scientific(one.level),
                _rounds(one.rounds_stated),
                _rounds(one.rounds_explicit),
            ]
        )
    note = (
        "Means over the seeds, at the end of the run. In brackets: a condition of this bound is not met, so it is only "
        "what its formula gives. The last columns: after how many rounds the bound would be below the greatest squared "
        "gradient of the run, with the best rate that its conditions allow."
    )
    return f"{table(heads, rows)}\n\n{note}"


def _marked(text: str, *, proved: bool) -> str:
    return text if proved else f"({text})"


def _rounds(rounds: float) -> str:
    return scientific(rounds if rounds == inf else float(ceil(rounds)))


def _constants(everything: Sequence[CaseFigures]) -> str:
    heads = ["", "L", "sigma²", "G", "D", "tau", "E_min", "E_max", "h", "H", "X", "condition met", "rate allowed"]
    columns: tuple[Callable[[CaseFigures], str], ...] = (
        *(_column(name) for name in ("smoothness", "noise", "dissimilarity", "gap")),
        lambda one: f"{one.span('staleness').most:.0f}",
        lambda one: f"{one.span('least_steps').least:.0f}",
        lambda one: f"{one.span('most_steps').most:.0f}",
        *(_column(name) for name in ("least_stride", "most_stride")),
        lambda one: scientific(fmean(run.imbalance[-1] for run in one.runs)),
        lambda one: f"{one.conditions[0].held} of {len(one.runs)}",
        lambda one: scientific(one.conditions[0].rate or 0.0),
    )
    rows = [[_name(one), *(column(one) for column in columns)] for one in everything]
    note = (
        "L, sigma², G, D, h, H and X are means over the seeds; tau and the numbers of steps are the extremes. "
        "*Condition met*: eta ≤ 1/(8·L·E_max), in so many runs. *Rate allowed*: that meets it in all of them."
    )
    return f"{table(heads, rows)}\n\n{note}"


def _column(name: str) -> Callable[[CaseFigures], str]:
    return lambda one: scientific(one.span(name).mean)


def _gaps(everything: Sequence[CaseFigures]) -> str:
    heads = ["", "L of F", "of the F_k", "mean shares of the facilities", "rate that the proof needs", "greatest move"]
    heads += ["L²·tau² fails in", "E_min(r)", "rounds without update", "beside the theorem"]
    rows = []
    for one in everything:
        shares = [fmean(run.mean_shares[k] for run in one.runs) for k in range(len(one.runs[0].mean_shares))]
        weights = one.runs[0].data_weights
        least, most = one.span("least_stride").least / one.rate, one.span("most_stride").most / one.rate
        needs = min(judged.rate or 0.0 for judged in one.conditions if judged.of == "proof")
        rows.append(
            [
                _name(one),
                scientific(one.span("mean_smoothness").mean),
                scientific(one.span("smoothness").mean),
                ", ".join(f"{share:.2f}" for share in shares)
                + (f" (weights {weights[0]:.2f})" if len(set(weights)) == 1 else ""),
                "any" if needs == inf else scientific(needs),
                scientific(one.span("greatest_move").most),
                f"{sum(run.unfounded for run in one.runs)} of {count(sum(run.rounds for run in one.runs), 'round')}",
                f"{least:.0f} to {most:.0f}",
                str(sum(run.empty_rounds for run in one.runs)),
                "; ".join(one.departures) or "nothing",
            ]
        )
    note = (
        "*L of F* and *of the F_k*: gap 1. *Mean shares*: what each facility has in a round, on average; where that is "
        "not its data weight, another function than F is minimised (gap 2). *Rate that the proof needs*: the lesser of "
        "its two unstated conditions, with the smallest constants that its inequalities allow (gap 3). *Greatest move* "
        "of the model in a round: at most 1 is taken for granted; *L²·tau² fails in* counts the rounds t in which an "
        "earlier |∇F(w_s)|² is above 2·|∇F(w_t)|² + 2·L²·tau² (gap 4). *E_min(r)*: the fewest steps of a round, from "
        "and to (gap 6). The last columns: gaps 7 and 8."
    )
    return f"{table(heads, rows, numbers=False)}\n\n{note}"
