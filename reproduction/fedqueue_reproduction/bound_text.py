"""What `fedqueue bound` found, for a person: tables narrow enough for a terminal of 80 columns, then plain words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import sqrt

from fedqueue.cli import terminal
from fedqueue.report.style import amount, short
from fedqueue_reproduction.bound import Assessment, Check, Rule
from fedqueue_reproduction.error_distribution import FAR, NEAR, Shape
from fedqueue_reproduction.forecast_errors import Measured

_RULES = {
    "given": "the margin as given",
    "lemma": "Lemma 1",
    "quantile": "quantile of errors *",
    "log": "log space",
    "log quantile": "quantile of log errors *",
}


def show(assessment: Assessment, measured: Measured) -> None:
    """On standard output; prose is wrapped to the terminal."""
    setting = assessment.setting
    say = partial(terminal.console().print, markup=False)
    several = "y" if setting.facilities == 1 else "ies"
    say(
        f"{measured.name}: {assessment.errors} errors; K = {setting.facilities} facilit{several}, "
        f"R = {setting.rounds} rounds of {amount(setting.round_length)} s, margin {amount(setting.margin)} s, "
        f"epsilon {setting.epsilon:g}\n"
    )
    _show_checks(assessment.checks)
    say(
        "needs: the margin for gamma = 0, with which every update meets its own cutoff: staleness 0, where the Lemma's "
        "ceil(1 + 0) says 1. gamma: the least that the given margin allows. Lemma: its bound on staleness, ceil(1 + "
        "gamma). sharper: ceil(gamma), which is what the same proof gives. above: errors above gamma*T + margin. "
        "all errors: rho is fitted to them, so at most epsilon/(K R) of them can be. plain sd: as if they were "
        "Gaussian. first half: rho from the first half of the errors, held against the second."
    )
    if setting.gamma is not None and assessment.margin_for_gamma is not None:
        reached = setting.gamma * setting.round_length + setting.margin
        say(
            f"gamma = {setting.gamma:g} needs a margin of {amount(assessment.margin_for_gamma)} s; with the given one "
            f"{assessment.above_gamma} of {assessment.errors} errors are above gamma*T + margin = {amount(reached)} s."
        )
    say()
    _show_errors(assessment)
    logs = all(figures.log is not None for figures in assessment.by_facility.values())
    if logs:
        _show_logs(assessment)
    _show_tails(assessment, logs=logs)
    say(
        "proxy: the least variance proxy of the sample (long delays) over its variance; 1 is Gaussian, and that of a "
        "sample is a lower bound. by: about so many errors decide it. deferred: above the margin. above: above "
        "gamma*T + margin. stalest: rounds, for a job that uses its whole budget. x Gaussian: share of errors more "
        "than 2, 3, 4 sd above the mean over that of a Gaussian.\n"
    )
    share = f"{100 * setting.epsilon:g} %"
    _show_rules(f"nothing deferred in all but {share} of runs", assessment.rules_of_run)
    _show_rules(f"{share} of the rounds deferred", assessment.rules_of_round)
    say("J > 0: rounds that have time left to train. * chosen in hindsight, from the errors it is held against.")
    if measured.observed is not None:
        seen = measured.observed
        say(
            f"In the run {terminal.percent(seen.deferred)} % of {seen.updates} aggregated updates were deferred; "
            f"the greatest staleness was {seen.max_staleness}."
        )
    for note in notes(assessment, measured):
        say(f"Note: {note}.")
    say()
    for sentence in verdict(assessment):
        say(sentence)


def show_cases(found: Sequence[tuple[str, Assessment]]) -> None:
    """A row a trace, wider than 80 columns."""
    rows = []
    for name, assessment in found:
        (figures,) = assessment.by_facility.values()
        assert figures.log is not None  # a trace has delays and forecasts
        length, logs = assessment.setting.round_length, figures.log.shape
        broken = {check.rho_from: str(check.above) for check in assessment.checks}
        of_round = {rule.name: rule for rule in assessment.rules_of_round}
        rows.append(
            (
                name,
                amount(length),
                str(assessment.errors),
                _figure(figures.shape.excess_kurtosis),
                _figure(figures.shape.proxy_ratio),
                amount(figures.needed_margin / length),
                broken["plain sd"],
                broken.get("first half", "-"),
                _figure(logs.sd),
                _figure(logs.excess_kurtosis),
                _figure(logs.proxy_ratio),
                _factor(figures.log.factor),
                _share(figures.log.trains),
                _factor(of_round["log quantile"].factor),
                _share(of_round["log quantile"].trains),
            )
        )
    heads = ("case", "T s", "errors", "kurt.", "proxy", "needs/T", "broken", "by half", "log sd", "kurt.", "proxy")
    title = "Lemma 1 on traces; then log errors: m and J > 0 for a run, and by quantile for a share of epsilon"
    terminal.show_table(title, (*heads, "m", "J > 0", "m", "J > 0"), rows)


def _show_checks(checks: Sequence[Check]) -> None:
    rows = [
        (
            check.rho_from,
            amount(check.rho),
            amount(check.needed_margin),
            f"{check.gamma:.2f}",
            str(check.lemma_bound),
            str(check.sharper_bound),
            f"{check.above} of {check.errors}",
        )
        for check in checks
    ]
    heads = ("rho from", "rho s", "needs s", "gamma", "Lemma", "sharper", "above")
    terminal.show_table("Lemma 1: the margin it needs, the staleness it promises", heads, rows)


def _show_errors(assessment: Assessment) -> None:
    rows = [
        (_name(name), str(figures.shape.errors), *_spread(figures.shape), amount(figures.needed_margin))
        for name, figures in assessment.by_facility.items()
    ]
    if len(rows) > 1:
        rows.append(("greatest", *[""] * 7, amount(assessment.checks[0].needed_margin)))
    _table("errors, in seconds", ("facility", "n", *_SPREAD, "needs s"), rows)


def _show_logs(assessment: Assessment) -> None:
    rows = []
    for name, figures in assessment.by_facility.items():
        if figures.log is not None:
            shown = _factor(figures.log.factor), terminal.percent(figures.log.trains)
            rows.append((_name(name), *_spread(figures.log.shape), *shown))
    if len(rows) > 1:
        rule = next(rule for rule in assessment.rules_of_run if rule.name == "log")
        rows.append(("greatest", *[""] * 6, _factor(rule.factor), terminal.percent(rule.trains)))
    shift = assessment.setting.shift
    added = f" ({shift:g} s added to each)" if shift else ""
    _table(f"log errors, log q - log q-hat{added}; J = T - m * q-hat", ("facility", *_SPREAD, "m", "J > 0 %"), rows)


def _show_tails(assessment: Assessment, *, logs: bool) -> None:
    found = assessment.by_facility
    rows = []
    for name, figures in found.items():
        rows.append(
            [
                _name(name),
                terminal.percent(figures.deferred),
                terminal.percent(figures.above),
                str(figures.stalest),
                _ratios(figures.shape),
                *([_ratios(figures.log.shape)] if figures.log is not None and logs else []),
            ]
        )
    if len(rows) > 1:
        shares = [[getattr(figures, key) for figures in found.values()] for key in ("deferred", "above")]
        stalest = max(figures.stalest for figures in found.values())
        rows.append(["greatest", *(terminal.percent(max(share)) for share in shares), str(stalest), *[""] * (1 + logs)])
    heads = ("facility", "deferred", "above", "stalest", "x Gaussian", *(["of log errors"] if logs else []))
    _table("tails: shares in %, and shares over those of a Gaussian", heads, rows)


_SPREAD = ("mean", "sd", "skew", "kurt.", "proxy", "by")


def _spread(shape: Shape) -> list[str]:
    return [
        f"{'-' if shape.mean < 0 else '+'}{_figure(abs(shape.mean))}",
        _figure(shape.sd),
        _figure(shape.skewness),
        _figure(shape.excess_kurtosis),
        _figure(shape.proxy_ratio),
        "-" if shape.proxy_support is None else f"{shape.proxy_support:,.0f}",
    ]


def _ratios(shape: Shape) -> str:
    """At 2, 3 and 4 sd."""
    return "-" if shape.tail_ratios is None else "  ".join(_figure(ratio, 1) for ratio in shape.tail_ratios)


def _name(name: str) -> str:
    return short(name, 12)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The row of the greatest, which counts, stands out."""
    terminal.show_table(title, heads, rows, best=len(rows) - 1 if len(rows) > 1 else None)


