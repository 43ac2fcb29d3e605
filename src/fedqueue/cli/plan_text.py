"""What `fedqueue plan` found: for a person, within 100 columns, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from fedqueue.cli import terminal
from fedqueue.planning.advice import Advice, FacilityAdvice, Price
from fedqueue.planning.candidates import Candidate
from fedqueue.planning.search import Trial, difference
from fedqueue.planning.shapes import PAYS
from fedqueue.planning.stays import StayCheck
from fedqueue.planning.text import amount, change, duration, percent
from fedqueue.runs import rounded

WIDTH = 100


def show(advice: Advice) -> None:
    """On standard output, the recommendation first."""
    out = terminal.console()
    say = partial(out.print, markup=False, width=min(out.width, WIDTH))
    for sentence in recommendation(advice):
        say(sentence)
    say()
    _show_facilities(advice)
    say(explain(advice) + "\n")
    if advice.shapes:
        _show_shapes(advice)
        say(f"A size that takes twice the node-hours must bring {PAYS:g} times the work.\n")
    if advice.stays:
        _show_stays(advice)
        for curve in advice.stays:
            say(f"{curve.facility}: {describe_check(curve.check)}")
        say()
    _show_rivals(advice)
    say()
    if advice.price is not None:
        for sentence in describe_price(advice, advice.price):
            say(sentence)
        say()
    if advice.what_ifs:
        _show_what_ifs(advice)
        say()
    if advice.cautions:
        say("What is uncertain:")
        for caution in advice.cautions:
            say(f"- {caution}.")
        say()
    setting = advice.wish.setting
    say(
        f"{advice.simulations:,} simulations of {advice.virtual_days:,.0f} virtual days in all; the last of up to "
        f"{setting.days:g} days from {setting.starts} starting points, the same for all (seed {setting.seed})."
    )


def recommendation(advice: Advice) -> list[str]:
    """In plain words."""
    best, candidate = advice.best, advice.best.candidate
    rule = f" ({candidate.rule})" if candidate.rule else ""
    forecaster = f", with the predictor {candidate.predictor}" if candidate.predictor else ""
    first = f"Run {candidate.strategy}{rule} with {_length(candidate)}{forecaster}."
    late = best.late_rate
    lateness = "" if late is None else f", {percent(late)} of them after their cutoff"
    expect = f"Expect {amount(best.mean('updates'))} updates a day{lateness}, for "
    expect += f"{amount(best.mean('node_hours'))} node-hours a day."
    if best.target_days is not None:
        expect = f"The target should be reached after {duration(best.target_days * 86_400)}. {expect}"
    asks = [
        f"{f.place.name} {f.place.settings.nodes} node{'s'[: f.place.settings.nodes > 1]} for {_wall(f.wall_seconds)}"
        for f in advice.facilities
    ]
    return [first, f"Ask for jobs of: {'; '.join(asks)}.", expect]


def explain(advice: Advice) -> str:
    """What the objective is, in a sentence."""
    worth = advice.wish.setting.worth
    unit = amount(worth.reference)
    text = (
        f"work: effective local steps a day; the steps of a facility in one new model count as {unit} * (steps / "
        f"{unit})^{worth.returns:g}, divided by 1 + staleness / 2"
    )
    if worth.needed is not None:
        text += f"; the target needs {amount(worth.needed)} of them"
    text += ". wait: median and 90 % quantile of jobs like ours in the history."
    return f"{text} late: updates that missed the cutoff that they aimed at."


def describe_check(check: StayCheck | None) -> str:
    """What the advice of the first half of a history was worth in the second."""
    if check is None:
        return "its history is too short to check this."
    text = (
        f"the first half of the history advises {duration(check.wall_seconds)} and promises {percent(check.promised)}; "
        f"in the second half that trains {percent(check.achieved)} of the time"
    )
    if check.best_wall_seconds == check.wall_seconds:
        return f"{text}, and nothing does better."
    return f"{text}; best there is {duration(check.best_wall_seconds)} with {percent(check.best)}."


def describe_price(advice: Advice, price: Price) -> list[str]:
    """Of waiting for the slowest facility."""
    alone, together = (amount(price.others(t, "work")) for t in (price.blocking_without, price.blocking))
    updates, fewer = (amount(price.others(t, "updates")) for t in (price.blocking_without, price.blocking))
    lengths = [duration(t.candidate.length) for t in (price.blocking_without, price.blocking)]
    sentences = [
        f"Waiting for {price.slowest} costs FedAvg, which waits for all, {percent(max(0.0, price.cost))} of the work "
        f"of the others: {together} a day instead of {alone} ({fewer} updates of {lengths[1]} instead of {updates} "
        f"of {lengths[0]}).",
    ]
    strategy, what = advice.best.candidate.strategy, "speed" if advice.to_target else "work"
    if strategy != price.blocking.candidate.strategy:
        without = difference(price.without, advice.best, to_target=advice.to_target)
        work = advice.best.mean("work")
        sentences.append(
            f"With {strategy} it costs them {percent(max(0.0, price.cost_of_best))}; leaving {price.slowest} out would "
            f"change the {what} by {change(without.mean, without.half_width)}. FedAvg at its best does "
            f"{percent(price.blocking.mean('work') / work if work else None)} of the recommendation's work."
        )
    return sentences


def _show_facilities(advice: Advice) -> None:
    rows: list[tuple[str, ...]] = [
        (
            facility.place.name,
            str(facility.place.settings.nodes),
            _wall(facility.wall_seconds),
            duration(facility.wait_median),
            duration(facility.wait_p90),
            amount(facility.jobs),
            amount(facility.updates),
            amount(facility.work),
            percent(facility.late_rate),
            amount(facility.node_hours),
        )
        for facility in advice.facilities
    ]
    best = advice.best
    total = ("all", "", "", "", "", *(amount(best.mean(name)) for name in ("jobs", "updates", "work")))
    rows.append((*total, percent(best.late_rate), amount(best.mean("node_hours"))))
    heads = ("facility", "nodes", "wall time", "wait", "90 %", "jobs/d", "updates/d", "work/d", "late", "node-h/d")
    terminal.show_table("what to ask for, and what to expect", heads, rows)


def _show_shapes(advice: Advice) -> None:
    rows = []
    for facility in advice.facilities:
        for shape in advice.shapes.get(facility.place.name, ()):
            low, high = shape.procs or (0, 0)
            rows.append(
                (
                    facility.place.name,
                    f"{shape.nodes}{' *' if shape.nodes == facility.place.settings.nodes else '  '}",
                    f"{low}-{high}" if low != high else str(low),
                    f"{shape.jobs:,}",
                    duration(shape.wait_median),
                    amount(shape.work),
                    amount(shape.node_hours),
                )
            )
    scaling = f"speed as nodes^{advice.wish.scaling:g}"
    heads = ("facility", "nodes", "processors", "jobs in history", "wait", "work/d", "node-h/d")
    terminal.show_table(f"job sizes, each facility alone under just in time; {scaling}; * recommended", heads, rows)


def _show_stays(advice: Advice) -> None:
    rows = []
    for curve in advice.stays:
        checked = {wall: (first, second) for wall, first, second in curve.check.shares} if curve.check else {}
        for point in curve.points:
            first, second = checked.get(point.wall_seconds, (None, None))
            rows.append(
                (
                    curve.facility,
                    f"{duration(point.wall_seconds)}{' *' if point is curve.chosen else '  '}",
                    f"{point.jobs:,}",
                    duration(point.wait_median),
                    duration(point.wait_mean),
                    percent(point.share),
                    percent(first),
                    percent(second),
                )
            )
    heads = ("facility", "wall time", "jobs in history", "wait", "mean", "training", "first half", "second half")
    terminal.show_table("share of time training, with jobs that stay; * shortest that is nearly the best", heads, rows)


def _show_rivals(advice: Advice) -> None:
    rows = []
    for rival in advice.rivals:
        trial, gap = rival.trial, rival.against_best
        versus = "recommended" if trial is advice.best else change(gap.mean, gap.half_width)
        rows.append((trial.candidate.strategy, *_figures(advice, trial), versus))
    heads = ("strategy", "length", "rule", *_heads(advice), "difference")
    terminal.show_table("the best of each strategy; difference over starting points, 95 %", heads, rows, best=0)


def _show_what_ifs(advice: Advice) -> None:
    best = advice.best
    rows = [("as planned", *_figures(advice, best), "")]
    rows += [
        (found.text, *_figures(advice, found.trial), change(found.change.mean, found.change.half_width))
        for found in advice.what_ifs
    ]
    heads = ("what if", "length", "rule", *_heads(advice), "difference")
    terminal.show_table(f"what if ({best.candidate.strategy}, round length and rule chosen anew)", heads, rows, best=0)


def _heads(advice: Advice) -> tuple[str, ...]:
    return (*(("target",) if advice.to_target else ()), "updates/d", "work/d", "late", "node-h/d")


def _figures(advice: Advice, trial: Trial) -> tuple[str, ...]:
    target = ("-" if trial.target_days is None else duration(trial.target_days * 86_400),) if advice.to_target else ()
    return (
        duration(trial.candidate.length),
        trial.candidate.rule,
        *target,
        amount(trial.mean("updates")),
        amount(trial.mean("work")),
        percent(trial.late_rate),
        amount(trial.mean("node_hours")),
    )


def _length(candidate: Candidate) -> str:
    return f"{'rounds' if candidate.timed else 'jobs that train'} {'of ' if candidate.timed else ''}" + duration(
        candidate.length
    )


def _wall(seconds: float) -> str:
    """As schedulers write it.

    >>> _wall(5400.0)
    '1:30:00'
    """
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02}:00"


# JSON -------------------------------------------------------------------------------------------------------


def as_json(advice: Advice) -> dict[str, Any]:
    """Everything, with floats of six digits."""
    setting = advice.wish.setting
    price = advice.price
    found = {
        "recommendation": {
            **_trial_json(advice.best),
            "words": recommendation(advice),
            "facilities": {f.place.name: _facility_json(f) for f in advice.facilities},
        },
        "objective": {
            "figure": "days to target" if advice.to_target else "effective steps a day",
            "returns": setting.worth.returns,
            "reference_steps": setting.worth.reference,
            "needed": setting.worth.needed,
        },
        "strategies": [{**_trial_json(r.trial), "difference": asdict(r.against_best)} for r in advice.rivals],
        "shapes": {
            name: [
                {
                    **{key: getattr(shape, key) for key in ("nodes", "procs", "jobs", "wait_median")},
                    **_per_day(shape, "work", "node_hours"),
                }
                for shape in shapes
            ]
            for name, shapes in advice.shapes.items()
        },
        "stays": [asdict(curve) for curve in advice.stays],
        "price": None
        if price is None
        else {
            "slowest": price.slowest,
            "fedavg": _trial_json(price.blocking),
            "fedavg_without": _trial_json(price.blocking_without),
            "fedavg_cost": price.cost,
            "cost": price.cost_of_best,
            "without": _trial_json(price.without),
        },
        "what_if": [
            {"what_if": w.text, **_trial_json(w.trial), "difference": asdict(w.change)} for w in advice.what_ifs
        ],
        "uncertain": list(advice.cautions),
        "tried": [
            {
                **_candidate_json(one.candidate),
                **_per_day(one, "work", "steps", "node_hours"),
                "late_rate": one.late_rate,
                "stage": one.stage,
            }
            for one in advice.tried
        ],
        "simulations": advice.simulations,
        "virtual_days": advice.virtual_days,
        "days": setting.days,
        "starts": setting.starts,
        "seed": setting.seed,
        "scaling": advice.wish.scaling,
    }
    made: dict[str, Any] = rounded(found)
    return made


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": candidate.strategy,
        "round_length" if candidate.timed else "train_seconds": candidate.length,
        "options": dict(candidate.options),
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        **_candidate_json(trial.candidate),
        **{f"{key}_per_day": trial.mean(key) for key in ("work", "steps", "updates", "jobs", "node_hours")},
        "late_rate": trial.late_rate,
        "target_days": trial.target_days,
        "starts": len(trial.outcomes),
    }


def _facility_json(facility: FacilityAdvice) -> dict[str, Any]:
    waits, place = facility.waits, facility.place
    return {
        "nodes": place.settings.nodes,
        "steps_per_second": place.settings.steps_per_second,
        **{
            key: getattr(facility, key) for key in ("wall_seconds", "wait_median", "wait_p90", "wait_mean", "late_rate")
        },
        **_per_day(facility, "jobs", "updates", "work", "node_hours"),
        "history": None
        if waits is None
        else {"jobs": len(waits.waits), "procs": place.procs, "requested_about": waits.about},
    }


def _per_day(owner: object, *figures: str) -> dict[str, Any]:
    return {f"{key}_per_day": getattr(owner, key) for key in figures}
