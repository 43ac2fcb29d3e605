"""The jobs of a facility: what its agent does with each, and the folder in which the two speak without a network.

The job's script makes the next free attempt-N folder: making a folder is the one thing of which a file system says to
exactly one of two that it was first, so two incarnations of a job never share one. Only result.json, which appears
whole or not at all, means that a job did its work; of a job that stays, each part has one, and left.json says that no
more will come.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

from fedqueue import PROTOCOL
from fedqueue.agent.journal import Closed, Memory, Notes, SiteJob
from fedqueue.agent.privacy import PrivacyAccount, account_of
from fedqueue.agent.schedulers import (
    JobStatus,
    Scheduler,
    SchedulerUnreachableError,
    SubmitRefusedError,
    clamp_wall,
    longest_wall,
)
from fedqueue.agent.schedulers.base import NAME, OUTPUT, last_line
from fedqueue.agent.settings import AgentConfig
from fedqueue.errors import ConfigError, StorageError, what_to_do
from fedqueue.files import FileClock, failpoint, write_json
from fedqueue.protocol.cap import CapLeft, cap_left
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import (
    REASON_LENGTH,
    Assignment,
    AssignmentFile,
    BoundFile,
    Order,
    OrderFile,
    Result,
    TakenFile,
    one_line,
)
from fedqueue.protocol.reports import MOST_TROUBLES, Failed, Trouble
from fedqueue.protocol.state import PartKey

T = TypeVar("T")

STANDING: Final = "standing.json"  # in a home
WORDS_READ: Final = 8192  # bytes of a job's output
WORDS_LENGTH: Final = 200
NOT_OF_THE_JOB: Final = re.compile(r"^(slurmstepd\S*: error: \*\*\* |=>> PBS: ).*$", re.MULTILINE)
SIGN_SECONDS: Final = 1.0
"""Between two signs of life of a job's script: if its scheduler runs it twice unseen, they tell when it was ended."""
SCORING_SECONDS: Final = 1800.0
"""Of wall time, for one model."""
MOST_DOUBLINGS: Final = 10
"""Of the time between two cancels of one job."""


class Shared(Protocol):
    """What the runs of one site share."""

    node_hours: float | None
    privacy: PrivacyAccount | None
    home: Path

    def node_seconds(self) -> tuple[float, float]:
        """Of all runs together: held by jobs that are over, and asked for by those under way."""

    def has_place(self, jobs: Jobs) -> bool:
        """Whether a job of this run may be submitted now."""


