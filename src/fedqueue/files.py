"""Files on a disk that may fail: whole or not there, on the disk when we say so, and with the time that they have.

Coordinator, agent and job write them; so this is Python 3.9, and the standard library. At a `failpoint`, which lies
between two durable steps, a test may kill the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from fedqueue.errors import ConfigError, StorageError, what_to_do
from fedqueue.protocol.codec import body

PIECE_BYTES: Final = 64 << 10
"""So few that they are still in the processor's cache when they are hashed and written. Larger pieces, and a thread
that hashes and writes them, were slower."""

APART = 0.5
"""Seconds: two readings that differ by less say the same; some file systems stamp in steps of a second."""


def sync(path: Path) -> None:
    """On the disk when this returns; a folder too, so that the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with the disk inside is told with what helps."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; {what_to_do(error)}") from None


class ArrivingFile:
    """What has arrived of a file, in `target`.part, and its sha256 so far. Leaves the part when it is closed."""

    def __init__(self, target: Path) -> None:
        self._target, self._path = target, target.with_name(target.name + ".part")
        self._digest = hashlib.sha256()
        self.have = 0
        """Bytes that have arrived and are written."""

    def __enter__(self) -> ArrivingFile:
        with writing(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            while data := os.pread(self._file, PIECE_BYTES, self.have):
                self._digest.update(data)
                self.have += len(data)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def fill(self, read_into: Callable[[memoryview], int]) -> None:
        """Appends what `read_into` puts into the buffer it is given, until it says that nothing is left (0)."""
        buffer = memoryview(bytearray(PIECE_BYTES))
        while count := read_into(buffer):
            piece = buffer[:count]
            with writing(self._path):
                while piece:
                    written = os.pwrite(self._file, piece, self.have)
                    self._digest.update(piece[:written])
                    piece, self.have = piece[written:], self.have + written

    def needs(self, number: int) -> None:
        """So many bytes are to come: is there room for them?"""
        with writing(self._path):
            found = os.fstatvfs(self._file)
        free = found.f_bavail * found.f_frsize
        if number > free:
            raise StorageError(f"{self._path}: {number:,} bytes are to come, and {free:,} are free; make room")

    def restart(self) -> None:
        with writing(self._path):
            os.ftruncate(self._file, 0)
        self._digest, self.have = hashlib.sha256(), 0

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Give it its name. It is not forced to the disk: what can be fetched again need not outlive the machine, and
        an agent looks over its models when it starts."""
        with writing(self._path):
            self._path.replace(self._target)


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=body) + "\n")


def write_secret(path: Path, text: str) -> None:
    """A file that only its owner may read, from its first byte on; whole or not at all."""
    write_text(path, text, secret=True)


def write_text(path: Path, text: str, *, secret: bool = False) -> None:
    """Whole or not at all: written beside, then renamed."""
    beside = path.with_name(path.name + ".part")
    with writing(path):
        try:
            if secret:
                beside.unlink(missing_ok=True)
            with open(beside, "w", encoding="utf-8", opener=_open_secret if secret else None) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if secret:
                failpoint("secret.whole")
            beside.replace(path)
            if secret:
                sync(path.parent)  # who was shut out stays so, whatever happens to the machine
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


def is_locked(path: Path) -> bool:
    """Whether a living process on this machine holds this file's lock; of a file that is not there, nobody does."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process on this machine at a time."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def only_ours(path: Path, *, group: str = "") -> None:
    """Refuse a file or a folder that somebody else could change. `group`: the setting by which the owner says that the
    group may; empty: it was set."""
    found = path.stat()
    if os.geteuid() != 0 and found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path}: belongs to another user, who may change it; use one of your own")
    if found.st_mode & 0o002:
        raise ConfigError(f"{path}: everybody may write to it, and so to what is done with it; `chmod o-w {path}`")
    if group and found.st_mode & 0o020:
        raise ConfigError(
            f"{path}: its group may write to it; `chmod g-w {path}`, or set {group} = true if it is meant"
        )


def only_mine(path: Path, *, of_system: bool = False) -> None:
    """Refuse a secret that somebody else may read. `of_system`: a group may if it is root's, as with keys of hosts."""
    found = path.stat()
    if found.st_mode & (0o037 if of_system and found.st_uid == 0 else 0o077):
        raise ConfigError(f"{path}: others may read it; `chmod 600 {path}`, and have it replaced if they did")


