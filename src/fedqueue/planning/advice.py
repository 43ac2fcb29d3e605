"""From facilities and their histories to a recommendation, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Final

import numpy as np

from fedqueue.comparison import Estimate
from fedqueue.history.requests import Waits
from fedqueue.planning import whatif
from fedqueue.planning.candidates import Candidate, candidates, ladder, with_predictors
from fedqueue.planning.cautions import cautions
from fedqueue.planning.measure import Share
from fedqueue.planning.places import Place
from fedqueue.planning.search import Scenario, Searcher, Setting, Trial, Tried, compare_stages, difference
from fedqueue.planning.shapes import Shape, choose
from fedqueue.planning.stays import StayCurve

BASE: Final = "as it is"
BLOCKING: Final = "fedavg"  # the strategy that waits for all
WALL_SHARE: Final = 0.95  # of the jobs: the wall time to request covers what they asked for


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked of the planner."""

    setting: Setting
    places: tuple[Place, ...]
    strategies: Sequence[str]
    what_ifs: Sequence[str] = ()
    scaling: float = 0.9
    keep_sizes: bool = False
    may_stay: bool = True  # whether jobs may hand in part after part
    shortest: float | None = None  # round length, seconds
    longest: float = 172_800.0


@dataclass(frozen=True, slots=True)
class FacilityAdvice:
    """What to ask of one facility, and what to expect; figures a day."""

    place: Place
    wall_seconds: float  # to request
    waits: Waits | None  # jobs of the history that were taken for ours
    wait_median: float  # of these; without a history, of the simulated jobs
    wait_p90: float
    wait_mean: float
    jobs: float
    updates: float
    work: float
    late_rate: float | None
    node_hours: float


@dataclass(frozen=True, slots=True)
class Rival:
    """The best of a strategy, and how much more (share) of the objective it has than the recommendation."""

    trial: Trial
    against_best: Estimate


@dataclass(frozen=True, slots=True)
class Price:
    """Of waiting for the slowest facility."""

    slowest: str
    blocking: Trial  # FedAvg at its best, with all facilities
    blocking_without: Trial  # and at its best without the slowest
    best: Trial
    without: Trial  # the recommendation, the slowest left out

    @property
    def cost(self) -> float:
        """Share of the others' work that FedAvg loses by waiting for it."""
        return self._lost(self.blocking, self.blocking_without)

    @property
    def cost_of_best(self) -> float:
        """Share of it that the recommendation loses."""
        return self._lost(self.best, self.without)

    def others(self, trial: Trial, figure: str) -> float:
        """Of all facilities but the slowest, a day."""
        return fmean(
            sum(getattr(share, figure) for name, share in outcome.shares.items() if name != self.slowest) / outcome.days
            for outcome in trial.outcomes.values()
        )

    def _lost(self, together: Trial, alone: Trial) -> float:
        work = self.others(alone, "work")
        return 1.0 - self.others(together, "work") / work if work else 0.0


@dataclass(frozen=True, slots=True)
class WhatIf:
    text: str
    trial: Trial  # the best round length and rule of the recommended strategy
    change: Estimate  # of the objective, as a share of the base's


@dataclass(frozen=True, slots=True)
class Advice:
    wish: Wish
    places: tuple[Place, ...]  # with the sizes that are recommended
    best: Trial
    facilities: tuple[FacilityAdvice, ...]
    rivals: tuple[Rival, ...]
    price: Price | None  # None: there is only one facility
    what_ifs: tuple[WhatIf, ...]
    shapes: dict[str, list[Shape]]
    stays: tuple[StayCurve, ...]  # of facilities whose history says
    tried: tuple[Tried, ...]
    cautions: tuple[str, ...]
    simulations: int
    virtual_days: float

    @property
    def to_target(self) -> bool:
        return self.wish.setting.worth.needed is not None


