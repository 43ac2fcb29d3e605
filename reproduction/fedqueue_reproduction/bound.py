"""Lemma 1 of the paper, and what measured forecast errors make of it. Pure arithmetic; seconds unless said otherwise.

    a job has J = T - q-hat - delta seconds to train, so it is back at T + e - delta, where e = q - q-hat
    if e is rho-sub-Gaussian and  gamma*T + delta >= max over facilities of sqrt(2 rho^2 log(K R / epsilon)),
    then with probability 1 - epsilon every job of a run is back within (1 + gamma)*T, and its staleness is at most
    ceil(1 + gamma) as the Lemma counts, ceil(gamma) as the algorithm does

docs/protocol.md explains it in plain words. Who measured the errors is not asked here: see forecast_errors.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp, log
from typing import Final, Literal

import numpy as np

from fedqueue.protocol.codec import at_least, more_than
from fedqueue_reproduction.error_distribution import ROUNDING, Floats, Shape, exceeded_by, reach, shape_of

ENOUGH: Final = 20  # errors of a facility; what fewer say is mostly luck
_MOST_EXPONENT: Final = 200.0  # a factor beyond exp() of this says nothing, and times a delay it may overflow


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the Lemma is told. `gamma` is one to work the margin out for; None: only the least that the margin allows.
    `shift` is added to delays before their logarithm is taken."""

    facilities: int  # K
    rounds: int  # R
    round_length: float  # T
    epsilon: float = 0.05
    margin: float = 0.0  # delta
    gamma: float | None = None
    shift: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, 1, "facilities", "rounds")
        more_than(self, 0, "round_length")
        at_least(self, 0, "margin", "gamma", "shift")
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must be more than 0 and less than 1, found {self.epsilon}")

    @property
    def chance(self) -> float:
        """epsilon / (K R): what one job may take of epsilon, so that all jobs of a run together take no more."""
        return self.epsilon / (self.facilities * self.rounds)


@dataclass(frozen=True)
class Series:
    """The forecast errors of one facility in order of time; `expected` has q-hat, where it is known."""

    errors: Floats
    expected: Floats | None = None

    @property
    def delays(self) -> Floats:
        assert self.expected is not None
        return self.expected + self.errors

    def log_errors(self, shift: float) -> Floats:
        """log(q + shift) - log(q-hat + shift)"""
        assert self.expected is not None
        # A delay is not negative; expected + error may be, by a rounding.
        logs: Floats = np.log(np.maximum(self.delays, 0.0) + shift) - np.log(self.expected + shift)
        return logs


@dataclass(frozen=True, kw_only=True)
class LogFigures:
    """A facility in log space."""

    shape: Shape
    factor: float  # m: U = q-hat * m is exceeded with a chance of epsilon in a run
    factor_of_sample: float  # the same from the sample's own quantile
    trains: float  # share of rounds with J = T - q-hat * m > 0
    trains_of_sample: float


@dataclass(frozen=True, kw_only=True)
class FacilityFigures:
    shape: Shape
    needed_margin: float  # by the Lemma, for gamma = 0
    deferred: float  # share of errors above the margin
    above: float  # share above gamma*T + delta, with the gamma that was asked about, or else the least that is allowed
    stalest: int  # rounds, if every job used its whole budget
    log: LogFigures | None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One way to know rho, what the Lemma then says, and how many of the errors do not keep to it."""

    rho_from: Literal["all errors", "plain sd", "first half"]
    rho: float
    needed_margin: float  # for gamma = 0
    gamma: float  # the least that the given margin allows
    lemma_bound: int  # ceil(1 + gamma)
    sharper_bound: int  # ceil(gamma)
    errors: int  # that it is held against
    above: int  # of them, those above gamma*T + delta
    run_chance: float  # that a run of K R jobs has one, at this share; the Lemma allows epsilon


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A way to choose the margin and what it leaves. `factor`: the margin grows with the forecast, U = q-hat * factor;
    `margin` is then its median in seconds."""

    name: Literal["given", "lemma", "quantile", "log", "log quantile"]
    margin: float
    factor: float | None
    trains: float | None  # share of rounds with J > 0; None: q-hat is not known
    budget: float | None  # mean of J / T, nothing where J is not above 0
    deferred: float  # share of these errors above it


