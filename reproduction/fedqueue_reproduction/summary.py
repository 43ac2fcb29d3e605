"""What the page says first: which claims of the paper hold, how just in time compares, how coarse the times are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from fedqueue_reproduction.bound import lemma_bound, sharper_bound
from fedqueue_reproduction.claims import Comparison, Judgement, Overall, compare, condense, judge
from fedqueue_reproduction.experiment import Claim, matches, setting_text
from fedqueue_reproduction.findings import Findings
from fedqueue_reproduction.lemma import GAMMA, bound_checks
from fedqueue_reproduction.tables import short_label, subject, table
from fedqueue_reproduction.wording import count, head, listed, span, versus

OURS: Final = "jit"
MAIN: Final = ("synthetic", "ablation", "variability", "margin")
"""What the paper's main text rests on: claims that are told one by one."""
COMPARED: Final = {"synthetic": "with the paper's settings", "tuned": "each method tuned"}
"""The experiments in which just in time stands beside all methods."""

_GROUPS: Final[dict[Overall, str]] = {
    "holds": "these claims hold in every setting",
    "holds only in": "these hold only in some settings",
    "does not hold": "these do not hold",
    "not decided": "these are not decided, since no setting shows a difference",
}


@dataclass(frozen=True)
class _Judged:
    found: Findings
    claim: Claim
    judgement: Judgement

    @property
    def tuned(self) -> bool:
        """Whether it is the paper's claim with other settings than the paper's."""
        return any(row.tuned for row in self.found.experiment.rows)


def summary(everything: Sequence[Findings]) -> str:
    judged = [_Judged(found, claim, one) for found in everything for claim, one in found.judgements]
    compared = [one for one in judged if one.claim.than is not None]
    published = [one for one in compared if not one.tuned]
    parts = [_counts(published, [one for one in judged if one.claim.than is None])]
    if any(found.runs for found in everything):
        main = [one for one in published if one.found.name in MAIN]
        parts += [_overview(published)]
        parts += [_group(f"Of the main text, {title}:", main, verdict) for verdict, title in _GROUPS.items()]
        parts += [
            _group(f"With every method tuned, {title}:", [one for one in compared if one.tuned], verdict)
            for verdict, title in _GROUPS.items()
        ]
        parts += [_regimes(compared), _lemma(everything), _just_in_time(everything), _coarseness(everything)]
    return "\n\n".join(part for part in parts if part)


def _counts(compared: Sequence[_Judged], values: Sequence[_Judged]) -> str:
    numbers = {verdict: sum(one.judgement.verdict == verdict for one in compared) for verdict in _GROUPS}
    measured = sum(numbers.values())
    waiting = len(compared) - measured
    if not measured:
        return f"Nothing has been run yet: {count(len(compared), 'claim')} of the paper wait for their runs."
    hold, some, contrary, open_ = numbers.values()
    said = (
        f"Of {count(measured, 'claim')} in the paper that one thing is better than another, **{hold} hold in every "
        f"setting tried here, {some} only in some settings, {contrary} do not hold, and {open_} are not decided**."
    )
    known = [one.judgement for one in values if one.judgement.verdict != "not measured"]
    if known:
        agree = sum(bool(one.where) for one in known)
        said += f" Of {count(len(known), 'published value')} held against ours, {agree} agree in at least one setting."
    return said + (f" {count(waiting, 'further claim')} waiting for runs." if waiting else "")


def _overview(judged: Sequence[_Judged]) -> str:
    """How many claims of each experiment have which verdict."""
    rows = []
    for name in dict.fromkeys(one.found.name for one in judged):
        verdicts = [one.judgement.verdict for one in judged if one.found.name == name]
        if set(verdicts) != {"not measured"}:
            cells = [str(verdicts.count(verdict) or "") for verdict in _GROUPS]
            rows.append([f"[{name}](#{name})", *cells])
    return table(["claims", "hold", "hold only in some settings", "do not hold", "not decided"], rows)


# Lists of claims ----------------------------------------------------------------------------------------


