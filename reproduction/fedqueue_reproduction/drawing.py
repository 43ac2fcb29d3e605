"""How the figures of a study are drawn, from plain values: curves, dots with intervals, arrivals, sweeps.

Figures are small, with text that can be read at half the width of a page. Filled marks are ours, hollow ones the
paper's. Call everything inside `report.style.styled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedqueue.report.style import FAINT, INK, PAPER, new_figure
from fedqueue_reproduction.claims import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SCORES: Final = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)  # that may get a tick
WRAP: Final = 28  # letters of a row's label, before it goes on in a second line
BLUES: Final = ("#9ccbe8", "#5aa5d6", "#2478b4", "#0b3c6e")  # values of a knob, in order


def shades(values: int) -> tuple[str, ...]:
    """For so many values of a knob, up to four, light to dark."""
    return {1: BLUES[2:3], 2: BLUES[1::2], 3: (BLUES[0], BLUES[2], BLUES[3])}.get(values, BLUES)


@dataclass(frozen=True, slots=True)
class Line:
    """The curves of one row, (seconds, score) a model; one curve a seed."""

    label: str
    colour: str
    curves: Sequence[Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Dot:
    """A figure of one row, and what the paper has for it."""

    label: str
    colour: str
    sample: Sample
    published: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """A figure over the values of a knob."""

    label: str
    colour: str
    samples: Sequence[Sample]
    published: Sequence[float | None] = field(default=())


# Curves -------------------------------------------------------------------------------------------------


def quartiles(
    curves: Sequence[Sequence[tuple[float, float]]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds, and the lower quartile, median and upper quartile of several curves there (one a row of the array). A
    score holds until the next model, and the last one for good; it begins where all curves have a score."""
    begin = max(curve[0][0] for curve in curves)
    times = np.array(sorted({at for curve in curves for at, _ in curve if at > begin} | {begin}))
    held = []
    for curve in curves:
        at, score = np.array(curve).T
        held.append(score[np.searchsorted(at, times, side="right") - 1])
    return times, np.quantile(np.array(held), [0.25, 0.5, 0.75], axis=0)


