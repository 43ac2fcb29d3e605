"""Files that are whole or not there, and on the disk when we say so: coordinator and agent write them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fedqueue.errors import StorageError, what_to_do
from fedqueue.failpoints import failpoint
from fedqueue.protocol.codec import body

PIECE_BYTES: Final = 64 << 10
"""So few that they are still in the processor's cache when they are hashed and written. Larger pieces, and a thread
that hashes and writes them, were slower."""


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
        with self._disk():
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
            with self._disk():
                while piece:
                    written = os.pwrite(self._file, piece, self.have)
                    self._digest.update(piece[:written])
                    piece, self.have = piece[written:], self.have + written

    def restart(self) -> None:
        with self._disk():
            os.ftruncate(self._file, 0)
        self._digest, self.have = hashlib.sha256(), 0

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Give it its name. It is not forced to the disk: what can be fetched again need not outlive the machine, and
        an agent looks over its models when it starts."""
        with self._disk():
            self._path.replace(self._target)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written: {error.strerror}; {what_to_do(error)}") from None


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
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


def _open_secret(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_EXCL, 0o600)
