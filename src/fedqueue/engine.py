"""Connects: what happened goes to the strategy, what it wants goes to the driver, and both go on record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fedqueue.protocol.messages import (
    Aggregate,
    AssignWork,
    CancelJob,
    Command,
    Event,
    PostWork,
    Record,
    SetTimer,
    StopRun,
    SubmitJob,
)
from fedqueue.protocol.strategies import Strategy

Listener = Callable[[Event, Sequence[Command]], None]
"""Told every event with the commands it brought, before they are carried out: a ledger, a tally, a progress bar."""


class Driver(Protocol):
    """Acts: one method a command. It never calls back into the engine from one; what comes of it is a later event."""

    def submit_job(self, command: SubmitJob) -> None: ...
    def assign_work(self, command: AssignWork) -> None: ...
    def post_work(self, command: PostWork) -> None: ...
    def cancel_job(self, command: CancelJob) -> None: ...
    def set_timer(self, command: SetTimer) -> None: ...
    def aggregate(self, command: Aggregate) -> None: ...
    def record(self, command: Record) -> None: ...
    def stop_run(self, command: StopRun) -> None: ...


class Engine:
    def __init__(self, strategy: Strategy, driver: Driver, listeners: Sequence[Listener] = ()) -> None:
        self._strategy = strategy
        self._listeners = listeners
        self._acts: dict[type, Callable[[Any], None]] = {
            SubmitJob: driver.submit_job,
            AssignWork: driver.assign_work,
            PostWork: driver.post_work,
            CancelJob: driver.cancel_job,
            SetTimer: driver.set_timer,
            Aggregate: driver.aggregate,
            Record: driver.record,
            StopRun: driver.stop_run,
        }

    def advance(self, event: Event) -> None:
        """One step of a run."""
        commands = self._strategy.handle(event)
        for listener in self._listeners:
            listener(event, commands)
        for command in commands:
            self._acts[type(command)](command)