def curve_figure(
    panels: Sequence[tuple[str, Sequence[Line]]],
    *,
    target: float | None,
    columns: int,
    ends: Sequence[float] | None = None,
    floor: float = 0.8,
) -> Figure:
    """Score against virtual time, a panel a setting. The score axis is stretched towards 1, so that 95 % and 98 % can
    be told apart. `ends`: seconds at which each panel's axis ends, if not with its curves."""
    rows = ceil(len(panels) / columns)
    figure = new_figure(1.0 + 2.5 * columns, 0.75 + 2.25 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    best = max((score for _, lines in panels for one in lines for curve in one.curves for _, score in curve))
    for axes in grid[len(panels) :]:
        axes.remove()
    for place, (axes, (title, lines)) in enumerate(zip(grid, panels, strict=False)):
        end = ends[place] if ends else max((curve[-1][0] for one in lines for curve in one.curves), default=1.0)
        _score_axis(axes, floor, min(best + (1 - best) * 0.2, 0.9995))
        if target is not None:
            axes.axhline(target, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
        for one in lines:
            if one.curves:
                _curve(axes, one, end)
        axes.set_xlim(0, 1.02 * end)
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(title, fontsize=10, pad=6)
    figure.supxlabel("virtual time (s)", fontsize=10)
    figure.supylabel("test accuracy (%)", fontsize=10)
    _row_key(figure, {one.label: one.colour for _, lines in panels for one in lines})
    return figure


def _curve(axes: Axes, line: Line, end: float) -> None:
    times, (low, middle, high) = quartiles(line.curves)
    x = np.append(times, times[-1] + 0.02 * end)  # so that the last score can be seen
    low, middle, high = (np.append(values, values[-1]) for values in (low, middle, high))
    axes.fill_between(x, low, high, step="post", color=line.colour, alpha=0.18, linewidth=0)
    axes.step(x, middle, where="post", color=line.colour, linewidth=1.5)


def _score_axis(axes: Axes, low: float, high: float) -> None:
    least = 1e-4
    axes.set_yscale("function", functions=(lambda s: -np.log(np.maximum(1 - s, least)), lambda y: 1 - np.exp(-y)))
    axes.set_ylim(low, high)
    axes.set_yticks([tick for tick in SCORES if low <= tick <= high], minor=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def _row_key(figure: Figure, colours: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=2.5) for colour in colours.values()]
    key(figure, handles, list(colours))


def key(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Above the panels, in as many columns as the figure is wide enough for."""
    across = next((n for n in range(len(labels), 1, -1) if _width(labels, n) < figure.get_figwidth()), 1)
    figure.set_figheight(figure.get_figheight() + 0.2 * (ceil(len(labels) / across) - 1))
    shape: dict[str, Any] = {"handlelength": 1.5, "columnspacing": 1.4}
    figure.legend(handles, labels, loc="outside upper center", ncols=across, **shape)


def _width(labels: Sequence[str], columns: int) -> float:
    """Inches of a key, which is filled column by column."""
    parts = np.array_split(np.array([len(label) for label in labels]), columns)
    return sum(0.55 + 0.075 * float(part.max()) for part in parts)


# Dots with intervals ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of dots: a title above it, the figure's name below."""

    title: str
    label: str
    dots: Sequence[Dot]


def dot_figure(panels: Sequence[Panel], *, columns: int, shared: bool) -> Figure:
    """A dot and its 95 % interval a row; all panels have the same rows, and if `shared` the same axis, logarithmic if
    values differ by much. Where some seeds never reached the target: the median and its interval with an open end, and
    how many did."""
    everything = [dot for panel in panels for dot in panel.dots]
    logarithmic = shared and _far([v for dot in everything for v in (*_middles([dot.sample]), dot.published)], 5.0)
    names = [fill(dot.label, WRAP) for dot in panels[0].dots]
    rows = ceil(len(panels) / columns)
    widest = max(len(line) for name in names for line in name.split("\n"))
    height = 0.3 * len(names) + 0.12 * sum(name.count("\n") for name in names)
    figure = new_figure(0.3 + 0.085 * widest + 2.25 * columns, 0.55 + (0.75 + height) * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex=shared).ravel()
    for axes in grid[len(panels) :]:
        axes.remove()
    for place, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        if logarithmic:
            axes.set_xscale("log")
            _plain_ticks(axes.xaxis)
        else:
            axes.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        for line, dot in enumerate(panel.dots):
            _dot(axes, len(names) - 1 - line, dot)
        axes.set_title(panel.title, fontsize=10, pad=6)
        if not shared or place >= len(panels) - columns:
            axes.set_xlabel(panel.label, fontsize=9)
            axes.tick_params(axis="x", which="both", labelbottom=True)  # also above a gap in the last row
        axes.set_yticks(range(len(names)), names[::-1])
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.12)
    _paperkey(
        figure,
        any(dot.published is not None for dot in everything),
        any(dot.sample.reached < dot.sample.seeds for dot in everything),
    )
    return figure


def _dot(axes: Axes, height: float, dot: Dot) -> None:
    sample = dot.sample
    mark: dict[str, Any] = {"marker": "o", "markersize": 5.5, "color": dot.colour, "zorder": 3}
    bar: dict[str, Any] = {"color": dot.colour, "linewidth": 2.2, "solid_capstyle": "round"}
    if sample.mean is not None:
        half = sample.half_width or 0.0
        axes.plot([sample.mean - half, sample.mean + half], [height, height], **bar)
        axes.plot([sample.mean], [height], **mark)
    elif sample.seeds and sample.bound is not None:
        begin = sample.low if sample.low is not None else sample.bound
        end = sample.high if sample.high is not None else sample.bound
        axes.plot([begin, max(begin, end)], [height, height], **{**bar, "linewidth": 1.4})
        if sample.high is None:
            axes.plot([max(begin, end)], [height], marker=">", markersize=6, color=dot.colour, zorder=3)
        if sample.median is not None:
            axes.plot([sample.median], [height], **mark)
        said = f"{sample.reached} of {sample.seeds}"
        axes.annotate(
            said,
            (max(begin, end), height),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=7.5,
            color=FAINT,
            ha="right",
        )
    if dot.published is not None:
        axes.plot([dot.published], [height], marker="D", markersize=5.5, color=INK, fillstyle="none", zorder=4)


def _plain_ticks(axis: Axis) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}" if value < 1000 else f"{value:,.0f}")
    axis.set_minor_formatter(NullFormatter())


def _paperkey(figure: Figure, paper: bool, censored: bool) -> None:
    from matplotlib.lines import Line2D

    ours = Line2D([], [], color=FAINT, marker="o", markersize=5.5, linewidth=2.2)
    handles, labels = [ours], ["here, 95 % interval"]
    if paper:
        handles.append(Line2D([], [], color=INK, marker="D", fillstyle="none", markersize=5.5, linestyle="none"))
        labels.append("paper")
    if censored:
        handles.append(Line2D([], [], color=FAINT, marker=">", markersize=6, linewidth=1.4))
        labels.append("median: not all seeds reach it")
    key(figure, handles, labels)


# Arrivals -----------------------------------------------------------------------------------------------


def arrival_figure(
    panels: Sequence[tuple[str, Mapping[str, Sequence[float]]]], *, knob: str, end: float | None = None
) -> Figure:
    """When updates arrive after their round began, in round lengths: left the histogram, right the distribution
    function, a line a value of the knob, and the cutoff at 1. A pair of plots a panel."""
    figure = new_figure(7.6, 0.55 + 2.35 * len(panels))
    grid = figure.subplots(len(panels), 2, squeeze=False, sharex=True)
    values = np.concatenate([np.asarray(v) for _, lines in panels for v in lines.values() if len(v)])
    last = end if end is not None else max(1.4, min(2.6, float(np.quantile(values, 0.995)) * 1.05))
    edges = np.arange(0.0, last + 0.05, 0.05)
    for (left, right), (title, lines) in zip(grid, panels, strict=True):
        for colour, (_, arrivals) in zip(shades(len(lines)), lines.items(), strict=False):
            if not len(arrivals):
                continue
            shares = np.histogram(arrivals, edges)[0] / len(arrivals)
            left.stairs(100 * shares, edges, color=colour, linewidth=1.5)
            left.stairs(100 * shares, edges, color=colour, fill=True, alpha=0.13)
            ordered = np.sort(arrivals)
            right.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered) * 100, color=colour, where="post")
        for axes in (left, right):
            axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_xlim(0, last)
        left.set_ylabel("updates (%)")
        right.set_ylabel("arrived by then (%)")
        right.set_ylim(0, 102)
        left.set_title(title, fontsize=10, pad=6)
        left.annotate(
            "cutoff", (1, 1), xycoords=("data", "axes fraction"), xytext=(3, -9), textcoords="offset points", fontsize=8
        )
        _late_labels(right, lines)
    figure.supxlabel("arrival after submission, in round lengths", fontsize=10)
    names = list(dict.fromkeys(name for _, lines in panels for name in lines))
    _row_key(figure, {f"{knob} {name}": c for c, name in zip(shades(len(names)), names, strict=False)})
    return figure