@dataclass(frozen=True, kw_only=True)
class Assessment:
    setting: Setting
    errors: int
    worst: str  # the facility that needs the greatest margin
    by_facility: dict[str, FacilityFigures]
    checks: tuple[Check, ...]  # the first is the Lemma as it stands
    margin_for_gamma: float | None  # what the gamma that was asked about needs
    above_gamma: int | None  # errors above gamma*T + delta with that gamma and the given margin
    rules_of_run: tuple[Rule, ...]  # nothing is deferred in a run, but with a chance of epsilon; the Lemma's promise
    rules_of_round: tuple[Rule, ...]  # a share epsilon of the rounds is deferred


def least_shift(series: Mapping[str, Series]) -> float:
    """Seconds to add before logarithms are taken: none where all delays and forecasts are above 0; else one, which is
    the grain of recorded waits and what the predictor `log-ewma` adds."""
    known = [(one.delays, one.expected) for one in series.values() if one.expected is not None]
    return 0.0 if all(min(float(delays.min()), float(expected.min())) > 0 for delays, expected in known) else 1.0


def supported_gamma(needed_margin: float, margin: float, round_length: float) -> float:
    """The least gamma of which gamma*T + delta reaches the needed margin.

    >>> supported_gamma(17.0, margin=2.0, round_length=10.0)
    1.5
    """
    return max(0.0, (needed_margin - margin) / round_length)


def lemma_bound(gamma: float) -> int:
    """Staleness as the Lemma counts it: cutoffs until a job that is back within (1 + gamma)*T is used."""
    return sharper_bound(gamma) + 1


def sharper_bound(gamma: float) -> int:
    """Staleness of a job that is back within (1 + gamma)*T, as the algorithm counts it: round of use minus own round.

    >>> sharper_bound(0.0), sharper_bound(0.2), sharper_bound(1.0), lemma_bound(0.2)
    (0, 1, 1, 2)
    """
    return ceil(gamma - ROUNDING)


def stalest(errors: Floats, margin: float, round_length: float) -> int:
    """The greatest staleness that these errors lead to, if every job uses its whole budget."""
    return sharper_bound(supported_gamma(float(errors.max()), margin, round_length))


