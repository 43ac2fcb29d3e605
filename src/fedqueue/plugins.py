"""What installed packages add to FedQueue, by entry points: nobody has to change ours for it.

    fedqueue.commands      a module with HELP, add_arguments(parser) and run(args): a verb of the command line
    fedqueue.strategies    a `Strategy` class
    fedqueue.predictors    maker(first, smoothing) of a `Predictor`
    fedqueue.schedulers    a class that is made with (settings, home), has the methods of `Scheduler`, and a dataclass
                           `Settings` whose `kind` is a Literal
    fedqueue.workloads     a function that returns a `Workload`: a task by the name of the entry point
    fedqueue.tasks         a `Task` class with why_not(workload, settings); where that is None it trains on a GPU
    fedqueue.listeners     maker(config, folder) of a function that is told every event with its commands

docs/plugins.md has an example of each. What is added cannot take the place of something of ours.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedqueue.config import Config
    from fedqueue.engine import Listener
    from fedqueue.protocol.messages import Command, Event


@cache
def plugins(group: str, named: str | None = None) -> dict[str, Any]:
    """Name -> object, of all or of the one that is named. One that cannot be loaded is named on standard error and
    left out: it must stop no other."""
    found = {}
    for entry in importlib.metadata.entry_points(group=f"fedqueue.{group}"):
        if named not in (None, entry.name):
            continue
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else entry.value
            _complain(f"the plugin {entry.name!r} of {package} ({group}) cannot be used", error)
    return found


@cache
def register_rules() -> None:
    """Strategies and predictors from outside become known by their names."""
    from fedqueue.protocol.predict import PREDICTORS
    from fedqueue.protocol.strategies import STRATEGIES, register

    for strategy in plugins("strategies").values():
        if strategy.name not in STRATEGIES:
            register(strategy)
    for name, maker in plugins("predictors").items():
        PREDICTORS.setdefault(name, maker)


def listeners(config: Config, folder: Path | None) -> list[Listener]:
    """Those from outside, for one run; `folder` is the run's, None where it leaves none."""
    return [_Guarded(name, maker(config, folder)) for name, maker in plugins("listeners").items()]


class _Guarded:
    """A listener that fails is not called again; the run goes on without it."""

    def __init__(self, name: str, listener: Listener) -> None:
        self._name = name
        self._listener: Listener | None = listener

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        if self._listener is None:
            return
        try:
            self._listener(event, commands)
        except Exception as error:
            self._listener = None
            _complain(f"the listener {self._name!r} failed and is not called again", error)


def _complain(what: str, error: Exception) -> None:
    print(f"fedqueue: {what}: {f'{type(error).__name__}: {error}'.splitlines()[0]}", file=sys.stderr)