def _show_rules(title: str, rules: Sequence[Rule]) -> None:
    rows = [
        (
            _RULES[rule.name],
            amount(rule.margin) if rule.factor is None else f"{_factor(rule.factor)} x q-hat",
            terminal.percent(rule.trains),
            "-" if rule.budget is None else f"{rule.budget:.3f}",
            terminal.percent(rule.deferred),
        )
        for rule in rules
    ]
    terminal.show_table(f"one margin for all: {title}", ("rule", "margin s", "J > 0 %", "mean J/T", "deferred %"), rows)


def notes(assessment: Assessment, measured: Measured) -> list[str]:
    """What limits the figures."""
    setting, found = assessment.setting, list(measured.notes)
    if any(figures.log is None for figures in assessment.by_facility.values()):
        found.append("log space needs delays and forecasts, and only errors were given")
    for name, figures in assessment.by_facility.items():
        shape = figures.shape
        if shape.mean > 3 * shape.sd / sqrt(shape.errors):
            found.append(f"the Lemma assumes a mean error of 0; that of {name} is {amount(shape.mean)} s: add it")
    if setting.chance * min(figures.shape.errors for figures in assessment.by_facility.values()) < 1:
        found.append(
            f"epsilon / (K R) is {setting.chance:.2g}, less than one in so many errors: the sample's own quantile is "
            "then its greatest error"
        )
    return found


