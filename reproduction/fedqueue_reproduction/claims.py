"""A claim of the paper against our runs: how large the difference is, how sure, and whether the claim holds.

Every seed gives each row the same queues, data and first model, so differences are taken seed by seed. A target that
a run never reached has no time: it is only known to be later than the end of the run (it is *censored* there). Where
that happens no mean is taken. Rows are then compared by the seeds in which one was first, with the exact sign test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from statistics import fmean, median
from typing import Any, Final, Literal

from scipy.stats import binom, binomtest

from fedqueue.comparison import estimate
from fedqueue_reproduction.experiment import Claim, Experiment, matches, setting_text

Record = Mapping[str, Any]
Verdict = Literal["holds", "does not hold", "no difference seen", "not measured", "agrees", "differs"]
Overall = Literal["holds", "holds only in", "does not hold", "not decided", "not measured"]

LEVEL: Final = 0.05  # of a sign test, and one minus the share of a 95 % interval
REFERENCE: Final = "fedqueue"  # the row that movement ratios are taken against
# A figure that counts something until a target is reached, and the figure of the whole run that bounds it from below.
_UNTIL: Final = {
    "time_to": "virtual_seconds",
    "interpolated": "virtual_seconds",
    "steps_to": "local_steps",
    "node_seconds_to": "node_seconds",
    "movement_to": "model_transfers",
}
_LOWER: Final = (*_UNTIL, "movement_ratio", "late_probability", "normalised_delay_mean", "normalised_delay_max")
_LOWER_TOO: Final = ("missed_cutoff", "max_staleness", "node_seconds", "local_steps", "model_transfers", "loss")


def lower_is_better(key: str) -> bool:
    """Whether less of a figure is better; of a score or a weight, more is.

    >>> lower_is_better("time_to.0.95"), lower_is_better("score.max")
    (True, False)
    """
    return key.partition(".")[0] in (*_LOWER, *_LOWER_TOO)


@dataclass(frozen=True, slots=True)
class Reading:
    """A figure of one run. If it was not `reached`, all that is known is that it is greater than `value`."""

    value: float
    reached: bool = True


def reading(record: Record, key: str, reference: Record | None = None) -> Reading | None:
    """A figure of a run by its dotted key, or None where the run has none: nothing deferred, nothing scored.

    `reference` is the run of the row `fedqueue` with the same seed, which a `movement_ratio` needs.

    >>> reading({"time_to": {"0.95": None}, "virtual_seconds": 200.0}, "time_to.0.95")
    Reading(value=200.0, reached=False)
    """
    head, _, rest = key.partition(".")
    if head == "movement_ratio":
        own = reading(record, f"movement_to.{rest}")
        other = None if reference is None else reading(reference, f"movement_to.{rest}")
        if own is None or other is None or not other.reached or other.value == 0:
            return None
        return Reading(own.value / other.value, own.reached)
    group = record.get(head)
    if not rest:
        return None if group is None else Reading(float(group))
    if not isinstance(group, Mapping) or rest not in group:
        return None
    value = group[rest]
    if value is not None:
        return Reading(float(value))
    bound = record.get(_UNTIL.get(head, ""))
    return None if bound is None else Reading(float(bound), reached=False)


class Runs:
    """The records of an experiment by row, setting and seed."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._cells: dict[tuple[str, str], dict[int, Record]] = {}
        for record in records:
            self._cells.setdefault((record["row"], record["setting"]), {})[record["seed"]] = record

    def __bool__(self) -> bool:
        return bool(self._cells)

    def of(self, row: str, setting: str) -> dict[int, Record]:
        """By seed, the lowest first; empty where there are none."""
        return dict(sorted(self._cells.get((row, setting), {}).items()))

    def readings(self, row: str, setting: str, key: str) -> dict[int, Reading]:
        """A figure of the runs that have it, by seed."""
        references = self.of(REFERENCE, setting) if key.startswith("movement_ratio") else {}
        found = {seed: reading(record, key, references.get(seed)) for seed, record in self.of(row, setting).items()}
        return {seed: one for seed, one in found.items() if one is not None}


@dataclass(frozen=True, slots=True)
class Sample:
    """A figure of one row under one setting, over its seeds."""

    seeds: int  # with a reading
    reached: int  # of them
    mean: float | None  # only if all reached it
    half_width: float | None  # of the mean's 95 % interval; needs two seeds
    median: float | None  # None: most never reached it
    low: float | None  # of the median's 95 % interval; None: no reading
    high: float | None  # None: it has no upper end, or no reading
    bound: float | None  # the least that is known of a reading that was not reached


