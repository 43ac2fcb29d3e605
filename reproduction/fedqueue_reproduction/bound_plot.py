"""The plot of `fedqueue bound`: the tails of the errors, the same in log space, and the margin that each rule needs."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedqueue.report.style import FAINT, INK, PAPER, amount, facility_colours, new_figure, save_png, short, styled
from fedqueue_reproduction.bound import Assessment, Series, limits, log_factor
from fedqueue_reproduction.error_distribution import Floats, Shape, exceeded_by, gaussian_tail, reach
from fedqueue_reproduction.wording import raised

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEMMA: Final = "#0072b2"
LOG: Final = "#d55e00"
SAMPLE: Final = INK
WIDE: Final = 12.0  # standard deviations from which the axis of the tails is logarithmic
LEAST_SD: Final = 0.3  # where such an axis begins
STRICTEST: Final = 1e-6  # chance a job, at the right edge, unless epsilon / (K R) is smaller
SHADE: Final = 0.08  # of what is above the round length
MANY: Final = 6  # facilities; more have one colour


def bound_plot(series: Mapping[str, Series], assessment: Assessment, path: Path, title: str) -> Path:
    """Draw it as a PNG file."""
    with styled():
        figure = bound_figure(series, assessment, title)
    return save_png(figure, path)


def bound_figure(series: Mapping[str, Series], assessment: Assessment, title: str) -> Figure:
    """Call it inside `styled`. Without forecasts there is no panel for log space."""
    logs = {name: figures.log.shape for name, figures in assessment.by_facility.items() if figures.log is not None}
    panels = 3 if logs else 2
    figure = new_figure(4.3 * panels, 4.6)
    grid = figure.subplots(1, panels)
    shapes = {name: figures.shape for name, figures in assessment.by_facility.items()}
    standard = {name: _standard(one.errors, shapes[name]) for name, one in series.items()}
    log_standard = {
        name: _standard(series[name].log_errors(assessment.setting.shift), shape) for name, shape in logs.items()
    }
    # Panels to be compared have one scale.
    most = 1.1 * max(4.0, *(float(x.max()) for x in (*standard.values(), *log_standard.values())))
    _tails(grid[0], standard, shapes, most, "Errors", "q − q-hat")  # noqa: RUF001
    if logs:
        _tails(grid[1], log_standard, logs, most, "Log errors", "log q − log q-hat")  # noqa: RUF001
    _margins(grid[-1], series, shapes, logs, assessment)
    figure.suptitle(f"Lemma 1 on the errors of {title}", x=0.01, ha="left", fontsize=11, color=FAINT)
    _key(figure, list(series), band=bool(logs))
    return figure


def power(value: float, _: object = None) -> str:
    """A power of ten as people write it.

    >>> power(1.0), power(0.01), power(1e-4), power(1e4)
    ('1', '0.01', '10⁻⁴', '10⁴')
    """
    return f"{value:g}" if 0.01 <= value <= 1000 else f"10{raised(round(log10(value)))}"


def _colours(names: list[str]) -> dict[str, str]:
    return facility_colours(names) if 1 < len(names) <= MANY else dict.fromkeys(names, SAMPLE)


def _standard(errors: Floats, shape: Shape) -> Floats:
    """In standard deviations from the mean, rising, so that one Gaussian serves all facilities."""
    return np.sort(errors - shape.mean) / (shape.sd or 1.0)


def _tails(
    axes: Axes, standard: Mapping[str, Floats], shapes: Mapping[str, Shape], most: float, title: str, what: str
) -> None:
    """Share of errors above x."""
    wide = most > WIDE
    axes.set_yscale("log")
    axes.set_ylim(1 / max(map(len, standard.values())) / 3, 1.3)
    axes.set_xscale("log" if wide else "linear")
    axes.set_xlim(LEAST_SD if wide else 0, most)
    colours = _colours(list(standard))
    for name, x in standard.items():
        above = 1 - np.arange(1, len(x) + 1) / len(x)
        # The greatest has nothing above it: its step ends at one in n, where it is.
        axes.step(x, np.maximum(above, 1 / len(x)), where="post", color=colours[name], linewidth=1.5, zorder=3)
    ratio = max((shape.proxy_ratio or 1.0) for shape in shapes.values())
    x = np.geomspace(LEAST_SD, most, 400) if wide else np.linspace(0, most, 400)
    axes.plot(x, [gaussian_tail(z) for z in x], color=FAINT, linewidth=1.4, linestyle=(0, (4, 2)))
    axes.plot(x, np.exp(-(x**2) / (2 * ratio)), color=LEMMA, linewidth=1.4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(power)
    axes.set_xlabel(f"{what}, sd above the mean")
    axes.set_ylabel("share of jobs above")
    axes.set_title(title, pad=20)
    about = f"proxy {ratio:.2f} times the variance" if ratio < 10 else f"proxy {amount(ratio)} times the variance"
    axes.text(0, 1.03, about, transform=axes.transAxes, fontsize=9, color=FAINT)


def _margins(
    axes: Axes, series: Mapping[str, Series], shapes: Mapping[str, Shape], logs: Mapping[str, Shape], found: Assessment
) -> None:
    """Margin against the chance that one job is above it; the strictest at the right."""
    setting = found.setting
    strictest = min(STRICTEST, setting.chance / 3)
    chances = np.geomspace(0.5, strictest, 200)
    lemma = [max(reach(shape.rho, chance) for shape in shapes.values()) for chance in chances]
    known = chances[chances >= 1 / min(shape.errors for shape in shapes.values())]  # the sample says no more
    sample = [max(exceeded_by(one.errors, chance) for one in series.values()) for chance in known]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.5, strictest)
    # What matters is around the round length; the log rule may leave the picture at the top.
    axes.set_ylim(setting.round_length / 30, 4 * max(setting.round_length, lemma[-1], *sample))
    axes.plot(chances, lemma, color=LEMMA, linewidth=1.8)
    if sample:
        axes.step(known, sample, where="post", color=SAMPLE, linewidth=1.5)
        axes.plot([known[-1]], [sample[-1]], marker="o", color=SAMPLE, markersize=4)
    if logs:
        expected = np.concatenate([one.expected for one in series.values() if one.expected is not None])
        margins = []
        for chance in chances:
            most = limits(expected, max(log_factor(shape, chance) for shape in logs.values()), setting.shift)
            margins.append(np.quantile(most - expected, (0.1, 0.5, 0.9)))
        low, middle, high = np.array(margins).T
        axes.fill_between(chances, low, high, color=LOG, alpha=0.15, linewidth=0)
        axes.plot(chances, middle, color=LOG, linewidth=1.8)
    _mark_levels(axes, found)
    axes.set_xlabel("chance that a job is above it")
    axes.set_ylabel("margin (s)")
    axes.set_title("Margin that is needed", pad=20)
    axes.xaxis.set_major_formatter(power)
    axes.yaxis.set_major_formatter(lambda value, _: amount(value))


def _mark_levels(axes: Axes, found: Assessment) -> None:
    """The round length and the given margin, and the two chances at which tables compare the rules."""
    setting = found.setting
    line: dict[str, Any] = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (1, 2))}
    words: dict[str, Any] = {"fontsize": 9, "color": FAINT, "textcoords": "offset points", "xytext": (0, 4)}
    paper = {"boxstyle": "square,pad=0", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.8}
    low, high = axes.get_ylim()
    axes.axhspan(setting.round_length, high, color=FAINT, alpha=SHADE, linewidth=0)
    axes.axhline(setting.round_length, color=FAINT, linewidth=1.0)
    levels = {f"T = {amount(setting.round_length)} s": setting.round_length}
    if low < setting.margin < high:
        axes.axhline(setting.margin, **line)
        levels[f"margin {amount(setting.margin)} s"] = setting.margin
    for text, level in levels.items():
        axes.annotate(text, (0.98, level), xycoords=("axes fraction", "data"), ha="right", bbox=paper, **words)
    for chance, text in ((setting.epsilon, "ε"), (setting.chance, "ε / K R")):
        axes.axvline(chance, **line)
        axes.annotate(text, (chance, 1.0), xycoords=("data", "axes fraction"), ha="center", **words)


def _key(figure: Figure, names: list[str], *, band: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = _colours(names)
    several = len(set(colours.values())) > 1
    handles: list[Any] = [
        Line2D([], [], color=colours[name], linewidth=1.5) for name in (names if several else names[:1])
    ]
    labels = [short(name) for name in names] if several else ["measured"]
    if several:
        handles.append(Line2D([], [], color=SAMPLE, linewidth=1.5))
        labels.append("quantile of the errors")
    handles += [
        Line2D([], [], color=FAINT, linewidth=1.4, linestyle=(0, (4, 2))),
        Line2D([], [], color=LEMMA, linewidth=1.6),
    ]
    labels += ["Gaussian of the same sd", "sub-Gaussian envelope, and the Lemma's margin"]
    if band:
        handles.append((Patch(facecolor=LOG, alpha=0.15), Line2D([], [], color=LOG, linewidth=1.8)))
        labels.append("log space, at the median forecast (band: 10 to 90 % of forecasts)")
    handles.append(Patch(facecolor=FAINT, alpha=2 * SHADE))
    labels.append("no time left to train")
    figure.legend(handles, labels, loc="outside lower left", ncols=4 if several else 3 if band else 2)
