"""The plot of `fedqueue bound --theorem`: what was measured and both bounds, over rounds; a panel a case and rate."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedqueue.report.style import FAINT, INK, new_figure, save_png, styled
from fedqueue_reproduction.bound_plot import LEMMA, LOG, SHADE, power
from fedqueue_reproduction.theorem_results import CaseFigures
from fedqueue_reproduction.wording import scientific

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATED: Final = LEMMA
EXPLICIT: Final = LOG
UNPROVED: Final = (0, (4, 2))  # the line of a bound whose conditions are not met
COLUMNS: Final = 3


def theorem_plot(everything: Sequence[CaseFigures], path: Path) -> Path:
    """Draw it as a PNG file."""
    with styled():
        figure = theorem_figure(everything)
    return save_png(figure, path)


def theorem_figure(everything: Sequence[CaseFigures]) -> Figure:
    """Call it inside `styled`."""
    columns = min(COLUMNS, len(everything))
    rows = ceil(len(everything) / columns)
    figure = new_figure(1.0 + 3.1 * columns, 0.9 + 2.75 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(everything) :]:
        axes.remove()
    for axes, one in zip(grid, everything, strict=False):
        _panel(axes, one)
        axes.set_xlabel("rounds R")
    figure.supylabel("mean of |grad F|² over R rounds", fontsize=10)
    _key(figure)
    return figure


def _panel(axes: Axes, one: CaseFigures) -> None:
    measured = [span.mean for span in one.measured]
    lines = [value for values in (measured, one.stated, one.explicit) for value in values if value > 0]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1, max(one.at[-1], 2))
    low, high = _whole(min(*lines, one.level), max(*lines, one.level))
    axes.set_ylim(low, high)
    axes.axhspan(one.level, high, color=FAINT, alpha=SHADE, linewidth=0)
    axes.axhline(one.level, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
    for values, colour, of in ((one.stated, STATED, "stated"), (one.explicit, EXPLICIT, "explicit")):
        proved = one.holds("stated" if of == "stated" else "explicit")
        axes.plot(one.at, values, color=colour, linewidth=1.7, linestyle="-" if proved else UNPROVED)
    beneath = low / 10  # what is 0 has no logarithm
    least, most = ([max(end, beneath) for end in ends] for ends in zip(*_ends(one), strict=True))
    axes.fill_between(one.at, least, most, color=INK, alpha=0.15, linewidth=0)
    axes.plot(one.at, [max(value, beneath) for value in measured], color=INK, linewidth=1.7)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(power)
    axes.minorticks_off()
    axes.set_title(one.label, pad=20, fontsize=10)
    met = "the theorem allows it" if one.holds("stated") else f"it allows {scientific(one.allowed_rate or 0.0)}"
    axes.text(0, 1.035, f"rate {scientific(one.rate)}; {met}", transform=axes.transAxes, fontsize=9, color=FAINT)


def _ends(one: CaseFigures) -> list[tuple[float, float]]:
    return [(span.least, span.most) for span in one.measured]


def _whole(least: float, most: float) -> tuple[float, float]:
    """Powers of ten that hold both; at most nine of them, from above: what starts at nothing has no least."""
    top = ceil(log10(most) + 0.05)
    return 10.0 ** max(floor(log10(least) - 0.05), top - 9), 10.0**top


def _key(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    band: Any = (Patch(facecolor=INK, alpha=0.15), Line2D([], [], color=INK, linewidth=1.7))
    handles: list[Any] = [
        band,
        Line2D([], [], color=STATED, linewidth=1.7),
        Line2D([], [], color=EXPLICIT, linewidth=1.7),
        Line2D([], [], color=FAINT, linewidth=1.7, linestyle=UNPROVED),
        Patch(facecolor=FAINT, alpha=2 * SHADE),
    ]
    labels = [
        "measured (band: all seeds)",
        "as the paper states it, C0 = C1 = 1",
        "with constants that are proved",
        "the same, its condition on the rate not met",
        "above any gradient of the run: says nothing",
    ]
    figure.legend(handles, labels, loc="outside lower left", ncols=3)
