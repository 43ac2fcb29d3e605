"""The durable record of a run: one SQLite file with what happened, what was wanted, and what comes of reading both.

Tables: `meta` (config, plan, code version), `events`, `commands`. Views over them: `jobs`, `incarnations`,
`updates`, `scores`, `models`. An event and its commands are written together or not at all.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fedqueue import __version__
from fedqueue.errors import RunFolderError, StorageError, what_to_do
from fedqueue.protocol.codec import encode
from fedqueue.protocol.messages import Command, Event, parse
from fedqueue.schema import SCHEMA

FILE: Final = "ledger.sqlite"
FORMAT: Final = 3
BATCH: Final = 4096  # events a transaction, when the run can simply be made again


class Ledger:
    """Writes a ledger. As a listener it takes each event with its commands."""

    def __init__(self, path: Path, meta: Mapping[str, Any] | None, *, durable: bool = True) -> None:
        """`meta` describes a new run; without it the ledger that is there goes on. `durable`: every event is on the
        disk before its commands are carried out. A simulation, which can be made again from its config, writes in
        batches instead."""
        if path.exists() and meta is not None:
            raise RunFolderError(f"{path}: there is a ledger already; name another run folder")
        if meta is None:
            LedgerReader(path).close()  # it is one, and of our format
        self._path = path
        self._durable = durable
        self._together = False
        self._events: list[tuple[int, float, str, str | None, str, str | None]] = []
        self._commands: list[tuple[int, int, str, str | None, str]] = []
        self.origin: str | None = None
        """Who reported the next event; goes with it, and with it alone."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise storage_error(path, error) from None
        try:
            if durable:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
            else:
                self._db.execute("PRAGMA synchronous = OFF")
            if meta is not None:
                facts = {"format": FORMAT, **meta}
                rows = [(key, encode(value)) for key, value in facts.items()]
                self._db.execute("BEGIN")
                for statement in SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
                self._db.execute("COMMIT")
            (newest,) = self._db.execute("SELECT coalesce(max(seq), -1) FROM events").fetchone()
            self._seq = newest + 1
        except sqlite3.Error as error:
            self._db.close()
            raise storage_error(path, error) from None
        self._place = _place(path)

    @property
    def is_in_place(self) -> bool:
        """Whether the file that is written to is still the one in the run's folder: somebody may have deleted it, moved
        it, or put another there, and to write on would be to write for nobody."""
        return _place(self._path) == self._place

    def put_back(self) -> None:
        """All that is on record, back to its place; what lies there now is set aside."""
        copy = self._path.with_name(f"{self._path.name}.part")
        try:
            copy.unlink(missing_ok=True)
            self._db.execute("VACUUM INTO ?", (str(copy),))
            with copy.open("rb") as file:
                os.fsync(file.fileno())
            if self._path.exists():
                self._path.replace(self._path.with_name(f"{self._path.name}.aside"))
            self._db.close()
            for left in ("-wal", "-shm"):  # they belong to the file that is gone
                self._path.with_name(self._path.name + left).unlink(missing_ok=True)
            copy.replace(self._path)
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as error:
            raise storage_error(self._path, error, "put back") from None
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be put back: {error.strerror}; {what_to_do(error)}") from None
        self._place = _place(self._path)

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        seq = self._seq
        self._seq = seq + 1
        origin, self.origin = self.origin, None
        self._events.append((seq, event.at, type(event).__name__, _job_of(event), encode(event), origin))
        for place, command in enumerate(commands):
            self._commands.append((seq, place, type(command).__name__, _job_of(command), encode(command)))
        if (self._durable and not self._together) or len(self._events) >= BATCH:
            self.flush()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is told inside goes to the disk in one transaction, at the end."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self.flush()

    def flush(self) -> None:
        """Write what is held, in one transaction."""
        if not self._events:
            return
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", self._events)
            self._db.executemany("INSERT INTO commands VALUES (?, ?, ?, ?, ?)", self._commands)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise storage_error(self._path, error) from None
        self._events.clear()
        self._commands.clear()

    def note(self, key: str, value: Any) -> None:
        """Put a fact about the run beside its config."""
        try:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, encode(value)))
        except sqlite3.Error as error:
            raise storage_error(self._path, error) from None

    def close(self) -> None:
        self.flush()
        self._db.close()

    def cut_short(self, why: str) -> None:
        """After an interrupt, which may have come between any two steps of ours: write what is whole, and close."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        (written,) = self._db.execute("SELECT coalesce(max(seq), -1) FROM events").fetchone()
        newest = self._seq - 1  # it may be half there
        self._events = [row for row in self._events if written < row[0] < newest]
        self._commands = [row for row in self._commands if written < row[0] < newest]
        self.note("stopped", why)
        self.close()

    def abandon(self) -> None:
        """Close without writing what is held: what is on the disk stays."""
        self._events.clear()
        self._commands.clear()
        self._db.close()

    def seal(self) -> None:
        """Close the ledger of a run that is over: from now on it is one plain file."""
        self.flush()
        with suppress(sqlite3.Error):  # somebody reads it: it stays as it is
            self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()


class LedgerReader:
    """Reads a ledger, finished or still growing."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise RunFolderError(f"{path.parent}: is not a run folder: it has no {path.name}")
        self.path = path
        try:
            self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise storage_error(path, error, "read") from None
        self._db.row_factory = sqlite3.Row
        try:
            self.meta = {row["key"]: json.loads(row["value"]) for row in self._db.execute("SELECT * FROM meta")}
        except sqlite3.DatabaseError as error:
            self._db.close()
            if _primary(error) in _HELP:
                raise storage_error(path, error, "read") from None
            raise RunFolderError(f"{path}: is not a ledger: {error}") from None
        if self.meta.get("format") != FORMAT:
            found, build = self.meta.get("format"), self.meta.get("version", "of unknown version")
            self._db.close()
            raise RunFolderError(
                f"{path}: is of ledger format {found}, and this build ({__version__}) reads format {FORMAT} alone; "
                f"use the FedQueue that wrote it ({build})"
            )

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Ask one of the views, for example `SELECT * FROM jobs`."""
        return self._db.execute(query, values).fetchall()

    def steps(self, after: int = -1) -> Iterator[tuple[Event, list[tuple[str, str]]]]:
        """Every event in order, with its commands as (kind, JSON). `after`: of this number."""
        commands = self._db.execute("SELECT seq, kind, body FROM commands WHERE seq > ? ORDER BY seq, place", (after,))
        pending = commands.fetchone()
        for row in self._db.execute("SELECT seq, kind, body FROM events WHERE seq > ? ORDER BY seq", (after,)):
            wanted: list[tuple[str, str]] = []
            while pending is not None and pending["seq"] == row["seq"]:
                wanted.append((pending["kind"], pending["body"]))
                pending = commands.fetchone()
            event = parse(row["kind"], json.loads(row["body"]))
            yield event, wanted  # type: ignore[misc]  # the events table holds events

    def lines(self, after: int = -1, last: int = 2**62) -> Iterator[str]:
        """The journal as JSON lines: each event, then each command it brought. `after` and up to the `last` of these
        numbers. What a message says is in `body`, so no
        field of it can be taken for one of the line: a timer has an `at` of its own, a record a `kind`."""
        query = """SELECT seq, -1 AS place, 'event' AS what, kind, at, body FROM events
                   WHERE seq > :after AND seq <= :last
                   UNION ALL SELECT c.seq, c.place, 'command', c.kind, e.at, c.body
                   FROM commands c JOIN events e USING (seq) WHERE c.seq > :after AND c.seq <= :last ORDER BY 1, 2"""
        for row in self._db.execute(query, {"after": after, "last": last}):
            head = f'"seq":{row["seq"]},"at":{row["at"]!r},"what":"{row["what"]}","kind":"{row["kind"]}"'
            yield f'{{{head},"body":{row["body"]}}}'

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place(path: Path) -> tuple[int, int] | None:
    """Which file lies there; None: none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _job_of(message: Any) -> str | None:
    for owner in ("", "order", "receipt"):
        part = getattr(message, owner, None) if owner else message
        job: str | None = getattr(part, "job_id", None)
        if job is not None:
            return job
    return None


_HELP: Final = {
    sqlite3.SQLITE_FULL: "make room",
    sqlite3.SQLITE_IOERR: "make room, or look after the disk",
    sqlite3.SQLITE_READONLY: "let this user write it",
    sqlite3.SQLITE_PERM: "let this user read and write it",
    sqlite3.SQLITE_CANTOPEN: "put it back, let this user read and write it, or raise the limit of open files",
    sqlite3.SQLITE_BUSY: "end whatever else writes to it",
}
"""What to do, by SQLite's primary result code: nothing is wrong with the file itself."""


def _primary(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def storage_error(path: Path, error: sqlite3.Error, doing: str = "written") -> StorageError:
    advice = _HELP.get(_primary(error), "look at the file")
    return StorageError(f"{path}: cannot be {doing}: {error}; what was written stays; {advice}")
