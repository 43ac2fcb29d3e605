"""Test loss over time: of every method's model, and of each model on the questions of each facility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from fedqueue.report.style import FAINT, INK, facility_colours, new_figure
from fedqueue_reproduction.claims import Record
from fedqueue_reproduction.drawing import key
from fedqueue_reproduction.experiment import setting_text
from fedqueue_reproduction.figures import row_colours, short, title_of
from fedqueue_reproduction.findings import Findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS: Final = 3
DASHED: Final = (0, (4, 2))
TICKS: Final = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)


def global_losses(found: Findings) -> Figure:
    """A panel a setting; of several seeds the first."""
    settings = found.settings()
    figure = new_figure(1.0 + 4.2 * len(settings), 3.6)
    grid = figure.subplots(1, len(settings), squeeze=False, sharey=True).ravel()
    handles: dict[str, Any] = {}
    losses = [loss for s in settings for row in found.rows(s) for _, loss in _whole(_first(found, row.name, s))]
    for axes, setting in zip(grid, settings, strict=True):
        rows = found.rows(setting)
        colours = row_colours(rows)
        for row in rows:
            record = _first(found, row.name, setting)
            line = _curve(axes, _whole(record), record, colours[row.name], "-")
            handles.setdefault(short(row), line)
        _finish(axes, title_of(setting), losses)
    _name(figure, handles)
    return figure


def facility_losses(found: Findings) -> Figure:
    """A panel a method, of the first setting and seed."""
    setting = found.settings()[0]
    rows = found.rows(setting)
    columns = min(COLUMNS, len(rows))
    lines = ceil(len(rows) / columns)
    figure = new_figure(1.0 + 2.7 * columns, 0.9 + 2.3 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axes in grid[len(rows) :]:
        axes.remove()
    handles: dict[str, Any] = {}
    records = [_first(found, row.name, setting) for row in rows]
    losses = [loss for record in records for theirs in record["facilities"].values() for _, loss in theirs["losses"]]
    losses += [loss for record in records for _, loss in _whole(record)]
    for axes, row in zip(grid, rows, strict=False):
        record = _first(found, row.name, setting)
        facilities: Mapping[str, Any] = record["facilities"]
        colours = facility_colours(list(facilities))
        for name, theirs in facilities.items():
            handles.setdefault(name, _curve(axes, theirs["losses"], record, colours[name], DASHED))
        handles["all"] = _curve(axes, _whole(record), record, INK, "-")
        _finish(axes, short(row), losses)
    _name(figure, handles)
    return figure


def _first(found: Findings, row: str, setting: Mapping[str, str]) -> Record:
    return next(iter(found.runs.of(row, setting_text(setting)).values()))


def _whole(record: Record) -> list[tuple[float, float]]:
    """Second and loss of the global model, the first at second 0."""
    return [(0.0, float(record["first_loss"])), *((at, -score) for at, score, *_ in record["curve"])]


def _curve(axes: Axes, points: Sequence[tuple[float, float]], record: Record, colour: str, style: Any) -> Any:
    """The last loss holds until the end of the run."""
    times, losses = zip(*points, (record["virtual_seconds"], points[-1][1]), strict=True)
    (line,) = axes.step(times, losses, where="post", color=colour, linestyle=style, linewidth=1.5)
    return line


def _finish(axes: Axes, title: str, losses: Sequence[float]) -> None:
    axes.set_yscale("log")
    low, high = min(losses) / 1.1, max(losses) * 1.1
    axes.set_ylim(low, high)
    axes.set_yticks([tick for tick in TICKS if low <= tick <= high], minor=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(_nothing())
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=5)
    axes.set_title(title, fontsize=10, pad=6)


def _nothing() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _name(figure: Figure, handles: Mapping[str, Any]) -> None:
    figure.supxlabel("virtual time (s)", fontsize=10)
    figure.supylabel("test loss", fontsize=10, color=FAINT)
    key(figure, list(handles.values()), list(handles))
