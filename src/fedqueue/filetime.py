"""One clock for login and compute nodes: the stamps that their shared file system gives to files just written.

Clocks of machines may be minutes apart, so nobody compares the time of day of one with that of another. When a file
was written is for its file system to say, and everybody reads the same; "now" is the stamp of a file that the reader
writes itself. (Where a file system takes its stamps from the machine that writes, clocks are as good as before.)

Jobs use it too: Python 3.9 and the standard library.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

APART = 0.5
"""Seconds: two readings that differ by less say the same; some file systems stamp in steps of a second."""


class FileClock:
    """Seconds by the file system of a folder; from one reading to the next it goes on by this machine's own count."""

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
