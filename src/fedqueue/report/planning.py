"""The plot of `fedqueue plan`: what every candidate costs and gives, how the round length decides it, and how much of
its time a facility trains by the wall time of jobs that stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedqueue.planning.advice import Advice
from fedqueue.planning.search import Tried
from fedqueue.planning.stays import StayCurve
from fedqueue.planning.text import duration
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.report.plots import MARKERS
from fedqueue.report.style import INK, PAPER, facility_colours, new_figure, save_png, strategy_colours, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOT: Final = 26.0
STAR: Final = 190.0
MOST_TICKS: Final = 7


def plan_plot(advice: Advice, path: Path) -> Path:
    """Draw it as a PNG file."""
    with styled():
        figure = plan_figure(advice)
    return save_png(figure, path)


def plan_figure(advice: Advice) -> Figure:
    """Call it inside `styled`."""
    panels = 3 if advice.stays else 2
    figure = new_figure(5.3 * panels, 4.7)
    cost, length, *staying = figure.subplots(1, panels)
    length.sharey(cost)
    length.tick_params(labelleft=False)
    strategies = [name for name in STRATEGIES if any(t.candidate.strategy == name for t in advice.tried)]
    colours = strategy_colours(strategies)
    markers = {name: MARKERS[list(STRATEGIES).index(name) % len(MARKERS)] for name in strategies}
    for name in strategies:
        trials = [trial for trial in advice.tried if trial.candidate.strategy == name]
        cost.scatter(
            [trial.node_hours for trial in trials],
            [trial.work for trial in trials],
            s=DOT,
            color=colours[name],
            marker=markers[name],
            alpha=0.55,
            linewidth=0,
        )
        peaks = _best_by_length(trials)
        length.plot(
            [trial.candidate.length for trial in peaks],
            [trial.work for trial in peaks],
            color=colours[name],
            marker=markers[name],
            markersize=5,
            linewidth=1.6,
            label=name,
        )
    edge = frontier([(t.node_hours, t.work) for t in advice.tried])
    cost.plot(
        [x for x, _ in edge],
        [y for _, y in edge],
        color=INK,
        linewidth=1.0,
        drawstyle="steps-post",
        zorder=1.5,
        label="frontier",
    )
    best = advice.best
    work = best.mean("work")
    for axes, x in ((cost, best.mean("node_hours")), (length, best.candidate.length)):
        axes.scatter(
            [x], [work], s=STAR, marker="*", color=INK, edgecolor=PAPER, linewidth=0.8, zorder=5, label="recommended"
        )
    cost.set_xlabel("node-hours a day")
    cost.set_ylabel("work (effective local steps a day)")
    cost.set_title("What it costs, what it gives")
    cost.set_ylim(bottom=0)
    cost.set_xlim(left=0)
    cost.xaxis.set_major_formatter("{x:,.0f}")
    cost.yaxis.set_major_formatter("{x:,.0f}")
    _length_axis(length, sorted({trial.candidate.length for trial in advice.tried}))
    length.set_title("Best rule at each length")
    for axes in staying:
        _draw_stays(axes, advice.stays)
    shown = dict[str, Any]()
    for axes in (length, cost):
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
    return figure


def _draw_stays(axes: Axes, stays: Sequence[StayCurve]) -> None:
    """Solid: the whole history. Dotted: what its second half made of it, where the advice of the first is a ring."""
    for curve, colour in zip(stays, facility_colours([curve.facility for curve in stays]).values(), strict=True):
        shares = [(point.wall_seconds, point.share) for point in curve.points]
        axes.plot(*zip(*shares, strict=True), color=colour, marker="o", markersize=4, label=curve.facility)
        chosen = curve.chosen.wall_seconds, curve.chosen.share
        axes.scatter(*chosen, s=STAR, marker="*", color=colour, edgecolor=PAPER, linewidth=0.8, zorder=5)
        if curve.check is not None:
            later = [(wall, second) for wall, _, second in curve.check.shares]
            axes.plot(*zip(*later, strict=True), color=colour, linewidth=1.2, linestyle=":")
            advice = curve.check.wall_seconds, curve.check.achieved
            axes.scatter(*advice, s=2 * DOT, facecolor=PAPER, edgecolor=colour, zorder=6)
    _length_axis(axes, sorted({point.wall_seconds for curve in stays for point in curve.points}))
    axes.set_xlabel("wall time of jobs that stay")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set_title("Time spent training (dotted: second half)")
    axes.legend(loc="lower right")


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both, cheapest first.

    >>> frontier([(1.0, 5.0), (2.0, 4.0), (3.0, 9.0)])
    [(1.0, 5.0), (3.0, 9.0)]
    """
    found: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or gain > found[-1][1]:
            found.append((cost, gain))
    return found


def _best_by_length(trials: Sequence[Tried]) -> list[Tried]:
    best: dict[float, Tried] = {}
    for trial in trials:
        known = best.get(trial.candidate.length)
        if known is None or trial.work > known.work:
            best[trial.candidate.length] = trial
    return [best[length] for length in sorted(best)]


def _length_axis(axes: Axes, lengths: Sequence[float]) -> None:
    axes.set_xscale("log")
    every = -(-len(lengths) // MOST_TICKS)
    shown = lengths[::every]
    axes.set_xticks(shown, [duration(length) for length in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("round length, or training time of a job")
