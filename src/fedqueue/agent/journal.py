"""What an agent must not forget: one `Work` an order, from order to hand-in, in an append-only file of JSON lines.

The home of an agent is on a shared file system, where databases are not safe; appending a line and asking for it to
be on the disk is. It is there before anything depends on it. A line that was cut short by a crash is the last one, and
is dropped: whatever depended on it did not happen. Entries that belong together are one line, a list. A lease says
which process may write, on which host.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal

from fedqueue.errors import ConfigError, FedQueueError, StorageError, what_to_do
from fedqueue.files import FileClock, failpoint, lock_file, sync
from fedqueue.protocol.codec import encode, message, read
from fedqueue.protocol.contract import JobOrder, ModelFile, Order
from fedqueue.protocol.reports import Ended, Report, Requeued, Started, Took

FILE: Final = "journal.jsonl"
LEASE: Final = "lease.json"
COMPACT_LINES: Final = 2000
"""When a journal is this long, what no longer matters is left out of a new one."""
KEPT_UNSCORED: Final = 10


@dataclass(slots=True, kw_only=True)
class SiteJob:
    """One order, and what became of it. Times are those of the shared file system (`FileClock`)."""

    kind: Literal["job"] = "job"
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
    took: int = 0  # of that attempt, the newest part whose work it has, as was reported; -1: it waits for its first
    delivered: dict[int, int] = field(default_factory=dict)  # by attempt, of a job that stays: parts that are settled
    ended: int = -1  # newest attempt whose end was reported
    settled: bool = False  # its update is in, or nobody wants it: the job has nothing more to do
    unwanted: bool = False  # it has handed in and does not end, or is run again: its scheduler is to end it
    cancelled: bool = False
    cancels_sent: int = 0  # to the scheduler
    cancel_sent_at: float | None = None  # the last of them

    @property
    def order(self) -> Order:
        return self.job.order

    @property
    def sequence(self) -> int:
        return self.job.sequence

    @property
    def stays(self) -> bool:
        """It hands in part after part."""
        return self.job.order.stay is not None

    def has_work(self, attempt: int) -> bool:
        """Whether this attempt has its first work from its order."""
        return self.job.assignment is not None and (attempt == 0 or not self.stays)

    def __str__(self) -> str:
        """For a person: its number in the run, and the scheduler's id."""
        return f"job {self.sequence}" + (f" ({self.scheduler_id})" if self.scheduler_id is not None else "")


@message
class Scoring:
    """A model that is being scored."""

    kind: Literal["scoring"] = "scoring"
    model: ModelFile
    tries: int = 0  # jobs that were lost before this one
    job: str | None = None  # the scheduler's id; None: it is not known to be there

    @property
    def version(self) -> int:
        return self.model.version


# What else a journal holds ------------------------------------------------------------------------------


@message
class Begun:
    kind: Literal["journal"] = "journal"
    id: str


@message
class Reported:
    """Something to tell the coordinator."""

    kind: Literal["report"] = "report"
    at: float
    report: Report
    took_work_at: float | None = None  # by the job; how long ago that is, is known when it is sent

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
    works: dict[int, SiteJob] = field(default_factory=dict)
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


Entry = Begun | SiteJob | Reported | Received | SetBack | Scoring | ScoringOver | NotScored | RunOver | Closed | Memory


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
                self._journal.close()
                line = self._journal.count + 1
                raise self._journal.damaged(
                    f"line {line} is of another version, which can go on with it ({error})"
                ) from None
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
            case SiteJob():
                known = memory.works.setdefault(entry.sequence, entry)
                for name in SiteJob.__slots__:  # who holds it sees what became of it
                    setattr(known, name, getattr(entry, name))
                memory.known = max(memory.known, entry.sequence)
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
            case Scoring():
                memory.scoring = entry
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
                work.took = 0 if report.bound is not None or work.has_work(report.attempt) else -1
            case Took():
                work.took = report.part
            case Requeued():
                work.attempt, work.requeued_at = report.attempt, at
            case Ended():
                work.ended = report.attempt


# The file --------------------------------------------------------------------------------------------


