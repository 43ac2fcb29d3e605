"""What may be recommended: strategies, each with a ladder of round lengths and its own rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fedqueue.config import Config, FixedQueue
from fedqueue.planning.places import Place
from fedqueue.planning.text import duration
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.protocol.strategies.base import STRETCH
from fedqueue.protocol.strategies.fedcompass import FedCompassOptions
from fedqueue.protocol.strategies.fedqueue import FedQueueOptions
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions
from fedqueue.protocol.strategies.jit import JitOptions
from fedqueue.protocol.strategies.rounds import RoundOptions
from fedqueue.protocol.strategies.staying import StayOptions
from fedqueue.training.job import TaskSettings

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
ROUND_LENGTHS: Final = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 20 * MINUTE, 40 * MINUTE),
    *(HOUR, 2 * HOUR, 4 * HOUR, 8 * HOUR, 12 * HOUR, DAY, 2 * DAY),
)
"""Seconds, each about twice the one before, and easy to say."""
SHORTEST: Final = 10 * MINUTE  # where real queues are involved: few sites welcome shorter jobs
MARGINS: Final = (0.0, 0.1, 0.3)  # of a round length
LATE_RATES: Final = (0.05, 0.25)
LEADS: Final = (0.5, 0.9)
STAYS: Final = (HOUR, 4 * HOUR, 12 * HOUR, DAY)  # wall times of jobs that stay, beside the automatic choice
FORECASTER: Final = "conformal"
"""For rules that need a whole distribution, while candidates are many; the best is then tried with each of these."""
FORECASTERS: Final = ("ewma", "log-ewma", "rolling-quantile", "conformal", "combined")

Pairs = tuple[tuple[str, Any], ...]

PLAIN: Final[Pairs] = (("rounds", "fixed"), ("absent", 0.0))
"""Just in time at a given round length: its own rule for that goes by scores, and nothing is trained here."""
ONCE: Final[Pairs] = (("stay", "off"), *PLAIN)  # and with one job a round


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run. `length` is the round length of strategies with a timer, and the training time of a job of those
    with a given number of steps."""

    strategy: str
    length: float
    options: Pairs = ()

    @property
    def timed(self) -> bool:
        return issubclass(STRATEGIES[self.strategy].Options, RoundOptions)

    @property
    def rule(self) -> str:
        """Its own choices, in words."""
        given = dict(self.options)
        words = []
        if "pipeline" in given:
            lead = f" (lead {100 * given['lead']:g} %)" if "lead" in given else ""
            words.append({"off": "no pipeline"}.get(given["pipeline"], given["pipeline"]) + lead)
        rule = given.get("rule", "paper" if "margin" in given else None)
        if rule == "paper":
            words.append(f"margin {given['margin'] / self.length:.0%} of T" if given["margin"] else "no margin")
        elif rule == "late-rate":
            words.append(f"late rate {given['late_rate']:.0%}")
        elif rule is not None:
            words.append(rule)
        if given.get("stay") == "auto":
            words.append("jobs stay")
        elif given.get("stay", "off") != "off":
            words.append(f"jobs stay {duration(given['stay'])}")
        if "buffer" in given:
            words.append(f"buffer {given['buffer']}")
        return ", ".join(words)

    @property
    def predictor(self) -> str | None:
        return dict(self.options).get("predictor")

    def wall_seconds(self, place: Place) -> float:
        """What its jobs ask for, about: jobs of the history that asked for at most so much are like them."""
        options = STRATEGIES[self.strategy].Options
        once = 1.2 * self.length if options is JitOptions else self.length if self.timed else STRETCH * self.length
        stay = dict(self.options).get("stay", "off")
        if stay == "auto":
            stay = place.stays.chosen.wall_seconds if place.stays is not None else 0.0
        return float(min(max(once, 0.0 if stay == "off" else stay) + place.overhead, place.most_wall_seconds))


def ladder(places: Sequence[Place], config: Config, *, shortest: float | None, longest: float) -> list[float]:
    """Round lengths worth trying: from a quarter of the shortest typical wait and overhead to many times the longest,
    and at least four."""
    real = any(place.log is not None for place in places)
    floor = shortest if shortest is not None else SHORTEST if real else ROUND_LENGTHS[0]
    around = [place.typical_wait(floor, config) + place.overhead for place in places]
    low = max(floor, min(around) / 4, max(place.overhead for place in places) * 2)
    high = min(longest, max(16 * max(around), 12 * low))
    found = [length for length in ROUND_LENGTHS if low <= length <= high]
    return found if len(found) >= 4 else [x for x in ROUND_LENGTHS if low / 2 <= x <= longest][:4] or [longest]