class Jobs:
    """All of them, and what the parts of an agent share: its config, its scheduler, its memory, its troubles."""

    def __init__(
        self,
        config: AgentConfig,
        home: Path,
        facility: str,
        scheduler: Scheduler,
        notes: Notes,
        *,
        run: str = "",
        worker: Path | None = None,
        site: Shared | None = None,
        name: str = "",
    ) -> None:
        """`site`: what it shares with other runs; `name`: of this run among them."""
        self._site = site
        self.privacy = site.privacy if site is not None else account_of(config.privacy, home)
        self.scheduling = config.scheduler
        self.settings = config.agent
        self.home = home
        self.site_home = site.home if site is not None else home
        self.masked = False  # updates go to groups, masked: as the coordinator said last
        self.facility = facility
        self.scheduler = scheduler
        self.notes = notes
        self.log = logging.getLogger(f"fedqueue.agent.{facility}" + (f"/{name}" if name else ""))
        self.run = run  # which one; empty: an invitation of before did not say
        self._worker = worker  # for the PYTHONPATH of jobs
        self._troubles: dict[str, tuple[str, float]] = {}  # what, and since when (monotonic)

    @property
    def memory(self) -> Memory:
        return self.notes.memory

    @property
    def clock(self) -> FileClock:
        return self.notes.clock

    @property
    def nodes(self) -> int:
        """That a job here holds."""
        return getattr(self.scheduling, "nodes", 1)

    def folder(self, work: SiteJob) -> JobFolder:
        return JobFolder(self.home, str(work.sequence), stays=work.stays)

    def prepare(
        self, folder: JobFolder, name: str, order: Order, command: str, work: Assignment | None, model: Path | None
    ) -> None:
        """All that a job will read, in its folder."""
        file = OrderFile(
            protocol=PROTOCOL,
            name=name,
            order=order,
            nodes=self.nodes,
            standing=str(self.home / STANDING),
            state_dir=str(self.home / "state"),
            assignment=work,
            model=None if model is None else str(model),
            run=self.run,
            privacy=None if self.privacy is None else self.privacy.settings.of_jobs,
        )
        before, environment = self.settings.before, self.settings.environment
        folder.prepare(file, script(folder, command, before, environment, self._worker, label=order.job_id))

    def wall(self, work: SiteJob) -> float:
        """Seconds to ask the scheduler for."""
        return clamp_wall(work.order.wall_seconds, self.scheduling)

    @property
    def shortest_wall(self) -> float:
        """Seconds that any job asks for at the least."""
        return clamp_wall(0.0, self.scheduling)

    @property
    def scoring_wall(self) -> float:
        """Seconds that a job which scores a model asks for."""
        return clamp_wall(SCORING_SECONDS, self.scheduling)

    def cap_left(self) -> CapLeft | None:
        """Of the cap on node-hours, what can be asked of the scheduler; None: there is no cap."""
        left = self._left()
        if left is None:
            return None
        return CapLeft(seconds=self._within(left.seconds), when_idle=self._within(left.when_idle))

    def _within(self, seconds: float) -> float:
        return seconds if seconds < 0 else longest_wall(seconds, self.scheduling)

    def node_seconds(self) -> tuple[float, float]:
        """Held by jobs that are over, and asked for by those under way."""
        there = [work for work in self.memory.works.values() if work.scheduler_id is not None]
        ending = [work for work in there if work.settled and not work.unwanted]
        used = self.memory.node_seconds + sum(map(self.held, ending)) * self.nodes
        walls = [self.wall(work) for work in there if work not in ending]
        scores = self.memory.scoring is not None and self.memory.scoring.job is not None
        return used, (sum(walls) + (self.scoring_wall if scores else 0.0)) * self.nodes

    def at_scheduler(self) -> int:
        """Jobs that hold a place there, or wait for one."""
        return sum(1 for work in self.memory.works.values() if work.scheduler_id is not None and not work.settled)

    def has_place(self) -> bool:
        """Whether one more job may be submitted now, by the caps on jobs at once."""
        own = self.settings.jobs_at_once
        return (own is None or self.at_scheduler() < own) and (self._site is None or self._site.has_place(self))

    def _caps(self) -> list[tuple[float, CapLeft]]:
        """Each cap on node-hours, and what it leaves: the run's own, and that of the site for all its runs."""
        caps = []
        if (own := self.settings.node_hours) is not None:
            used, asked = self.node_seconds()
            caps.append((own, cap_left(own, self.nodes, used=used, asked=asked)))
        if self._site is not None and (total := self._site.node_hours) is not None:
            used, asked = self._site.node_seconds()
            caps.append((total, cap_left(total, self.nodes, used=used, asked=asked)))
        return caps

    def _left(self) -> CapLeft | None:
        lefts = [left for _, left in self._caps()]
        if not lefts:
            return None
        return CapLeft(seconds=min(left.seconds for left in lefts), when_idle=min(left.when_idle for left in lefts))

    def check_cap(self, wall: float, shortest: float | None = None) -> None:
        """Raises SubmitRefusedError where the cap on node-hours forbids a job of so many seconds. It may come again if
        what is under way leaves enough, or as one of `shortest` seconds; None: it cannot be shorter."""
        lacking = [(cap, left) for cap, left in self._caps() if wall > left.seconds]
        if not lacking:
            return
        cap, left = min(lacking, key=lambda found: found[1].when_idle)
        spent = f"{cap - left.when_idle * self.nodes / 3600:.2f} of {cap:g} node-hours are used"
        if wall <= left.when_idle:
            raise SubmitRefusedError(f"{spent}, and jobs under way may use the rest", transient=True)
        if shortest is not None and shortest <= left.when_idle:
            raise SubmitRefusedError(f"{spent}, which leaves too little for a job of {wall:.0f} s", transient=True)
        reason = f"{spent}: the facility's cap; raise agent.node_hours there to go on"
        raise SubmitRefusedError(reason, transient=False)

    def trouble(self, where: str, what: str) -> None:
        """Say it once, not in every turn."""
        before, since = self._troubles.get(where, (None, time.monotonic()))
        if before != what:
            self._troubles[where] = what, since
            self.log.warning(what)

    def fine(self, where: str) -> None:
        if self._troubles.pop(where, None) is not None:
            self.log.info(f"{where}: well again")

    def troubles(self) -> list[Trouble]:
        """What the coordinator should know of; that it was out of reach it knows when it hears us."""
        current = [found for where, found in self._troubles.items() if where != "coordinator"]
        return [
            Trouble(reason=one_line(what)[:REASON_LENGTH], seconds=time.monotonic() - since)
            for what, since in current[:MOST_TROUBLES]
        ]

    def fail(
        self,
        work: SiteJob,
        reason: str,
        *,
        transient: bool,
        newest: int = -1,
        held_seconds: float | None = None,
        and_end: bool = False,
    ) -> None:
        """`held_seconds` of its newest attempt, where the scheduler says; else as far as its own stamp tells.
        `and_end`: the scheduler has it still, and shall end it."""
        held = held_seconds
        if held is None:
            stamp = self.folder(work).started(max(newest, 0))
            held = max(0.0, self.clock.now() - stamp - self.settings.grace_seconds) if stamp is not None else 0.0
        self.log.warning(f"{work} failed: {reason}")
        self.notes.note(
            self.notes.report(
                Failed,
                sequence=work.sequence,
                attempt=max(work.attempt, 0),
                reason=reason[:REASON_LENGTH],
                transient=transient,
                held_seconds=held,
            ),
            replace(work, cancelled=True, settled=work.settled or work.stays) if and_end else self.closing(work, held),
        )

    def cancel(self, work: SiteJob) -> bool:
        """Ask for the end of a job, once. PBS begins its delay from SIGTERM to SIGKILL anew each time it is asked, so a
        job that hangs would never end; a scheduler may also forget what it was asked. So it is asked again when twice
        the delay has passed, then after twice as long: however wrong the delay in the config is, the job ends."""
        if work.cancel_sent_at is not None:
            patience = self.scheduling.kill_delay_seconds * 2.0 ** min(work.cancels_sent, MOST_DOUBLINGS)
            if 0 <= self.clock.now() - work.cancel_sent_at < patience:  # less than 0: the clock was set back
                return True
        try:
            self.scheduler.cancel(work.scheduler_id or "")
        except SchedulerUnreachableError as error:
            self.trouble("scheduler", f"the scheduler did not answer: {error}")
            return False
        self.notes.note(replace(work, cancels_sent=work.cancels_sent + 1, cancel_sent_at=self.clock.now()))
        return True

    def held(self, work: SiteJob) -> float:
        folder = self.folder(work)
        stamp = folder.started(work.attempt)
        if stamp is None:
            return 0.0
        return max(0.0, (folder.finished(work.attempt) or self.clock.now()) - stamp)

    def held_in_all(self, work: SiteJob, status: JobStatus | None) -> float:
        """By a job that is over, in this attempt and in what its scheduler ran thereafter; `status` is its last."""
        folder, held, end = self.folder(work), [], self.clock.now()
        for attempt in reversed(range(work.attempt, folder.attempts())):
            stamp = folder.started(attempt)
            if stamp is not None:
                held.append((folder.finished(attempt) or end) - stamp)
                end = stamp
        if held and status is not None and status.started_at is not None and status.ended_at is not None:
            held[0] = status.ended_at - status.started_at
        return sum(min(self.wall(work), max(0.0, seconds)) for seconds in held)

    def closing(self, work: SiteJob, held_seconds: float) -> Closed:
        return Closed(sequence=work.sequence, node_seconds=held_seconds * self.nodes)

    def tidy(self, work: SiteJob) -> None:
        if not self.settings.keep_files:
            self.folder(work).drop_updates()

    def undelivered(self, work: SiteJob) -> PartKey | None:
        """Of a job that stays: the first part that it handed in and that is not settled."""
        folder = self.folder(work)
        for attempt in range(work.attempt + 1):
            part = work.delivered.get(attempt, 0)
            if folder.result(attempt, part) is not None:
                return attempt, part
        return None


