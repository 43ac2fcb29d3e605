"""The tables of the page, as Markdown: the paper's figures beside ours, claims and verdicts, the Lemma, winners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fedqueue_reproduction.claims import Check, Comparison, Judgement, Runs, check, condense, sample
from fedqueue_reproduction.experiment import Claim, Experiment, Row, setting_text
from fedqueue_reproduction.findings import Findings
from fedqueue_reproduction.lemma import EPSILON, GAMMA, bound_checks
from fedqueue_reproduction.tuning import ranked
from fedqueue_reproduction.wording import beside, cell, count, gain, head, in_one_seed, number, span, versus

MOST_TABLES: Final = 4  # settings that get a table each; more are the lines of one table a figure
MOST_LINES: Final = 6  # settings that a claim lists one by one


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A Markdown table; the first column is text, and the others stand to the right if they are `numbers`.

    >>> print(table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    sides = ["---", *(["---:" if numbers else "---"] * (len(heads) - 1))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(sides)}|"]
    lines += [f"| {' | '.join(text.replace('|', '/') for text in row)} |" for row in rows]
    return "\n".join(lines)


# Figures ------------------------------------------------------------------------------------------------


def figure_tables(found: Findings) -> str:
    """The paper's rows and ours: a table a setting, or a table a figure where there are many settings."""
    settings = found.settings()
    if len(settings) <= MOST_TABLES:
        made = [_setting_table(found, setting) for setting in settings]
    else:
        keys = [key for key in found.experiment.figures if _known(found, key)]
        made = [_figure_table(found, key, settings) for key in keys]
    notes = ["± is the half width of the 95 % interval of the mean over seeds."]
    if any(_short(found, key, setting) for key in found.experiment.figures for setting in settings):
        notes.append(
            "(7/10): only 7 of 10 seeds reached it within the run; the figure is then the median over all seeds, "
            "or `>` the end of the run if most never did."
        )
    return "\n\n".join([*made, " ".join(notes)])


def _setting_table(found: Findings, setting: Mapping[str, str]) -> str:
    experiment, name = found.experiment, setting_text(setting)
    rows = []
    for row in found.rows(setting):
        published = experiment.published(row, setting)
        if published:
            cells = [f"*{number(key, published[key])}*" if key in published else "" for key in experiment.figures]
            rows.append([f"*{row.label}, paper*", *cells])
        rows.append([row.label, *(_ours(found.runs, row, name, key) for key in experiment.figures)])
    made = table(["", *(head(key) for key in experiment.figures)], rows)
    return f"**{name}**\n\n{made}" if name else made


def _figure_table(found: Findings, key: str, settings: Sequence[Mapping[str, str]]) -> str:
    experiment = found.experiment
    rows = [row for row in experiment.rows if any(row in found.rows(setting) for setting in settings)]
    lines = []
    paper = False
    for setting in settings:
        cells = []
        for row in rows:
            published = experiment.published(row, setting).get(key)
            paper = paper or published is not None
            said = _ours(found.runs, row, setting_text(setting), key)
            cells.append(said if published is None else f"{said} *[{number(key, published)}]*")
        lines.append([setting_text(setting), *cells])
    title = f"**{head(key)}**" + (" *[paper]*" if paper else "")
    return f"{title}\n\n{table(['', *(row.label for row in rows)], lines)}"


def _ours(runs: Runs, row: Row, setting: str, key: str) -> str:
    return cell(key, sample(runs.readings(row.name, setting, key).values()))


def _known(found: Findings, key: str) -> bool:
    return any(found.runs.readings(r.name, setting_text(s), key) for s in found.settings() for r in found.rows(s))


def _short(found: Findings, key: str, setting: Mapping[str, str]) -> bool:
    name = setting_text(setting)
    each = (found.runs.readings(row.name, name, key).values() for row in found.rows(setting))
    return any(not one.reached for readings in each for one in readings)


def agreement(found: Findings) -> str:
    """How many of the published figures lie in our intervals, a setting."""
    said = []
    for setting in found.settings():
        name = setting_text(setting)
        checks = [
            check(found.runs, key, row.name, name, value)
            for row in found.rows(setting)
            for key, value in found.experiment.published(row, setting).items()
            if not (key.startswith("movement_ratio") and row.name == "fedqueue")  # 1 by definition
        ]
        measured = [one for one in checks if one.verdict != "not measured"]
        if measured:
            under = f" ({name})" if name else ""
            said.append(f"{sum(one.verdict == 'agrees' for one in measured)} of {len(measured)}{under}")
    return f"Published figures that lie in our 95 % intervals: {', '.join(said)}." if said else ""


# Claims -------------------------------------------------------------------------------------------------


def claim_table(found: Findings) -> str:
    """Every claim with what the paper has for it, what came out under each setting, and the verdict."""
    rows = []
    for claim, judgement in found.judgements:
        rows.append([claim.text, claim.paper, _found(found.experiment, claim, judgement), f"**{judgement.text}**"])
    return table(["claim", "paper", "here", "verdict"], rows, numbers=False)


