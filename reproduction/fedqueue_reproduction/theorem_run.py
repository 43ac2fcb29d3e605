"""One run of a config, watched: what Theorem 1 speaks of, round by round."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Final

import numpy as np
from torch import Tensor

from fedqueue.config import Config
from fedqueue.errors import ConfigError, TaskError
from fedqueue.protocol.aggregation import discount
from fedqueue.protocol.contract import UpdateKey
from fedqueue.protocol.messages import Aggregate
from fedqueue.protocol.strategies.fedqueue import FedQueueOptions
from fedqueue.sim.learning import RealLearning, Training
from fedqueue.sim.runner import TIMING, simulate
from fedqueue.training.tasks import Task, make_task
from fedqueue_reproduction.theorem import Constants, imbalance, shares
from fedqueue_reproduction.theorem_measure import Objectives
from fedqueue_reproduction.theorem_results import RunFacts

SHORTEST: Final = 1e-4
"""Two models nearer than this, in lengths of the model, say nothing of curvature in single precision."""
POINTS: Final = 60  # of a curve that are kept; they lie closer at its beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much is measured beside the gradients of all models."""

    models: int = 5  # at so many, spread over the run, curvature and noise are measured
    draws: int = 16  # steps of each facility for the noise
    least_loss: float = 0.0  # F* is not below it: no cross-entropy or squared error is negative


@dataclass(frozen=True, slots=True)
class _Update:
    facility: int
    base: int
    steps: int
    rate: float


@dataclass(frozen=True, slots=True)
class _Visited:
    """A version, and the round that began with it."""

    loss: float
    squared_gradient: float
    dissimilarity: float


class Watched(RealLearning):
    """Trains as always, and measures every model that it makes."""

    def __init__(self, task: Task, objectives: Objectives, depth: Depth, versions: Collection[int]) -> None:
        super().__init__(task)
        self._objectives, self._depth, self._chosen = objectives, depth, versions
        self._assigned: dict[UpdateKey, _Update] = {}
        self._gradients: dict[int, list[Tensor]] = {}  # of the versions that jobs may still start from
        self.visited: list[_Visited] = []
        self.rounds: list[list[tuple[_Update, float]]] = []  # updates and weights
        self.searched = self.secant = self.mean_searched = self.mean_secant = 0.0
        self.noise = self.greatest_move = 0.0
        self._look(0)

    def train(self, training: Training) -> int:
        samples = super().train(training)
        facility, (trained, base) = training.facility, self._updates[training.key]
        self._assigned[training.key] = _Update(facility, base, training.steps, training.work.learning_rate)
        start, end = self._objectives.vector(self._models[base]), self._objectives.vector(trained)
        _, gradient = self._objectives.at(facility, trained)
        self.secant = max(self.secant, _ratio(gradient - self._gradients[base][facility], start, end))
        return samples

    def aggregate(self, command: Aggregate) -> float | None:
        self.rounds.append([(self._assigned.pop(one.key), one.weight) for one in command.weights])
        agreement = super().aggregate(command)
        self._compare(command)
        return agreement

    def _compare(self, command: Aggregate) -> None:
        """The new model with the one before it."""
        before, after = command.from_version, command.to_version
        if not command.weights:
            self._gradients[after] = self._gradients[before]
            self.visited.append(self.visited[-1])
            return
        self._look(after)
        start, end = self._objectives.vector(self._models[before]), self._objectives.vector(self._models[after])
        changes = [new - old for new, old in zip(self._gradients[after], self._gradients[before], strict=True)]
        self.greatest_move = max(self.greatest_move, float((end - start).norm()))
        self.secant = max(self.secant, *(_ratio(change, start, end) for change in changes))
        _, change = self._objectives.mean([(0.0, change) for change in changes])
        self.mean_secant = max(self.mean_secant, _ratio(change, start, end))

    def forget(self, key: UpdateKey) -> None:
        super().forget(key)
        self._assigned.pop(key, None)

    def keep(self, ready: int, versions: Collection[int]) -> None:
        super().keep(ready, versions)
        self._gradients = {version: kept for version, kept in self._gradients.items() if version in self._models}

    def _look(self, version: int) -> None:
        model, objectives = self._models[version], self._objectives
        each = objectives.all_at(model)
        loss, gradient = objectives.mean(each)
        self._gradients[version] = [one for _, one in each]
        apart = max(float((one - gradient).norm()) for _, one in each)
        self.visited.append(_Visited(loss, float(gradient.square().sum()), apart))
        if version in self._chosen:
            self.mean_searched = max(self.mean_searched, objectives.mean_curvature(model, gradient))
            for facility, (_, own) in enumerate(each):
                self.searched = max(self.searched, objectives.curvature(facility, model, own))
                self.noise = max(self.noise, objectives.noise(facility, model, own, self._depth.draws, version))


def watch(config: Config, depth: Depth) -> RunFacts:
    """Run it and say what it showed."""
    check(config)
    if config.folder not in sys.path:  # a task of the user's own may lie beside the config
        sys.path.insert(0, config.folder)
    seed, facilities = config.run.seed, len(config.facility)
    task = make_task(config.task, facilities, seed)
    sizes = task.data_sizes()
    by_size = config.run.data_weights == "size"
    weights = [size / sum(sizes) for size in sizes] if by_size else [1 / facilities] * facilities
    objectives = Objectives(config.task, weights, seed)
    watched = Watched(task, objectives, depth, _spread(_length(config), depth.models))
    summary = simulate(config, learned=(watched, sizes))
    return _facts(config, watched, weights, depth, summary["score"]["final"])