def lock_file(path: Path) -> IO[str]:
    """A file to lock, which nobody else may: who could read it could hold a lock of it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8")
    with suppress(OSError):  # it may be older than this rule
        os.fchmod(file.fileno(), 0o600)
    return file


def _open_secret(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_EXCL, 0o600)


class FileClock:
    """One clock for login and compute nodes: the stamps that their shared file system gives to files just written.

    Clocks of machines may be minutes apart, so nobody compares the time of day of one with that of another. When a file
    was written is for its file system to say, and everybody reads the same; "now" is the stamp of a file that the
    reader writes itself, and from one reading to the next goes on by this machine's own count. (Where a file system
    takes its stamps from the machine that writes, clocks are as good as before.)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offset = time.time() - time.monotonic()  # for a folder in which nothing can be written
        self.read(apart=0.0)

    def now(self) -> float:
        return time.monotonic() + self._offset

    def read(self, apart: float = APART) -> None:
        """Set it by a file written just now; on a full disk it goes on as it is."""
        path = self._folder / f".clock-{os.uname().nodename}-{os.getpid()}"
        try:
            before = time.monotonic()
            path.write_bytes(b".")
            after = time.monotonic()
            offset = path.stat().st_mtime - (before + after) / 2
            path.unlink()
        except OSError:
            return
        if abs(offset - self._offset) >= apart:
            self._offset = offset


# Failpoints ---------------------------------------------------------------------------------------------
#
# FEDQUEUE_FAILPOINT=agent.submitted:2 kills the process (SIGKILL: no handler runs, nothing is flushed) when it reaches
# the point of that name for the second time. Without the variable a failpoint does nothing.

COORDINATOR: Final = (
    "secret.whole",  # a file of secrets is written beside the old one, which it does not replace yet
    "object.whole",  # a model's or an update's file is whole; it does not have its name
    "object.kept",  # it has its name; the ledger does not have it
    "ledger.before",  # an event is about to be written
    "ledger.after",  # it is written; its commands are not carried out
    "heartbeat.noted",  # the run clock is in the ledger
    "answer.before",  # a facility's reports are taken; it is about to be answered
    "upload.stored",  # an update's bytes are all there
    "update.refused",  # a bad update is kept aside; the event is not written
    "run.over",  # everybody knows that the run is over; its summary and its last model are not written
    "run.finished",  # they are
)

AGENT: Final = (
    "lease.written",  # the agent says that it is here
    "journal.whole",  # a new journal is written beside the old one, which it does not replace yet
    "journal.before",  # something is about to be noted
    "journal.after",  # it is noted; nothing that depends on it is done
    "agent.ordered",  # an order is in the journal, its folder not made
    "agent.prepared",  # its folder is made; that we are about to ask the scheduler is not noted
    "agent.intended",  # about to ask the scheduler
    "agent.submitted",  # the scheduler has the job; the agent has not noted it
    "agent.fetched",  # a model is at the facility
    "agent.posted",  # standing work is laid out
    "agent.brought",  # work for a further part is laid into the folder of a job that stays
    "agent.uploaded",  # the bytes are at the coordinator; it was not told so
    "agent.committed",  # the coordinator has it; the agent has not noted it
    "agent.scoring",  # the scheduler has a job that scores a model
)

WORKER: Final = (
    "worker.written",  # the update's file is there, the result is not
    "worker.handed_in",  # the result is there; of a job that stays, it does not look for further work yet
    "worker.found",  # a job that stays has found further work; that it takes it is not written
    "worker.taken",  # that is written; its training has not begun
)

RENEWAL: Final = (
    "credential.given",  # a new credential is known at the server; who asked for it was not answered
    "credential.came",  # it is where it was asked for; it is not written
    "credential.kept",  # it is written; it was not used yet
    "credential.used",  # it is used for the first time; the one before works still
)
"""Of credentials, once in months: no run meets them by itself."""

MASKS: Final = (
    "mask.held",  # an update is kept until a group is there; the coordinator was not told so
    "mask.bound",  # which group it is masked for is written down; nothing is masked
    "mask.made",  # it is masked; nothing has left
    "mask.given",  # the coordinator has it; the agent has not cleared it away
    "mask.kept",  # what was given has its name at the coordinator; nobody was told so
)
"""Of masked updates, in the agent but for the last."""

POINTS: Final = (*COORDINATOR, *AGENT, *WORKER)

_name = ""
_left = 0


def arm() -> None:
    """Read the variable; done on import, and by who forks processes of one that has imported us."""
    global _name, _left
    _name, _, count = os.environ.get("FEDQUEUE_FAILPOINT", "").partition(":")
    _left = int(count or 1) if _name else 0


def failpoint(name: str) -> None:
    global _left
    if _left and name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


arm()
