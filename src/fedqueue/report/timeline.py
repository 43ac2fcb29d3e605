"""The timeline: what every facility was doing, a row a facility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fedqueue.report.data import Job, Run
from fedqueue.report.style import FAINT, INK, LINE, PAPER, clock_unit, legend_below, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDS_SHOWN: Final = 12
JOBS_SHOWN: Final = 40  # a facility; more bars in a row cannot be told apart
LANE: Final = 0.30  # inches
BAR: Final = 0.72  # of a lane
GAP: Final = 0.5  # of a lane, between facilities


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Where the jobs of a facility are drawn: jobs that overlap lie in different lanes."""

    jobs: Sequence[tuple[int, Job]]
    count: int


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
    """Waiting, training and hand-in of every job, with what went wrong. Call it inside `styled`."""
    shown = window(run)
    size, unit = clock_unit(shown)
    rows = {name: _lanes([j for j in run.jobs if j.facility == name and j.submitted_at < shown]) for name in colours}
    rows = {name: rows[name] for name in run.facilities}
    lanes = sum(row.count for row in rows.values()) + GAP * len(rows)
    figure = new_figure(10.0, 1.5 + LANE * lanes)
    axes = figure.subplots()
    top, centres = 0.0, {}
    for name, row in rows.items():
        top += GAP / 2
        _absences(axes, run, name, (top - GAP / 2, row.count + GAP), size)
        for lane, job in row.jobs:
            _draw(axes, job, top + lane + 0.5, colours[name], size)
        centres[name] = top + row.count / 2
        top += row.count + GAP / 2
        axes.axhline(top, color=LINE, linewidth=0.8)
    closings = run.cutoffs or run.models
    label = "cutoff" if run.cutoffs else "new model"
    for at in closings:
        if at <= shown:
            axes.axvline(at / size, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1.5, label=label)
    axes.set_xlim(0, max(shown, 1e-9) / size)
    axes.set_ylim(top, 0)
    axes.set_yticks(list(centres.values()), list(centres))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set_xlabel(f"{'virtual time' if run.simulated else 'run clock'} ({unit})")
    part = "" if shown == run.end else f": the first {shown / size:.4g} of {run.end / size:.4g} {unit}"
    axes.set_title(f"What each facility was doing{part}")
    legend_below(figure, axes, columns=8)
    return figure


def _lanes(jobs: Sequence[Job]) -> _Lanes:
    free_at: list[float] = []
    placed = []
    for job in jobs:
        lane = next((i for i, at in enumerate(free_at) if at <= job.submitted_at), len(free_at))
        free_at[lane : lane + 1] = [job.closed_at]
        placed.append((lane, job))
    return _Lanes(placed, max(len(free_at), 1))


def _draw(axes: Axes, job: Job, y: float, colour: str, size: float) -> None:
    def bar(since: float, until: float, height: float, *, alpha: float, label: str) -> None:
        axes.broken_barh(
            [(since / size, (until - since) / size)],
            (y - height / 2, height),
            facecolor=colour,
            alpha=alpha,
            linewidth=0,
            zorder=2,
            label=label,
        )

    known = job.submitted_at
    for attempt in job.attempts:
        waited_from = max(attempt.eligible_at, known)
        bar(waited_from, attempt.started_at, BAR, alpha=0.25, label="waiting")
        bar(attempt.started_at, attempt.stopped_at, BAR, alpha=1.0, label="training")
        known = attempt.stopped_at
        if attempt.outcome == "requeued":
            axes.plot(
                [known / size],
                [y],
                marker="<",
                markersize=7,
                color=INK,
                markeredgecolor=PAPER,
                linestyle="none",
                zorder=4,
                label="requeued",
            )
    if job.waits_since is not None:
        bar(job.waits_since, job.closed_at, BAR, alpha=0.25, label="waiting")
    elif job.closed_at > known:
        bar(known, job.closed_at, BAR / 4, alpha=1.0, label="upload")
    if job.failed:
        at = [job.closed_at / size]
        axes.plot(at, [y], marker="X", markersize=8, color=INK, markeredgecolor=PAPER, linestyle="none", zorder=5, label="failed")


def _absences(axes: Axes, run: Run, facility: str, span: tuple[float, float], size: float) -> None:
    """Grey behind the row while a facility was out of reach or suspended."""
    kinds = ((run.outages, "////", "out of reach"), (run.suspensions, "....", "suspended"))
    for absences, hatch, label in kinds:
        for absence in absences:
            if absence.facility == facility:
                until = run.end if absence.until is None else absence.until
                axes.broken_barh(
                    [(absence.at / size, (until - absence.at) / size)],
                    span,
                    facecolor="none",
                    edgecolor=FAINT,
                    alpha=0.55,
                    hatch=hatch,
                    linewidth=0,
                    zorder=1,
                    label=label,
                )