class JobFolder:
    def __init__(self, home: Path, name: str, *, stays: bool = False) -> None:
        """`stays`: its result is not its end."""
        self._stays = stays
        self.path = home / "jobs" / name
        self.script = self.path / "job.sh"
        self.output = self.path / OUTPUT

    def prepare(self, order: OrderFile, script: str) -> None:
        """All that the job will read; whole before the scheduler hears of it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "order.json", order)
            self.script.write_text(script, encoding="utf-8")
            self.script.chmod(0o700)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}; {what_to_do(error)}") from None

    def name(self) -> str | None:
        """Of the job at the scheduler, as far as it says."""
        order = _read(OrderFile, self.path / "order.json")
        return order.name if order is not None and NAME.fullmatch(order.name) else None

    def put_aside(self) -> None:
        """Make room for another job of this number; what is there stays, beside."""
        number = 0
        while (aside := self.path.with_name(f"before-{self.path.name}-{number}")).exists():
            number += 1
        try:
            self.path.rename(aside)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be renamed: {error.strerror}") from None

    def gone(self, started: int) -> Path | None:
        """What of it has been lost, of a job whose attempt `started` has begun."""
        wanted = [self.path, self.script, *(self.attempt(number) for number in range(started + 1))]
        return next((path for path in wanted if not path.exists()), None)

    def last_line_written(self) -> str:
        """The last line that the job wrote, of all its incarnations; it may be anything. What a scheduler writes there
        when it ends a job is left out."""
        try:
            with self.output.open("rb") as file:
                file.seek(max(0, self.output.stat().st_size - WORDS_READ))
                return one_line(last_line(NOT_OF_THE_JOB.sub("", file.read().decode("utf-8", "replace"))))[
                    :WORDS_LENGTH
                ]
        except OSError:
            return ""

    def ends_with(self, home: Path) -> str:
        """For a reason: where its output is, and how that ends."""
        words = self.last_line_written()
        where = f"its output is in {self.output.relative_to(home)} at the facility"
        return f"{where} and ends with: {words}" if words else where

    def attempts(self) -> int:
        """How many incarnations have begun."""
        number = 0
        while (self.path / f"attempt-{number}").is_dir():
            number += 1
        return number

    def attempt(self, number: int) -> Path:
        return self.path / f"attempt-{number}"

    def started(self, number: int) -> float | None:
        """When it began, by the clock of the file system; so are the next three."""
        return _stamp(self.attempt(number) / "started")

    def alive(self, number: int) -> float | None:
        """When its script last gave a sign of life, `SIGN_SECONDS` before its end at most; None: it gave none."""
        return _stamp(self.attempt(number) / "alive")

    def took_work(self, number: int) -> float | None:
        return _stamp(self.attempt(number) / "bound.json")

    def finished(self, number: int) -> float | None:
        """When it was done, by its own word."""
        return _stamp(self.attempt(number) / ("left.json" if self._stays else "result.json"))

    def bound(self, number: int) -> BoundFile | None:
        return _read(BoundFile, self.attempt(number) / "bound.json")

    def part(self, number: int, part: int) -> Path:
        """Where a part of it lies."""
        return self.attempt(number) if part == 0 else self.attempt(number) / f"part-{part}"

    def waits(self, number: int) -> bool:
        """Whether it has started, and had no work then."""
        return (self.attempt(number) / "waiting.json").exists()

    def bring(self, number: int, part: int, work: AssignmentFile) -> None:
        """Work for a job that stays; its model is at hand."""
        place = self.part(number, part)
        if not (place / "further.json").exists():
            try:
                place.mkdir(exist_ok=True)
            except OSError as error:
                raise StorageError(f"{place}: cannot be made: {error.strerror}; {what_to_do(error)}") from None
            write_json(place / "further.json", work)
            failpoint("agent.brought")

    def taken(self, number: int, part: int) -> tuple[TakenFile, float] | None:
        """What a job that stays says of the work of this part, and when it took it."""
        path = self.part(number, part) / "taken.json"
        found, at = _read(TakenFile, path), _stamp(path)
        return None if found is None or at is None else (found, at)

    def in_hand(self, number: int, part: int) -> Assignment | None:
        """What it works on in this part, once it has its model."""
        found = _read(AssignmentFile, self.part(number, part) / "assignment.json")
        return found.assignment if found is not None else None

    def parts(self, number: int) -> int:
        """That it handed in."""
        part = 0
        while self.result(number, part) is not None:
            part += 1
        return part

    def work_taken_at(self, number: int, part: int = 0) -> float | None:
        """When it took the work of this part. One that begins with standing work counts as if it had taken that when it
        started, but for the time that it lingered: its start-up is over, and is learned with its overhead."""
        taken, bound, at = self.taken(number, part), self.bound(number), self.took_work(number)
        if taken is not None or part:
            return None if taken is None else taken[1]
        return self.started(number) if bound is None or at is None else at - bound.startup_seconds

    def without_work_since(self, number: int) -> float | None:
        """Of a job that stays: when it handed in last, or took work of which it has handed in nothing."""
        parts = self.parts(number)
        last = self.part(number, parts - 1) / "result.json" if parts else self.attempt(number) / "waiting.json"
        return _stamp(self.part(number, parts) / "taken.json") or _stamp(last)

    def result(self, number: int, part: int = 0) -> Result | None:
        return _read(Result, self.part(number, part) / "result.json")

    def out_of_time(self, number: int) -> bool:
        """Whether it says that not a single step fitted into its wall time."""
        return (self.attempt(number) / "out_of_time.json").exists()

    def update(self, number: int, part: int = 0) -> Path:
        return self.part(number, part) / "update.safetensors"

    def drop_updates(self) -> None:
        for pattern in ("attempt-*/update.safetensors*", "attempt-*/part-*/update.safetensors*"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)


def _stamp(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _read(kind: type[T], path: Path) -> T | None:
    """None while it is not there; a file that is no such thing is nothing either: the job's script may be anyone's."""
    try:
        return read(kind, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError, ConfigError):
        return None


def script(
    folder: JobFolder,
    command: str,
    before: Sequence[str],
    environment: Mapping[str, str],
    python_path: Path | None,
    label: str,
) -> str:
    """The batch script. bash replaces itself by the command, so that the scheduler's signals reach it; whether it is
    still there is told by a process beside, which is nobody's child and heeds no signal that a job may live through."""
    job = shlex.quote(str(folder.path))
    lines = [
        "#!/bin/bash",
        f"# Made by the FedQueue agent for job {label}.",
        f"job={job}",
        "attempt=0",
        'until mkdir "$job/attempt-$attempt" 2>/dev/null; do',
        "  attempt=$((attempt + 1))",
        '  [ "$attempt" -gt 10000 ] && { echo "fedqueue: cannot make a folder in $job" >&2; exit 73; }',
        "done",
        'uname -n > "$job/attempt-$attempt/.started" && mv "$job/attempt-$attempt/.started" '  # its stamp counts
        '"$job/attempt-$attempt/started" || exit 74',
        f"( ( trap '' HUP INT USR1 USR2 TERM XCPU; while kill -0 $$; do "
        f'echo > "$job/attempt-$attempt/alive"; sleep {SIGN_SECONDS:g}; done ) </dev/null >/dev/null 2>&1 & )',
        'export FEDQUEUE_JOB="$job" FEDQUEUE_ATTEMPT="$attempt"',
    ]
    if python_path is not None:
        lines.append(f'export PYTHONPATH={shlex.quote(str(python_path))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += before
    lines.append(f"exec /bin/bash -c {shlex.quote(command)}")
    return "\n".join(lines) + "\n"
