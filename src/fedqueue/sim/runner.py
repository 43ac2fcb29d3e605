"""From a config to a finished simulation, with or without a run folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedqueue import plugins
from fedqueue.config import Config
from fedqueue.engine import Listener
from fedqueue.errors import FedQueueError
from fedqueue.files import write_json
from fedqueue.ledger import FILE, Ledger
from fedqueue.metrics import Tally
from fedqueue.protocol.aggregation import must_match, special
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.runs import SUMMARY, describe
from fedqueue.sim.learning import Learning, RealLearning
from fedqueue.sim.simulation import Simulation, make_plan, make_strategy
from fedqueue.sim.site import Site

if TYPE_CHECKING:
    from fedqueue.training.tasks import Task

TIMING = "timing"
"""The task that trains nothing."""


Learned = tuple[Learning, Sequence[int] | None]
"""What jobs really do, and how many samples each facility has."""


def simulate(
    config: Config,
    *,
    folder: Path | None = None,
    listeners: Sequence[Listener] = (),
    learned: Learned | None = None,
) -> dict[str, Any]:
    """Run it; with a folder, leave a ledger and a summary there. Returns the summary. `learned` is used instead of
    what the config's task would do by itself: many runs may share one device."""
    began = time.perf_counter()
    seed = config.run.seed
    sites = [Site(i, facility, config, seed) for i, facility in enumerate(config.facility)]
    learning, data_sizes = learning_of(config) if learned is None else learned
    plan = make_plan(config, sites, data_sizes)
    strategy = make_strategy(config, plan)
    tally = Tally.of(config, strategy.state)
    ledger = None
    if folder is not None:
        meta = describe(config, plan, seed=seed, driver="simulation")
        ledger = Ledger(folder / FILE, {**meta, "roles": special(learning.roles)}, durable=False)
    listening: list[Listener] = [*listeners, *plugins.listeners(config, folder)]
    if ledger is not None:
        listening.insert(0, ledger)
    try:
        Simulation(config, sites, learning, strategy, listening).run()
        summary = tally.summary(
            strategy=config.run.strategy, seed=seed, wall_seconds=round(time.perf_counter() - began, 3)
        )
        if ledger is not None and folder is not None:
            ledger.note("stopped", strategy.stopped or "nothing was left to happen")
            ledger.close()
            write_json(folder / SUMMARY, summary)
    except FedQueueError:
        if ledger is not None:
            ledger.abandon()
        raise
    except KeyboardInterrupt:  # what has happened so far is worth keeping
        if ledger is not None:
            ledger.cut_short("interrupted")
        raise
    return summary


def learning_of(config: Config) -> Learned:
    """What the config's task does by itself."""
    if config.task.name == TIMING:
        return Learning(config.simulator.model_megabytes), None
    from fedqueue.training.tasks import make_task  # loads torch: only runs that train pay for it

    if config.folder not in sys.path:  # a task of the user's own may lie beside the config
        sys.path.insert(0, config.folder)
    return learning_with(make_task(config.task, len(config.facility), config.run.seed), config)


def learning_with(task: Task, config: Config) -> Learned:
    must_match(config.model.roles, task.initial_model())
    keeps_variates = STRATEGIES[config.run.strategy].keeps_variates
    shares = config.model.moments == "shared"
    return RealLearning(task, config.model.roles, variates=keeps_variates, moments=shares), task.data_sizes()