def verdict(assessment: Assessment) -> list[str]:
    """Three or four sentences that need no table."""
    setting = assessment.setting
    lemma, of_run = assessment.checks[0], {rule.name: rule for rule in assessment.rules_of_run}
    said = f"On these errors the Lemma needs a margin of {amount(lemma.needed_margin)} s in a round of "
    said += f"{amount(setting.round_length)} s"
    trains = of_run["lemma"].trains
    if trains == 0 or (trains is None and lemma.needed_margin >= setting.round_length):
        said += ": no round has time left to train, so it cannot be met."
    else:
        said += "." if trains is None else f"; {_percent(trains)} of the rounds then have time left to train."
    sentences = [said, _promise(assessment), _nearness(assessment)]
    if "log" in of_run:
        of_round = {rule.name: rule for rule in assessment.rules_of_round}
        sentences.append(
            f"In log space the same promise takes m = {_factor(of_run['log'].factor)} "
            f"({_share(of_run['log'].trains)} of the rounds have time left to train); deferring "
            f"{100 * setting.epsilon:g} % of the rounds takes {_factor(of_round['log'].factor)} "
            f"({_share(of_round['log'].trains)}), or {_factor(of_round['log quantile'].factor)} "
            f"({_share(of_round['log quantile'].trains)}) by their own quantile."
        )
    return sentences


def _promise(assessment: Assessment) -> str:
    setting, lemma = assessment.setting, assessment.checks[0]
    said = (
        f"The margin of {amount(setting.margin)} s supports gamma = {lemma.gamma:.2f}: a staleness of at most "
        f"{lemma.lemma_bound} as the Lemma counts, {lemma.sharper_bound} as the algorithm does"
    )
    held = assessment.checks[-1]
    if held.rho_from != "first half":
        return said + "."
    if held.above == 0:
        return said + f"; fitted on the first half of the errors, it holds for all {held.errors} of the second."
    return (
        said + f"; fitted on the first half of the errors, {held.above} of the {held.errors} of the second break it "
        f"(at that rate a run does with a chance of {held.run_chance:.2g}, and {setting.epsilon:g} is allowed)."
    )


def _nearness(assessment: Assessment) -> str:
    figures = assessment.by_facility[assessment.worst]
    ratio = figures.shape.proxy_ratio
    if ratio is None:
        return "All errors are the same: they have no spread."
    where = "" if len(assessment.by_facility) == 1 else f" of {assessment.worst}"
    said = f"The errors{where} are {nearness(ratio)} sub-Gaussian: the least variance proxy is {_figure(ratio)} times "
    support = figures.shape.proxy_support or 0.0
    said += "the variance" + (
        f", decided by about {support:,.0f} of {figures.shape.errors:,} errors" if ratio > NEAR else ""
    )
    if figures.log is not None and figures.log.shape.proxy_ratio is not None:
        of_log = figures.log.shape.proxy_ratio
        said += f"; log errors are {nearness(of_log)} it ({_figure(of_log)} times)"
    return said + "."


def nearness(ratio: float) -> str:
    return "near to" if ratio <= NEAR else "some way from" if ratio <= FAR else "far from"


def _figure(value: float | None, digits: int = 2) -> str:
    """Two or three digits; `digits` after the point below 10.

    >>> _figure(1.0432), _figure(61.23), _figure(None)
    ('1.04', '61.2', '-')
    """
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _factor(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2e}" if value >= 1e6 else amount(value)


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value in (0, 1) or 0.01 <= value <= 0.99 else f"{100 * value:.1f} %"


def _share(value: float | None) -> str:
    return "-" if value is None else _percent(value)
