"""The tables of the page: figures of runs, of their facilities, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from fedqueue.report.data import Absence, Run, Trouble
from fedqueue.report.html import Cell, Number, facts, link, paragraph, swatch, table
from fedqueue.report.plots import forecasts

FATES: Final = ("admitted", "deferred", "rejected", "expired")
MOST_TROUBLES: Final = 40  # rows; free text can make every reason a new one

_Column = tuple[str, Callable[[Mapping[str, Any]], Cell]]
"""Its head, and its cell from the summary of a run."""


def run_facts(run: Run) -> str:
    """What the run is and how it ended."""
    summary = run.summary
    score = summary["score"]
    pairs: list[tuple[str, Cell]] = [
        ("run", run.name),
        ("strategy", run.strategy),
        ("seed", Number(run.seed)),
        ("task", str(run.meta["config"]["task"]["name"])),
        ("facilities", Number(len(run.facilities))),
        ("rounds", Number(summary["rounds"])),
        ("virtual seconds" if run.simulated else "run clock, s", Number(summary["virtual_seconds"], 1)),
        ("round length, s", Number(run.round_length, 1)),
        ("driver", str(run.meta["driver"])),
        ("code version", str(run.meta["version"])),
        ("stopped", run.stopped or "cut off, or still going on"),
    ]
    if score["max"] is not None:
        pairs.insert(7, ("best score", Number(score["max"], 4)))
    return facts(pairs)


def summary_tables(runs: Sequence[Run], colours: Mapping[str, str], anchors: Sequence[str] | None = None) -> str:
    """The figures of all runs, a row a run: how fast and how well, then at what cost. `colours` by strategy; `anchors`
    of the runs' own sections, to link to."""
    targets = list(dict.fromkeys(target for run in runs for target in run.summary["time_to"]))
    names: list[Cell] = [run.folder.resolve().name for run in runs]
    if anchors is not None:
        names = [link(anchor, str(name)) for anchor, name in zip(anchors, names, strict=True)]
    first: list[_Column] = [
        ("rounds", lambda s: Number(s["rounds"])),
        ("virtual\ns", lambda s: Number(s["virtual_seconds"], 1)),
    ]
    if any(run.scores for run in runs):  # otherwise the columns would be empty
        first += [
            ("score\nbest", lambda s: Number(s["score"]["max"], 4)),
            ("score\nlast", lambda s: Number(s["score"]["final"], 4)),
            *((f"to {target}\ns", _time_to(target)) for target in targets),
        ]
    first += [
        ("late\nprobability", lambda s: Number(s["late_probability"], 3)),
        ("missed\ncutoff", lambda s: Number(s["missed_cutoff"], 3)),
        ("staleness\nmost", lambda s: Number(s["max_staleness"])),
    ]
    second: list[_Column] = [
        *((f"jobs\n{key}", _count("jobs", key)) for key in ("submitted", "completed", "failed", "resubmitted")),
        *((f"updates\n{key}", _count("updates", key)) for key in FATES),
        ("local\nsteps", lambda s: Number(s["local_steps"])),
        ("model\ntransfers", lambda s: Number(s["model_transfers"])),
        ("cost\nnode s", lambda s: Number(s["node_seconds"], 1)),
        ("idle\nnode s", lambda s: Number(s.get("idle_node_seconds"), 1)),  # older summaries have none
    ]
    made = []
    for columns in (first, second):
        rows = [
            [
                name,
                swatch(colours[run.strategy], run.strategy),
                Number(run.seed),
                *(get(run.summary) for _, get in columns),
            ]
            for name, run in zip(names, runs, strict=True)
        ]
        made.append(table(["run", "strategy", "seed", *(head for head, _ in columns)], rows))
    return "".join(made)


def _time_to(target: str) -> Callable[[Mapping[str, Any]], Cell]:
    return lambda summary: Number(summary["time_to"].get(target), 1, "not reached")


