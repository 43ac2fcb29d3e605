"""Many candidates for a short time, the best for longer and from more starting points: successive halving.

Every candidate meets the same queues from the same starting points, so differences are taken point by point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from fedqueue.comparison import Estimate, estimate
from fedqueue.config import Config
from fedqueue.planning.candidates import Candidate, configure
from fedqueue.planning.measure import DAY, Meter, Outcome, Share, Worth
from fedqueue.planning.places import Place
from fedqueue.processes import run_all
from fedqueue.sim.learning import Learning
from fedqueue.sim.simulation import Simulation, make_plan, make_strategy
from fedqueue.sim.site import Site

LEAST_ROUNDS: Final = 8  # in a short simulation
ROUNDS_A_DAY: Final = 40  # of the days planned: with shorter rounds, fewer days say as much
FEW: Final = 40  # simulations that are quicker in one process: another takes a second to start


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all simulations of a plan share."""

    config: Config
    worth: Worth
    days: float
    seed: int
    starts: int = 6  # starting points of the last stage


@dataclass(frozen=True, eq=False)
class Scenario:
    places: tuple[Place, ...]
    candidates: Sequence[Candidate]


@dataclass(slots=True)
class Trial:
    """A candidate and what came of it, by starting point."""

    candidate: Candidate
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def values(self, *, to_target: bool) -> list[float]:
        """More is better: effective steps a day, or the inverse of the days to the target."""
        found = []
        for outcome in self.outcomes.values():
            if not to_target:
                found.append(outcome.total("work"))
            else:
                found.append(1.0 / outcome.target_days if outcome.target_days else 0.0)
        return found

    def value(self, *, to_target: bool) -> float:
        return fmean(self.values(to_target=to_target))

    def mean(self, figure: str) -> float:
        """A day, over all facilities and starting points."""
        return fmean(outcome.total(figure) for outcome in self.outcomes.values())

    @property
    def late_rate(self) -> float | None:
        shares = self.shares().values()
        aimed = sum(share.aimed for share in shares)
        return sum(share.missed for share in shares) / aimed if aimed else None

    @property
    def target_days(self) -> float | None:
        known = [outcome.target_days for outcome in self.outcomes.values()]
        return fmean(d for d in known if d is not None) if known and None not in known else None

    def shares(self) -> dict[str, Share]:
        """What each facility did, over all starting points."""
        sums: dict[str, Share] = {}
        for outcome in self.outcomes.values():
            for name, share in outcome.shares.items():
                sums.setdefault(name, Share()).add(share)
        return sums


