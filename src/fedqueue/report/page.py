"""One page of one or several runs: self-contained, so that it can be mailed, printed and kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fedqueue.errors import ConfigError
from fedqueue.files import write_text, writing
from fedqueue.report.data import Curve, Run, read_run
from fedqueue.report.html import html, page, paragraph, picture
from fedqueue.report.plots import comparison_figure, run_figures
from fedqueue.report.style import facility_colours, save_png, strategy_colours, svg
from fedqueue.report.tables import (
    absence_table,
    facility_table,
    privacy_table,
    run_facts,
    settings,
    summary_tables,
    trouble_table,
)

HOW_TO_READ: Final = {
    "comparison": (
        "A line is the score of the newest model, the mean over seeds, and holds until the next model; further left "
        "and higher is better. The band runs from the lowest to the highest seed, and a dot is the mean time at which "
        "all seeds have reached a target. A run that is over keeps its last score."
    ),
    "score": (
        "The score of the newest model; it holds until the next one, so a target (dotted) is reached at the dot and "
        "no earlier."
    ),
    "timeline": (
        "A row is a facility: pale while a job waits in the queue, stronger while it holds nodes and lingers for the "
        "coming model, solid while it trains, thin while its update travels. White space is a facility without a job. "
        "Jobs that overlap lie below each other."
    ),
    "staleness": (
        "How many models old its base was when an update was used. Hatched are deferred updates: they came after the "
        "cutoff that they aimed at."
    ),
    "forecast": (
        "A dot is a job: above the line it waited longer than forecast, below the line shorter. The mean error is that "
        "of the absolute difference."
    ),
}


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of these run folders to `out`, and its plots as PNG files to a folder beside it, named after it:
    report.html and report-plots. Both replace what an earlier report left there."""
    if not folders:
        raise ConfigError("a report needs a run folder: name at least one")
    runs = [read_run(folder) for folder in folders]
    beside = out.with_name(f"{out.stem}-plots")
    anchors = [f"run-{place}" for place in range(1, len(runs) + 1)]
    facilities = facility_colours(list(dict.fromkeys(name for run in runs for name in run.facilities)))
    parts = [_header(runs)]
    if len(runs) > 1:
        parts.append(_comparison(runs, anchors, beside))
    for run, anchor in zip(runs, anchors, strict=True):
        parts.append(_section(run, anchor, facilities, beside, alone=len(runs) == 1))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(_title(runs), "\n".join(parts)))
    return out


def _title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return f"{shown}: {len(runs)} runs" if len(runs) > 1 else f"{shown}: {runs[0].strategy}, seed {runs[0].seed}"


def _header(runs: Sequence[Run]) -> str:
    what = "A run" if len(runs) == 1 else f"{len(runs)} runs"
    drivers = {run.simulated for run in runs}
    clock = {True: "in virtual time", False: "on real queues"}
    where = clock[drivers.pop()] if len(drivers) == 1 else "in virtual time and on real queues"
    lead = f"{what} of federated learning across batch queues, {where}. Times are seconds on the run clock."
    return f"<header><h1>{html(_title(runs))}</h1>{paragraph(lead, 'lead')}</header>"


def _comparison(runs: Sequence[Run], anchors: Sequence[str], beside: Path) -> str:
    parts = ['<section><h2 id="comparison">Comparison</h2>']
    curves = _curves(runs)
    if curves:
        targets = sorted({target for run in runs for target in run.targets})
        figure = comparison_figure(curves, targets=targets, title="Score of the newest model")
        save_png(figure, beside / "comparison.png")
        parts.append(picture(svg(figure, "score against time"), HOW_TO_READ["comparison"]))
    else:
        parts.append(paragraph("No run has a score: nothing was trained, or no model was made."))
    parts.append(summary_tables(runs, strategy_colours([run.strategy for run in runs]), anchors))
    return "".join([*parts, "</section>"])


def _curves(runs: Sequence[Run]) -> dict[str, list[Curve]]:
    """Curves by label. Runs that differ only by seed share one; the same strategy and seed twice means different
    settings, so such runs are told apart by the names of their folders."""
    alike = Counter((run.strategy, run.seed) for run in runs)
    apart = {strategy for (strategy, _), count in alike.items() if count > 1}
    curves: dict[str, list[Curve]] = {}
    for run in runs:
        if run.scores:
            label = f"{run.strategy} ({run.folder.resolve().name})" if run.strategy in apart else run.strategy
            curves.setdefault(label, []).append(run.scores)
    return curves


def _section(run: Run, anchor: str, colours: Mapping[str, str], beside: Path, *, alone: bool) -> str:
    name = run.folder.resolve().name
    parts = [f'<section><h2 id="{anchor}">{html(f"{name}: {run.strategy}, seed {run.seed}")}</h2>']
    if run.recounted is not None:
        why = "" if run.stopped else " The run was cut off, or still goes on."
        counted = f"The figures are counted from its ledger, which ends at {run.end:,.1f} s."
        parts.append(paragraph(f"{run.recounted}.{why} {counted}", "note"))
    parts.append(run_facts(run))
    if alone:
        parts += ["<h3>Figures</h3>", summary_tables([run], strategy_colours([run.strategy]))]
    prefix = "" if alone else f"{anchor}-{run.strategy}-seed{run.seed}-"
    for plot, figure in run_figures(run, colours).items():
        save_png(figure, beside / f"{prefix}{plot}.png")
        parts.append(picture(svg(figure, f"{plot} of {name}"), HOW_TO_READ[plot]))
    parts += ["<h3>Facilities</h3>", facility_table(run, colours)]
    if run.spent:
        about = (
            "How much all that a site ever handed in says of its data at the most, in all runs, as its agent reckons."
        )
        parts += ["<h3>Privacy</h3>", paragraph(about, "lead"), privacy_table(run)]
    parts.append("<h3>Failures</h3>")
    parts.append(trouble_table(run.troubles) if run.troubles else paragraph("Nothing failed."))
    absences = sorted((*run.outages, *run.suspensions), key=lambda absence: absence.at)
    parts.append("<h3>Suspensions and outages</h3>")
    parts.append(absence_table(absences) if absences else paragraph("No facility was suspended or out of reach."))
    config = html(json.dumps(settings(run), indent=2, ensure_ascii=False))
    parts.append(f"<details><summary>Settings</summary><pre>{config}</pre></details>")
    return "".join([*parts, "</section>"])
