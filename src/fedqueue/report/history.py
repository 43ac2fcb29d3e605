"""The plots of `fedqueue history`: waits by hour and weekday, and by the shape of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedqueue.history.summary import WEEKDAYS, Summary, Waits, human, request_label, size_label
from fedqueue.report.style import FAINT, INK, LINE, PAPER, new_figure, save_png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEDIAN: Final = "#0072b2"
P90: Final = "#56b4e9"
COLOURS: Final = "YlGnBu"  # light is short; the same to any colour vision
FEW: Final = 20  # jobs; a shape with fewer is drawn faint
TICKS: Final = (1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0, 864_000.0, 8_640_000.0)
LEAST: Final = 1.0  # seconds: where a logarithmic scale of waits begins


def history_plots(found: Summary, counts: str, folder: Path, title: str) -> list[Path]:
    """PNG files in the folder: `shape.png`, and with clock times `week.png`."""
    paths = []
    with styled():
        if found.clock:
            paths.append(save_png(week_figure(found, title), folder / "week.png"))
        paths.append(save_png(shape_figure(found, counts, title), folder / "shape.png"))
    return paths


def week_figure(found: Summary, title: str) -> Figure:
    """Median wait by weekday and hour; above it by hour, beside it by weekday. Call it inside `styled`."""
    figure = new_figure(10.5, 6.2)
    grid = figure.subplots(2, 2, width_ratios=(4, 1.35), height_ratios=(1, 1.35))
    top, nothing, heat, side = grid.ravel()
    nothing.axis("off")
    hours, days = np.arange(24), np.arange(7)
    _bars(top, hours, found.hours, upright=True)
    top.set_xticks(hours[::3], [f"{hour:02}" for hour in hours[::3]])
    top.set_xlim(-0.5, 23.5)
    top.set_title("By hour of submission")
    _bars(side, days, found.weekdays, upright=False)
    side.set_yticks(days, [""] * 7)
    side.set_ylim(6.5, -0.5)
    side.tick_params(axis="y", length=0)
    side.set_title("By weekday")
    table = np.array([[np.nan if wait is None else wait for wait in row] for row in found.week])
    _heat(figure, heat, table)
    heat.set_xticks(hours[::3], [f"{hour:02}" for hour in hours[::3]])
    heat.set_yticks(days, [day[:3] for day in WEEKDAYS])
    heat.set_xlabel("hour of submission")
    heat.set_title("Median wait by weekday and hour")
    _key(nothing)
    figure.suptitle(f"Waits in {title}", x=0.01, ha="left", fontsize=11, color=FAINT)
    return figure


def shape_figure(found: Summary, counts: str, title: str) -> Figure:
    """Median wait by processors and requested time; in each field the wait, and how many jobs. Call it inside
    `styled`."""
    sizes = sorted({shape.procs for shape in found.shapes})
    requests = sorted({shape.requested for shape in found.shapes}, key=lambda one: (one is None, one or (0.0, 0.0)))
    table = np.full((len(sizes), len(requests)), np.nan)
    figure = new_figure(2.6 + 1.15 * len(requests), 1.6 + 0.5 * len(sizes))
    axes = figure.subplots()
    for shape in found.shapes:
        table[sizes.index(shape.procs), requests.index(shape.requested)] = shape.median or 0.0
    mesh = _heat(figure, axes, table)
    for shape in found.shapes:
        x, y = requests.index(shape.requested), sizes.index(shape.procs)
        dark = mesh.norm(max(shape.median or 0.0, LEAST)) > 0.55
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": PAPER if dark else INK}
        faint = 0.55 if shape.jobs < FEW else 1.0
        axes.text(x, y - 0.14, human(shape.median), fontsize=9, alpha=faint, **style)
        axes.text(x, y + 0.25, f"{shape.jobs:,}", fontsize=7, alpha=0.75 * faint, **style)
    axes.set_xticks(range(len(requests)), [request_label(one) for one in requests])
    axes.set_yticks(range(len(sizes)), [size_label(one) for one in sizes])
    axes.set_xlabel("requested wall time")
    axes.set_ylabel(counts)
    axes.set_title("Median wait by shape of the job")
    figure.suptitle(f"Waits in {title} (small: jobs)", x=0.01, ha="left", fontsize=11, color=FAINT)
    return figure


def _heat(figure: Figure, axes: Axes, table: NDArray[np.float64]) -> Any:
    """On a logarithmic scale; white where there is no job."""
    from matplotlib.colors import LogNorm

    most = max(float(np.nanmax(table)), 10 * LEAST)
    mesh = axes.imshow(np.maximum(table, LEAST), aspect="auto", cmap=COLOURS, norm=LogNorm(LEAST, most))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    bar = figure.colorbar(mesh, ax=axes, pad=0.015, fraction=0.05)
    bar.outline.set_visible(False)
    bar.set_ticks([tick for tick in TICKS if tick <= most])
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter(lambda value, _: human(value))
    return mesh


def _bars(axes: Axes, places: NDArray[np.int64], waits: Sequence[Waits], *, upright: bool) -> None:
    """The median as a bar, the 90 % quantile as a thin one behind it, on a logarithmic scale: they differ by far."""
    draw = axes.bar if upright else axes.barh
    for values, colour, width in (
        ([one.p90 or 0.0 for one in waits], P90, 0.42),
        ([one.median or 0.0 for one in waits], MEDIAN, 0.78),
    ):
        draw(places, np.maximum(values, LEAST), width, color=colour, linewidth=0)
    axis = axes.yaxis if upright else axes.xaxis
    (axes.set_yscale if upright else axes.set_xscale)("log")
    most = 2 * max(10.0, *(one.p90 or 0.0 for one in waits))
    (axes.set_ylim if upright else axes.set_xlim)(LEAST, most)
    axis.set_ticks([tick for tick in TICKS[:: 1 if upright else 2] if tick <= most])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(lambda value, _: human(value))
    axes.grid(visible=False, axis="x" if upright else "y")
    axes.grid(color=LINE, axis="y" if upright else "x")


def _key(axes: Axes) -> None:
    from matplotlib.patches import Patch

    axes.legend([Patch(color=MEDIAN), Patch(color=P90)], ["median", "90 % wait less"], loc="center left")
