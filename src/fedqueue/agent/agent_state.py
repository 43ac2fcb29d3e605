"""What an agent is busy with, as its journal tells it: one `Work` an order, from order to hand-in."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from fedqueue.agent.journal import COMPACT_LINES, Journal
from fedqueue.errors import ConfigError
from fedqueue.filetime import FileClock
from fedqueue.protocol.codec import message, read
from fedqueue.protocol.contract import JobOrder, ModelFile, Order
from fedqueue.protocol.reports import Ended, Report, Requeued, Started

KEPT_UNSCORED: Final = 10


@dataclass(slots=True)
class Work:
    """One order. Times are those of the shared file system (filetime.py)."""

    name: str  # of the job at its scheduler
    job: JobOrder
    ordered_at: float
    intended: bool = False  # we may have asked the scheduler for it
    asked_at: float | None = None  # when we did last, as far as that is known
    scheduler_id: str | None = None  # None: it is not known to be there
    submitted_at: float | None = None
    requeued_at: float | None = None
    attempt: int = 0  # the one that counts now
    started: int = -1  # newest attempt whose start was reported
    admission_delay: float = 0.0  # of that attempt
    ended: int = -1  # newest attempt whose end was reported
    settled: bool = False  # its update is in, or nobody wants it: the job has nothing more to do
    unwanted: bool = False  # it has handed in and does not end, or is run again: its scheduler is to end it
    cancelled: bool = False
    cancels_sent: int = 0  # to the scheduler
    cancel_sent_at: float | None = None  # the last of them
    missing_since: float | None = None  # monotonic: it has ended or is not known, and has no result

    @property
    def order(self) -> Order:
        return self.job.order

    @property
    def sequence(self) -> int:
        return self.job.sequence

    def __str__(self) -> str:
        """For a person: its number in the run, and the scheduler's id."""
        return f"job {self.sequence}" + (f" ({self.scheduler_id})" if self.scheduler_id is not None else "")


@dataclass(slots=True)
class Scoring:
    """A model that is being scored."""

    model: ModelFile
    tries: int = 0  # jobs that were lost before this one
    job: str | None = None  # the scheduler's id; None: it is not known to be there

    @property
    def version(self) -> int:
        return self.model.version


# What a journal holds -----------------------------------------------------------------------------------


@message
class Begun:
    kind: Literal["journal"] = "journal"
    id: str


@message
class Ordered:
    kind: Literal["order"] = "order"
    at: float
    name: str
    job: JobOrder


@message
class Intended:
    kind: Literal["intent"] = "intent"
    sequence: int
    at: float


@message
class AtScheduler:
    kind: Literal["submitted"] = "submitted"
    sequence: int
    id: str
    at: float


@message
class Marked:
    """`Work` says what each means."""

    kind: Literal["settled", "unwanted", "cancelled"]
    sequence: int


@message
class CancelSent:
    kind: Literal["cancel_sent"] = "cancel_sent"
    sequence: int
    at: float


@message
class Reported:
    """Something to tell the coordinator."""

    kind: Literal["report"] = "report"
    at: float
    report: Report
    took_work_at: float | None = None  # by a job that started; how long ago that is, is known when it is sent

    def renumbered(self, n: int) -> Reported:
        return dataclasses.replace(self, report=dataclasses.replace(self.report, n=n))


@message
class Received:
    """By the coordinator, up to report n."""

    kind: Literal["received"] = "received"
    n: int


@message
class SetBack:
    """Journal and coordinator are of different days: reports are numbered from 1 on, without those up to `after`."""

    kind: Literal["set back"] = "set back"
    id: str
    after: int


@message
class ScoringBegun:
    kind: Literal["scoring"] = "scoring"
    model: ModelFile
    tries: int = 0


@message
class ScoringAtScheduler:
    kind: Literal["scoring job"] = "scoring job"
    id: str


@message
class ScoringOver:
    kind: Literal["scoring over"] = "scoring over"


@message
class NotScored:
    kind: Literal["unscored"] = "unscored"
    version: int
    reason: str


@message
class RunOver:
    kind: Literal["over"] = "over"
    reason: str | None  # None: it goes on after all


@message
class Closed:
    """A job that needs no more care, or a part of one; what it held counts."""

    kind: Literal["closed"] = "closed"
    sequence: int | None = None  # None: it closes none
    node_seconds: float = 0.0