def candidates(
    strategies: Sequence[str], lengths: Sequence[float], places: Sequence[Place], *, stay: bool = True
) -> list[Candidate]:
    """Jobs hand in once, or they stay: as long as each facility's waits say, or just in time also for fixed times."""
    most = max(place.most_wall_seconds for place in places) if stay else 0.0
    return [
        Candidate(strategy, length, options)
        for strategy in strategies
        for length in lengths
        for options in [*_choices(strategy, length, len(places)), *_stays(strategy, length, len(places), most)]
    ]


def _stays(strategy: str, length: float, facilities: int, most: float) -> list[Pairs]:
    options = STRATEGIES[strategy].Options
    if not issubclass(options, StayOptions) or 2 * length > most:
        return []
    if options is JitOptions:
        return [(("stay", stay), *PLAIN) for stay in ("auto", *(s for s in STAYS if 2 * length <= s <= most))]
    return [(*_choices(strategy, length, facilities)[-1], ("stay", "auto"))]


def _choices(strategy: str, length: float, facilities: int) -> list[Pairs]:
    options = STRATEGIES[strategy].Options
    fields = {field.name for field in dataclasses.fields(options)}
    if options is JitOptions:
        timed: list[Pairs] = [(("pipeline", "timed"), ("lead", lead), ("predictor", FORECASTER)) for lead in LEADS]
        choices = [*timed, (("pipeline", "independent"),), (("pipeline", "off"),)]
        return [(*pairs, *ONCE) for pairs in choices]
    if options is FedQueueOptions:
        paper: list[Pairs] = [(("margin", share * length), ("predictor", "ewma")) for share in MARGINS]
        known = ("predictor", FORECASTER)
        rates: list[Pairs] = [(("rule", "late-rate"), ("late_rate", rate), known) for rate in LATE_RATES]
        return [*((("rule", "paper"), *pairs) for pairs in paper), *rates, (("rule", "newsvendor"), known)]
    if "buffer" in fields:
        return [(("buffer", k),) for k in sorted({max(1, facilities // 2), facilities})]
    return [()]


def with_predictors(candidate: Candidate) -> list[Candidate]:
    """The same with every forecaster; itself alone, if none has a say."""
    if candidate.predictor is None:
        return [candidate]
    rest = tuple(pair for pair in candidate.options if pair[0] != "predictor")
    return [replace(candidate, options=(*rest, ("predictor", name))) for name in FORECASTERS]


def configure(config: Config, places: Sequence[Place], candidate: Candidate, seconds: float) -> Config:
    """The run of a candidate: timing alone, for so many virtual seconds. Waits are not in it."""
    return replace(
        config,
        run=replace(
            config.run,
            strategy=candidate.strategy,
            round_length=candidate.length,
            rounds=None,
            seconds=seconds,
            stop_at_score=None,
            warm_up=False,
        ),
        task=TaskSettings(name="timing"),
        strategy={candidate.strategy: options_of(config, places, candidate)},
        facility=[
            replace(
                place.settings,
                queue=FixedQueue(delay=0.0),
                first_delay=first_delay(place, candidate),
                known_waits=place.known_waits,
            )
            for place in places
        ],
        fault=[f for f in config.fault if f.facility in ("*", *(place.name for place in places))],
    )


def first_delay(place: Place, candidate: Candidate) -> float:
    """The wait to expect before anything was seen: the median of jobs like the candidate's, if there is a history."""
    if place.log is None:
        return place.settings.first_delay
    return place.jobs.like(candidate.wall_seconds(place)).quantile(0.5) * place.factor


def options_of(config: Config, places: Sequence[Place], candidate: Candidate) -> Any:
    """Of its strategy: the config's own, with what the candidate says."""
    options = config.options(candidate.strategy)
    changes = dict(candidate.options)
    steps = {place.name: max(1, int((place.settings.steps_per_second or 1.0) * candidate.length)) for place in places}
    if isinstance(options, RoundOptions):
        changes["round_length"] = None  # the run's
    elif isinstance(options, FixedStepOptions):
        changes["steps"] = steps
    elif isinstance(options, FedCompassOptions):
        changes |= {"min_steps": max(1, min(steps.values()) // 4), "max_steps": max(steps.values())}
    return replace(options, **changes)
