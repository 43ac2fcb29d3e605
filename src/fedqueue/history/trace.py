"""Our own trace files: CSV with the columns submit_s, wait_s, run_s, requested_s and procs, in seconds.

A line `# epoch 1609437616` before the header says at which Unix time second 0 is. Other columns are ignored; an empty
cell is an unknown figure.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable
from contextlib import suppress
from math import isfinite, nan
from pathlib import Path
from typing import Final

from fedqueue.errors import DataError
from fedqueue.files import writing
from fedqueue.history.joblog import JobLog
from fedqueue.history.lines import MOST_SECONDS, NO_PROCS, Format, LoggedJob, Options, Tally, number

COLUMNS: Final = ("submit_s", "wait_s", "run_s", "requested_s", "procs")
NEEDED: Final = ("submit_s", "wait_s", "requested_s", "procs")
_EPOCH: Final = re.compile(r"#\s*epoch\s+(-?\d+(?:\.\d+)?)\s*$")


def begins(line: str) -> bool:
    return not {"submit_s", "wait_s"}.isdisjoint(_heads(line)) or bool(_EPOCH.match(line))


def _heads(line: str) -> list[str]:
    return [head.strip().strip('"') for head in line.lstrip("\ufeff").split(",")]


class TraceReader:
    def __init__(self, options: Options, tally: Tally) -> None:
        self._tally = tally
        self._places: list[int] = []  # of COLUMNS; -1: none

    def read(self, line: str) -> LoggedJob | str | None:
        if not self._places or line.startswith("#"):
            self._head(line)
            return None
        cells = line.rstrip("\n").split(",") if '"' not in line else next(csv.reader([line]))
        if len(cells) == 1 and not cells[0].strip():
            return None
        cells.append("")  # stands for a column that is not there
        submit, wait, run, requested, procs = (float(cells[place] or nan) for place in self._places)
        if not (abs(submit) < MOST_SECONDS and 0 <= wait < MOST_SECONDS):
            raise ValueError(f"submit_s {submit:g}, wait_s {wait:g}")
        if not 0 < procs < MOST_SECONDS:
            return NO_PROCS
        return (
            submit,
            wait,
            run if 0 <= run < MOST_SECONDS else nan,
            requested if 0 < requested < MOST_SECONDS else nan,
            procs,
        )

    def _head(self, line: str) -> None:
        if line.startswith("#"):
            epoch = _EPOCH.match(line)
            if epoch:
                self._tally.base = number(epoch[1])
            return
        heads = _heads(line)
        missing = [name for name in NEEDED if name not in heads]
        if missing:
            raise DataError(f"column {missing[0]} is missing; a trace needs {', '.join(NEEDED)}")
        self._places = [heads.index(name) if name in heads else -1 for name in COLUMNS]


TRACE: Final = Format(name="trace", article="a trace", begins=begins, reader=TraceReader)


def write_log(log: JobLog, path: Path) -> None:
    """As a trace; compressed if the name ends in .gz. `read_log` gives it back as it was."""
    columns = (log.submit.tolist(), log.wait.tolist(), log.run.tolist(), log.requested.tolist(), log.procs.tolist())
    write_trace(path, log.epoch, zip(*columns, strict=True))


def write_trace(path: Path, epoch: float | None, rows: Iterable[LoggedJob]) -> None:
    """Whole or not at all: written beside, then renamed."""
    beside = path.with_name(f"{path.name}.part")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (gzip.open if path.suffix == ".gz" else open)(beside, "wt", encoding="utf-8") as out:
                if epoch is not None:
                    out.write(f"# epoch {cell(epoch)}\n")
                out.write(",".join(COLUMNS) + "\n")
                for row in rows:
                    out.write(",".join(map(cell, row)) + "\n")
            beside.replace(path)
        finally:
            with suppress(OSError):
                beside.unlink()


def cell(value: float) -> str:
    """A number as short as it can be said exactly; empty for nan.

    >>> cell(60.0), cell(0.1), cell(float("nan"))
    ('60', '0.1', '')
    """
    if not isfinite(value):
        return ""
    return str(int(value)) if value == int(value) else repr(float(value))
