"""The figures of the page: which experiment shows what, drawn from its records alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fedqueue.report.style import strategy_colours
from fedqueue_reproduction.claims import Sample, sample
from fedqueue_reproduction.drawing import (
    Dot,
    Line,
    Panel,
    Series,
    arrival_figure,
    curve_figure,
    dot_figure,
    shades,
    sweep_figure,
)
from fedqueue_reproduction.experiment import Row, setting_text
from fedqueue_reproduction.findings import Findings
from fedqueue_reproduction.wording import head, is_score, per_cent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BANDS: Final = "Lines are medians over seeds, bands go from the lower to the upper quartile."
MEANS: Final = "Dots are means over seeds with 95 % intervals."
FIRST_SEED: Final = "Of the first seed."
INTERVALS: Final = f"{MEANS} Diamonds are the paper's values."


@dataclass(frozen=True)
class Picture:
    """A figure that the page shows; `make` draws it, inside `report.style.styled`."""

    file: str
    caption: str
    make: Callable[[], Figure]


def pictures(found: Findings) -> list[Picture]:
    """Those of an experiment that has runs; none for one that nobody has thought of a figure for."""
    if not found.runs:
        return []
    return [
        Picture(f"{found.name}-{name}.png", caption, lambda make=make: make(found))  # type: ignore[misc]
        for name, caption, make in _PICTURES.get(found.name, ())
    ]


# What the panels show -----------------------------------------------------------------------------------


def curves(*, target: float, columns: int, floor: float = 0.8, past: float = 1.25) -> Callable[[Findings], Figure]:
    """Score against time, a panel a setting, up to somewhat after the second at which the slowest row that gets there
    has reached the target in most seeds."""

    def make(found: Findings) -> Figure:
        panels, ends = [], []
        for setting in found.settings():
            rows = found.rows(setting)
            colours = row_colours(rows)
            lines = []
            for row in rows:
                records = found.runs.of(row.name, setting_text(setting)).values()
                each = [[(at, score) for at, score, *_ in record["curve"]] for record in records if record.get("curve")]
                lines.append(Line(short(row), colours[row.name], each))
            panels.append((title_of(setting), lines))
            ends.append(_end(lines, target, past))
        return curve_figure(panels, target=target, columns=min(columns, len(panels)), ends=ends, floor=floor)

    return make


def losses(found: Findings) -> Figure:
    """Test loss against time, of every method's model."""
    from fedqueue_reproduction.deployment_plot import global_losses  # which takes its names and colours from here

    return global_losses(found)


def losses_of_facilities(found: Findings) -> Figure:
    """Test loss against time, of each method's model on the questions of each facility."""
    from fedqueue_reproduction.deployment_plot import facility_losses

    return facility_losses(found)


