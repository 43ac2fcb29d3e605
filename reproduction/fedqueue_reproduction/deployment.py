"""What the paper reports of its deployment beside what came out in miniature: thresholds, facilities, answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Final

from fedqueue.config import Config
from fedqueue_reproduction.claims import Reading, Record, sample
from fedqueue_reproduction.experiment import Row, setting_text
from fedqueue_reproduction.findings import Findings
from fedqueue_reproduction.tables import short_label, table
from fedqueue_reproduction.wording import cell, listed

OURS: Final = ("fedqueue-1", "fedqueue-2")
"""The rows whose facilities the paper reports, both together."""
LONGEST: Final = 2
"""Rounds a facility that count as anomalous: the paper leaves out one or two."""
FIRST: Final = 2.0
BEST: Final = 0.3658
THRESHOLDS: Final = (1.0, 0.8, 0.6, 0.4)
TIMES: Final[dict[str, tuple[float | None, ...]]] = {
    "fedavg": (2284, 4567, 9502, None),
    "fedasync": (1245, 3038, 11079, None),
    "fedbuff": (1574, 3351, 9328, None),
    "fedcompass": (1454, 3490, 7270, None),
    "fedqueue-1": (2807, 4597, 7216, 15727),
    "fedqueue-2": (2680, 5331, 5331, 16881),
}
"""Seconds to the thresholds, as published."""
JOBS: Final = {
    "aurora": (10, 6, 4, 1.34),
    "polaris": (10, 6, 4, 1.33),
    "frontier": (12, 10, 2, 1.16),
    "perlmutter": (12, 10, 2, 1.09),
}
"""Submitted, admitted, deferred, greatest delay ratio, as published."""
ASKED_FOR_NUMBERS: Final = "perlmutter"
"""Who has questions whose answers are numbers."""
BUDGETS: Final = {"fedqueue-1": "20 to 72", "fedqueue-2": "20 to 176"}
ERRORS: Final = {"fedqueue-1": "3 to 10 %", "fedqueue-2": "2 to 5 %"}


def deployment_tables(found: Findings) -> str:
    """Empty unless its runs have kept what was seen of each facility."""
    if not {"facilities", "errors", "answers"} <= found.experiment.keep:
        return ""
    parts = []
    for setting in found.settings():
        rows, name = found.rows(setting), setting_text(setting)
        known = [row for row in rows if row.name in OURS]
        made = [_times(found, rows, setting), _jobs(found, known, name), _forecasts(found, known, name)]
        made.append(_answers(found, rows, name))
        parts += [f"**{name}**" if name else "", *made]
    return "\n\n".join(part for part in parts if part)


# Thresholds ---------------------------------------------------------------------------------------------


def thresholds(records: Iterable[Record]) -> tuple[float, ...]:
    """Between the least loss that any of these runs had and the loss that all began with, where the paper's lie if its
    first loss, which it does not give, was 2.

    >>> [round(one, 2) for one in thresholds([{"first_loss": 2.0, "loss": {"least": 0.3658}}])]
    [1.0, 0.8, 0.6, 0.4]
    """
    found = list(records)
    best = min(float(record["loss"]["least"]) for record in found)
    first = float(found[0]["first_loss"])
    return tuple(best + (at - BEST) / (FIRST - BEST) * (first - best) for at in THRESHOLDS)


def _times(found: Findings, rows: Sequence[Row], setting: Mapping[str, str]) -> str:
    name = setting_text(setting)
    runs = {row.name: found.runs.of(row.name, name) for row in rows}
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    at = {seed: thresholds(by_seed[seed] for by_seed in runs.values() if seed in by_seed) for seed in seeds}
    lines = []
    for row in rows:
        published = found.experiment.published(row, setting).get("loss.final")
        if published is not None:
            times = ["-" if time is None else f"{time:,.0f}" for time in TIMES[row.name]]
            over = published / (found.experiment.published(_row(found, "fedavg"), setting)["loss.final"])
            lines.append(
                [f"*{row.label}, paper*", *(f"*{one}*" for one in (*times, f"{published:.3f}", f"{over:.2f}"))]
            )
        ours = runs[row.name]
        cells = [
            cell("time_to.1", sample(_reached(record, at[seed][place]) for seed, record in ours.items()))
            for place in range(len(THRESHOLDS))
        ]
        final = sample(Reading(float(record["loss"]["final"])) for record in ours.values())
        both = [seed for seed in ours if seed in runs.get("fedavg", {})]
        ratios = [ours[seed]["loss"]["final"] / runs["fedavg"][seed]["loss"]["final"] for seed in both]
        lines.append([row.label, *cells, cell("loss.final", final), f"{fmean(ratios):.2f}" if ratios else "-"])
    marks = [", ".join(f"{at[seed][place]:.3f}" for seed in seeds) for place in range(len(THRESHOLDS))]
    heads = [f"time to {threshold:g} ({mark} here), s" for threshold, mark in zip(THRESHOLDS, marks, strict=True)]
    first = listed(list(dict.fromkeys(f"{next(iter(_of(runs, seed)))['first_loss']:.3f}" for seed in seeds)))
    about = (
        f"Test loss of the global model. It began at {first}; the paper does not say where its own began. Thresholds "
        "here lie between that and the least loss of any method, at the shares at which the paper's would lie had its "
        f"first loss been {FIRST:g}."
    )
    return f"{about}\n\n{table(['', *heads, 'final loss', 'over FedAvg'], lines)}"


def _of(runs: Mapping[str, Mapping[int, Record]], seed: int) -> list[Record]:
    return [by_seed[seed] for by_seed in runs.values() if seed in by_seed]


def _row(found: Findings, name: str) -> Row:
    return next(row for row in found.experiment.rows if row.name == name)


def _reached(record: Record, threshold: float) -> Reading:
    time = next((at for at, score, *_ in record["curve"] if -score <= threshold), None)
    return Reading(float(record["virtual_seconds"]), reached=False) if time is None else Reading(float(time))


# Facilities ---------------------------------------------------------------------------------------------


def _jobs(found: Findings, rows: Sequence[Row], setting: str) -> str:
    """Of these rows together, as the paper has them."""
    records = [found.runs.of(row.name, setting) for row in rows]
    seeds = set.intersection(*(set(by_seed) for by_seed in records)) if records else set()
    if len(rows) < len(OURS) or not seeds:
        return ""
    lines = []
    for name, published in JOBS.items():
        each = [[by_seed[seed]["facilities"][name] for by_seed in records] for seed in sorted(seeds)]
        counts = [
            fmean(sum(one[key] for one in both) for both in each) for key in ("submitted", "admitted", "deferred")
        ]
        most = max(delay for both in each for one in both for delay in one["delays"])
        ours = [f"{count:.3g}" for count in counts] + [f"{most:.2f}"]
        lines.append([name, *(f"{a} *[{b}]*" for a, b in zip(ours, published, strict=True))])
    heads = ["", "jobs submitted", "updates admitted", "deferred", "greatest delay, rounds"]
    about = (
        f"What became of the jobs of {listed([short_label(found.experiment, row.name) for row in rows])} together "
        "*[paper]*; delays are from submission to arrival. A mean over seeds, and the greatest of all."
    )
    return f"{about}\n\n{table(heads, lines)}"


def _forecasts(found: Findings, rows: Sequence[Row], setting: str) -> str:
    lines = []
    for row in rows:
        records = list(found.runs.of(row.name, setting).values())
        length = _config(found, row).run.round_length
        for name in JOBS:
            errors = [error for record in records for error in record["errors"][name]]
            usual = sorted(errors, key=abs)[: -LONGEST * len(records)]
            steps = [count for record in records for count in record["facilities"][name]["steps"]]
            lines.append(
                [
                    short_label(found.experiment, row.name),
                    name,
                    str(len(errors)),
                    *_mean_and_deviation(errors, length),
                    *_mean_and_deviation(usual, length),
                    f"{min(steps)} to {max(steps)}",
                ]
            )
    if not lines:
        return ""
    heads = [
        "",
        "",
        "jobs",
        "mean error, s",
        "sd, s (of T)",
        f"mean without the {LONGEST} largest a run",
        "sd, s (of T)",
    ]
    paper = [
        f"{short_label(found.experiment, row.name)}: {ERRORS[row.name]} of T, steps {BUDGETS[row.name]}" for row in rows
    ]
    about = (
        "Forecast errors (wait less forecast) and step budgets. The paper, which leaves out one or two anomalous "
        f"rounds a facility: standard deviations of {listed(paper)}."
    )
    return f"{about}\n\n{table([*heads, 'steps of a job'], lines)}"


def _mean_and_deviation(errors: Sequence[float], length: float) -> tuple[str, str]:
    if len(errors) < 2:
        return "-", "-"
    deviation = stdev(errors)
    return f"{fmean(errors):,.0f}", f"{deviation:,.0f} ({100 * deviation / length:.0f} %)"


# Answers ------------------------------------------------------------------------------------------------


def _answers(found: Findings, rows: Sequence[Row], setting: str) -> str:
    labels = _labels(found)
    lines = []
    for row in rows:
        records = list(found.runs.of(row.name, setting).values())
        cells = []
        for name in JOBS:
            exact = [record["answers"][f"exact_match/{name}"] for record in records]
            errors = [record["answers"].get(f"numeric_error/{name}") for record in records]
            known = [error for error in errors if error is not None]
            cells.append(
                f"{100 * fmean(exact):.1f} %" + (f"; {fmean(known):.2f}" if name == ASKED_FOR_NUMBERS and known else "")
            )
        lines.append([row.label, *cells])
    heads = ["", *(f"{name}: {labels[name]}" for name in JOBS)]
    about = (
        "Answers that the last model writes to test questions: the share that is the text in the file, letter by "
        "letter, and for properties also the mean distance of the first number in each, where both have one."
    )
    return f"{about}\n\n{table(heads, lines)}"


def _labels(found: Findings) -> dict[str, str]:
    """What each facility has questions of."""
    options: Any = _config(found, found.experiment.rows[0]).task.options
    return {name: " and ".join(values).replace("_", " ") for name, values in options["labels"].items()}


def _config(found: Findings, row: Row) -> Config:
    experiment = found.experiment
    return experiment.config_of(next(one for one in experiment.cells() if one.row == row), experiment.seeds.first)