def _late_labels(axes: Axes, lines: Mapping[str, Sequence[float]]) -> None:
    """How much arrives after the cutoff, in the colours of the lines."""
    axes.text(0.98, 0.06 + 0.115 * len(lines), "after the cutoff", transform=axes.transAxes, ha="right", fontsize=8)
    for place, (colour, (_, arrivals)) in enumerate(zip(shades(len(lines)), lines.items(), strict=False)):
        if len(arrivals):
            late = float(np.mean(np.asarray(arrivals) > 1)) * 100
            height = 0.06 + 0.115 * (len(lines) - 1 - place)
            style: dict[str, Any] = {"ha": "right", "fontsize": 9, "color": colour, "weight": "bold"}
            axes.text(0.98, height, f"{late:.1f} %", transform=axes.transAxes, **style)


# Sweeps -------------------------------------------------------------------------------------------------


def sweep_figure(
    panels: Sequence[tuple[str, Sequence[Series]]],
    *,
    knob: str,
    values: Sequence[str],
    columns: int,
    logarithmic: bool = False,
) -> Figure:
    """Figures over the values of a knob, which stand at equal distances; a panel a figure, a line a series."""
    rows = ceil(len(panels) / columns)
    figure = new_figure(0.6 + 2.6 * columns, 0.9 + 2.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for axes in grid[len(panels) :]:
        axes.remove()
    x = np.arange(len(values), dtype=np.float64)
    for number, (axes, (title, series)) in enumerate(zip(grid, panels, strict=False)):
        for place, one in enumerate(series):
            shift = (place - (len(series) - 1) / 2) * min(0.07, 0.35 / max(len(series), 1))
            _series(axes, np.asarray(x + shift, np.float64), one)
        if logarithmic and _far([v for one in series for v in (*_middles(one.samples), *one.published)], 4.0):
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis)
        axes.set_xticks(x, values)
        axes.tick_params(axis="x", labelbottom=number >= len(panels) - columns)
        axes.set_xlim(-0.4, len(values) - 0.6)
        axes.grid(visible=False, axis="x")
        axes.set_title(title, fontsize=10, pad=6)
    figure.supxlabel(knob, fontsize=10)
    everything = [one for _, series in panels for one in series]
    _sweepkey(figure, everything)
    return figure


