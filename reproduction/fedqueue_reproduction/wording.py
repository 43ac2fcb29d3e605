"""Figures, intervals and verdicts in words, as the page and the plots print them."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf, log10
from typing import Final

from fedqueue.report.style import amount as amount_of
from fedqueue_reproduction.claims import Check, Comparison, Sample, lower_is_better
from fedqueue_reproduction.experiment import AT_TARGET

_RAISED: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Head of a column; digits after the point; what is better and worse than another in it; whether it is compared by the
# difference itself (a share, a score) and not in per cent of the other.
_Words = tuple[str, int, tuple[str, str], bool]
_WORDS: Final[dict[str, _Words]] = {
    "score.max": ("best accuracy, %", 2, ("higher", "lower"), True),
    "score.final": ("last accuracy, %", 2, ("higher", "lower"), True),
    "time_to": ("time to {}, s", 1, ("sooner", "later"), False),
    "interpolated": ("time to {}, interpolated, s", 1, ("sooner", "later"), False),
    "steps_to": ("local steps to {}", 0, ("fewer", "more"), False),
    "node_seconds_to": ("node-seconds to {}", 0, ("fewer", "more"), False),
    "movement_to": ("model transfers to {}", 0, ("fewer", "more"), False),
    "movement_ratio": ("movement ratio to {}", 2, ("less", "more"), False),
    "late_probability": ("late probability", 3, ("lower", "higher"), True),
    "normalised_delay_mean": ("delay of the late, rounds", 2, ("shorter", "longer"), False),
    "normalised_delay_max": ("greatest delay, rounds", 2, ("shorter", "longer"), False),
    "max_staleness": ("greatest staleness", 2, ("less", "more"), True),
    "missed_cutoff": ("missed cutoff", 3, ("lower", "higher"), True),
    "deferred_weight": ("weight of the deferred", 3, ("greater", "smaller"), True),
    "local_steps": ("local steps", 0, ("fewer", "more"), False),
    "model_transfers": ("model transfers", 0, ("fewer", "more"), False),
    "node_seconds": ("node seconds", 0, ("fewer", "more"), False),
    "loss.final": ("last test loss", 3, ("lower", "higher"), False),
    "loss.least": ("least test loss", 3, ("lower", "higher"), False),
    "updates.admitted": ("updates admitted", 0, ("more", "fewer"), False),
    "updates.deferred": ("updates deferred", 0, ("fewer", "more"), False),
}


def per_cent(target: str) -> str:
    """
    >>> per_cent("0.95"), per_cent("0.955")
    ('95 %', '95.5 %')
    """
    return f"{100 * float(target):.6g} %"


def head(key: str) -> str:
    """What a figure is called, with its unit.

    >>> head("time_to.0.95")
    'time to 95 %, s'
    """
    name, _, target = key.partition(".")
    if name in AT_TARGET:
        return _WORDS[name][0].format(per_cent(target))
    return _words(key)[0]


def number(key: str, value: float) -> str:
    """A value of a figure; scores in per cent.

    >>> number("score.max", 0.96618), number("steps_to.0.95", 5893)
    ('96.62', '5,893')
    """
    digits = _words(key)[1]
    return f"{value * (100 if is_score(key) else 1):,.{digits}f}"


def cell(key: str, sample: Sample) -> str:
    """Mean and half width of its 95 % interval. Where some seeds never reached the target, the median over all seeds
    (a bound, if most never did) and how many did.

    >>> from fedqueue_reproduction.claims import Reading, sample
    >>> cell("time_to.0.95", sample([Reading(10.0), Reading(20.0)]))
    '15.0 ± 63.5'
    >>> cell("time_to.0.95", sample([Reading(10.0), Reading(20.0), Reading(200.0, reached=False)]))
    '20.0 (2/3)'
    """
    if sample.seeds == 0:
        return "-"
    if sample.mean is not None:
        half = "" if sample.half_width is None else f" ± {number(key, sample.half_width)}"
        return number(key, sample.mean) + half
    said = number(key, sample.median) if sample.median is not None else f"> {number(key, sample.bound or 0.0)}"
    return f"{said} ({sample.reached}/{sample.seeds})"


def gain(key: str, one: Comparison) -> str:
    """How much better, with its 95 % interval, or how often where no mean can be taken.

    >>> gain("time_to.0.95", Comparison("", "holds", 10, 10, gain=9.0, interval=(8.0, 10.0), scale=100.0))
    '9 % sooner (8 to 10 %)'
    >>> gain("time_to.0.95", Comparison("", "no difference seen", 10, 10, gain=1.0, interval=(-2.0, 4.0), scale=100.0))
    'between 2 % later and 4 % sooner'
    """
    better, worse = _words(key)[2]
    if one.gain is None or one.interval is None:
        return (
            f"{better} in {one.ahead} of {one.seeds} seeds, {worse} in {one.behind} "
            f"(reached by {one.reached[0]} and {one.reached[1]}; p = {one.chance:.2g})"
        )
    fewer = f", {one.seeds} of {one.runs} seeds" if one.seeds < one.runs else ""
    (middle, low, high), unit = _in_units(key, one, (one.gain, *one.interval))
    if one.verdict == "no difference seen":
        if low == high:
            return f"the same in every seed{fewer}"
        return f"between {_size(low, unit)} {worse} and {_size(high, unit)} {better}{fewer}"
    ends = sorted((abs(low), abs(high)))
    word = better if middle > 0 else worse
    return f"{_size(middle, unit)} {word} ({_size(ends[0], unit, bare=True)} to {_size(ends[1], unit)}{fewer})"


def in_one_seed(key: str, one: Comparison) -> str:
    """What a single seed says, which is no verdict.

    >>> in_one_seed("time_to.0.95", Comparison("", "not measured", 1, 1, ahead=1))
    'one seed, no verdict: sooner'
    """
    better, worse = _words(key)[2]
    said = better if one.ahead else worse if one.behind else "no difference that can be told"
    return f"one seed, no verdict: {said}"


def versus(one: Comparison, by: float | None) -> str:
    """How a difference compares with the published one, a share of the other row's mean; empty where none is
    published, no mean could be taken, or the difference goes the other way."""
    if by is None or one.relative is None or one.verdict == "does not hold":
        return ""
    _, low, high = one.relative
    if one.verdict == "no difference seen":
        return ", too little for the published difference" if by > high else ""
    return ", less than published" if by > high else ", more than published" if by < low else ", as published"


def span(key: str, each: Sequence[Comparison]) -> str:
    """The mean differences under several settings in a few words: the least and the greatest; and how often one was
    ahead where some seeds never reached the target.

    >>> ones = [Comparison("", "holds", 10, 10, gain=g, interval=(g, g), scale=100.0) for g in (9.0, -20.0)]
    >>> span("time_to.0.95", ones)
    'from 20 % later to 9 % sooner'
    """
    better, worse = _words(key)[2]
    known = [_in_units(key, one, (one.gain,)) for one in each if one.gain is not None]
    censored = [one for one in each if one.gain is None and one.verdict != "not measured"]
    said = []
    if known:
        unit = known[0][1]
        low, high = min(values[0] for values, _ in known), max(values[0] for values, _ in known)
        said.append(_range(low, high, unit, better, worse))
    if censored:
        ahead, seeds = sum(one.ahead for one in censored), sum(one.seeds for one in censored)
        said.append(f"{'where some never reach it, ' if known else ''}{better} in {ahead} of {seeds} pairs of runs")
    return "; ".join(said)


def _range(low: float, high: float, unit: str, better: str, worse: str) -> str:
    if low == high == 0:
        return "the same"
    if low < 0 < high:
        return f"from {_size(low, unit)} {worse} to {_size(high, unit)} {better}"
    word = better if high > 0 else worse
    ends = sorted((abs(low), abs(high)))
    if _size(ends[0], unit) == _size(ends[1], unit):
        return f"{_size(low, unit)} {word}"
    if ends[0] == 0:
        return f"up to {_size(ends[1], unit)} {word}"
    return f"{_size(ends[0], unit, bare=True)} to {_size(ends[1], unit)} {word}"


def beside(key: str, one: Check) -> str:
    """A published value and ours."""
    return f"{cell(key, one.ours)} against {number(key, one.published)}"


def listed(names: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def count(amount: int, noun: str) -> str:
    """
    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def scientific(value: float) -> str:
    """About three digits, with a power of ten where it would be long.

    >>> scientific(5.8e-05), scientific(0.0025), scientific(32280.6), scientific(4.71e9), scientific(inf)
    ('5.8·10⁻⁵', '0.0025', '32,281', '4.71·10⁹', 'never')
    """
    if value == inf:
        return "never"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return amount_of(value)
    exponent = floor(log10(abs(value)))
    return f"{value / 10.0**exponent:.3g}·10{raised(exponent)}"