def _found(experiment: Experiment, claim: Claim, judgement: Judgement) -> str:
    """What came out, a line a setting, or a line a verdict where there are many settings."""
    each = judgement.each
    run = any(one.seeds for one in each if isinstance(one, Comparison))
    lines = [] if claim.than is None or not run else [f"{subject(experiment, claim)}:"]
    if len(each) <= MOST_LINES:
        lines += [f"{one.setting}: {one_line(claim, one)}" if one.setting else one_line(claim, one) for one in each]
        return "<br>".join(lines)
    for verdict in dict.fromkeys(one.verdict for one in each):
        alike = [one for one in each if one.verdict == verdict]
        where = "; ".join(condense([one.setting for one in alike], [one.setting for one in each]))
        size = span(claim.figure, [one for one in alike if isinstance(one, Comparison)])
        lines.append(f"{verdict} in {len(alike)} of {len(each)} ({where}){f': {size}' if size else ''}")
    return "<br>".join(lines)


def one_line(claim: Claim, one: Comparison | Check) -> str:
    """The verdict under one setting and what it rests on."""
    if isinstance(one, Check):
        if one.verdict == "not measured":
            return f"one seed, no verdict: {beside(claim.figure, one)}" if one.ours.seeds else one.verdict
        return f"{one.verdict}: {beside(claim.figure, one)}"
    if one.verdict == "not measured":
        return in_one_seed(claim.figure, one) if one.seeds else one.verdict
    return f"{one.verdict}: {gain(claim.figure, one)}{versus(one, claim.by)}"


def subject(experiment: Experiment, claim: Claim) -> str:
    """Whom the size of a difference is about, in few words."""
    label = short_label(experiment, claim.better)
    return label if len(label) <= 12 else claim.better


def short_label(experiment: Experiment, name: str) -> str:
    """A row's label up to a bracket or colon."""
    label = next(row.label for row in experiment.rows if row.name == name)
    return label.partition(" (")[0].partition(":")[0]


# The Lemma ----------------------------------------------------------------------------------------------


def lemma_table(found: Findings) -> str:
    """The staleness bound against every run that kept its forecast errors; empty if none did."""
    rows = [
        [
            found_cell.row.label,
            found_cell.setting,
            str(one.runs),
            str(one.most),
            share(one.above, one.runs),
            share(one.above_sharper, one.runs),
            f"{one.given:.1f}",
            f"{one.needed:.1f}",
            share(one.met, one.runs),
            share(one.above_met, one.met),
        ]
        for found_cell, one in bound_checks(found)
    ]
    if not rows:
        return ""
    heads = ["", "setting", "runs", "greatest staleness", "above ceil(1+gamma)", "above ceil(gamma)"]
    heads += ["gamma·T + delta, s", "needed, s", "condition met", "of these above ceil(1+gamma)"]
    about = (
        f"The Lemma's staleness bound, run by run, with the paper's gamma {GAMMA:g}: if the margin is large enough, at "
        f"most {100 * EPSILON:g} % of runs have an update staler than ceil(1+gamma). Whether it is large enough is "
        "judged with the standard deviation of each run's own forecast errors in the place of rho. That is generous, "
        "since no sub-Gaussian scale is smaller. Why ceil(gamma) is what the published rule gives is told in "
        "[protocol.md](protocol.md#lemma-1-and-the-bound-that-holds-here)."
    )
    return f"{about}\n\n{table(heads, rows)}"


def share(part: int, whole: int) -> str:
    """
    >>> share(3, 40), share(0, 0)
    ('3 (8 %)', '-')
    """
    return f"{part} ({100 * part / whole:.0f} %)" if whole else "-"


# Tuning -------------------------------------------------------------------------------------------------


def winner_table(found: Findings) -> str:
    """The best row of every grid, a line a grid and setting; empty without grids or runs."""
    experiment = found.experiment
    if not experiment.grids or found.results is None or experiment.objective is None:
        return ""
    labels = {grid.name: grid.label or grid.name for grid in experiment.grids}
    rows, sizes = [], set()
    for (grid, setting), choices in ranked(experiment, found.results.sorted()).items():
        reached = sum(choice.reached == choice.seeds for choice in choices)
        best, figure = choices[0], choices[0].figure
        first, second = (number(figure, choice.objective) for choice in (best, choices[:2][-1]))
        rows.append(
            [labels[grid], setting, best.row.label, head(figure), first, second, f"{reached} of {len(choices)}"]
        )
        sizes.add(len(choices))
    if not rows:
        return ""
    heads = ["", "setting", "best", "judged by", "mean", "next best", "tries that reach it in all seeds"]
    seeds = experiment.seeds_of()
    tries = " to ".join(str(size) for size in sorted({min(sizes), max(sizes)}))
    about = (
        f"The best of {tries} tries a method, by its mean over {count(len(seeds), 'seed')} "
        f"({seeds[0]} to {seeds[-1]}) that are reported nowhere else:"
    )
    return f"{about}\n\n{table(heads, rows, numbers=False)}"