def _end(lines: Sequence[Line], target: float, past: float) -> float:
    last = max((curve[-1][0] for one in lines for curve in one.curves), default=1.0)
    middles = []
    for one in lines:
        hits = sorted(next((at for at, score in curve if score >= target), last) for curve in one.curves)
        middles += [hits[len(hits) // 2]] if hits else []
    return min(last, past * max(middles, default=last))


def times(key: str, *, columns: int = 2) -> Callable[[Findings], Figure]:
    """A figure of every row, a panel a setting, with the paper's values."""

    def make(found: Findings) -> Figure:
        panels = [Panel(title_of(setting), head(key), _dots(found, setting, key)) for setting in found.settings()]
        return dot_figure(panels, columns=min(columns, len(panels)), shared=True)

    return make


def several(*keys: str) -> Callable[[Findings], Figure]:
    """Several figures of every row side by side, a line of panels a setting."""

    def make(found: Findings) -> Figure:
        panels = [
            Panel(title_of(setting) if place == 0 else "", head(key), _dots(found, setting, key))
            for setting in found.settings()
            for place, key in enumerate(keys)
        ]
        return dot_figure(panels, columns=len(keys), shared=False)

    return make


def _dots(found: Findings, setting: Mapping[str, str], key: str) -> list[Dot]:
    rows = [row for row in found.experiment.rows if any(row in found.rows(s) for s in found.settings())]
    colours = row_colours(rows)
    dots = []
    for row in rows:
        published = found.experiment.published(row, setting).get(key)
        shown = None if published is None else published * _unit(key)
        dots.append(Dot(short(row), colours[row.name], _sample(found, row.name, setting, key), shown))
    return dots


def arrivals(knob: str, rows: Mapping[str, str]) -> Callable[[Findings], Figure]:
    """When updates arrive, a pair of panels a setting and a line a row; `rows` gives the value of the knob in each."""

    def make(found: Findings) -> Figure:
        panels = []
        for setting in found.settings():
            lines = {}
            for name, value in rows.items():
                records = found.runs.of(name, setting_text(setting)).values()
                lines[value] = [at for record in records for at in record.get("arrivals", ())]
            panels.append((title_of(setting), lines))
        return arrival_figure([panel for panel in panels if any(panel[1].values())], knob=knob)

    return make


def decay(*keys: str) -> Callable[[Findings], Figure]:
    """Figures over beta, for both kinds of decay; a line of panels a setting."""
    kinds = {"harmonic": "#0072b2", "exponential": "#d55e00"}

    def make(found: Findings) -> Figure:
        betas = list(dict.fromkeys(row.name.partition("-")[2] for row in found.experiment.rows))
        panels = []
        for setting in found.settings():
            for place, key in enumerate(keys):
                under = f"{title_of(setting)}\n" if place == 0 and setting else ""
                series = [
                    _series(found, kind, colour, [(f"{kind}-{beta}", setting) for beta in betas], key)
                    for kind, colour in kinds.items()
                ]
                panels.append((f"{under}{head(key)}", series))
        return sweep_figure(panels, knob="beta", values=betas, columns=len(keys))

    return make


def over_axis(axis: str, *keys: str) -> Callable[[Findings], Figure]:
    """Figures of every row over the values of an axis."""

    def make(found: Findings) -> Figure:
        settings = found.settings()
        rows = [row for row in found.experiment.rows if any(row in found.rows(s) for s in settings)]
        colours = row_colours(rows)
        panels = [
            (head(key), [_series(found, short(r), colours[r.name], [(r.name, s) for s in settings], key) for r in rows])
            for key in keys
        ]
        values = [setting[axis] for setting in settings]
        return sweep_figure(panels, knob=axis, values=values, columns=len(keys), logarithmic=True)

    return make


def _series(
    found: Findings, label: str, colour: str, cells: Sequence[tuple[str, Mapping[str, str]]], key: str
) -> Series:
    rows = {row.name: row for row in found.experiment.rows}
    samples = [_sample(found, name, setting, key) for name, setting in cells]
    published = [
        found.experiment.published(rows[name], setting).get(key) if name in rows else None for name, setting in cells
    ]
    return Series(label, colour, samples, [None if v is None else v * _unit(key) for v in published])


def _sample(found: Findings, row: str, setting: Mapping[str, str], key: str) -> Sample:
    """In the units that are shown: scores in per cent."""
    return sample(found.runs.readings(row, setting_text(setting), key).values(), unit=_unit(key))


def _unit(key: str) -> float:
    return 100.0 if is_score(key) else 1.0


def short(row: Row) -> str:
    """Its label without what is in brackets or after a colon: the table beside the figure has it."""
    return row.label.partition(" (")[0].partition(":")[0]


def title_of(setting: Mapping[str, str]) -> str:
    """
    >>> title_of({"data": "full", "rho": "log"})
    'data full, rho log'
    """
    return ", ".join(f"{axis} {value}" for axis, value in setting.items())


_KNOBS: Final = {
    "rho": ("#e0a030", "#b86a10", "#5f2a00", "#5f2a00"),
    "alpha": ("#7fc8a9", "#2e8b6a", "#12503a", "#12503a"),
}
"""Where one figure has several knobs."""


def row_colours(rows: Sequence[Row]) -> dict[str, str]:
    """A strategy has its own colour everywhere; values of a knob get darker in their order."""
    names = [row.name for row in rows]
    colours = strategy_colours(names)
    knobs: dict[str, list[str]] = {}
    for name in names:
        stem, _, value = name.rpartition("-")
        if stem in ("margin", "rho", "alpha") and value:
            knobs.setdefault(stem, []).append(name)
    for stem, several_ in knobs.items():
        for place, name in enumerate(several_):
            colours[name] = _KNOBS.get(stem, shades(len(several_)))[place % 4]
    return colours


_Entry = tuple[str, str, Callable[[Findings], Any]]
_TARGET: Final = per_cent("0.95")

_PICTURES: Final[dict[str, tuple[_Entry, ...]]] = {
    "synthetic": (
        ("times", f"Time to {_TARGET}. {INTERVALS}", times("time_to.0.95")),
        ("curves", f"Accuracy over time. {BANDS}", curves(target=0.95, columns=2)),
    ),
    "cifar100": (
        (
            "figures",
            f"Best accuracy, time to 45 % and to 50 %. {INTERVALS}",
            several("score.max", "time_to.0.45", "time_to.0.50"),
        ),
        ("curves", f"Accuracy over time. {BANDS}", curves(target=0.5, columns=2, floor=0.0)),
    ),
    "chemistry": (
        ("losses", f"Test loss of the global model over virtual time. {FIRST_SEED}", losses),
        (
            "facilities",
            "Test loss of each method's model, on all test questions and on those of each facility; all weights "
            f"trained. {FIRST_SEED}",
            losses_of_facilities,
        ),
    ),
    "tuned": (
        (
            "times",
            f"Time to {_TARGET}, interpolated, each method tuned. {MEANS}",
            times("interpolated.0.95"),
        ),
        ("curves", f"Accuracy over time, each method tuned. {BANDS}", curves(target=0.97, columns=2)),
    ),
    "regimes": (
        ("times", f"Time to 93 %, interpolated, in every regime. {MEANS}", times("interpolated.0.93", columns=3)),
        ("curves", f"Accuracy over time. {BANDS}", curves(target=0.95, columns=3, floor=0.6)),
    ),
    "mnist-regimes": (
        ("times", f"Time to 97 %, interpolated, in every regime. {MEANS}", times("interpolated.0.97", columns=3)),
        ("curves", f"Accuracy over time. {BANDS}", curves(target=0.97, columns=3, floor=0.8)),
    ),
    "mnist-regimes-final": (
        ("scores", f"Accuracy after 100 s, in every regime. {MEANS}", times("score.final", columns=3)),
    ),
    "mnist-regimes-moments": (
        ("times", f"Time to 97 %, interpolated, in every regime. {MEANS}", times("interpolated.0.97", columns=3)),
    ),
    "mnist-regimes-options": (
        ("times", f"Time to 97 %, interpolated, in every regime. {MEANS}", times("interpolated.0.97", columns=3)),
    ),
    "ablation": (
        (
            "parts",
            f"FedQueue without each of its parts. {INTERVALS}",
            several("score.final", "time_to.0.85", "late_probability"),
        ),
    ),
    "bound-grid": (("times", f"Time to {_TARGET}. {INTERVALS}", times("time_to.0.95")),),
    "admission": (
        (
            "late",
            f"Who arrives after the cutoff, and how late. {INTERVALS}",
            several("late_probability", "normalised_delay_mean", "normalised_delay_max"),
        ),
    ),
    "variability": (("curves", f"Accuracy over time. {BANDS}", curves(target=0.95, columns=3)),),
    "gamma": (("curves", f"Accuracy over time. {BANDS}", curves(target=0.95, columns=2)),),
    "margin": (
        (
            "arrivals",
            "When updates arrive: histogram and distribution function.",
            arrivals("margin", {"margin-0.5": "0.5 s", "margin-1": "1 s", "margin-2": "2 s", "margin-4": "4 s"}),
        ),
        ("times", f"Time to {_TARGET}, interpolated. {MEANS}", times("interpolated.0.95")),
    ),
    "arrivals": (
        (
            "rho",
            "When updates arrive, over queue variance.",
            arrivals("rho", {"rho-0.1": "0.1", "rho-0.5": "0.5", "rho-0.9": "0.9"}),
        ),
        (
            "alpha",
            "When updates arrive, over smoothing.",
            arrivals("alpha", {"alpha-0.1": "0.1", "rho-0.9": "0.5", "alpha-1.0": "1.0"}),
        ),
    ),
    "decay": (
        ("sweep", f"Kinds of decay over beta. {INTERVALS}", decay("deferred_weight", "score.max", "time_to.0.90")),
    ),
    "scalability": (
        (
            "facilities",
            f"Four, eight and twelve facilities. {INTERVALS}",
            over_axis("facilities", "time_to.0.85", "steps_to.0.85", "score.max"),
        ),
    ),
    "skew": (
        ("times", f"Time to 85 %. {INTERVALS}", times("time_to.0.85")),
        (
            "curves",
            f"Accuracy over time under Dirichlet 0.1. {BANDS}",
            curves(target=0.85, columns=2, floor=0.5, past=1.6),
        ),
    ),
}
"""By experiment: what the file's name ends with, the caption, and what draws it."""
