"""What an agent is busy with, as its journal tells it: one `Work` an order, from order to hand-in."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fedqueue.agent.journal import COMPACT_LINES, Journal
from fedqueue.filetime import FileClock

KEPT_UNSCORED: Final = 10


@dataclass(slots=True)
class Work:
    """One order. Times are those of the shared file system (filetime.py)."""

    sequence: int
    order: dict[str, Any]
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
    def name(self) -> str:
        return str(self.order["name"])

    def __str__(self) -> str:
        """For a person: its number in the run, and the scheduler's id."""
        return f"job {self.sequence}" + (f" ({self.scheduler_id})" if self.scheduler_id is not None else "")


@dataclass(slots=True)
class Scoring:
    """A model that is being scored."""

    version: int
    model: dict[str, Any]
    tries: int = 0  # jobs that were lost before this one
    job: str | None = None  # the scheduler's id; None: it is not known to be there


@dataclass(slots=True)
class Memory:
    """Everything that must survive the agent."""

    journal_id: str = ""
    works: dict[int, Work] = field(default_factory=dict)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)  # not yet acknowledged, by number
    newest_report: int = 0
    node_seconds: float = 0.0  # held by jobs that are closed
    known: int = -1  # the highest order ever taken: they come in order, and no one twice
    scoring: Scoring | None = None
    unscored: dict[int, str] = field(default_factory=dict)  # models that get no score, the newest: why
    over: str | None = None  # why the run is over
    restored: bool = False  # it was once set back: the scheduler may have jobs that are not in here


class Notes:
    """The agent's memory, and the only one who writes to its journal."""

    def __init__(self, home: Path, clock: FileClock | None = None) -> None:
        self._journal = Journal(home)
        self.clock = clock or FileClock(home)
        self.memory = Memory()
        for entry in self._journal.lines():
            self._apply(entry)
        self.found = self.memory.newest_report  # number of the newest report when we started

    def close(self) -> None:
        self._journal.close()

    def note(self, *entries: Mapping[str, Any]) -> None:
        """Remember these, all or none."""
        self._journal.append(*entries)
        for entry in entries:
            self._apply(entry)
        if self._journal.count > COMPACT_LINES + 4 * len(self.memory.works) + len(self.memory.reports):
            self._journal.rewrite([{"kind": "memory", **_plain(self.memory)}])

    def report(self, **facts: Any) -> dict[str, Any]:
        """A journal entry that tells the coordinator something; `note` it."""
        return {"kind": "report", "n": self.memory.newest_report + 1, "at": self.clock.now(), "report": facts}

    def begin_anew(self, after: int) -> None:
        """Journal and coordinator are of different days: number reports from 1 on, without those up to `after`. The
        first half of the journal's id is in the names of jobs, and stays."""
        anew = self.memory.journal_id[:8] + secrets.token_hex(4)
        self.note({"kind": "set back", "id": anew, "after": after})

    def _apply(self, entry: Mapping[str, Any]) -> None:
        memory = self.memory
        match entry["kind"]:
            case "journal":
                memory.journal_id = entry["id"]
            case "memory":
                self.memory = _memory(entry)
            case "order":
                memory.works[entry["sequence"]] = Work(entry["sequence"], entry["order"], entry["at"])
                memory.known = max(memory.known, entry["sequence"])
            case "intent":
                work = memory.works[entry["sequence"]]
                work.intended, work.asked_at = True, entry.get("at")
            case "submitted":
                work = memory.works[entry["sequence"]]
                work.scheduler_id, work.submitted_at = entry["id"], entry["at"]
            case "settled":
                memory.works[entry["sequence"]].settled = True
            case "unwanted":
                memory.works[entry["sequence"]].unwanted = True
            case "cancel":
                memory.works[entry["sequence"]].cancelled = True
            case "cancel_sent":
                work = memory.works[entry["sequence"]]
                work.cancels_sent, work.cancel_sent_at = work.cancels_sent + 1, entry["at"]
            case "report":
                memory.newest_report = entry["n"]
                memory.reports[entry["n"]] = {**entry["report"], "at": entry["at"]}
                self._reported(entry["report"], entry["at"])
            case "received":
                for number in [n for n in memory.reports if n <= entry["n"]]:
                    del memory.reports[number]
            case "set back":
                kept = [memory.reports[n] for n in sorted(memory.reports) if n > entry["after"]]
                memory.journal_id, memory.restored = entry["id"], True
                memory.reports = dict(enumerate(kept, 1))
                memory.newest_report = len(kept)
            case "scoring":
                memory.scoring = Scoring(entry["version"], entry["model"], entry["tries"])
            case "scoring job" if memory.scoring is not None:
                memory.scoring.job = entry["id"]
            case "scoring over":
                memory.scoring = None
            case "unscored":
                memory.unscored[entry["version"]] = entry["reason"]
                for version in sorted(memory.unscored)[:-KEPT_UNSCORED]:
                    del memory.unscored[version]
            case "over":
                memory.over = entry["reason"]
            case "closed":
                memory.works.pop(entry["sequence"], None)
                memory.node_seconds += entry.get("node_seconds", 0.0)

    def _reported(self, report: Mapping[str, Any], at: float) -> None:
        work = self.memory.works.get(report.get("sequence", -1))
        if work is None:
            return
        match report["kind"]:
            case "started":
                work.attempt = work.started = report["attempt"]
                work.admission_delay = report["admission_delay"]
            case "requeued":
                work.attempt, work.requeued_at = report["attempt"], at
            case "ended":
                work.ended = report["attempt"]


def _plain(memory: Memory) -> dict[str, Any]:
    works = [{name: getattr(work, name) for name in Work.__slots__} for work in memory.works.values()]
    return {
        "journal_id": memory.journal_id,
        "works": works,
        "reports": {str(n): report for n, report in memory.reports.items()},
        "newest_report": memory.newest_report,
        "node_seconds": memory.node_seconds,
        "known": memory.known,
        "over": memory.over,
        "scoring": None if memory.scoring is None else asdict(memory.scoring),
        "unscored": [[version, reason] for version, reason in memory.unscored.items()],
        "restored": memory.restored,
    }


def _memory(entry: Mapping[str, Any]) -> Memory:
    works = [Work(**{**fields, "missing_since": None}) for fields in entry["works"]]
    return Memory(
        journal_id=entry["journal_id"],
        works={work.sequence: work for work in works},
        reports={int(n): report for n, report in entry["reports"].items()},
        newest_report=entry["newest_report"],
        node_seconds=entry["node_seconds"],
        known=entry["known"],
        over=entry.get("over"),
        scoring=Scoring(**entry["scoring"]) if entry.get("scoring") else None,
        unscored=dict(entry.get("unscored", [])),
        restored=entry.get("restored", False),
    )
