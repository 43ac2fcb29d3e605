"""What `fedqueue forecast evaluate` found, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedqueue.cli import terminal
from fedqueue.forecasting.evaluate import PUBLISHED, Evaluation, best, means
from fedqueue.report.style import amount, short

_LEGEND = (
    "MAE: mean absolute error over that of ewma's mean; of the mean forecast, then of the median. late: share of waits "
    "above the 95 % quantile U. J/T: share of the round left to train, T - U. at 5 %: the same with log(1 + U) shifted "
    "in hindsight so that 5 % are late. on time: J/T of the newsvendor rule, where a late job counts nothing."
)


def show(found: Sequence[tuple[Mapping[str, Any], Evaluation]]) -> None:
    """On standard output: a table for one case; for several a line each, and means."""
    say = partial(terminal.console().print, markup=False)
    if len(found) == 1:
        _show_one(*found[0])
    else:
        _show_many(found)
    say(_LEGEND)


def _show_one(case: Mapping[str, Any], found: Evaluation) -> None:
    say = partial(terminal.console().print, markup=False)
    length = case["round_length"]
    say(
        f"{case['case']}: {found.jobs:,} jobs, {found.of_shape:,} of the shape; {found.probes:,} probes in rounds of "
        f"{amount(length)} s after {found.warm_up:,} to warm up; mean wait {amount(found.mean_wait)} s, median "
        f"{amount(found.median_wait)} s\n"
    )
    rows = [
        (
            name,
            _ratio(score.mae_ratio),
            _ratio(score.median_mae_ratio),
            amount(score.median_error),
            terminal.percent(score.late),
            f"{score.budget:.3f}",
            f"{score.equal_budget:.3f}",
            f"{score.on_time:.3f}",
            amount(score.per_second),
        )
        for name, score in found.scores.items()
    ]
    heads = ("forecaster", "MAE", "median", "med. err. s", "late %", "J/T", "at 5 %", "on time", "a second")
    terminal.show_table(
        "forecasters at nominal 5 % late", heads, rows, best=list(found.scores).index(best(means([found])))
    )
    say(
        f"In hindsight: {PUBLISHED} with its best margin reaches J/T {found.ewma_budget:.3f} at 5 % late and "
        f"{found.ewma_on_time:.3f} on time; the best constant U {found.constant_on_time:.3f} on time; whoever knew "
        f"every wait {found.oracle:.3f}."
    )


def _show_many(found: Sequence[tuple[Mapping[str, Any], Evaluation]]) -> None:
    figures = means([one for _, one in found])
    chosen = best(figures)
    rows = []
    for case, one in found:
        score = one.scores[chosen]
        rows.append(
            (
                short(str(case["case"]), 20),
                amount(case["round_length"]),
                f"{one.probes:,}",
                _ratio(score.median_mae_ratio),
                terminal.percent(score.late),
                f"{score.budget:.3f}",
                f"{one.ewma_budget:.3f}",
                f"{score.on_time:.3f}",
                f"{one.ewma_on_time:.3f}",
                f"{one.constant_on_time:.3f}",
                f"{one.oracle:.3f}",
            )
        )
    columns = ("case", "T s", "probes", "median", "late %", "J/T", "ewma *", "on time", "ewma *", "const. *", "oracle")
    terminal.show_table(f"{chosen}, which has the most J/T at equal lateness", columns, rows)
    lines = [
        (
            name,
            _ratio(row["mae_ratio"]),
            _ratio(row["median_mae_ratio"]),
            f"{terminal.percent(row['least_late'])} to {terminal.percent(row['most_late'])}",
            f"{row['budget']:.3f}",
            f"{row['equal_budget']:.3f}",
            f"{row['on_time']:.3f}",
            "-" if row["worst_on_time"] is None else f"{100 * row['worst_on_time']:+.1f}",
        )
        for name, row in figures.items()
    ]
    heads = ("forecaster", "MAE", "median", "late %", "J/T", "at 5 %", "on time", "worst %")
    terminal.show_table(
        f"means over {len(found)} cases, at nominal 5 % late", heads, lines, best=list(figures).index(chosen)
    )
    hindsight = [sum(getattr(one, key) for _, one in found) / len(found) for key in _HINDSIGHT]
    terminal.console().print(
        "In hindsight, means: {} with its best margin reaches J/T {:.3f} at 5 % late and {:.3f} on time; the best "
        "constant U {:.3f} on time; whoever knew every wait {:.3f}.".format(PUBLISHED, *hindsight),
        f"* in hindsight. worst: on time, against {PUBLISHED}'s best margin, in the worst case.",
        markup=False,
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


_HINDSIGHT = ("ewma_budget", "ewma_on_time", "constant_on_time", "oracle")
