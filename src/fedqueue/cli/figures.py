"""Strategies side by side, as tables for a person; narrow enough for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedqueue.cli import terminal
from fedqueue.comparison import Estimate, estimates, paired
from fedqueue.config import Config
from fedqueue.metrics import target_key

Runs = Mapping[str, Sequence[dict[str, Any]]]
"""Summaries by strategy, one a seed."""

Column = tuple[str, str, float, int]
"""Title, figure, factor, decimals."""

PROTOCOL: tuple[Column, ...] = (
    ("late %", "late_probability", 100.0, 1),
    ("missed %", "missed_cutoff", 100.0, 1),
    ("stale", "max_staleness", 1.0, 0),
    ("local steps", "local_steps", 1.0, 0),
    ("node s", "node_seconds", 1.0, 0),
    ("transfers", "model_transfers", 1.0, 0),
)


def show(runs: Runs, config: Config, folder: Path) -> None:
    """How well they learn, how they keep to the cutoffs and at what cost, and how they differ seed by seed."""
    count = max(len(summaries) for summaries in runs.values())
    targets = [target_key(target) for target in config.run.targets]
    spread = f", mean ± sd over {count} seeds; (n): only n reached it" if count > 1 else ""
    if any(s["score"]["max"] is not None for summaries in runs.values() for s in summaries):
        times: list[Column] = [(f"s to {float(t):.3g}", f"time_to.{t}", 1.0, 1) for t in targets]
        columns = [("best score %", "score.max", 100.0, 1), *times]
        best = _first_at(runs, f"time_to.{targets[-1]}", count) if targets else None
        _table(f"{config.run.name}{spread}", runs, columns, count, best)
        _table("late and missed jobs, greatest staleness, cost", runs, PROTOCOL, count, None)
        if count > 1 and len(runs) > 1:
            _show_paired(runs, targets, count)
    else:
        _table(f"{config.run.name}{spread}", runs, PROTOCOL, count, None)
    print(f"run folders and comparison.json: {folder}")


def _table(title: str, runs: Runs, columns: Sequence[Column], count: int, best: str | None) -> None:
    values = {key: estimates(runs, key) for _, key, _, _ in columns}
    rows = [[name, *(_cell(values[key][name], scale, n, count) for _, key, scale, n in columns)] for name in runs]
    heads = ("strategy", *(head for head, *_ in columns))
    terminal.show_table(title, heads, rows, best=None if best is None else list(runs).index(best))


def _first_at(runs: Runs, key: str, count: int) -> str | None:
    """The strategy that is first at a target on average, among those that always reach it."""
    means = {n: e.mean for n, e in estimates(runs, key).items() if e.count == count and e.mean is not None}
    return min(means, key=lambda name: means[name], default=None)


def _show_paired(runs: Runs, targets: Sequence[str], count: int) -> None:
    against, *others = runs
    differences = [paired(runs, f"time_to.{t}", against) for t in targets]
    rows = [[name, *(_interval(of_target[name], count) for of_target in differences)] for name in others]
    title = f"seconds more (+) or fewer (-) than {against}, seed by seed: mean, 95 % interval"
    terminal.show_table(title, ("strategy", *(f"to {float(t):.3g}" for t in targets)), rows)


def _cell(value: Estimate, scale: float, digits: int, count: int) -> str:
    if value.mean is None:
        return "-"
    text = f"{value.mean * scale:,.{digits}f}"
    if value.sd is not None and digits:  # the spread of a count says little, and takes room
        text += f" ± {value.sd * scale:,.{digits}f}"
    return text if value.count == count else f"{text} ({value.count})"


def _interval(value: Estimate, count: int) -> str:
    if value.mean is None:
        return "-"
    pairs = "" if value.count == count else f" ({value.count})"
    if value.half_width is None:
        return f"{value.mean:+.1f}{pairs}"
    low, high = value.mean - value.half_width, value.mean + value.half_width
    return f"{value.mean:+.1f} [{low:+.1f}, {high:+.1f}]{pairs}"
