"""What `sacct -P` prints: a header line, then a line a job, in any order of columns. Times are local."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, tzinfo
from functools import lru_cache
from math import isnan, nan
from typing import Final

from fedqueue.errors import DataError
from fedqueue.history.lines import NEVER_STARTED, PART_OF_JOB, Format, LoggedJob, Options, Tally, duration, job, number

SEPARATORS: Final = ("|", "\t", ";", ",")
NODES: Final = ("nnodes", "allocnodes", "reqnodes")
CORES: Final = ("ncpus", "alloccpus", "reqcpus")
_COLUMNS: Final = ("submit", "eligible", "start", "end", "timelimit", "timelimitraw", "state")
_IDS: Final = ("jobid", "jobidraw")
_NAMES: Final = ("jobname", "comment", "workdir", "submitline")  # may hold the separator
_NO_TIME: Final = frozenset(("", "Unknown", "None", "N/A", "(null)"))
_NO_LIMIT: Final = frozenset((*_NO_TIME, "UNLIMITED", "Partition_Limit", "INVALID", "NOT_SET"))
_NOT_STARTED: Final = frozenset(("PENDING", "REVOKED", "REQUEUE_HOLD", "REQUEUE_FED"))
_MAY_NOT_HAVE_STARTED: Final = frozenset(("CANCELLED", "DEADLINE"))
_MINUTE: Final = len("2026-01-05T10:00")


def begins(line: str) -> bool:
    return _heads(line) is not None


def _heads(line: str) -> tuple[str, list[str]] | None:
    """Separator and column names of a header line."""
    for separator in SEPARATORS:
        names = [name.strip().lower() for name in line.lstrip("\ufeff").split(separator)]
        if "submit" in names and "start" in names:
            return separator, names
    return None


class SacctReader:
    def __init__(self, options: Options, tally: Tally) -> None:
        tally.base, tally.local = 0.0, True
        self._tally = tally
        self._cores = options.cores
        self._minute = lru_cache(maxsize=32_768)(_clock(options.zone()))
        self._separator = ""
        self._width = 0
        self._name = -1
        self._places: dict[str, int] = {}
        self._procs: list[int] = []

    def read(self, line: str) -> LoggedJob | str | None:
        if not self._separator:
            self._head(line)
            return None
        cells = line.rstrip("\n").split(self._separator)
        if len(cells) != self._width:
            if not line.strip():
                return None
            cells = self._mended(cells)
        cells.append("")  # stands for every column that is not there
        places = self._places
        ident, state = cells[places["id"]], cells[places["state"]]
        if "." in ident:
            return "job step"
        if "+" in ident and not ident.endswith("+0"):
            return PART_OF_JOB
        if not ident[:1].isdecimal() and places["id"] < self._width:
            if _heads(line):  # dumps put one after the other
                return None
            raise ValueError(f"{ident!r} is no job")
        start, end = self._time(cells[places["start"]]), self._time(cells[places["end"]])
        word = state.partition(" ")[0]
        if isnan(start) or word in _NOT_STARTED or (word in _MAY_NOT_HAVE_STARTED and end <= start):
            return NEVER_STARTED
        return job(
            self._time(cells[places["submit"]]),
            self._time(cells[places["eligible"]]),
            start,
            end,
            self._limit(cells),
            next((number(cells[place]) for place in self._procs if cells[place] not in ("", "0")), nan),
        )

    def _head(self, line: str) -> None:
        found = _heads(line)
        if found is None:
            return
        self._separator, names = found
        self._width = len(names)
        self._name = next((names.index(name) for name in _NAMES if name in names), -1)
        preferred = (*CORES, *NODES) if self._cores else (*NODES, *CORES)
        first = next((name for name in preferred if name in names), None)
        if first is None:
            raise DataError(f"column NNodes or NCPUS is missing; found {', '.join(filter(None, names))}")
        kind = CORES if first in CORES else NODES
        self._tally.counts = "cores" if kind is CORES else "nodes"
        self._procs = [names.index(name) for name in kind if name in names]
        empty = self._width
        self._places = {
            "id": next((names.index(name) for name in _IDS if name in names), empty),
            **{name: names.index(name) if name in names else empty for name in _COLUMNS},
        }

    def _mended(self, cells: list[str]) -> list[str]:
        """A line whose job name holds the separator, put together again."""
        extra = len(cells) - self._width
        if extra < 0 or self._name < 0:
            raise ValueError(f"{len(cells)} columns instead of {self._width}")
        end = self._name + extra + 1
        return [*cells[: self._name], self._separator.join(cells[self._name : end]), *cells[end:]]

    def _limit(self, cells: list[str]) -> float:
        text, minutes = cells[self._places["timelimit"]], cells[self._places["timelimitraw"]]
        if text not in _NO_LIMIT:
            return duration(text)
        return nan if minutes in _NO_LIMIT else 60 * number(minutes)

    def _time(self, text: str) -> float:
        if text in _NO_TIME:
            return nan
        if text.isdecimal():  # SLURM_TIME_FORMAT=%s
            return number(text)
        second, offset = text[_MINUTE + 1 : _MINUTE + 3], text[_MINUTE + 3 :]
        if text[_MINUTE : _MINUTE + 1] != ":" or not second.isdecimal() or (offset and offset[0] not in "+-Z"):
            raise ValueError(f"{text!r} is no time such as 2026-01-05T10:00:00")
        return self._minute(text[:_MINUTE] + offset) + int(second)  # SLURM_TIME_FORMAT may add an offset


def _clock(zone: tzinfo | None) -> Callable[[str], float]:
    def minute(text: str) -> float:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp()

    return minute


SACCT: Final = Format(name="sacct", article="a dump of sacct", begins=begins, reader=SacctReader)
