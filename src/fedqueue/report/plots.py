"""The plots of a run, and the one of several runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedqueue.errors import ConfigError
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.report.data import Curve, Run, read_run
from fedqueue.report.style import (
    FAINT,
    PAPER,
    amount,
    clock_label,
    clock_unit,
    facility_colours,
    new_figure,
    save_png,
    short,
    strategy_colours,
    styled,
)
from fedqueue.report.timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER: Final = "plots"
MARKERS: Final = "osD^vph<"
STUB: Final = 0.012  # of the time axis, drawn after the last score
MANY: Final = 1000  # points of one colour; more are drawn as one picture inside an SVG
MOST_RANGE: Final = 1e4  # largest over smallest delay that has a place on an axis
LOG_RANGE: Final = 30.0  # largest over smallest delay from which axes are logarithmic


def run_plots(folder: Path) -> list[Path]:
    """Draw what the run in this folder has to show, as PNG files in folder/plots."""
    run = read_run(folder)
    figures = run_figures(run, facility_colours(run.facilities))
    return [save_png(figure, folder / FOLDER / f"{name}.png") for name, figure in figures.items()]


def run_figures(run: Run, colours: Mapping[str, str]) -> dict[str, Figure]:
    """The plots of a run by name; `colours` has one for each of its facilities."""
    figures: dict[str, Figure] = {}
    with styled():
        if run.scores:
            label = run.strategy
            figures["score"] = _scores({label: [run.scores]}, run.targets, "Score of the newest model", run.simulated)
        if run.jobs and run.end > 0:
            figures["timeline"] = timeline(run, colours)
        if any(update.fate == "aggregated" for update in run.updates):
            figures["staleness"] = _staleness(run, colours)
        if any(forecasts(run).values()):
            figures["forecast"] = _forecast(run, colours)
    return figures


def comparison_plot(curves: Mapping[str, Sequence[Curve]], path: Path, *, targets: Sequence[float], title: str) -> Path:
    """Score against virtual time as a PNG file: a line a label, the mean over its curves (one a seed), and a band from
    the lowest to the highest; a dot at the mean second at which a target was reached, if every curve reached it."""
    return save_png(comparison_figure(curves, targets=targets, title=title), path)


def comparison_figure(curves: Mapping[str, Sequence[Curve]], *, targets: Sequence[float], title: str) -> Figure:
    scored = {label: [curve for curve in several if curve] for label, several in curves.items()}
    scored = {label: several for label, several in scored.items() if several}
    if not scored:
        raise ConfigError("there is no score to compare: choose a task that trains, or compare the summaries")
    with styled():
        return _scores(scored, targets, title, simulated=True)


def mean_curve(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds, mean, lowest and highest score of several curves, stepwise: a score holds until the next model, and
    the last one for good. It begins where all of them have a score.

    >>> mean_curve([[(1.0, 0.25), (3.0, 0.5)], [(2.0, 0.75)]])
    ([2.0, 3.0], [0.5, 0.625], [0.25, 0.5], [0.75, 0.75])
    """
    begin = max(curve[0][0] for curve in curves)
    times = sorted({at for curve in curves for at, _ in curve if at > begin} | {begin})
    held = []
    for curve in curves:
        places = np.searchsorted([at for at, _ in curve], times, side="right") - 1
        held.append([curve[place][1] for place in places])
    each = list(zip(*held, strict=True))
    return times, [sum(scores) / len(scores) for scores in each], [*map(min, each)], [*map(max, each)]


def reached(curve: Curve, target: float) -> float | None:
    """The second at which a curve first has this score."""
    return next((at for at, score in curve if score >= target), None)


