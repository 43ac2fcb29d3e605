"""A real run as it goes: a line for each facility on a terminal, plain lines otherwise."""

from __future__ import annotations

import datetime
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedqueue.cli.terminal import console
from fedqueue.config import Config
from fedqueue.protocol.contract import facility_of
from fedqueue.protocol.messages import (
    Aggregate,
    Command,
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    FacilityLeft,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelReady,
    ModelScored,
    Record,
    RunPaused,
    RunResumed,
    RunStarted,
    StopRun,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
)
from fedqueue.protocol.state import JobState

REFRESH_SECONDS = 0.25
KEPT_LINES = 6


@dataclass
class _Line:
    doing: str = "not seen yet"
    since: float = 0.0  # monotonic
    updates: int = 0
    waits: int = 0
    waited: float = 0.0
    failures: int = 0


class Screen:
    """A view of the run's state: shows what a person wants to know."""

    def __init__(self, config: Config, *, quiet: bool, served: bool = False, plain: bool = False) -> None:
        self._config = config
        self._quiet = quiet
        self._stamps = served  # its lines are a log of days
        self.past = served  # what it is told now happened before this process: it is counted, and not said again
        self._lines = {facility.name: _Line() for facility in config.facility}
        self._said: list[str] = []
        self._at = 0.0
        self._seen = time.monotonic()
        self._model = 0
        self._scored = 0  # the newest model that is
        self._score: float | None = None  # its score
        self._shares: dict[int, int] = {}  # updates in models that are being made
        self._aggregated = 0
        self._ended: str | None = None
        self._held: set[bool] = set()  # True: by a fault, False: by an operator
        self._lock = threading.Lock()
        self._out = console(stderr=True)
        self.fancy = self._out.is_terminal and not quiet and not plain

    def say(self, line: str) -> None:
        with self._lock:
            self._said = [*self._said, line][-KEPT_LINES:]
        self._print(line)

    def _print(self, line: str) -> None:
        if not self._quiet and not self.fancy:
            when = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S  ") if self._stamps else ""
            print(f"{when}{line}", file=sys.stderr, flush=True)

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        with self._lock:
            if isinstance(told, Event):
                self._at, self._seen = told.at, time.monotonic()
            self._happened(told)
        if self.past:
            return
        for line in news(told):
            self.say(line)
        if isinstance(told, ModelReady | ModelScored):
            self._print(self._head())

    def _now(self, facility: str, doing: str) -> _Line:
        line = self._lines[facility]
        line.doing, line.since = doing, time.monotonic()
        return line

    def _happened(self, told: Event | Command) -> None:
        match told:
            case SubmitJob(order=order):
                self._now(order.facility, "asking for a job")
            case JobSubmitted(job_id=job):
                self._now(facility_of(job), "in the queue")
            case JobStarted(job_id=job, admission_delay=delay):
                line = self._now(facility_of(job), "training")
                line.waits, line.waited = line.waits + 1, line.waited + delay
            case JobEnded(job_id=job):
                self._now(facility_of(job), "handing in")
            case JobRequeued(job_id=job):
                self._now(facility_of(job), "in the queue again")
            case JobFailed(job_id=job) | UpdateRejected(job_id=job) | SubmitRefused(job_id=job):
                self._now(facility_of(job), "failed").failures += 1
            case UpdateArrived(receipt=receipt):
                self._now(facility_of(receipt.job_id), "idle").updates += 1
            case FacilityLeft(facility=name):
                self._now(name, "away")
            case FacilityJoined(facility=name):
                self._now(name, "back")
            case FacilityDrained(facility=name):
                self._now(name, "drained")
            case CoordinatorResumed():
                for line in self._lines.values():
                    line.since = time.monotonic()
            case RunPaused(reason=reason):
                self._held.add(bool(reason))
            case RunResumed(mended=mended):
                self._held.discard(mended)
            case ModelReady(version=version):
                self._model = version
                self._aggregated += self._shares.pop(version, 0)
            case ModelScored(version=version, metrics=metrics) if version >= self._scored:
                self._scored, self._score = version, metrics.get("score")
            case Aggregate(to_version=version, weights=weights):
                self._shares[version] = len(weights)
            case StopRun(reason=reason):
                self._ended = reason

    def _head(self) -> str:
        run = self._config.run
        seconds = "" if run.seconds is None else f"{run.seconds:g} s"
        limit = " or ".join(filter(None, [seconds, f"{run.rounds} models" if run.rounds else ""]))
        score = "" if self._score is None else f"   score {100 * self._score:.1f} %"
        over = "" if self._ended is None else f"   over: {self._ended}"
        counts = f"model {self._model}   {self._aggregated} {'update' if self._aggregated == 1 else 'updates'}"
        going = 0.0 if self._ended is not None or self._held or not self._at else time.monotonic() - self._seen
        return f"{run.strategy}  {self._at + going:7.1f} s of {limit}   {counts}{score}{over}"

    def __rich__(self) -> RenderableType:
        with self._lock:
            table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
            for column in ("facility", "now", "for (s)", "updates", "mean wait (s)", "failures"):
                table.add_column(column, justify="left" if column in ("facility", "now") else "right")
            for name, line in self._lines.items():
                waited = f"{line.waited / line.waits:.1f}" if line.waits else "-"
                since = f"{time.monotonic() - line.since:.0f}" if line.since else "-"
                table.add_row(name, line.doing, since, str(line.updates), waited, str(line.failures))
            said = [Text(line, style="dim") for line in self._said]
            return Group(Text(self._head(), style="bold"), table, *said)


def news(told: Event | Command) -> Iterator[str]:
    """What a person would want to be told, in a line each."""
    match told:
        case RunStarted():
            yield "the run begins"
        case RunPaused(reason=reason):
            again = "it is tried again by itself, and at once by `fedqueue resume`"
            yield f"paused: {reason}; {again}" if reason else "paused"
        case RunResumed(mended=mended):
            yield "goes on: what was wrong is mended" if mended else "goes on after the pause"
        case FacilityDrained(facility=name):
            yield f"{name} is drained: it gets no new job"
        case JobFailed(job_id=job, reason=reason):
            yield f"{job} failed: {reason}"
        case SubmitRefused(job_id=job, reason=reason):
            yield f"{job} was refused by its scheduler: {reason}"
        case UpdateRejected(job_id=job, reason=reason):
            yield f"the update of {job} was rejected: {reason}"
        case JobRequeued(job_id=job, reason=reason):
            yield f"{job} waits again: {reason}"
        case StopRun(reason=reason):
            yield f"the run is over: {reason}; jobs that are out are ended"
        case Record(kind="rejoined", facts=facts):
            yield f"{facts['facility']} gets work again"
        case Record(kind="suspended", facts=facts):
            until = facts["until"]
            when = "until `fedqueue join` says so" if until is None else f"until {until:.0f} s on the run clock"
            yield f"{facts['facility']} gets no work {when}"


@contextmanager
def following(config: Config, *, quiet: bool, served: bool = False, plain: bool = False) -> Iterator[Screen]:
    """`served`: it says nothing of what happened until its `past` is set to False. `plain`: no table."""
    screen = Screen(config, quiet=quiet, served=served, plain=plain)
    if screen.fancy:
        with Live(screen, console=screen._out, refresh_per_second=1 / REFRESH_SECONDS, transient=True):
            yield screen
    else:
        yield screen
