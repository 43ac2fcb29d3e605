"""How every plot looks: colours, units, the figure itself, and how it becomes a PNG file or SVG text.

matplotlib is optional, so it is loaded by the functions that need it, and its global settings are never changed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedqueue.errors import ConfigError
from fedqueue.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK: Final = "#1b1f24"  # text and crosses
FAINT: Final = "#6b7280"  # axes, secondary text
LINE: Final = "#d5d9de"  # grid
PAPER: Final = "#ffffff"
PAGE_COLOURS: Final = {INK: "--ink", FAINT: "--faint", LINE: "--line", PAPER: "--paper"}
"""Colours that follow the page, light or dark, when a plot is part of one."""

# Okabe and Ito's colours, which people with any colour vision can tell apart, for strategies ...
_STRATEGY: Final = {
    "fedqueue": "#0072b2",
    "jit": "#d55e00",
    "fedavg": "#7f7f7f",
    "fedasync": "#009e73",
    "fedbuff": "#cc79a7",
    "fedcompass": "#e69f00",
}
_OTHER_STRATEGIES: Final = ("#56b4e9", "#8c6d31", "#5e4fa2", "#1b9e9e", "#a50f5c", "#637939")
# ... and Paul Tol's "muted" set, made for the same, for facilities.
_FACILITY: Final = (
    *("#4477aa", "#cc6677", "#44aa99", "#aa8833", "#aa4499", "#117733"),
    *("#88a0dd", "#999944", "#b03030", "#7a7a7a", "#5ab4d8", "#6a3d7c"),
)

_SETTINGS: Final[dict[Any, Any]] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.labelsize": 10.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.labelcolor": INK,
    "hatch.linewidth": 0.7,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",  # text stays text: sharp, small, can be searched
    "svg.hashsalt": "fedqueue",  # the same run gives the same page
}

DOTS: Final = 160  # an inch, in PNG files and where an SVG holds points as a picture
_UNITS: Final = ((2 * 86_400.0, 86_400.0, "days"), (3 * 3_600.0, 3_600.0, "h"), (1_200.0, 60.0, "min"))


def strategy_colours(labels: Sequence[str]) -> dict[str, str]:
    """A colour a label: a known strategy has its own, wherever it appears; others get what is left, in order."""
    others = [label for label in labels if label not in _STRATEGY]
    return {
        label: _STRATEGY.get(label) or _OTHER_STRATEGIES[others.index(label) % len(_OTHER_STRATEGIES)]
        for label in labels
    }


def facility_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour a facility, by its place in the plan."""
    return {name: _FACILITY[i % len(_FACILITY)] for i, name in enumerate(names)}


def clock_unit(span: float) -> tuple[float, str]:
    """Seconds in the unit that suits a span of seconds, and its name.

    >>> clock_unit(90.0), clock_unit(7200.0)
    ((1.0, 's'), (60.0, 'min'))
    """
    return next(((size, name) for least, size, name in _UNITS if span >= least), (1.0, "s"))


@contextmanager
def styled() -> Iterator[None]:
    """Everything drawn or saved inside has our style; nothing outside notices."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'fedqueue[plots]'") from None
    with rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, outside pyplot's state. Call it inside `styled`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def clock_label(unit: str, *, simulated: bool) -> str:
    return f"{'virtual time' if simulated else 'run clock'} ({unit})"


def short(name: str, most: int = 22) -> str:
    """A name that fits beside a plot."""
    return name if len(name) <= most else name[: most - 1] + "…"


def amount(value: float) -> str:
    """About three digits, and never an exponent.

    >>> amount(0.7491), amount(1387.03)
    ('0.749', '1,387')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def save_png(figure: Figure, path: Path) -> Path:
    with writing(path), styled():
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=DOTS, facecolor=PAPER)
    return path


def svg(figure: Figure, description: str) -> str:
    """The figure as an SVG element for a page: the page's fonts and, for ink and paper, the page's colours."""
    with styled():
        text = io.StringIO()
        figure.savefig(text, format="svg", dpi=DOTS, transparent=True, metadata={"Date": None})
    drawing = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    drawing = drawing[drawing.index("<svg ") :]
    # Every figure numbers its groups alike: not unique in a page.
    drawing = re.sub(r'(<g) id="\w+_\d+"', r"\1", drawing)
    for colour, name in PAGE_COLOURS.items():
        drawing = drawing.replace(colour, f"var({name}, {colour})")
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