def assess(series: Mapping[str, Series], setting: Setting) -> Assessment:
    """Everything there is to say about these errors; each facility has at least one."""
    gamma = setting.gamma
    shapes = {name: shape_of(one.errors) for name, one in series.items()}
    logs = {name: shape_of(one.log_errors(setting.shift)) for name, one in series.items() if one.expected is not None}
    logs = logs if len(logs) == len(series) else {}
    everything = [one.errors for one in series.values()]
    check = _check("all errors", max(shape.rho for shape in shapes.values()), everything, setting)
    checks = [check, _check("plain sd", max(shape.sd for shape in shapes.values()), everything, setting)]
    halves = [len(errors) // 2 for errors in everything]
    if min(halves) >= ENOUGH // 2:
        first = max(shape_of(errors[:half]).rho for errors, half in zip(everything, halves, strict=True))
        later = [errors[half:] for errors, half in zip(everything, halves, strict=True)]
        checks.append(_check("first half", first, later, setting))
    return Assessment(
        setting=setting,
        errors=sum(map(len, everything)),
        worst=max(shapes, key=lambda name: shapes[name].rho),
        by_facility={
            name: _facility(one, shapes[name], logs.get(name), check.gamma if gamma is None else gamma, setting)
            for name, one in series.items()
        },
        checks=tuple(checks),
        margin_for_gamma=None if gamma is None else max(0.0, check.needed_margin - gamma * setting.round_length),
        above_gamma=None if gamma is None else _above(everything, gamma, setting),
        rules_of_run=_rules(series, shapes, logs, setting.chance, setting),
        rules_of_round=_rules(series, shapes, logs, setting.epsilon, setting),
    )


def _facility(one: Series, shape: Shape, logs: Shape | None, gamma: float, setting: Setting) -> FacilityFigures:
    length, margin = setting.round_length, setting.margin
    figures = None
    if logs is not None and one.expected is not None:
        factor = log_factor(logs, setting.chance)
        of_sample = _exp(exceeded_by(one.log_errors(setting.shift), setting.chance))
        figures = LogFigures(
            shape=logs,
            factor=factor,
            factor_of_sample=of_sample,
            trains=float((limits(one.expected, factor, setting.shift) < length).mean()),
            trains_of_sample=float((limits(one.expected, of_sample, setting.shift) < length).mean()),
        )
    return FacilityFigures(
        shape=shape,
        needed_margin=reach(shape.rho, setting.chance),
        deferred=float((one.errors > margin).mean()),
        above=float((one.errors > gamma * length + margin).mean()),
        stalest=stalest(one.errors, margin, length),
        log=figures,
    )


def log_factor(logs: Shape, chance: float) -> float:
    """m: q is above q-hat * m with at most this chance. The mean of log errors is not 0, because a forecast of the
    mean is above the typical delay; it is part of m."""
    return _exp(logs.mean + reach(logs.rho, chance))


def limits(expected: Floats, factor: float, shift: float) -> Floats:
    """U: what a delay is not expected to be above; J is what it leaves of the round."""
    return (expected + shift) * factor - shift


def _exp(value: float) -> float:
    return exp(min(value, _MOST_EXPONENT))


def _above(errors: list[Floats], gamma: float, setting: Setting) -> int:
    return sum(int((values > gamma * setting.round_length + setting.margin).sum()) for values in errors)


def _check(
    rho_from: Literal["all errors", "plain sd", "first half"], rho: float, held: list[Floats], setting: Setting
) -> Check:
    needed = reach(rho, setting.chance)
    gamma = supported_gamma(needed, setting.margin, setting.round_length)
    errors, above = sum(map(len, held)), _above(held, gamma, setting)
    return Check(
        rho_from=rho_from,
        rho=rho,
        needed_margin=needed,
        gamma=gamma,
        lemma_bound=lemma_bound(gamma),
        sharper_bound=sharper_bound(gamma),
        errors=errors,
        above=above,
        run_chance=1 - (1 - above / errors) ** (setting.facilities * setting.rounds),
    )


def _rules(
    series: Mapping[str, Series],
    shapes: Mapping[str, Shape],
    logs: Mapping[str, Shape],
    chance: float,
    setting: Setting,
) -> tuple[Rule, ...]:
    """One margin, or one factor, for all facilities, as the algorithm has it."""
    errors = np.concatenate([one.errors for one in series.values()])
    known = [one.expected for one in series.values() if one.expected is not None]
    expected = np.concatenate(known) if len(known) == len(series) else None

    def plain(name: Literal["given", "lemma", "quantile"], margin: float) -> Rule:
        budgets = None if expected is None else setting.round_length - expected - margin
        return _rule(name, margin, None, budgets, float((errors > margin).mean()), setting)

    rules = [
        plain("given", setting.margin),
        plain("lemma", max(reach(shape.rho, chance) for shape in shapes.values())),
        plain("quantile", max(0.0, *(exceeded_by(one.errors, chance) for one in series.values()))),
    ]
    if logs and expected is not None:
        spread = {name: one.log_errors(setting.shift) for name, one in series.items()}
        together = np.concatenate(list(spread.values()))
        factors: dict[Literal["log", "log quantile"], float] = {
            "log": max(log_factor(shape, chance) for shape in logs.values()),
            "log quantile": max(_exp(exceeded_by(values, chance)) for values in spread.values()),
        }
        for name, factor in factors.items():
            most = limits(expected, factor, setting.shift)
            deferred = float((together > log(factor) + ROUNDING).mean())
            budgets = setting.round_length - most
            rules.append(_rule(name, float(np.median(most - expected)), factor, budgets, deferred, setting))
    return tuple(rules)


def _rule(
    name: Literal["given", "lemma", "quantile", "log", "log quantile"],
    margin: float,
    factor: float | None,
    budgets: Floats | None,
    deferred: float,
    setting: Setting,
) -> Rule:
    trains = None if budgets is None else float((budgets > 0).mean())
    budget = None if budgets is None else float(np.maximum(budgets, 0.0).mean()) / setting.round_length
    return Rule(name=name, margin=margin, factor=factor, trains=trains, budget=budget, deferred=deferred)
