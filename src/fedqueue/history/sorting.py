"""Write a trace in order of submission from jobs in any order, with bounded memory: SQLite sorts them on the disk."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from math import inf
from pathlib import Path

import numpy as np

from fedqueue.errors import StorageError
from fedqueue.history.joblog import Floats
from fedqueue.history.trace import write_trace


class TraceWriter:
    """Takes chunks; `finish` writes the file. What is unknown is kept as infinity, which can be compared."""

    def __init__(self) -> None:
        self._jobs = sqlite3.connect("")  # a temporary file of its own, as soon as it does not fit into memory
        self._jobs.execute("CREATE TABLE jobs (submit REAL, wait REAL, run REAL, requested REAL, procs REAL)")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.close()

    def add(self, rows: Floats) -> None:
        with _on_disk():
            self._jobs.executemany(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?)", np.where(np.isnan(rows), inf, rows).tolist()
            )

    def finish(self, path: Path, *, clock: bool) -> None:
        """`clock`: times of submission are Unix times. There must be a job."""
        with _on_disk():
            rows = self._jobs.execute("SELECT * FROM jobs ORDER BY submit, wait, run, requested, procs")
            first = next(rows)
            begin = first[0]
            shifted = ((row[0] - begin, *row[1:]) for row in chain((first,), rows))
            write_trace(path, begin if clock else None, shifted)


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        where = f"{tempfile.gettempdir()}: cannot be written: {error}"
        raise StorageError(f"{where}; set TMPDIR to a folder with room") from None
