"""Who did what, from where, and when: a file of lines that are on the disk before what they tell of takes effect.

So nothing that was done is missing; what was begun and could not be done has a second line that says so. What
strangers can bring about as often as they like, refusals, is one line a minute for each, with how many there were.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from fedqueue.errors import RunFolderError
from fedqueue.files import only_mine, sync, writing
from fedqueue.protocol.contract import one_line

FILE: Final = "audit.jsonl"
LENGTH: Final = 200
"""Characters of a value: names may come from strangers."""
SECONDS: Final = 60.0
"""Between two lines about refusals of the same kind to the same."""
MOST_KINDS: Final = 100
"""Of refusals that are told apart; the others are one kind."""

Key = tuple[str, str, str]


@dataclass
class _Refusals:
    """Of one kind."""

    written: float  # monotonic
    unwritten: int = 0


class Audit:
    """Of a federation, or of a server with one run. Any thread may note."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / FILE
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals: dict[Key, _Refusals] = {}
        if self._path.exists():
            only_mine(self._path)

    def note(self, what: str, who: str, address: str, **facts: str) -> None:
        """On the disk when it returns."""
        line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "what": what, "who": who, "from": address}
        text = json.dumps({key: one_line(value)[:LENGTH] for key, value in {**line, **facts}.items()})
        with self._lock, writing(self._path):
            is_new = not self._path.exists()
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(file).st_size
                cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # the machine ended in the middle of a line
                os.write(file, f"{chr(10) * cut}{text}\n".encode())
                os.fsync(file)
            finally:
                os.close(file)
            if is_new:
                sync(self._path.parent)

    def refusals(self, what: str, who: str, address: str) -> list[tuple[Key, int]]:
        """Count one more; of which kinds a line is due, with how many: for `note_refusals`. Costs no disk."""
        now = self._clock()
        with self._lock:
            key = (what, who, address)
            if key not in self._refusals and len(self._refusals) >= MOST_KINDS:
                key = (what, "", "many addresses")
            known = self._refusals.setdefault(key, _Refusals(now - SECONDS))
            known.unwritten += 1
            return self._due(now)

    def _due(self, now: float) -> list[tuple[Key, int]]:
        over = {key: found for key, found in self._refusals.items() if now - found.written >= SECONDS}
        due = [(key, found.unwritten) for key, found in over.items() if found.unwritten]
        for key, found in over.items():
            if found.unwritten:
                found.written, found.unwritten = now, 0
            else:
                del self._refusals[key]
        return due

    def note_refusals(self, due: list[tuple[Key, int]]) -> None:
        for (what, who, address), number in due:
            self.note(what, who, address, times=str(number))

    def close(self) -> None:
        """What was refused since the last line about it."""
        with self._lock:
            due = self._due(self._clock() + SECONDS)
        with suppress(Exception):  # there may be no room, and the server ends all the same
            self.note_refusals(due)


def read_audit(folder: Path) -> Iterator[dict[str, str]]:
    """Line by line; one that was cut short by the end of the machine is left out."""
    try:
        with (folder / FILE).open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict) and {"at", "what", "who", "from"} <= found.keys():
                        yield found
    except FileNotFoundError:
        raise RunFolderError(f"{folder}: has no {FILE}: nothing that is noted has happened there") from None
