"""Experiments and their results, as tables for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedqueue.cli import terminal
from fedqueue_reproduction import experiment as files
from fedqueue_reproduction import results
from fedqueue_reproduction.claims import Runs, sample
from fedqueue_reproduction.experiment import Experiment, matches, setting_text
from fedqueue_reproduction.tuning import ranked
from fedqueue_reproduction.wording import cell, count, head, number

PAPER = "  in the paper"
HEADING = 13  # columns of a heading, before it goes on in the next line


def show_list(folder: Path | None) -> None:
    """What can be reproduced, and what of it has been."""
    rows = []
    for path in files.catalogue():
        experiment = files.load(path)
        wanted = len(experiment.cells()) * experiment.seeds.count
        kept = results.path_of(path, folder=folder)
        there = f"{len(results.read(kept).runs):,} in {kept.name}" if kept.exists() else "-"
        rows.append((experiment.name, experiment.paper, f"{wanted:,}", there))
    if not rows:
        print(f"no experiments in {files.folder()}; name a file, or go to the source tree")
        return
    made = _table(("experiment", "left"), ("in the paper", "left"), ("runs", "right"), ("results", "right"))
    for row in rows:
        made.add_row(*row)
    terminal.console().print(made)


def show_results(experiment: Experiment, records: Iterable[Mapping[str, Any]], *, quick: bool) -> None:
    """A table for each setting: our figures, and under each row what the paper has for it."""
    records = list(records)
    if experiment.grids:
        _show_grids(experiment, records, quick)
        return
    runs = Runs(records)
    there = {record["row"] for record in records}
    for setting in experiment.settings(quick=quick):
        _show_setting(experiment, runs, setting, there)


def _show_setting(experiment: Experiment, runs: Runs, setting: Mapping[str, str], there: set[str]) -> None:
    name = setting_text(setting)
    rows = [row for row in experiment.rows if row.name in there and matches(setting, row.only)]
    seeds = max((len(runs.of(row.name, name)) for row in rows), default=0)
    if not seeds:
        return
    labels, columns, short = list[str](), {key: list[str]() for key in experiment.figures}, False
    for row in rows:
        published = experiment.published(row, setting)
        labels += [row.label, PAPER] if published else [row.label]
        for key, shown in columns.items():
            one = sample(runs.readings(row.name, name, key).values())
            short = short or one.reached < one.seeds
            shown.append(cell(key, one))
            if published:
                shown.append(number(key, published[key]) if key in published else "")
    spread = "mean ± half width of its 95 % interval" if seeds > 1 else "so no spread"
    _say(f"{experiment.name}{f', {name}' if name else ''}: {count(seeds, 'seed')}, {spread}")
    for part in _parts(labels, columns):
        made = _table(("", "left"), *((fill(head(key), HEADING), "right") for key in part))
        for i, label in enumerate(labels):
            cells, dim = [columns[key][i] for key in part], label == PAPER and terminal.console().is_terminal
            if any(cells):  # the paper may have nothing for these columns
                made.add_row(label, *cells, style="dim" if dim else None)
        terminal.console().print(made)
    if short:
        print("(n/m): n of m seeds reached it; the figure is then the median of all, or what it is known to exceed")
    print()


def _parts(labels: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """The columns in as many tables as the terminal is too narrow for one."""
    room = terminal.console().width - max(map(len, labels)) - 3
    part, used = list[str](), 0
    for key, shown in columns.items():
        width = 2 + max(map(len, (*shown, *fill(head(key), HEADING).splitlines())))
        if part and used + width > room:
            yield part
            part, used = [], 0
        part.append(key)
        used += width
    yield part


def _show_grids(experiment: Experiment, records: Sequence[Mapping[str, Any]], quick: bool) -> None:
    """The best row of every grid, and how far ahead of the next it is."""
    judged = ranked(experiment, records, quick=quick)
    for setting in map(setting_text, experiment.settings(quick=quick)):
        grids = {grid: choices for (grid, under), choices in judged.items() if under == setting}
        if not grids:
            continue
        figure = next(iter(grids.values()))[0].figure
        heading = fill(head(figure), HEADING)
        made = _table(("", "left"), (heading, "right"), ("next", "right"), ("reached by", "right"), ("best", "left"))
        for grid, choices in grids.items():
            costs = [number(figure, choice.objective) for choice in choices[:2]]
            reached = f"{sum(choice.reached == choice.seeds for choice in choices)} of {len(choices)}"
            made.add_row(grid, costs[0], costs[1] if len(costs) > 1 else "-", reached, choices[0].row.label)
        _say(f"{experiment.name}{f', {setting}' if setting else ''}: best of each grid")
        terminal.console().print(made)
        print()


def _say(line: str) -> None:
    out = terminal.console()
    out.print(Text(line, style="bold" if out.is_terminal else ""))


def _table(*columns: tuple[str, str]) -> Table:
    plain = not terminal.console().is_terminal
    made = Table(
        box=None if plain else box.SIMPLE_HEAD,
        header_style="" if plain else "bold",
        padding=(0, 2, 0, 0) if plain else (0, 1),
        pad_edge=False,
    )
    for heading, side in columns:
        left = side == "left"
        made.add_column(heading, justify="left" if left else "right", no_wrap=not left, min_width=8 if left else None)
    return made