def sample(readings: Iterable[Reading], *, unit: float = 1.0) -> Sample:
    """Of a figure over seeds; values are taken times `unit`.

    >>> sample([Reading(10.0), Reading(20.0), Reading(200.0, reached=False)]).median
    20.0
    """
    found = [Reading(one.value * unit, one.reached) for one in readings]
    known = [one.value for one in found if one.reached]
    if not found:
        return Sample(0, 0, None, None, None, None, None, None)
    ordered = sorted([*known, *[inf] * (len(found) - len(known))])
    place = _median_place(len(ordered))
    mean = estimate(known if len(known) == len(found) else [])
    low, high, middle = ordered[place], ordered[-1 - place], median(ordered)
    return Sample(
        seeds=len(found),
        reached=len(known),
        mean=mean.mean,
        half_width=mean.half_width,
        median=middle if middle < inf else None,
        low=low if low < inf else None,
        high=high if high < inf else None,
        bound=min((one.value for one in found if not one.reached), default=None),
    )


def _median_place(count: int) -> int:
    """Of the ordered value that bounds the median's 95 % interval from below (the ends, where there are too few).

    >>> _median_place(5), _median_place(10)
    (0, 1)
    """
    return max(0, int(binom.ppf(LEVEL / 2, count, 0.5)) - 1)


def sign_test(ahead: int, behind: int) -> float:
    """How likely so lopsided a count is, or a more lopsided one, if neither is better: two-sided, exact.

    >>> sign_test(6, 0)
    0.03125
    """
    return float(binomtest(ahead, ahead + behind).pvalue) if ahead + behind else 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Row `better` against row `than` under one setting. Positive is what is claimed."""

    setting: str
    verdict: Verdict
    seeds: int = 0  # in which both have a reading
    runs: int = 0  # seeds in which both were run
    reached: tuple[int, int] = (0, 0)  # by better, by than
    ahead: int = 0  # seeds in which better was better; in the rest they tied or nobody can tell
    behind: int = 0
    chance: float = 1.0  # of the sign test
    gain: float | None = None  # mean by which better is better, in units of the figure; None: a seed never reached it
    interval: tuple[float, float] | None = None  # of the gain, 95 %
    scale: float | None = None  # the mean of `than`, for relative gains
    censored_at: float | None = None  # the least bound of a reading that was not reached

    @property
    def relative(self) -> tuple[float, float, float] | None:
        """Gain and its interval as shares of the mean of `than`: (0.37, 0.3, 0.44) is 37 % sooner."""
        if self.gain is None or self.interval is None or not self.scale:
            return None
        return self.gain / self.scale, self.interval[0] / self.scale, self.interval[1] / self.scale


def compare(runs: Runs, key: str, better: str, than: str, setting: str) -> Comparison:
    """Whether `better` is better, seed by seed."""
    one, other = runs.readings(better, setting, key), runs.readings(than, setting, key)
    pairs = [(one[seed], other[seed]) for seed in one if seed in other]
    both = len(set(runs.of(better, setting)) & set(runs.of(than, setting)))
    sign = -1.0 if lower_is_better(key) else 1.0
    ahead = sum(_ahead(a, b, sign) for a, b in pairs)
    behind = sum(_ahead(b, a, sign) for a, b in pairs)
    if len(pairs) < 2:
        return Comparison(setting, "not measured", len(pairs), both, ahead=ahead, behind=behind)
    reached = sum(a.reached for a, _ in pairs), sum(b.reached for _, b in pairs)
    chance = sign_test(ahead, behind)
    if reached != (len(pairs), len(pairs)):
        verdict: Verdict = "no difference seen"
        if chance < LEVEL:
            verdict = "holds" if ahead > behind else "does not hold"
        bound = min(r.value for pair in pairs for r in pair if not r.reached)
        return Comparison(setting, verdict, len(pairs), both, reached, ahead, behind, chance, censored_at=bound)
    gain = estimate([sign * (a.value - b.value) for a, b in pairs])
    middle, half = gain.mean or 0.0, gain.half_width or 0.0  # both exist: there are two pairs or more
    low, high = middle - half, middle + half
    verdict = "holds" if low > 0 else "does not hold" if high < 0 else "no difference seen"
    scale = fmean(b.value for _, b in pairs)
    return Comparison(setting, verdict, len(pairs), both, reached, ahead, behind, chance, middle, (low, high), scale)


def _ahead(a: Reading, b: Reading, sign: float) -> bool:
    """Whether a is surely better than b: a bound that lies below what the other reached decides nothing."""
    if not a.reached:
        return False
    return sign * (a.value - b.value) > 0 or (not b.reached and a.value == b.value)


@dataclass(frozen=True, slots=True)
class Check:
    """A published value of one row beside ours."""

    setting: str
    verdict: Verdict
    published: float
    ours: Sample


def check(runs: Runs, key: str, row: str, setting: str, published: float, spread: float = 0.0) -> Check:
    """Whether the published value lies in our 95 % interval, widened by the published spread. The interval is that of
    the mean, or of the median where some seeds never reached the target."""
    ours = sample(runs.readings(row, setting, key).values())
    if ours.seeds < 2:
        return Check(setting, "not measured", published, ours)
    if ours.mean is not None and ours.half_width is not None:
        agrees = abs(published - ours.mean) <= ours.half_width + spread
    else:
        low = ours.low if ours.low is not None else ours.bound or 0.0
        agrees = low - spread <= published and (ours.high is None or published <= ours.high + spread)
    return Check(setting, "agrees" if agrees else "differs", published, ours)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A claim over all its settings."""

    verdict: Overall
    where: tuple[str, ...]  # the settings in which it holds
    missing: tuple[str, ...]  # those that were not measured
    each: tuple[Comparison | Check, ...]

    @property
    def text(self) -> str:
        """
        >>> judge([Comparison("data=full", "holds"), Comparison("data=scarce", "no difference seen")]).text
        'holds only in: data=full'
        """
        where = "; ".join(condense(self.where, [one.setting for one in self.each]))
        said = f"{self.verdict}: {where}" if self.verdict == "holds only in" else self.verdict
        if any(isinstance(one, Check) for one in self.each):  # a value is not claimed, it is published
            said = said.replace("does not hold", "differs").replace("holds", "agrees")
        if self.missing and self.verdict != "not measured":
            said += f" ({len(self.missing)} of {len(self.each)} settings not measured)"
        return said


