"""What keeps a run from going on until somebody mends it: a file that is gone, changed or locked, a full disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fedqueue.errors import FedQueueError, what_to_do
from fedqueue.tensorfile import TensorFileError

SHORTEST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 60.0


class Patience:
    """When to try again: after a second, then after twice as long each time, a minute at most."""

    def __init__(self) -> None:
        self._seconds = SHORTEST_SECONDS
        self._next: float | None = None  # monotonic; None: nothing is waited for

    @property
    def waits(self) -> bool:
        """It was in vain, and it is not yet time to try again."""
        return self._next is not None and time.monotonic() < self._next

    @property
    def is_over(self) -> bool:
        """It was in vain, and it is time to try again."""
        return self._next is not None and time.monotonic() >= self._next

    def in_vain(self) -> None:
        self._next = time.monotonic() + self._seconds
        self._seconds = min(2 * self._seconds, LONGEST_SECONDS)

    def try_now(self) -> None:
        self._seconds, self._next = SHORTEST_SECONDS, time.monotonic()

    def done(self) -> None:
        self._seconds, self._next = SHORTEST_SECONDS, None


def reason(error: Exception, folder: Path, names: Mapping[str, str]) -> str:
    """What is wrong, with which file, and what to do, in one line. `names`: what is called how, by its sha256."""
    if isinstance(error, TensorFileError):
        name = names.get(error.path.stem)
        if name is None:
            return str(error)
        return f"the coordinator's own copy of {name}, {error.path.relative_to(folder)}, {error.reason}"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}; {what_to_do(error)}"
    if isinstance(error, FedQueueError):
        return str(error)
    return f"ours: {type(error).__name__}: {error}; please report it"