def _group(title: str, judged: Sequence[_Judged], verdict: Overall) -> str:
    """The claims with this verdict. Those that say the same of several rows, under the same settings, are one line."""
    mine = [one for one in judged if one.judgement.verdict == verdict]
    lines = []
    for key in dict.fromkeys(_alike(one) for one in mine):
        alike = [one for one in mine if _alike(one) == key]
        lines += [_line(text, some) for text, some in merged(alike)]
    return "\n".join([f"**{title}**", "", *lines]) if lines else ""


def _alike(one: _Judged) -> tuple[str, str, str, tuple[str, ...]]:
    return one.found.name, one.claim.figure, one.claim.better, one.judgement.where


def merged(judged: Sequence[_Judged]) -> Iterator[tuple[str, list[_Judged]]]:
    """Texts that differ in one word alone are one text with a list in its place."""
    left = list(judged)
    while left:
        first = left.pop(0)
        words = first.claim.text.split()
        place = next((found for other in left if (found := _differ(words, other.claim.text.split())) is not None), None)
        alike = [o for o in left if place is not None and _differ(words, o.claim.text.split()) == place]
        left = [other for other in left if other not in alike]
        if place is None:
            yield first.claim.text, [first]
            continue
        values = [one.claim.text.split()[place] for one in (first, *alike)]
        comma = "," if words[place].endswith(",") else ""
        both = listed([value.rstrip(",") for value in values]) + comma
        yield " ".join([*words[:place], both, *words[place + 1 :]]), [first, *alike]


