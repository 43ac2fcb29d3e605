"""Connects: what happened goes to the strategy, what it wants goes to the driver, and both go on record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fedqueue.protocol.messages import Command, Event
from fedqueue.protocol.strategies import Strategy

Listener = Callable[[Event, Sequence[Command]], None]
"""Told every event with the commands it brought, before they are carried out: a ledger, a tally, a progress bar."""


class Driver(Protocol):
    """Acts. It never calls back into the engine from there; what comes of it is a later event."""

    def act(self, command: Command) -> None: ...


class Engine:
    def __init__(self, strategy: Strategy, driver: Driver, listeners: Sequence[Listener] = ()) -> None:
        self._strategy = strategy
        self._driver = driver
        self._listeners = listeners

    def advance(self, event: Event) -> None:
        """One step of a run."""
        commands = self._strategy.handle(event)
        for listener in self._listeners:
            listener(event, commands)
        for command in commands:
            self._driver.act(command)