def check(config: Config) -> None:
    """Refuse what the theorem is not about."""
    if config.run.strategy != "fedqueue":
        raise ConfigError(
            f"run.strategy is {config.run.strategy!r}, and the theorem is about 'fedqueue'; "
            "add --set run.strategy=fedqueue"
        )
    if config.task.name == TIMING:
        raise ConfigError("task 'timing' trains nothing, so it has no gradient; add --set task.name=digits")
    options = _options(config)
    if options.stay != "off" or options.absent:
        raise ConfigError("strategy.fedqueue: stay must be off and absent 0, since the theorem's updates are used once")


def _options(config: Config) -> FedQueueOptions:
    options = config.options()
    assert isinstance(options, FedQueueOptions)
    return options


def departures(config: Config) -> list[str]:
    """Where this run is not what the theorem is about, in words; most likely none of it is news."""
    task = config.task
    objectives = Objectives(task, [1 / len(config.facility)] * len(config.facility), config.run.seed)
    said = []
    if task.optimizer != "sgd":
        said.append(f"the local steps are those of {task.optimizer}; the theorem is about plain SGD")
    if task.momentum or task.weight_decay:
        said.append("the local steps have momentum or weight decay; the theorem's have neither")
    if _options(config).lr_scaling != "inverse":
        said.append("the rate of a job is not scaled by E_min / E_k")
    if objectives.draws:
        said.append("dropout or changed inputs: a step follows another function than F; the difference is in sigma")
    if objectives.kinked:
        said.append("layers with kinks (ReLU, max-pooling): no L holds at every model")
    if objectives.batch_share < 1:
        said.append("batches are drawn from shuffled epochs: those of one epoch hang on each other")
    return said


def _facts(config: Config, run: Watched, weights: Sequence[float], depth: Depth, score: float | None) -> RunFacts:
    updates = [(round_, update) for round_, round_updates in enumerate(run.rounds) for update, _ in round_updates]
    if not updates:
        raise TaskError("no round had an update that could be used, so there is nothing to measure; run it longer")
    gradients = np.array([one.squared_gradient for one in run.visited])
    if not np.isfinite(gradients).all():
        version = int(np.argmin(np.isfinite(gradients)))
        raise TaskError(f"model {version} has no finite gradient; try a rate below {config.run.learning_rate:g}")
    least = min(one.loss for one in run.visited)
    if least < depth.least_loss:
        raise ConfigError(f"a loss of {least:.6g} was seen, which is below --least-loss {depth.least_loss:g}")
    strides = [update.rate * update.steps for _, update in updates]
    staleness = max(round_ - update.base for round_, update in updates)
    constants = Constants(
        smoothness=max(run.searched, run.secant),
        noise=run.noise,
        dissimilarity=max(one.dissimilarity for one in run.visited),
        gap=run.visited[0].loss - depth.least_loss,
        staleness=staleness,
        least_steps=min(update.steps for _, update in updates),
        most_steps=max(update.steps for _, update in updates),
        rate=config.run.learning_rate,
        least_stride=min(strides),
        most_stride=max(strides),
    )
    begun = gradients[: len(run.rounds)]  # the last model begins no round
    each = [
        shares([(update.facility, weight, update.rate * update.steps) for update, weight in one], len(weights))
        for one in run.rounds
        if one
    ]
    used = np.array([bool(one) for one in run.rounds])
    squares = np.zeros(len(used))
    squares[used] = [imbalance(one, weights) ** 2 for one in each]
    until = np.cumsum(used)
    least_used = int(np.argmax(used))  # rounds before the first update have nothing to be averaged
    at = [int(r) for r in _points(len(used)) if r > least_used]
    above = 2 * begun + 2 * (constants.smoothness * staleness) ** 2
    options = _options(config)
    return RunFacts(
        seed=config.run.seed,
        rounds=len(run.rounds),
        constants=constants,
        mean_smoothness=max(run.mean_searched, run.mean_secant),
        searched=run.searched,
        secant=run.secant,
        least_gap=run.visited[0].loss - least,
        greatest_move=run.greatest_move,
        empty_rounds=int((~used).sum()),
        unfounded=int((np.maximum.accumulate(begun) > above).sum()),
        least_discount=discount(staleness, options.decay, options.beta),
        data_weights=list(weights),
        mean_shares=[fmean(one[k] for one in each) for k in range(len(weights))],
        first_gradient=float(gradients[0]),
        greatest_gradient=float(gradients.max()),
        last_gradient=float(gradients[-1]),
        score=score if score is not None and isfinite(score) else 0.0,
        at=at,
        measured=[float(begun[:r].mean()) for r in at],
        used=[int(until[r - 1]) for r in at],
        measured_used=[float(begun[:r][used[:r]].mean()) for r in at],
        imbalance=[float(squares[:r].sum() / until[r - 1]) for r in at],
    )


def _ratio(change: Tensor, start: Tensor, end: Tensor) -> float:
    """What gradients change a length of the way; nothing, if so little way says more of rounding."""
    length = float((end - start).norm())
    return float(change.norm()) / length if length > SHORTEST * max(1.0, float(start.norm())) else 0.0


def _length(config: Config) -> int:
    """Rounds that the run should have."""
    by_time = None if config.run.seconds is None else int(config.run.seconds / config.run.round_length)
    return max(1, min(count for count in (config.run.rounds, by_time) if count is not None))


def _spread(rounds: int, count: int) -> frozenset[int]:
    """Versions from the first to the last.

    >>> sorted(_spread(50, 3))
    [0, 25, 50]
    """
    return frozenset(int(version) for version in np.linspace(0, rounds, max(count, 2)).round())


def _points(rounds: int) -> list[int]:
    """
    >>> _points(5)
    [1, 2, 3, 4, 5]
    """
    return sorted({round(float(x)) for x in np.geomspace(1, rounds, POINTS)} | {rounds})