def forecasts(run: Run) -> dict[str, list[tuple[float, float]]]:
    """(forecast, real) admission delay in seconds of the jobs of each facility that were forecast and started. A job
    that was requeued counts with its first wait, which is the one that was forecast."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in run.facilities}
    for job in run.jobs:
        if job.expected_delay is not None and job.attempts:
            pairs[job.facility].append((job.expected_delay, job.attempts[0].admission_delay))
    return pairs


def _scores(curves: Mapping[str, Sequence[Curve]], targets: Sequence[float], title: str, simulated: bool) -> Figure:
    last = max(curve[-1][0] for several in curves.values() for curve in several) or 1.0
    size, unit = clock_unit(last)
    figure = new_figure(8.6, 4.6)
    axes = figure.subplots()
    for target in targets:
        axes.axhline(target, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
        axes.annotate(
            f"{target:g}",
            (1.0, target),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=FAINT,
            fontsize=9,
        )
    axes.set_xlim(0, last / size * (1 + STUB))
    for place, (label, colour) in enumerate(strategy_colours(list(curves)).items()):
        known = list(STRATEGIES).index(label) if label in STRATEGIES else len(STRATEGIES) + place
        _score_line(axes, label, curves[label], colour, MARKERS[known % len(MARKERS)], targets, size)
    axes.set_xlabel(clock_label(unit, simulated=simulated))
    axes.set_ylabel("score")
    axes.set_title(title)
    _score_key(figure, axes, band=any(len(several) > 1 for several in curves.values()), dots=bool(targets))
    return figure


def _score_key(figure: Figure, axes: Axes, *, band: bool, dots: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles, labels = axes.get_legend_handles_labels()
    if band:
        handles.append(Patch(facecolor=FAINT, alpha=0.25))
        labels.append("lowest to highest seed")
    if dots:
        handles.append(Line2D([], [], color=FAINT, marker="o", markeredgecolor=PAPER, linestyle="none"))
        labels.append("reaches a target, mean of seeds" if band else "reaches a target")
    figure.legend(handles, labels, loc="outside lower left", ncols=4)


def _score_line(
    axes: Axes, label: str, curves: Sequence[Curve], colour: str, marker: str, targets: Sequence[float], size: float
) -> None:
    times, mean, low, high = mean_curve(curves)
    edge = axes.get_xlim()[1]
    x = [at / size for at in times]
    x.append(min(x[-1] + STUB * edge, edge))  # so that the last score can be seen
    if len(curves) > 1:
        axes.fill_between(x, [*low, low[-1]], [*high, high[-1]], step="post", color=colour, alpha=0.16, linewidth=0)
        label = f"{label}, mean of {len(curves)}"
    line: dict[str, Any] = {"color": colour, "marker": marker, "markeredgecolor": PAPER, "markersize": 6.5}
    axes.step(x, [*mean, mean[-1]], where="post", linewidth=1.8, markevery=[], label=label, **line)
    for target in targets:
        hits = [at for curve in curves if (at := reached(curve, target)) is not None]
        if len(hits) == len(curves):
            axes.plot([sum(hits) / len(hits) / size], [target], linestyle="none", zorder=4, **line)


def _staleness(run: Run, colours: Mapping[str, str]) -> Figure:
    used = [update for update in run.updates if update.fate == "aggregated" and update.staleness is not None]
    counts = Counter((update.facility, update.staleness or 0, update.deferred) for update in used)
    values = np.arange(max(staleness for _, staleness, _ in counts) + 1)
    figure = new_figure(7.2, 3.9)
    axes = figure.subplots()
    base = np.zeros(len(values))
    for name in run.facilities:
        for deferred in (False, True):
            heights = np.array([counts[name, int(value), deferred] for value in values])
            hatch: dict[str, Any] = {"hatch": "////", "edgecolor": PAPER} if deferred else {}
            axes.bar(values, heights, bottom=base, width=0.8, color=colours[name], linewidth=0, **hatch)
            base = base + heights
    axes.set_xlabel("staleness (models since the one it was trained from)")
    axes.set_ylabel("updates")
    axes.set_title("Staleness of the updates that were aggregated")
    axes.locator_params(integer=True)
    axes.set_xlim(-0.6, max(len(values), 4) - 0.4)
    axes.grid(visible=False, axis="x")
    _facility_key(figure, run, colours, deferred=any(deferred for _, _, deferred in counts))
    return figure


def _facility_key(figure: Figure, run: Run, colours: Mapping[str, str], *, deferred: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colours[name]) for name in run.facilities]
    labels = [short(name) for name in run.facilities]
    if deferred:
        handles.append(Patch(facecolor=FAINT, edgecolor=PAPER, hatch="////", linewidth=0))
        labels.append("deferred")
    figure.legend(handles, labels, loc="outside lower left", ncols=min(6, 100 // max(map(len, [*labels, "-" * 12]))))


def _forecast(run: Run, colours: Mapping[str, str]) -> Figure:
    pairs = {name: points for name, points in forecasts(run).items() if points}
    columns = min(len(pairs), 4)
    rows = ceil(len(pairs) / columns)
    figure = new_figure(0.7 + 2.35 * columns, 0.45 + 2.85 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    delays = np.array([value for points in pairs.values() for pair in points for value in pair])
    least = _delay_axes(grid[0], delays)
    for axes in grid[len(pairs) :]:
        axes.remove()
    for axes, (name, points) in zip(grid, pairs.items(), strict=False):
        expected, real = np.array(points).T
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.9, transform=axes.transAxes)
        many = len(points) > MANY
        dots: dict[str, Any] = {"color": colours[name], "alpha": 0.2 if many else 0.65, "linewidth": 0}
        axes.scatter(np.maximum(expected, least), np.maximum(real, least), s=16, zorder=3, rasterized=many, **dots)
        error = np.abs(real - expected).mean()
        axes.set_title(short(name), pad=20)
        about = f"{len(points)} jobs, mean error {amount(error)} s"
        axes.text(0, 1.03, about, transform=axes.transAxes, fontsize=9, color=FAINT)
        axes.set_box_aspect(1)
    figure.supxlabel("forecast admission delay (s)", fontsize=10)
    figure.supylabel("real admission delay (s)", fontsize=10)
    return figure


def _delay_axes(axes: Axes, delays: NDArray[np.float64]) -> float:
    """The same scale both ways for all panels, logarithmic if delays differ by much. Returns the least delay, in
    seconds, that has a place on it: those below, zero among them, are drawn there."""
    high = float(delays.max()) or 1.0
    least = max(float(delays[delays > 0].min(initial=high)), high / MOST_RANGE)
    logarithmic = high / least > LOG_RANGE
    low = least / 1.3 if logarithmic else 0.0
    for axis, set_scale, set_limits in (
        (axes.xaxis, axes.set_xscale, axes.set_xlim),
        (axes.yaxis, axes.set_yscale, axes.set_ylim),
    ):
        set_scale("log" if logarithmic else "linear")
        set_limits(low, high * 1.3 if logarithmic else high * 1.05)
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    return least if logarithmic else 0.0
