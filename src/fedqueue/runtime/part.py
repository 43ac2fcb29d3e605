"""A file that is still arriving."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fedqueue.errors import StorageError

READ_BYTES: Final = 1 << 20
AHEAD: Final = 3
"""Pieces that may wait to be written."""


class Part:
    """What has arrived of a file, in `target`.part, and its sha256 so far. Leaves the part when it is closed.

    A thread hashes and writes while the next bytes arrive.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._path = target, target.with_name(target.name + ".part")
        self._digest = hashlib.sha256()
        self._have = 0
        self._behind = ThreadPoolExecutor(1, "fedqueue-part")
        self._under_way: deque[Future[None]] = deque()
        self._failed = False

    def __enter__(self) -> Part:
        with self._disk():
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            while data := os.pread(self._file, READ_BYTES, self._have):
                self._digest.update(data)
                self._have += len(data)
        return self

    def __exit__(self, *_: object) -> None:
        self._behind.shutdown()
        os.close(self._file)

    @property
    def have(self) -> int:
        """Bytes that have arrived and are written."""
        self._settle()
        return self._have

    def append(self, data: bytes) -> None:
        self._settle(AHEAD)
        self._under_way.append(self._behind.submit(self._write, data))

    def _settle(self, leave: int = 0) -> None:
        """Waits until at most so many pieces are still to be written."""
        while len(self._under_way) > leave:
            self._under_way.popleft().result()

    def _write(self, data: bytes) -> None:
        if self._failed:  # a piece before this one is not there
            return
        self._failed = True
        self._digest.update(data)
        view = memoryview(data)
        with self._disk():
            while view:
                count = os.pwrite(self._file, view, self._have)
                view, self._have = view[count:], self._have + count
        self._failed = False

    def restart(self) -> None:
        self._settle()
        with self._disk():
            os.ftruncate(self._file, 0)
        self._digest, self._have = hashlib.sha256(), 0

    def sha256(self) -> str:
        self._settle()
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
            raise StorageError(f"{self._path}: cannot be written: {error.strerror}; make room, then again") from None
