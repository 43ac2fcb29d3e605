"""Each method's best: the row of its grid whose objective has the least mean over the tuning seeds.

Those seeds are for this alone: an experiment that reports a tuned row must not share one with the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from fedqueue.errors import ConfigError
from fedqueue_reproduction import results
from fedqueue_reproduction.experiment import Cell, Experiment, Row, load, setting_text

NEVER: Final = 2.0  # a run that never reached the target counts as so many times its length


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of a grid, judged."""

    row: Row
    figure: str  # that it was judged by
    objective: float  # mean of it over the seeds
    best_score: float  # mean over the seeds
    reached: int  # seeds that have the figure at all
    seeds: int


def ranked(
    experiment: Experiment, records: Iterable[Mapping[str, Any]], *, quick: bool = False
) -> dict[tuple[str, str], list[Choice]]:
    """By grid and setting: its rows that have a run with every tuning seed, the best first."""
    assert experiment.objective is not None
    seeds = set(experiment.seeds_of(quick=quick))
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record["seed"] in seeds:
            runs.setdefault((record["row"], record["setting"]), []).append(record)
    found: dict[tuple[str, str], list[Choice]] = {}
    for cell in experiment.cells(quick=quick):
        of_cell = runs.get((cell.row.name, cell.setting), [])
        if cell.row.grid is not None and len(of_cell) == len(seeds):
            figure = cell.objective or experiment.objective
            known = [results.figure(record, figure) for record in of_cell]
            costs = [
                value if value is not None else NEVER * record["virtual_seconds"]
                for value, record in zip(known, of_cell, strict=True)
            ]
            best = fmean(results.figure(record, "score.max") or 0.0 for record in of_cell)
            reached = sum(value is not None for value in known)
            choice = Choice(cell.row, figure, fmean(costs), best, reached, len(seeds))
            found.setdefault((cell.row.grid, cell.setting), []).append(choice)
    for choices in found.values():
        # Those that never reached the target are as good as their best score.
        choices.sort(key=lambda choice: (choice.objective, -choice.best_score))
    return found


def winner_for(experiment: Experiment, seeds: Sequence[int], folder: Path | None) -> Callable[[Cell], Sequence[str]]:
    """What says which changes a cell takes from the grid that its row names; `folder` holds the results."""
    known: dict[str, tuple[Experiment, dict[tuple[str, str], list[Choice]]]] = {}

    def winner(cell: Cell) -> Sequence[str]:
        if cell.row.tuned is None:
            return ()
        name, _, grid = cell.row.tuned.partition("/")
        if name not in known:
            known[name] = _judged(experiment, name, seeds, folder)
        tuning, choices = known[name]
        axes = [axis.name for axis in tuning.axes]
        setting = setting_text({axis: value.name for axis, value in cell.under if axis in axes})
        if (grid, setting) not in choices:
            raise ConfigError(f"{experiment.path}: {cell}: {name} has no grid {grid!r} under {setting or 'no setting'}")
        return choices[grid, setting][0].row.changes

    return winner


def _judged(
    experiment: Experiment, name: str, seeds: Sequence[int], folder: Path | None
) -> tuple[Experiment, dict[tuple[str, str], list[Choice]]]:
    tuning = load(experiment.path.parent / f"{name}.toml")
    shared = sorted(set(seeds) & set(tuning.seeds_of()))
    if shared:
        raise ConfigError(f"{experiment.path}: seeds: {shared[0]} was used for tuning by {name}; take fresh ones")
    path = results.path_of(tuning.path, folder=folder)
    if not path.exists():
        raise ConfigError(f"{path}: is missing, and {experiment.name} takes its winners; `fedqueue reproduce {name}`")
    choices = ranked(tuning, results.read(path).sorted())
    lacking = len(tuning.cells()) - sum(len(rows) for rows in choices.values())
    if lacking:
        raise ConfigError(f"{path}: {lacking} rows lack runs; `fedqueue reproduce {name} --resume` completes them")
    return tuning, choices