def advise(wish: Wish, searcher: Searcher) -> Advice:
    """Sizes first, each facility by itself; then strategy, round length and rule for all together."""
    config = wish.setting.config
    for text in wish.what_ifs:  # a bad one is refused before anything is simulated
        whatif.apply(text, wish.places, wish.scaling)
    lengths = ladder(wish.places, config, shortest=wish.shortest, longest=wish.longest)
    places, shapes = wish.places, dict[str, list[Shape]]()
    if not wish.keep_sizes:
        places, shapes = choose(wish.places, lengths, wish.scaling, searcher)
        lengths = ladder(places, config, shortest=wish.shortest, longest=wish.longest)
    strategies = list(dict.fromkeys([*wish.strategies, BLOCKING]))
    scenario = Scenario(places, candidates(strategies, lengths, places, stay=wish.may_stay))
    stages = searcher.search({BASE: scenario}, "strategies and round lengths")[BASE]
    found = stages[-1]
    best = _polish(next(t for t in found if t.candidate.strategy in wish.strategies), places, searcher)
    facilities = tuple(
        _facility(place, best, share) for place, share in zip(places, best.shares().values(), strict=True)
    )
    rivals = _rivals(found, best, to_target=searcher.to_target)
    price = _price(wish, facilities, best, found, lengths, searcher) if len(places) > 1 else None
    tried = tuple(one for one in compare_stages(stages) if one.candidate.strategy in wish.strategies)
    return Advice(
        wish=wish,
        places=places,
        best=best,
        facilities=facilities,
        rivals=tuple(r for r in rivals if r.trial.candidate.strategy in wish.strategies),
        price=price,
        what_ifs=_what_ifs(wish, places, lengths, best, searcher),
        shapes=shapes,
        stays=tuple(place.stays for place in places if place.stays is not None),
        tried=tried,
        cautions=cautions(wish.setting, places, best, rivals, tried, lengths, wish.places, wish.scaling),
        simulations=searcher.simulations,
        virtual_days=searcher.virtual_days,
    )


def _polish(best: Trial, places: tuple[Place, ...], searcher: Searcher) -> Trial:
    """The best with every forecaster."""
    several = with_predictors(best.candidate)
    if len(several) == 1:
        return best
    return searcher.run({BASE: Scenario(places, several)}, "forecasters")[BASE][0]


def _facility(place: Place, best: Trial, share: Share) -> FacilityAdvice:
    waits = place.jobs.like(best.candidate.wall_seconds(place)) if place.log is not None else None
    delays = np.array(share.waits or [0.0] if waits is None else waits.waits) * (1.0 if waits is None else place.factor)
    median, p90 = (float(q) for q in np.quantile(delays, (0.5, 0.9)))
    return FacilityAdvice(
        place=place,
        wall_seconds=_wall(place, share),
        waits=waits,
        wait_median=median,
        wait_p90=p90,
        wait_mean=float(delays.mean()),
        jobs=share.jobs / share.days,
        updates=share.updates / share.days,
        work=share.work / share.days,
        late_rate=share.late_rate,
        node_hours=share.node_hours / share.days,
    )


def _wall(place: Place, share: Share) -> float:
    """Whole minutes that cover what nearly all jobs asked for, within the site's limits."""
    asked = float(np.quantile(share.walls, WALL_SHARE)) if share.walls else 60.0
    scheduler = place.settings.scheduler
    least = scheduler.min_wall_seconds if scheduler is not None else 0.0
    return min(place.most_wall_seconds, 60.0 * ceil(max(asked, least) / 60))


def _rivals(found: Sequence[Trial], best: Trial, *, to_target: bool) -> list[Rival]:
    """The best of each strategy, best first."""
    first: dict[str, Trial] = {best.candidate.strategy: best}
    for trial in found:
        first.setdefault(trial.candidate.strategy, trial)
    rivals = [Rival(trial, difference(trial, best, to_target=to_target)) for trial in first.values()]
    return sorted(rivals, key=lambda rival: -rival.trial.value(to_target=to_target))


def _price(
    wish: Wish,
    facilities: Sequence[FacilityAdvice],
    best: Trial,
    found: Sequence[Trial],
    lengths: Sequence[float],
    searcher: Searcher,
) -> Price:
    """FedAvg and the recommendation, with the slowest facility and without it."""
    slowest = max(facilities, key=lambda f: f.wait_mean).place.name
    left = tuple(f.place for f in facilities if f.place.name != slowest)
    tries = {
        "blocking": Scenario(left, candidates([BLOCKING], lengths, left, stay=wish.may_stay)),
        "best": Scenario(left, [best.candidate]),
    }
    without = {name: stages[-1][0] for name, stages in searcher.search(tries, "the slowest left out").items()}
    blocking = next(trial for trial in found if trial.candidate.strategy == BLOCKING)
    return Price(slowest, blocking, without["blocking"], best, without["best"])


def _what_ifs(
    wish: Wish, places: tuple[Place, ...], lengths: Sequence[float], best: Trial, searcher: Searcher
) -> tuple[WhatIf, ...]:
    """Round length, rule and forecaster of the recommended strategy, chosen anew for each."""
    if not wish.what_ifs:
        return ()
    strategy = best.candidate.strategy
    scenarios = {}
    for text in wish.what_ifs:
        changed = whatif.apply(text, places, wish.scaling)
        several: list[Candidate] = candidates([strategy], lengths, changed, stay=wish.may_stay)
        scenarios[text] = Scenario(changed, list(dict.fromkeys([*several, best.candidate])))
    found = {text: stages[-1][0] for text, stages in searcher.search(scenarios, "what if").items()}
    to_target = searcher.to_target
    return tuple(WhatIf(text, found[text], difference(found[text], best, to_target=to_target)) for text in scenarios)
