"""The plot of `fedqueue forecast evaluate`: are forecasts right as often as they say, what are they worth, and what do
they look like beside the waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedqueue.forecasting.evaluate import NOMINAL, PUBLISHED, Evaluation, best, means
from fedqueue.report.style import FAINT, INK, LINE, PAPER, amount, clock_unit, new_figure, save_png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found = Sequence[tuple[Mapping[str, Any], Evaluation]]

# Okabe and Ito's colours; the published forecaster and the best one stand out, the others stay behind.
PUBLISHED_COLOUR: Final = "#0072b2"
BEST_COLOUR: Final = "#d55e00"
OTHER_COLOUR: Final = "#b9bfc7"
ON_TIME_COLOUR: Final = "#009e73"


def forecasts_plot(found: Found, path: Path) -> Path:
    """Draw it as a PNG file."""
    with styled():
        figure = forecasts_figure(found)
    return save_png(figure, path)


def forecasts_figure(found: Found) -> Figure:
    """Call it inside `styled`."""
    figures = means([one for _, one in found])
    chosen = best(figures)
    figure = new_figure(11.0, 8.2)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1.0), width_ratios=(1.0, 1.35))
    _calibration(figure.add_subplot(grid[0, 0]), found, chosen)
    _worth(figure.add_subplot(grid[0, 1]), found, figures)
    _stretch(figure.add_subplot(grid[1, :]), found, chosen)
    what = f"{len(found)} cases" if len(found) > 1 else f"{found[0][0]['case']}, {_rounds(found[0][0])}"
    figure.suptitle(f"Forecasts of queue waits: {what}", x=0.01, ha="left", fontsize=11, color=FAINT)
    return figure


def _calibration(axes: Axes, found: Found, chosen: str) -> None:
    """Nominal against realised, the mean over the cases; a band from the least to the greatest for the best."""
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
    evaluations = [one for _, one in found]
    for name in sorted(evaluations[0].scores, key=lambda name: (name == chosen, name == PUBLISHED)):
        curves = np.array([[real for _, real in one.scores[name].calibration] for one in evaluations])
        levels = [level for level, _ in evaluations[0].scores[name].calibration]
        colour = _colour(name, chosen)
        if name == chosen and len(found) > 1:
            axes.fill_between(levels, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        front = name in (chosen, PUBLISHED)
        axes.plot(
            levels,
            curves.mean(axis=0),
            color=colour,
            linewidth=1.8 if front else 1.0,
            label=name if front else None,
            marker="o" if front else None,
            markersize=3,
        )
    axes.plot([], [], color=OTHER_COLOUR, linewidth=1.0, label="others")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal", adjustable="box")
    axes.set_xlabel("share of waits promised below the quantile")
    axes.set_ylabel("share found below it")
    axes.set_title("Calibration")
    axes.legend(loc="lower right")


def _worth(axes: Axes, found: Found, figures: Mapping[str, Mapping[str, float | None]]) -> None:
    """A row a forecaster: share of the round that is left to train; a thin line spans the cases."""
    names = sorted(figures, key=lambda name: figures[name]["on_time"] or 0.0)
    evaluations = [one for _, one in found]
    for row, name in enumerate(names):
        scores = [one.scores[name] for one in evaluations]
        for key, colour, shift in (("budget", PUBLISHED_COLOUR, 0.2), ("on_time", ON_TIME_COLOUR, -0.2)):
            values = [getattr(score, key) for score in scores]
            if len(values) > 1:
                axes.plot([min(values), max(values)], [row + shift] * 2, color=LINE, linewidth=2.4, zorder=1)
                axes.plot(values, [row + shift] * len(values), "|", color=colour, markersize=4, alpha=0.5, zorder=2)
            mean = float(np.mean(values))
            axes.plot([mean], [row + shift], "o", color=colour, markersize=6.5, zorder=3)
            axes.annotate(
                f"{mean:.3f}",
                (1.01, row + shift),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=7.5,
                color=colour,
                annotation_clip=False,
            )
    marks = (
        ("ewma_budget", PUBLISHED_COLOUR, f"{PUBLISHED}, best margin in hindsight, at 5 % late"),
        ("ewma_on_time", ON_TIME_COLOUR, f"{PUBLISHED}, best margin in hindsight, on time"),
    )
    handles = [
        axes.axvline(
            float(np.mean([getattr(one, key) for one in evaluations])),
            color=colour,
            linewidth=1.1,
            linestyle=(0, (4, 2)),
            label=label,
        )
        for key, colour, label in marks
    ]
    dots = [
        axes.plot([], [], "o", color=colour, markersize=6.5, label=label)[0]
        for colour, label in (
            (PUBLISHED_COLOUR, f"J/T at nominal {100 * NOMINAL:g} % late"),
            (ON_TIME_COLOUR, "on-time J/T, newsvendor rule"),
        )
    ]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(0, 1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("share of the round left to train")
    axes.set_title("What they are worth", pad=10)
    axes.legend(
        handles=[*dots, *handles], loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=2, fontsize=8, borderpad=0
    )


def _stretch(axes: Axes, found: Found, chosen: str) -> None:
    """Waits, the best forecaster's 5 to 95 % band and its median; of several cases, the one in the middle by what an
    oracle could use of the round."""
    case, one = sorted(found, key=lambda pair: pair[1].oracle)[len(found) // 2]
    stretch = one.stretch
    low, middle, high = np.maximum(1.0, np.array(stretch.quantiles[chosen]).T)
    waits = np.maximum(1.0, np.array(stretch.waits))
    late, order = waits > high, np.arange(1, len(waits) + 1)
    span = stretch.at[-1] - stretch.at[0]
    unit, unit_name = clock_unit(span)
    axes.set_yscale("log")
    axes.vlines(order, low, high, color=BEST_COLOUR, alpha=0.28, linewidth=3.2, label=f"{chosen}, 5 to 95 %")
    axes.plot(order, middle, "_", color=BEST_COLOUR, markersize=4.5, label=f"{chosen}, median")
    axes.plot(order[~late], waits[~late], "o", color=INK, markersize=3, label="wait")
    axes.plot(
        order[late],
        waits[late],
        "o",
        markeredgecolor=INK,
        markerfacecolor=PAPER,
        markersize=4.5,
        label=f"wait above the 95 % quantile ({int(late.sum())} of {len(waits)})",
    )
    length = case["round_length"]
    axes.axhline(length, color=FAINT, linewidth=1.0)
    axes.annotate(
        f"T = {amount(length)} s",
        (1.0, length),
        xycoords=("axes fraction", "data"),
        ha="right",
        textcoords="offset points",
        xytext=(0, 3),
        fontsize=9,
        color=FAINT,
    )
    axes.set_xlim(0, len(waits) + 1)
    axes.yaxis.set_major_formatter(lambda value, _: amount(value))
    axes.set_xlabel(f"probe, in order of submission, over {amount(span / unit)} {unit_name}")
    axes.set_ylabel("wait (s; below 1 drawn at 1)")
    axes.set_title(f"Forecasts and waits: the last {len(waits)} probes of {case['case']}, {_rounds(case)}")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)


def _colour(name: str, chosen: str) -> str:
    return BEST_COLOUR if name == chosen else PUBLISHED_COLOUR if name == PUBLISHED else OTHER_COLOUR


def _rounds(case: Mapping[str, Any]) -> str:
    return f"rounds of {amount(case['round_length'])} s"