@dataclass(slots=True)
class Memory:
    """Everything that must survive the agent."""

    kind: Literal["memory"] = "memory"
    journal_id: str = ""
    works: dict[int, Work] = field(default_factory=dict)
    reports: dict[int, Reported] = field(default_factory=dict)  # not yet acknowledged, by number
    newest_report: int = 0
    node_seconds: float = 0.0  # held by jobs that are closed
    known: int = -1  # the highest order ever taken: they come in order, and no one twice
    scoring: Scoring | None = None
    unscored: dict[int, str] = field(default_factory=dict)  # models that get no score, the newest: why
    over: str | None = None  # why the run is over
    restored: bool = False  # it was once set back: the scheduler may have jobs that are not in here

    def untold(self, sequence: int) -> bool:
        """Whether the coordinator has not heard yet of all that became of this job."""
        return any(getattr(found.report, "sequence", None) == sequence for found in self.reports.values())


Entry = (
    Begun
    | Ordered
    | Intended
    | AtScheduler
    | Marked
    | CancelSent
    | Reported
    | Received
    | SetBack
    | ScoringBegun
    | ScoringAtScheduler
    | ScoringOver
    | NotScored
    | RunOver
    | Closed
    | Memory
)


@message
class _Line:
    entry: Entry


class Notes:
    """The agent's memory, and the only one who writes to its journal."""

    def __init__(self, home: Path, clock: FileClock | None = None) -> None:
        self._journal = Journal(home)
        self.clock = clock or FileClock(home)
        self.memory = Memory()
        for found in self._journal.lines():
            try:
                entry = read(_Line, {"entry": found}, "").entry
            except ConfigError as error:
                raise self._journal.damaged(f"line {self._journal.count + 1} is of another version ({error})") from None
            self._apply(entry)
        self.found = self.memory.newest_report  # number of the newest report when we started

    def close(self) -> None:
        self._journal.close()

    def note(self, *entries: Entry) -> None:
        """Remember these, all or none."""
        self._journal.append(*entries)
        for entry in entries:
            self._apply(entry)
        if self._journal.count > COMPACT_LINES + 4 * len(self.memory.works) + len(self.memory.reports):
            self._journal.rewrite([self.memory])

    def report(self, kind: Callable[..., Report], *, took_work_at: float | None = None, **facts: Any) -> Reported:
        """A journal entry that tells the coordinator something; `note` it."""
        said = kind(n=self.memory.newest_report + 1, **facts)
        return Reported(at=self.clock.now(), report=said, took_work_at=took_work_at)

    def begin_anew(self, after: int) -> None:
        """The first half of the journal's id is in the names of jobs, and stays."""
        self.note(SetBack(id=self.memory.journal_id[:8] + secrets.token_hex(4), after=after))

    def _apply(self, entry: Entry) -> None:
        memory = self.memory
        match entry:
            case Begun():
                memory.journal_id = entry.id
            case Memory():
                self.memory = entry
                for work in entry.works.values():
                    work.missing_since = None
            case Ordered():
                memory.works[entry.job.sequence] = Work(entry.name, entry.job, entry.at)
                memory.known = max(memory.known, entry.job.sequence)
            case Intended():
                work = memory.works[entry.sequence]
                work.intended, work.asked_at = True, entry.at
            case AtScheduler():
                work = memory.works[entry.sequence]
                work.scheduler_id, work.submitted_at = entry.id, entry.at
            case Marked():
                setattr(memory.works[entry.sequence], entry.kind, True)
            case CancelSent():
                work = memory.works[entry.sequence]
                work.cancels_sent, work.cancel_sent_at = work.cancels_sent + 1, entry.at
            case Reported():
                memory.newest_report = entry.report.n
                memory.reports[entry.report.n] = entry
                self._reported(entry.report, entry.at)
            case Received():
                for number in [n for n in memory.reports if n <= entry.n]:
                    del memory.reports[number]
            case SetBack():
                kept = [memory.reports[n] for n in sorted(memory.reports) if n > entry.after]
                memory.journal_id, memory.restored = entry.id, True
                memory.reports = {n: found.renumbered(n) for n, found in enumerate(kept, 1)}
                memory.newest_report = len(kept)
            case ScoringBegun():
                memory.scoring = Scoring(entry.model, entry.tries)
            case ScoringAtScheduler() if memory.scoring is not None:
                memory.scoring.job = entry.id
            case ScoringOver():
                memory.scoring = None
            case NotScored():
                memory.unscored[entry.version] = entry.reason
                for version in sorted(memory.unscored)[:-KEPT_UNSCORED]:
                    del memory.unscored[version]
            case RunOver():
                memory.over = entry.reason
            case Closed():
                if entry.sequence is not None:
                    memory.works.pop(entry.sequence, None)
                memory.node_seconds += entry.node_seconds

    def _reported(self, report: Report, at: float) -> None:
        work = self.memory.works.get(getattr(report, "sequence", -1))
        if work is None:
            return
        match report:
            case Started():
                work.attempt = work.started = report.attempt
                work.admission_delay = report.admission_delay
            case Requeued():
                work.attempt, work.requeued_at = report.attempt, at
            case Ended():
                work.ended = report.attempt