def raised(number: int) -> str:
    """
    >>> raised(-12)
    '⁻¹²'
    """
    return str(number).translate(_RAISED)


def _words(key: str) -> _Words:
    found = _WORDS.get(key) or _WORDS.get(key.partition(".")[0])
    better = ("lower", "higher") if lower_is_better(key) else ("higher", "lower")
    return found or (key.replace("_", " ").replace(".", " "), 2, better, False)


def is_score(key: str) -> bool:
    """Whether it is shown in per cent."""
    return key.startswith("score.")


def _in_units(key: str, one: Comparison, values: Sequence[float]) -> tuple[list[float], str]:
    """Points of a score, the figure itself, or per cent of the other row's mean."""
    if _words(key)[3] or not one.scale:
        return ([100 * v for v in values], " points") if is_score(key) else (list(values), "")
    return [100 * v / one.scale for v in values], " %"


def _size(value: float, unit: str, *, bare: bool = False) -> str:
    """Without its sign; `bare` also without its unit, where another follows.

    >>> _size(-36.7, " %"), _size(0.0204, ""), _size(0.385, " points")
    ('37 %', '0.02', '0.39 points')
    """
    size = abs(value)
    said = f"{size:.2f}" if unit == " points" else f"{size:.0f}" if size >= 10 else f"{size:.2g}"
    return said if bare else said + unit
