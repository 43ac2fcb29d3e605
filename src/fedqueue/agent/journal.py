"""What an agent must not forget: an append-only file of JSON lines, on the disk before anything depends on it.

The home of an agent is on a shared file system, where databases are not safe; appending a line and asking for it to
be on the disk is. A line that was cut short by a crash is the last one, and is dropped: whatever depended on it did
not happen. Entries that belong together are one line, a list. A lease says which process may write, on which host.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

from fedqueue.errors import ConfigError, FedQueueError, StorageError, what_to_do
from fedqueue.failpoints import failpoint
from fedqueue.files import sync
from fedqueue.filetime import FileClock
from fedqueue.protocol.codec import encode, message, read

FILE: Final = "journal.jsonl"
LEASE: Final = "lease.json"
COMPACT_LINES: Final = 2000
"""When a journal is this long, what no longer matters is left out of a new one."""


class LeaseError(FedQueueError):
    """Another agent works for this facility."""

    exit_code = 10


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
        self._lock = (home / f".{LEASE}.{socket.gethostname()}.lock").open("a")
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
