"""The Standard Workload Format of the Parallel Workloads Archive: 18 numbers a line, -1 where unknown."""

from __future__ import annotations

import re
from math import nan
from typing import Final

from fedqueue.history.lines import NEVER_STARTED, NO_PROCS, PART_OF_JOB, Format, LoggedJob, Options, Tally, number

FIELDS: Final = 18
_LEAST: Final = 9  # up to the requested time
_START: Final = re.compile(r";\s*UnixStartTime:\s*(\d+)")
_HEADER: Final = re.compile(r";\s*\w+:")
_NUMBERS: Final = re.compile(r"(?:\s*-?\d+(?:\.\d+)?(?=\s)){9,}\s*$")  # up to the requested time
_CANCELLED: Final = 5
_PARTS: Final = (2, 3, 4)  # lines for the parts of a job that was checkpointed; another one sums them up


def begins(line: str) -> bool:
    return bool(_HEADER.match(line) or _NUMBERS.match(line))


class SwfReader:
    def __init__(self, options: Options, tally: Tally) -> None:
        self._tally = tally

    def read(self, line: str) -> LoggedJob | str | None:
        if line.startswith(";"):
            start = _START.match(line)
            if start and int(start[1]) > 0:
                self._tally.base = number(start[1])
            return None
        cells = line.split()
        if not cells:
            return None
        if len(cells) < _LEAST:
            raise ValueError(f"{len(cells)} numbers instead of {FIELDS}")
        submit, wait, run, allocated = map(number, cells[1:5])
        asked, requested = number(cells[7]), number(cells[8])
        status = int(number(cells[10])) if len(cells) > 10 else -1
        if status in _PARTS:
            return PART_OF_JOB
        if wait < 0 or (status == _CANCELLED and run <= 0):
            return NEVER_STARTED
        procs = asked if asked > 0 else allocated
        if procs <= 0:
            return NO_PROCS
        return submit, wait, run if run >= 0 else nan, requested if requested > 0 else nan, procs


SWF: Final = Format(name="swf", article="a Standard Workload Format log", begins=begins, reader=SwfReader)
