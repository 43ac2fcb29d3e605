"""Just in time against baselines that were tuned in every regime: seed by seed, on the seeds that all rows have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Final

from fedqueue.comparison import estimate
from fedqueue_reproduction.claims import Reading
from fedqueue_reproduction.experiment import setting_text
from fedqueue_reproduction.findings import Findings
from fedqueue_reproduction.summary import OURS
from fedqueue_reproduction.tables import short_label, table
from fedqueue_reproduction.wording import per_cent

MANY: Final = 4  # settings; with fewer, the tables of figures say it all
TIME: Final = "interpolated"

ABOUT: Final = """\
**Seed by seed.** On the seeds that all rows have. `best` is the one of the tuned baselines with the least mean time in
this setting. `over` is its time over that of just in time: the geometric mean over seeds with its 95 % interval; with 1
in the interval no difference is seen. A run that did not get there counts its whole length, in brackets how many did.
`frugal` is the least of the node-seconds of the three fastest of the rows that got there most often, and who needs
them. `moved` counts model transfers, of just in time and of the best; times the size of a model they are bytes."""

MEANS: Final = """\
Time over that of just in time, ratio of means, geometric mean over the settings (least of them); runs that did not get
there count their whole length. The last two rows are of the settings in which all runs of just in time and of the best
got there."""


@dataclass(frozen=True)
class Against:
    """One setting and target."""

    setting: str
    seeds: tuple[int, ...]
    times: Mapping[str, Mapping[int, Reading]]  # by row and seed
    node_seconds: Mapping[str, float]  # means by row
    moved: Mapping[str, float]
    best: str  # of the tuned rows

    def mean(self, row: str) -> float:
        return fmean(self.times[row][seed].value for seed in self.seeds)

    def reached(self, row: str) -> int:
        return sum(self.times[row][seed].reached for seed in self.seeds)

    @property
    def over(self) -> tuple[float, float, float]:
        """Time of the best over ours, seed by seed: geometric mean, ends of its 95 % interval."""
        ours, best = self.times[OURS], self.times[self.best]
        found = estimate([log(best[seed].value / ours[seed].value) for seed in self.seeds])
        middle, half = found.mean or 0.0, found.half_width or 0.0
        return exp(middle), exp(middle - half), exp(middle + half)

    @property
    def frugal(self) -> str:
        """Of the three fastest rows, the one with the least node-seconds. Who does not get there needs little."""
        most = max(map(self.reached, self.times))
        fastest = sorted((row for row in self.times if self.reached(row) == most), key=self.mean)[:3]
        return min(fastest, key=lambda row: self.node_seconds[row])

    @property
    def is_complete(self) -> bool:
        return self.reached(OURS) == self.reached(self.best) == len(self.seeds)


def paired_tables(found: Findings) -> str:
    """Empty where there is nothing of the kind."""
    tuned = [row.name for row in found.experiment.rows if row.tuned]
    settings = found.settings()
    if len(settings) <= MANY or len(tuned) < 2 or OURS not in {row.name for row in found.experiment.rows}:
        return ""
    keys = [key for key in found.experiment.figures if key.startswith(f"{TIME}.")]
    by_key = {key: [one for s in settings if (one := _against(found, setting_text(s), key, tuned))] for key in keys}
    by_key = {key: each for key, each in by_key.items() if each}
    if not by_key:
        return ""
    labels = {row.name: short_label(found.experiment, row.name) for row in found.experiment.rows}
    parts = [ABOUT]
    parts += [
        f"**to {per_cent(key.partition('.')[2])}**\n\n{_setting_table(each, labels)}" for key, each in by_key.items()
    ]
    parts += [MEANS, _mean_table(by_key, labels)]
    return "\n\n".join(parts)


def _against(found: Findings, setting: str, key: str, tuned: list[str]) -> Against | None:
    target = key.partition(".")[2]
    rows = [row.name for row in found.experiment.rows]
    times = {row: found.runs.readings(row, setting, key) for row in rows}
    seeds = tuple(sorted(set.intersection(*(set(readings) for readings in times.values()))))
    if len(seeds) < 2:
        return None

    def means(figure: str) -> dict[str, float]:
        known = {row: found.runs.readings(row, setting, f"{figure}.{target}") for row in rows}
        return {row: fmean(readings[seed].value for seed in seeds) for row, readings in known.items()}

    best = min(tuned, key=lambda row: fmean(times[row][seed].value for seed in seeds))
    return Against(setting, seeds, times, means("node_seconds_to"), means("movement_to"), best)


def _setting_table(each: list[Against], labels: Mapping[str, str]) -> str:
    rows = []
    for one in each:
        middle, low, high = one.over
        frugal = f"{one.node_seconds[one.frugal]:.0f} {'' if one.frugal == OURS else labels[one.frugal]}".strip()
        rows.append(
            [
                one.setting,
                str(len(one.seeds)),
                _time(one, OURS),
                f"{_time(one, one.best)} {labels[one.best]}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                f"{one.node_seconds[OURS]:.0f}",
                frugal,
                f"{one.moved[OURS]:.0f} and {one.moved[one.best]:.0f}",
            ]
        )
    heads = ["", "seeds", "just in time, s", "best, s", "over", "node-seconds", "frugal", "moved"]
    return table(heads, rows)


def _time(one: Against, row: str) -> str:
    some = "" if one.reached(row) == len(one.seeds) else f" ({one.reached(row)})"
    return f"{one.mean(row):.1f}{some}"


def _mean_table(by_key: Mapping[str, list[Against]], labels: Mapping[str, str]) -> str:
    rows = [
        [label, *(_ratio([one.mean(row) / one.mean(OURS) for one in each]) for each in by_key.values())]
        for row, label in labels.items()
        if row != OURS
    ]
    for what, ratios in _of_the_best(by_key):
        rows.append([what, *ratios])
    return table(["", *(f"to {per_cent(key.partition('.')[2])}" for key in by_key)], rows)


def _of_the_best(by_key: Mapping[str, list[Against]]) -> Iterator[tuple[str, list[str]]]:
    yield (
        "the best of the tuned in each setting",
        [_ratio([one.mean(one.best) / one.mean(OURS) for one in each]) for each in by_key.values()],
    )
    complete = [[one for one in each if one.is_complete] for each in by_key.values()]
    yield (
        "node-seconds of the most frugal of the three fastest",
        [_ratio([one.node_seconds[one.frugal] / one.node_seconds[OURS] for one in each]) for each in complete],
    )
    yield (
        "models moved by the best of the tuned",
        [_ratio([one.moved[one.best] / one.moved[OURS] for one in each]) for each in complete],
    )


def _ratio(ratios: list[float]) -> str:
    return f"{exp(fmean(map(log, ratios))):.2f} ({min(ratios):.2f})" if ratios else "-"
