"""A real run as it goes: a table on a terminal, plain lines otherwise. Here logging is configured, for all of fedqueue.

Whoever has something to say logs it; who watches reads it below the table, or line by line on standard error.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

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
    UpdatesWithdrawn,
    WorkTaken,
)
from fedqueue.protocol.state import JobState

log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
KEPT_LINES = 6
RUN_THREAD = "run "
"""With the run's name: the thread of a run that a federation hosts."""


class SupportsWrite(Protocol):
    def write(self, line: str) -> object: ...


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

    def __init__(self, config: Config, *, quiet: bool, served: bool = False, debugged: bool = False) -> None:
        self._config = config
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
        self.fancy = self._out.is_terminal and not quiet and not debugged

    def write(self, line: str) -> None:
        """What was logged, under the table; so a handler can write here."""
        with self._lock:
            self._said = [*self._said, *filter(None, [line.rstrip("\n")])][-KEPT_LINES:]

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        with self._lock:
            if isinstance(told, Event):
                self._at, self._seen = told.at, time.monotonic()
            self._happened(told, job)
        if self.past:
            return
        for line in news(told):
            log.info(line)
        if isinstance(told, ModelReady | ModelScored) and not self.fancy:
            log.info(self._head())

    def _now(self, facility: str, doing: str) -> _Line:
        line = self._lines[facility]
        line.doing, line.since = doing, time.monotonic()
        return line

    def _happened(self, told: Event | Command, job_state: JobState | None) -> None:
        match told:
            case SubmitJob(order=order):
                self._now(order.facility, "asking for a job")
            case JobSubmitted(job_id=job):
                self._now(facility_of(job), "in the queue")
            case JobStarted(job_id=job, admission_delay=delay):
                line = self._now(facility_of(job), "training")
                line.waits, line.waited = line.waits + 1, line.waited + delay
            case WorkTaken(job_id=job):
                self._now(facility_of(job), "training")
            case JobEnded(job_id=job):
                self._now(facility_of(job), "handing in")
            case JobRequeued(job_id=job):
                self._now(facility_of(job), "in the queue again")
            case JobFailed(job_id=job) | UpdateRejected(job_id=job) | SubmitRefused(job_id=job):
                self._now(facility_of(job), "failed").failures += 1
            case UpdateArrived(receipt=receipt):
                name = facility_of(receipt.job_id)
                self._lines[name].updates += 1
                if job_state is None or job_state.is_over:
                    self._now(name, "idle")
                elif job_state.awaits_work:
                    self._now(name, "waiting for the next model")
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
                self._shares[version] = sum(not share.again for share in weights)
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
        case UpdatesWithdrawn(facility=name, reason=reason):
            yield f"updates of {name} that are in no model are rejected: {reason}"
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


# Logging ------------------------------------------------------------------------------------------------


class _Lines(logging.Formatter):
    """A line each, whatever is in it: others' words, which may hold line breaks and a terminal's commands."""

    def __init__(self, *, stamped: bool, debugged: bool) -> None:
        super().__init__("%(asctime)s  %(message)s" if stamped else None, "%Y-%m-%d %H:%M:%S")
        self._debugged = debugged

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in line)

    def formatMessage(self, record: logging.LogRecord) -> str:  # as the standard library calls it
        facility, run = whose(record)
        if named := run or (facility if self._debugged else ""):
            record.message = f"{named}: {record.message}"
        return super().formatMessage(record)


def whose(record: logging.LogRecord) -> tuple[str, str]:
    """The facility whose agent says it, and the run that it is about; empty: none."""
    facility, _, run = record.name.removeprefix("fedqueue.agent.").partition("/")
    hosted = (record.threadName or "").partition(RUN_THREAD)[2]  # by a federation
    return "" if facility == record.name else facility, run or hosted


class _Json(logging.Formatter):
    """An object of JSON in each line, for programs that collect logs."""

    def format(self, record: logging.LogRecord) -> str:
        facility, run = whose(record)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {"at": at, "level": record.levelname.lower(), "facility": facility, "run": run}
        error = {} if record.exc_info is None else {"error": self.formatException(record.exc_info)}
        said = {**facts, "message": record.getMessage(), **error}
        return json.dumps({key: value for key, value in said.items() if value}, ensure_ascii=True)


@contextmanager
def logged(
    to: SupportsWrite | None = None,
    *,
    quiet: bool = False,
    stamped: bool = True,
    debugged: bool = False,
    as_json: bool = False,
) -> Iterator[None]:
    """Inside, what fedqueue logs is written: a line each, to standard error if nothing else is named. `stamped`: with
    the time of day. `debugged`: agents share this process, so each line says whose it is."""
    handler = logging.NullHandler() if quiet else logging.StreamHandler(to or sys.stderr)
    handler.setFormatter(_Json() if as_json else _Lines(stamped=stamped, debugged=debugged))
    ours = logging.getLogger("fedqueue")
    before = ours.level
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before)


@contextmanager
def following(
    config: Config, *, quiet: bool, served: bool = False, debugged: bool = False, as_json: bool = False
) -> Iterator[Screen]:
    """`served`: it says nothing of what happened until its `past` is set to False, and its lines are a log of days.
    `debugged`, `as_json`: no table."""
    screen = Screen(config, quiet=quiet, served=served, debugged=debugged)
    screen.fancy = screen.fancy and not as_json
    to = screen if screen.fancy else None
    with logged(to, quiet=quiet, stamped=served and not screen.fancy, debugged=debugged, as_json=as_json):
        if screen.fancy:
            with Live(screen, console=screen._out, refresh_per_second=1 / REFRESH_SECONDS, transient=True):
                yield screen
        else:
            yield screen
