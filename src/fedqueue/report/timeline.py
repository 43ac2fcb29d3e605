"""The timeline: what every facility was doing, a row a facility."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fedqueue.report.data import Run
from fedqueue.report.jobs import Bar, Mark, ReportedJob
from fedqueue.report.style import FAINT, INK, LINE, PAPER, amount, clock_label, clock_unit, new_figure, short

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDS_SHOWN: Final = 12
JOBS_SHOWN: Final = 40  # a facility; more bars in a row cannot be told apart
LANE: Final = 0.30  # inches
GAP: Final = 0.6  # of a lane, between facilities
_BARS: Final[dict[Bar, tuple[float, float]]] = {  # height in lanes, opacity
    "waiting": (0.74, 0.28),
    "lingering": (0.74, 0.6),
    "training": (0.74, 1.0),
    "upload": (0.18, 1.0),
}
_MARKS: Final[dict[Mark, str]] = {"requeued": "<", "failed": "X"}
_ABSENCES: Final[dict[str, dict[str, Any]]] = {
    "out of reach": {"facecolor": "none", "edgecolor": INK, "alpha": 0.45, "hatch": "/////", "linewidth": 0},
    "suspended": {"facecolor": LINE, "alpha": 0.6, "linewidth": 0},
}
_CLOSINGS: Final[dict[str, dict[str, Any]]] = {  # models may come close together, so they are drawn lighter
    "cutoff": {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (4, 2))},
    "new model": {"color": FAINT, "linewidth": 0.7, "linestyle": (0, (1, 2))},
}


def window(run: Run) -> float:
    """How many seconds from the start are drawn: about twelve rounds, or all if that is little more."""
    closings = run.cutoffs or run.models
    shown = ROUNDS_SHOWN * run.round_length
    if len(closings) >= ROUNDS_SHOWN:
        shown = max(shown, closings[ROUNDS_SHOWN - 1])
    for facility in run.facilities:
        submitted = [job.submitted_at for job in run.jobs if job.facility == facility]
        if len(submitted) > JOBS_SHOWN:
            shown = min(shown, submitted[JOBS_SHOWN])
    return run.end if run.end <= 1.25 * shown else shown


def timeline(run: Run, colours: Mapping[str, str]) -> Figure:
    """Waiting, training and upload of every job, with what went wrong. Call it inside `styled`."""
    shown = window(run)
    size, unit = clock_unit(shown)
    rows = {
        name: _lanes([j for j in run.jobs if j.facility == name and j.submitted_at < shown]) for name in run.facilities
    }
    heights = {name: 1 + max((lane for lane, _ in row), default=0) for name, row in rows.items()}
    figure = new_figure(10.0, 1.5 + LANE * sum(height + GAP for height in heights.values()))
    axes = figure.subplots()
    seen: set[str] = set()
    top, centres = 0.0, []
    for name, row in rows.items():
        height = heights[name] + GAP
        seen |= _draw_absences(axes, run, name, (top, height), size, shown)
        seen |= _draw_jobs(axes, row, top + GAP / 2, colours[name], size, shown)
        centres.append(top + height / 2)
        top += height
        axes.axhline(top, color=LINE, linewidth=0.8)
    closings = [at / size for at in run.cutoffs or run.models if at <= shown]
    if closings:
        label = "cutoff" if run.cutoffs else "new model"
        axes.vlines(closings, 0, top, zorder=1.5, **_CLOSINGS[label])
        seen.add(label)
    axes.set_xlim(0, shown / size)
    axes.set_ylim(top, 0)
    axes.set_yticks(centres, [short(name) for name in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set_xlabel(clock_label(unit, simulated=run.simulated))
    part = "" if shown == run.end else f": the first {amount(shown / size)} of {amount(run.end / size)} {unit}"
    axes.set_title(f"What each facility was doing{part}")
    key = {label: artist for label, artist in _key().items() if label in seen}
    figure.legend(key.values(), key.keys(), loc="outside lower left", ncols=len(_key()))
    return figure


def _lanes(jobs: Sequence[ReportedJob]) -> list[tuple[int, ReportedJob]]:
    """Each job with the lane it is drawn in: jobs that overlap lie in different lanes."""
    free_at: list[float] = []
    placed = []
    for job in jobs:
        lane = next((i for i, at in enumerate(free_at) if at <= job.submitted_at), len(free_at))
        free_at[lane : lane + 1] = [job.closed_at]
        placed.append((lane, job))
    return placed


def _draw_jobs(
    axes: Axes, row: Sequence[tuple[int, ReportedJob]], top: float, colour: str, size: float, shown: float
) -> set[str]:
    bars: defaultdict[tuple[int, Bar], list[tuple[float, float]]] = defaultdict(list)
    marks: defaultdict[Mark, list[tuple[float, float]]] = defaultdict(list)
    for lane, job in row:
        for bar, since, until in job.bars():
            if since < shown:
                bars[lane, bar].append((since / size, (until - since) / size))
        for mark, at in job.marks():
            if at <= shown:
                marks[mark].append((at / size, top + lane + 0.5))
    for (lane, bar), spans in bars.items():
        height, alpha = _BARS[bar]
        span = (top + lane + (1 - height) / 2, height)
        axes.broken_barh(spans, span, facecolor=colour, alpha=alpha, linewidth=0, zorder=2)
    for mark, places in marks.items():
        x, y = zip(*places, strict=True)
        axes.scatter(x, y, marker=_MARKS[mark], s=60, color=INK, edgecolor=PAPER, linewidth=0.8, zorder=4)
    return {bar for _, bar in bars} | set(marks)


def _draw_absences(
    axes: Axes, run: Run, facility: str, span: tuple[float, float], size: float, shown: float
) -> set[str]:
    """Grey over the row while a facility was out of reach, when what is known of its jobs is old; behind it while it
    was suspended, when jobs that it has go on."""
    seen = set()
    for label, absences, layer in (("out of reach", run.outages, 3), ("suspended", run.suspensions, 1)):
        for absence in absences:
            if absence.facility == facility and absence.at < shown:
                until = run.end if absence.until is None else absence.until
                stretch = [(absence.at / size, (until - absence.at) / size)]
                axes.broken_barh(stretch, span, **_ABSENCES[label], zorder=layer)
                seen.add(label)
    return seen


def _key() -> dict[str, Artist]:
    """The signs of the plot, in the neutral colour: rows have their own."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    key: dict[str, Artist] = {
        bar: Patch(facecolor=FAINT, alpha=alpha) for bar, (_, alpha) in _BARS.items() if bar != "upload"
    }
    key["upload"] = Line2D([], [], color=FAINT, linewidth=2.5)
    for mark, shape in _MARKS.items():
        key[mark] = Line2D([], [], color=INK, marker=shape, markersize=7, markeredgecolor=PAPER, linestyle="none")
    for label, look in _ABSENCES.items():
        key[label] = Patch(**look)
    for label, look in _CLOSINGS.items():
        key[label] = Line2D([], [], **look)
    return key