def _differ(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Where two texts differ, if it is one word that does.

    >>> _differ("sooner than FedAvg".split(), "sooner than FedBuff".split())
    2
    """
    places = [place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return places[0] if len(one) == len(other) and len(places) == 1 else None


def _line(text: str, judged: Sequence[_Judged]) -> str:
    first = judged[0]
    key, who = first.claim.figure, subject(first.found.experiment, first.claim)
    each = [o for one in judged for o in one.judgement.each if isinstance(o, Comparison)]
    link = f"[{first.found.name}](#{first.found.name})"
    if first.judgement.verdict != "holds only in":
        ruled_out = first.judgement.verdict == "not decided" and all(_too_little(one) for one in judged)
        out = "; too little for the published difference" if ruled_out else ""
        return f"- {text}. Here, {who}: {span(key, each)}{out} ({link})."
    inside = [one for one in each if one.setting in first.judgement.where]
    outside = [one for one in each if one.setting not in first.judgement.where]
    where = "; ".join(condense(first.judgement.where, [o.setting for o in first.judgement.each]))
    return f"- {text}, only in {where}. {who}: there {span(key, inside)}; elsewhere {span(key, outside)} ({link})."


def _too_little(judged: _Judged) -> bool:
    """Whether no setting leaves room for as large a difference as is published."""
    each = [one for one in judged.judgement.each if isinstance(one, Comparison) and one.verdict != "not measured"]
    return bool(each) and all(versus(one, judged.claim.by) for one in each)


def _regimes(judged: Sequence[_Judged]) -> str:
    """How often claims hold under each value of the axes that several experiments have."""
    counts: dict[str, dict[str, int]] = {}
    for one in judged:
        for each in one.judgement.each:
            for value in each.setting.split(", "):
                if value.partition("=")[0] in ("data", "partition") or value in ("rho=log", "rho=seconds"):
                    tally = counts.setdefault(value, {})
                    tally[each.verdict] = tally.get(each.verdict, 0) + 1
    verdicts = ("holds", "no difference seen", "does not hold")
    rows = [[value, *(str(counts[value].get(verdict, 0)) for verdict in verdicts)] for value in sorted(counts)]
    if len(rows) < 2:
        return ""
    return f"**By regime.** Each claim is counted once a setting:\n\n{table(['', *verdicts], rows)}"


def _lemma(everything: Sequence[Findings]) -> str:
    """Where the staleness bound was kept: with its condition met, and without."""
    checks = [(found, cell, one) for found in everything for cell, one in bound_checks(found)]
    if not checks:
        return ""
    runs, met = sum(one.runs for *_, one in checks), sum(one.met for *_, one in checks)
    above, above_met = sum(one.above for *_, one in checks), sum(one.above_met for *_, one in checks)
    sharper = sum(one.above_sharper_met for *_, one in checks)
    links = listed([f"[{name}](#{name})" for name in dict.fromkeys(found.name for found, *_ in checks)])
    said = (
        f"**The staleness bound** ({links}). In {met:,} of {runs:,} runs the margin is as large as the Lemma asks for. "
        f"In {above_met or 'none'} of these an update was staler than its ceil(1+gamma) = {lemma_bound(GAMMA)}, and in "
        f"{sharper or 'none'} staler than the sharper ceil(gamma) = {sharper_bound(GAMMA)}. In the other "
        f"{runs - met:,} runs the margin is too small for the Lemma, and {above - above_met} had an update staler than "
        f"{lemma_bound(GAMMA)}."
    )
    _, cell, worst = max(checks, key=lambda each: each[2].above / each[2].runs)
    if worst.above:
        where = f" ({cell.setting})" if cell.setting else ""
        said += f" Most often {cell.row.label}{where}: {worst.above} of its {worst.runs} runs."
    return said


# Just in time -------------------------------------------------------------------------------------------


def _just_in_time(everything: Sequence[Findings]) -> str:
    shown = [found for found in everything if found.name in COMPARED and found.runs]
    shown = [found for found in shown if any(row.name == OURS for row in found.experiment.rows)]
    if not shown:
        return ""
    others = list(dict.fromkeys(row.name for found in shown for row in found.experiment.rows if row.name != OURS))
    labels = {row.name: short_label(found.experiment, row.name) for found in shown for row in found.experiment.rows}
    rows = [[labels[other], *(_against(found, other) for found in shown)] for other in others]
    heads = ["against", *(f"{COMPARED[found.name]} ([{found.name}](#{found.name}))" for found in shown)]
    about = f"**Just in time**, which is not in the paper, in {head(_key(shown[0]))}:"
    return f"{about}\n\n{table(heads, rows, numbers=False)}"


def _key(found: Findings) -> str:
    """Interpolated, because just in time makes more models than others."""
    wanted = ("interpolated.0.95", "time_to.0.95", *found.experiment.figures)
    return next(key for key in wanted if key in found.experiment.figures)


def _against(found: Findings, other: str) -> str:
    rows = [row for row in found.experiment.rows if row.name in (OURS, other)]
    if len(rows) < 2:
        return ""
    key = _key(found)
    names = [setting_text(s) for s in found.experiment.settings() if all(matches(s, row.only) for row in rows)]
    one = judge([compare(found.runs, key, OURS, other, name) for name in names])
    each = [each for each in one.each if isinstance(each, Comparison)]
    if one.verdict == "not measured":
        return "not run yet"
    if one.verdict == "holds only in":
        inside = [c for c in each if c.setting in one.where]
        outside = [c for c in each if c.setting not in one.where]
        where = "; ".join(condense(one.where, names))
        return f"{span(key, inside)} in {where}; elsewhere {span(key, outside)}"
    words = {"holds": "in every setting", "does not hold": "in no setting", "not decided": "no difference seen"}
    return f"{words[one.verdict]}: {span(key, each)}"


# How coarse ---------------------------------------------------------------------------------------------


def _coarseness(everything: Sequence[Findings]) -> str:
    shown = next((found for found in everything if found.name in COMPARED and found.runs), None)
    if shown is None:
        return ""
    rates = [(label, f"{low:.0f}", f"{high:.0f}") for label, low, high in _models(shown)]
    said = [f"{label} {low}" if low == high else f"{label} {low} to {high}" for label, low, high in rates]
    return (
        "**How coarse times are.** A score exists only when a model is made, so a time to a target is the time of a "
        f"model. Models in 100 s ([{shown.name}](#{shown.name})): {'; '.join(said)}. A method that makes one every "
        "10 s reaches any target at a multiple of 10 s. So there are also times that are interpolated between two "
        "models, and targets that take more models to reach."
    )


def _models(found: Findings) -> Iterator[tuple[str, float, float]]:
    """Label of each row, and its models in 100 s: the least and the most under any setting, means over seeds."""
    for row in found.experiment.rows:
        rates = []
        for setting in found.experiment.settings():
            records = found.runs.of(row.name, setting_text(setting)).values()
            each = [100 * len(r["curve"]) / r["virtual_seconds"] for r in records if r.get("curve")]
            if each:
                rates.append(fmean(each))
        if rates:
            yield short_label(found.experiment, row.name), min(rates), max(rates)