def judge(each: Sequence[Comparison | Check]) -> Judgement:
    """It holds if it holds wherever it was measured; where it holds nowhere it is refuted by one setting that says the
    opposite (or by a value that differs), and not decided by settings in which no difference was seen."""
    where = tuple(one.setting for one in each if one.verdict in ("holds", "agrees"))
    missing = tuple(one.setting for one in each if one.verdict == "not measured")
    verdict: Overall
    if len(missing) == len(each):
        verdict = "not measured"
    elif len(where) + len(missing) == len(each):
        verdict = "holds"
    elif where:
        verdict = "holds only in"
    else:
        refuted = any(one.verdict in ("does not hold", "differs") for one in each)
        verdict = "does not hold" if refuted else "not decided"
    return Judgement(verdict, where, missing, tuple(each))


def assess(experiment: Experiment, claim: Claim, runs: Runs) -> Judgement:
    """A claim under every setting that it speaks of and its rows exist in."""
    rows = [row for row in experiment.rows if row.name in (claim.better, claim.than)]
    each: list[Comparison | Check] = []
    for setting in experiment.settings():
        if matches(setting, claim.only) and all(matches(setting, row.only) for row in rows):
            name = setting_text(setting)
            if claim.than is not None:
                each.append(compare(runs, claim.figure, claim.better, claim.than, name))
            elif claim.value is not None:
                each.append(check(runs, claim.figure, claim.better, name, claim.value, claim.spread))
    return judge(each)


def condense(some: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Some of the settings in as few words as say the same: by the axes that matter, if these tell them apart.

    >>> condense(["data=full, rho=log", "data=full, rho=seconds"],
    ...          ["data=full, rho=log", "data=full, rho=seconds", "data=scarce, rho=log", "data=scarce, rho=seconds"])
    ['data=full']
    """
    parts = [setting.split(", ") for setting in some]
    axes = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    every = [list(dict.fromkeys(column)) for column in zip(*(s.split(", ") for s in settings), strict=True)]
    if prod(map(len, axes)) != len(set(some)):
        return list(some)
    strict = [values for values, whole in zip(axes, every, strict=True) if len(values) < len(whole)]
    if not strict:
        return ["all settings"]
    return [", ".join(" or ".join(_joined(values)) for values in strict)]


def _joined(values: Sequence[str]) -> list[str]:
    """The name of the axis once.

    >>> _joined(["rho=0.1", "rho=0.5"])
    ['rho=0.1', '0.5']
    """
    return [values[0], *(value.partition("=")[2] for value in values[1:])]