def difference(trial: Trial, other: Trial, *, to_target: bool) -> Estimate:
    """How much more of the objective the trial has than the other, as a share of the other's, over starting points
    that both have."""
    ours = dict(zip(trial.outcomes, trial.values(to_target=to_target), strict=True))
    theirs = dict(zip(other.outcomes, other.values(to_target=to_target), strict=True))
    return estimate([ours[i] / theirs[i] - 1.0 for i in ours if theirs.get(i)])


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate and its figures a day, made comparable with those of the last stage: by how much the winner's
    differ between the stages, which is what short simulations and other starting points do to all."""

    candidate: Candidate
    work: float
    steps: float
    node_hours: float
    late_rate: float | None
    stage: int  # the last that it was in, from 1


def compare_stages(stages: Sequence[Sequence[Trial]]) -> list[Tried]:
    """Every candidate once."""
    winner = stages[-1][0]
    found: dict[Candidate, Tried] = {}
    for number, trials in enumerate(stages, 1):
        same = next(trial for trial in trials if trial.candidate == winner.candidate)
        for trial in trials:
            work, steps, hours = (
                trial.mean(name) * (winner.mean(name) / same.mean(name) if same.mean(name) else 1.0)
                for name in ("work", "steps", "node_hours")
            )
            found[trial.candidate] = Tried(trial.candidate, work, steps, hours, trial.late_rate, number)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Item:
    number: int
    scenario: str
    candidate: Candidate
    starts: tuple[int, ...]
    seconds: float


class Searcher:
    """Runs simulations, here or in several processes, and remembers how many there were."""

    def __init__(self, setting: Setting, processes: int, told: Callable[[str, int, int], None] | None = None) -> None:
        """`told` hears how it gets on: what is done, how much of it, of how much."""
        self.setting = setting
        self.simulations = 0
        self.virtual_days = 0.0
        self._processes = processes
        self._told = told or (lambda what, done, total: None)

    @property
    def to_target(self) -> bool:
        return self.setting.worth.needed is not None

    def search(self, scenarios: Mapping[str, Scenario], what: str) -> dict[str, list[list[Trial]]]:
        """For each scenario its stages, best candidates first. In the last, which counts, is the best of each
        strategy."""
        days, starts = self.setting.days, self.setting.starts
        left = {name: list(scenario.candidates) for name, scenario in scenarios.items()}
        stages = ((days / 4, min(2, starts), 0.3, 3), (days / 2, min(3, starts), 0.25, 1), (days, starts, 1.0, 1))
        found: dict[str, list[list[Trial]]] = {name: [] for name in scenarios}
        for stage, (length, count, share, least) in enumerate(stages, 1):
            label = f"{what}, stage {stage} of {len(stages)}"
            trials = self._try(scenarios, left, length, tuple(range(count)), label)
            left = {name: self._best(several, share, least) for name, several in trials.items()}
            for name, several in trials.items():
                found[name].append(several)
        return found

    def run(self, scenarios: Mapping[str, Scenario], what: str) -> dict[str, list[Trial]]:
        """Every candidate of every scenario at full length, best first."""
        left = {name: list(scenario.candidates) for name, scenario in scenarios.items()}
        return self._try(scenarios, left, self.setting.days, tuple(range(self.setting.starts)), what)

    def short(self, scenarios: Mapping[str, Scenario], what: str) -> dict[str, list[Trial]]:
        left = {name: list(scenario.candidates) for name, scenario in scenarios.items()}
        starts = tuple(range(min(3, self.setting.starts)))
        return self._try(scenarios, left, self.setting.days / 2, starts, what)

    def _best(self, trials: Sequence[Trial], share: float, least: int) -> list[Candidate]:
        """This share of all, and the `least` best of each strategy."""
        kept = {trial.candidate for trial in trials[: max(3, round(share * len(trials)))]}
        for strategy in {trial.candidate.strategy for trial in trials}:
            kept.update([t.candidate for t in trials if t.candidate.strategy == strategy][:least])
        return [trial.candidate for trial in trials if trial.candidate in kept]

    def _try(
        self,
        scenarios: Mapping[str, Scenario],
        left: Mapping[str, Sequence[Candidate]],
        days: float,
        starts: tuple[int, ...],
        what: str,
    ) -> dict[str, list[Trial]]:
        items = [
            _Item(number, name, candidate, starts, self._seconds(candidate, days))
            for number, (name, candidate) in enumerate((n, c) for n, several in left.items() for c in several)
        ]
        processes = self._processes if len(items) * len(starts) > FEW else 1
        made: dict[int, list[Outcome]] = {}
        self._told(what, 0, len(items))
        for number, outcomes in run_all(
            _simulate, items, processes, prepare=_prepare, given=(dict(scenarios), self.setting)
        ):
            made[number] = outcomes
            self._told(what, len(made), len(items))
        trials: dict[str, list[Trial]] = {name: [] for name in left}
        for item in items:
            outcomes = made[item.number]
            trials[item.scenario].append(Trial(item.candidate, dict(zip(item.starts, outcomes, strict=True))))
            self.simulations += len(outcomes)
            self.virtual_days += sum(outcome.days for outcome in outcomes)
        for several in trials.values():
            several.sort(key=lambda trial: -trial.value(to_target=self.to_target))
        return trials

    def _seconds(self, candidate: Candidate, days: float) -> float:
        """At least a few rounds, and no more than are needed."""
        most = min(self.setting.days * DAY, ROUNDS_A_DAY * days * candidate.length)
        return min(most, max(days * DAY, LEAST_ROUNDS * candidate.length))


# What a process knows; set once in each.
_scenarios: dict[str, Scenario] = {}
_setting: Setting | None = None


def _prepare(scenarios: dict[str, Scenario], setting: Setting) -> None:
    global _scenarios, _setting
    _scenarios, _setting = scenarios, setting


def _simulate(item: _Item) -> tuple[int, list[Outcome]]:
    assert _setting is not None
    places = _scenarios[item.scenario].places
    return item.number, [simulate(_setting, places, item.candidate, start, item.seconds) for start in item.starts]


def simulate(setting: Setting, places: Sequence[Place], candidate: Candidate, start: int, seconds: float) -> Outcome:
    """One candidate from one starting point."""
    config = configure(setting.config, places, candidate, seconds)
    sites = []
    for index, (place, facility) in enumerate(zip(places, config.facility, strict=True)):
        site = Site(index, facility, config, setting.seed + start)
        site.queue = place.queue(start=start, seed=setting.seed, folder=config.folder)
        site.true_mean_delay = site.queue.mean(candidate.wall_seconds(place))
        sites.append(site)
    strategy = make_strategy(config, make_plan(config, sites, None))
    meter = Meter(config, setting.worth, strategy.state)
    Simulation(config, sites, Learning(config.simulator.model_megabytes), strategy).run()
    return meter.outcome()