def _far(values: Iterable[float | None], times: float) -> bool:
    """Whether values differ so much that the small ones could not be told apart on a linear axis."""
    known = [value for value in values if value]
    return bool(known) and max(known) > times * min(known)


def _middles(samples: Iterable[Sample]) -> list[float | None]:
    return [one.mean if one.mean is not None else one.median for one in samples]


def _series(axes: Axes, x: NDArray[np.float64], one: Series) -> None:
    middles = _middles(one.samples)
    known = [(at, middle, s) for at, middle, s in zip(x, middles, one.samples, strict=True) if middle is not None]
    axes.plot([at for at, _, _ in known], [middle for _, middle, _ in known], color=one.colour, linewidth=1.4)
    for at, middle, s in known:
        whole = s.mean is not None
        if whole and s.half_width is not None:
            axes.plot([at, at], [middle - s.half_width, middle + s.half_width], color=one.colour, linewidth=2)
        marker = "o" if whole else "^"  # a triangle: a median, since some seeds never reached the target
        axes.plot([at], [middle], marker=marker, markersize=6.5, color=one.colour, markeredgecolor=PAPER, zorder=3)
    paper = [(at, value) for at, value in zip(x, one.published, strict=False) if value is not None]
    if paper:
        px, py = zip(*paper, strict=True)
        axes.plot(px, py, color=one.colour, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.plot(px, py, marker="D", markersize=5, color=one.colour, fillstyle="none", linestyle="none")


def _sweepkey(figure: Figure, series: Sequence[Series]) -> None:
    from matplotlib.lines import Line2D

    colours = {one.label: one.colour for one in series if one.label}
    shape: dict[str, Any] = {"marker": "o", "markersize": 6.5, "markeredgecolor": PAPER}
    handles = [Line2D([], [], color=colour, linewidth=1.6, **shape) for colour in colours.values()]
    labels = list(colours)
    if any(value is not None for one in series for value in one.published):
        style: dict[str, Any] = {"linestyle": (0, (1, 2)), "linewidth": 0.9, "markersize": 5}
        handles.append(Line2D([], [], color=INK, marker="D", fillstyle="none", **style))
        labels.append("paper")
    if any(s.mean is None and s.median is not None for one in series for s in one.samples):
        handles.append(Line2D([], [], color=FAINT, marker="^", markersize=6.5, linestyle="none"))
        labels.append("median: not all seeds reach it")
    key(figure, handles, labels)
