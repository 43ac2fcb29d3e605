"""What every reader of a scheduler's log shares: how a file is opened, what a line may be, and what was left out."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import IO, Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from fedqueue.errors import ConfigError, DataError

LoggedJob = tuple[float, float, float, float, float]
"""submit, wait, run, requested, procs of one job that started, in seconds; nan: unknown (run and requested)."""

NEVER_STARTED: Final = "never started"
STARTS_EARLY: Final = "starts before it was submitted"
NO_PROCS: Final = "number of processors unknown"
PART_OF_JOB: Final = "part of another job"
MOST_SECONDS: Final = 1e11  # a time beyond this is a mistake, or counts milliseconds
PACKED: Final[dict[bytes, Callable[..., IO[str]]]] = {  # how a file begins, and what reads it
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
ARCHIVES: Final = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to read what a log leaves open."""

    timezone: str | None = None  # of local times; None: that of this machine
    facility: str | None = None  # of a ledger; None: all
    cores: bool = False  # count cores where the log has both nodes and cores

    def zone(self) -> ZoneInfo | None:
        if self.timezone is None:
            return None
        try:
            return ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigError(f"--timezone {self.timezone}: no such zone; name one such as Europe/Berlin") from None


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a reader met."""

    format: str = ""
    jobs: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    broken: int = 0  # lines that could not be understood ...
    first_broken: str | None = None  # ... and what is wrong with the first
    base: float | None = None  # Unix time of second 0 of its times; None: unknown
    local: bool = False  # its times are local ones
    counts: str = "processors"  # what `procs` counts

    @property
    def lines(self) -> int:
        """Those that stand for a job, or should."""
        return self.jobs + sum(self.dropped.values()) + self.broken

    def take(self, other: Tally) -> None:
        """Add what was met in a further file."""
        self.format, self.counts = other.format, other.counts
        self.jobs += other.jobs
        self.dropped += other.dropped
        self.broken += other.broken
        self.first_broken = self.first_broken or other.first_broken
        self.local |= other.local


class Reader(Protocol):
    """Of one file in one format, line by line."""

    def read(self, line: str) -> LoggedJob | str | None:
        """A job; or why it is left out; or None for a line that stands for no job. ValueError: it is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`begins` tells a file by one of its first lines."""

    name: str
    article: str
    begins: Callable[[str], bool]
    reader: Callable[[Options, Tally], Reader]


def job(submit: float, eligible: float, start: float, end: float, requested: float, procs: float) -> LoggedJob | str:
    """A job from its times, nan where unknown; or why it cannot count.

    A job that was held, or waited for another one, counts as submitted when it became eligible: from then on the
    queue alone decides. So `submit + wait` is always its start.

    >>> job(100.0, 160.0, 200.0, 500.0, 600.0, 4)
    (160.0, 40.0, 300.0, 600.0, 4)
    """
    if not start > 0:
        return NEVER_STARTED
    since = eligible if eligible > submit else submit
    if not since > 0:
        return "time of submission unknown"
    if start < since:
        # Some schedulers stamp the start a second before they note that the job is eligible.
        if start < submit or start < since - 1:
            return STARTS_EARLY
        since = start
    if not 0 < procs < MOST_SECONDS:
        return NO_PROCS
    return since, start - since, end - start if end >= start else nan, requested if requested > 0 else nan, procs


def number(text: str) -> float:
    """A number of seconds; ValueError if it is none, or not one that can be."""
    value = float(text)
    if not -MOST_SECONDS < value < MOST_SECONDS:
        raise ValueError(f"{text.strip()!r} is no number of seconds")
    return value


@lru_cache(maxsize=4096)  # limits come again and again
def duration(text: str) -> float:
    """Seconds in `[days-][hours:]minutes:seconds`, `days-hours[:minutes]` or plain seconds.

    >>> duration("1-02:00:00"), duration("30:00"), duration("90"), duration("2-12")
    (93600.0, 1800.0, 90.0, 216000.0)
    """
    days, dash, rest = text.rpartition("-")
    parts = [number(part) for part in rest.split(":")]
    if len(parts) > 3 or min(parts) < 0:
        raise ValueError(f"{text!r} is no duration")
    if dash:
        hours, minutes, seconds = (*parts, 0.0, 0.0, 0.0)[:3]
        return 86_400 * number(days) + 3600 * hours + 60 * minutes + seconds
    total = 0.0
    for part in parts:
        total = 60 * total + part
    return total


def unreadable(path: Path, error: BaseException) -> DataError:
    """Which file cannot be read, why, and what to do: schedulers keep their logs from users."""
    where = getattr(error, "filename", None) or path
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    advice = "; ask the administrators for a copy, and name that" if isinstance(error, PermissionError) else ""
    return DataError(f"{where}: cannot be read: {why}{advice}")


def open_text(path: Path) -> IO[str]:
    """Lines of a file that may be compressed, whatever its name says; what is no UTF-8 is replaced."""
    with path.open("rb") as raw:
        first = raw.read(6)
    archive = next((name for begin, name in ARCHIVES.items() if first.startswith(begin)), None)
    if archive:
        raise DataError(f"{path}: is packed with {archive}; unpack it first (gzip, bzip2 and xz can stay)")
    opened = next((reader for begin, reader in PACKED.items() if first.startswith(begin)), open)
    return opened(path, "rt", encoding="utf-8", errors="replace")