class Journal:
    """Appends; `lines` gives everything from the beginning."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE
        self.count = 0
        self._file: FileIO | None = None
        try:
            if not self._path.exists():
                self.rewrite([{"kind": "journal", "id": secrets.token_hex(8)}])
            else:
                self._drop_torn_line()
                self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._trouble(error) from None

    def lines(self) -> Iterator[object]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    found = json.loads(line)
                except ValueError:
                    raise self.damaged(f"line {number} is damaged") from None
                if number == 1 and not (isinstance(found, dict) and found.get("kind") in ("journal", "memory")):
                    raise self.damaged("its beginning is gone")
                yield from found if isinstance(found, list) else [found]
                self.count = number

    def append(self, *entries: object) -> None:
        """All of these entries, or none: on the disk when this returns."""
        failpoint("journal.before")
        assert self._file is not None
        data = _line(entries[0] if len(entries) == 1 else entries)
        end = os.fstat(self._file.fileno()).st_size
        try:
            self._write(self._file, data)
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)  # half a line must not be followed by another
            raise self._trouble(error) from None
        self.count += 1
        failpoint("journal.after")

    def rewrite(self, entries: Sequence[object]) -> None:
        """Replace the whole journal, at once."""
        beside = self._path.with_name(FILE + ".part")
        file: FileIO | None = None
        try:
            beside.unlink(missing_ok=True)
            file = beside.open("ab", buffering=0)
            self._write(file, b"".join(map(_line, entries)))
            failpoint("journal.whole")
            beside.replace(self._path)
            # From here on this file is the journal, whatever else goes wrong.
            file, self._file = self._file, file
            self.count = len(entries)
            sync(self._path.parent)
        except OSError as error:
            raise self._trouble(error) from None
        finally:
            if file is not None:
                file.close()

    @staticmethod
    def _write(file: FileIO, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += file.write(data[written:])
        os.fsync(file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _drop_torn_line(self) -> None:
        with self._path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                raise self.damaged("is empty")
            file.seek(max(0, size - (1 << 20)))
            tail = file.read()
            whole = tail.rfind(b"\n") + 1
            if whole < len(tail):
                file.truncate(size - len(tail) + whole)
                os.fsync(file.fileno())

    def damaged(self, how: str) -> StorageError:
        """What to do about it."""
        return StorageError(
            f"{self._path}: {how}; put back the one that was there, or move it away: the agent then begins anew, and "
            "the jobs it had are given up"
        )

    def _trouble(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path}: cannot be written: {error.strerror}; {what_to_do(error)}; nothing was lost")


def _line(content: object) -> bytes:
    return encode(content).encode() + b"\n"


# Who may write to it ---------------------------------------------------------------------------------


class LeaseError(FedQueueError):
    """Another agent works for this facility."""

    exit_code = 10


@message
class _Held:
    """lease.json: by whom."""

    host: str
    pid: int
    generation: int
    seconds: float  # 0: it was given back


class Lease:
    """Who may be the agent of this home. It names its host, since a process number means nothing on another one."""

    def __init__(self, home: Path, seconds: float) -> None:
        self._path = home / LEASE
        self._seconds = seconds
        # On one host the lock decides at once; across hosts, where locks may not reach, the file's age does.
        self._lock = lock_file(home / f".{LEASE}.{socket.gethostname()}.lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise LeaseError(f"{home}: an agent for this facility runs on this host; stop it first") from None
        held = self._read()
        left = held.seconds - self._age(home) if held is not None else 0.0
        if held is not None and held.host != socket.gethostname() and left > 0:
            self._lock.close()
            raise LeaseError(
                f"{home}: the agent of this facility runs on {held.host} (process {held.pid}); "
                f"stop that one, or try again in {left:.0f} s if it is gone"
            )
        self.generation = (held.generation + 1) if held is not None else 1
        self.renew()

    def renew(self) -> None:
        """Say that we are here. Raises `LeaseError` when somebody else took over meanwhile."""
        held = self._read()
        if held is not None and held.generation > self.generation:
            raise LeaseError(f"{self._path}: an agent on {held.host} has taken over; this one ends")
        self._write(self._seconds)

    def release(self) -> None:
        held = self._read()
        if held is None or held.generation == self.generation:  # otherwise it is another's by now
            self._write(0.0)
        self._lock.close()

    def _age(self, home: Path) -> float:
        """Seconds since it was written, by the clock of the file system."""
        return FileClock(home).now() - self._path.stat().st_mtime

    def _write(self, seconds: float) -> None:
        held = _Held(host=socket.gethostname(), pid=os.getpid(), generation=self.generation, seconds=seconds)
        beside = self._path.with_name(f".{LEASE}.{socket.gethostname()}.part")
        try:
            beside.write_text(encode(held))
            beside.replace(self._path)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written: {error.strerror}; {what_to_do(error)}") from None
        failpoint("lease.written")

    def _read(self) -> _Held | None:
        try:
            return read(_Held, json.loads(self._path.read_text()), LEASE)
        except (FileNotFoundError, ValueError, ConfigError):
            return None