def _count(group: str, key: str) -> Callable[[Mapping[str, Any]], Cell]:
    return lambda summary: Number(summary[group][key])


def facility_table(run: Run, colours: Mapping[str, str]) -> str:
    heads = ["facility", "nodes", "jobs\nsubmitted", "jobs\nfailed", "delay\nmean, s", "delay\np90, s"]
    heads += ["forecast\nerror, s", "steps\ndone", *(f"updates\n{fate}" for fate in FATES)]
    heads += ["cost\nnode s", "idle\nnode s"]
    rows = [_facility_row(run, name, colours[name]) for name in run.facilities]
    total: list[Cell] = ["all"]
    for place in range(1, len(heads)):
        cells = [row[place] for row in rows]
        values = [cell.value for cell in cells if isinstance(cell, Number) and cell.value is not None]
        adds_up = not heads[place].startswith(("delay", "forecast"))
        total.append(Number(sum(values), 1 if heads[place].endswith("node s") else 0) if adds_up else "")
    return table(heads, rows, total=total)


def _facility_row(run: Run, name: str, colour: str) -> list[Cell]:
    jobs = [job for job in run.jobs if job.facility == name]
    attempts = [attempt for job in jobs for attempt in job.attempts]
    delays = [attempt.admission_delay for attempt in attempts]
    errors = [abs(real - expected) for expected, real in forecasts(run)[name]]
    fates = Counter(
        ("deferred" if update.deferred else "admitted") if update.fate == "aggregated" else update.fate
        for update in run.updates
        if update.facility == name
    )
    digits = 2 if run.round_length < 1000 else 0  # hundredths of a second say nothing about hours in a queue
    held = sum(attempt.held_seconds for attempt in attempts)
    return [
        swatch(colour, name),
        Number(run.nodes[name]),
        Number(len(jobs)),
        Number(sum(job.failed for job in jobs)),
        Number(float(np.mean(delays)) if delays else None, digits),
        Number(float(np.quantile(delays, 0.9)) if delays else None, digits),
        Number(float(np.mean(errors)) if errors else None, digits),
        Number(sum(job.steps for job in jobs)),
        *(Number(fates[fate]) for fate in FATES),
        Number(held * run.nodes[name], 1),
        Number(sum(attempt.idle_seconds for attempt in attempts) * run.nodes[name], 1),
    ]


def privacy_table(run: Run) -> str:
    what = {"update": "all of a site's data", "records": "each record"}
    rows: list[list[Cell]] = [
        [name, what[spent.unit], Number(spent.epsilon, 3), f"{spent.delta:g}"] for name, spent in run.spent.items()
    ]
    return table(["facility", "protects", "epsilon", "delta"], rows)


def trouble_table(troubles: Sequence[Trouble]) -> str:
    """What went wrong, the same reason at the same facility in one row."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for trouble in troubles:
        groups.setdefault((trouble.facility, trouble.what, trouble.reason), []).append(trouble.at)
    most = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows: list[list[Cell]] = [
        [facility, what, reason, Number(len(times)), Number(times[0], 1), Number(times[-1], 1)]
        for (facility, what, reason), times in most[:MOST_TROUBLES]
    ]
    made = table(["facility", "what", "reason", "times", "first\ns", "last\ns"], rows)
    left = len(most) - len(rows)
    return made + (paragraph(f"{left} further reasons are in the ledger.", "lead") if left > 0 else "")


def absence_table(absences: Sequence[Absence]) -> str:
    rows: list[list[Cell]] = [
        [a.facility, Number(a.at, 1), Number(a.until, 1, "did not come back"), a.reason] for a in absences
    ]
    return table(["facility", "from\ns", "until\ns", "reason"], rows)


def settings(run: Run) -> dict[str, Any]:
    """What the run was asked to do: its config, with the options of its own strategy only."""
    config = {key: value for key, value in run.meta["config"].items() if key != "strategy"}
    return {**config, "strategy": {run.strategy: run.meta["options"]}}
