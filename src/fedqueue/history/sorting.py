"""Write a trace in order of submission from jobs in any order, with bounded memory: sorted runs in a temporary file,
then a merge of them."""

from __future__ import annotations

import heapq
import os
import tempfile
from collections.abc import Iterator
from itertools import chain
from math import inf
from pathlib import Path
from types import TracebackType
from typing import IO, Final

import numpy as np

from fedqueue.errors import StorageError
from fedqueue.history.joblog import Floats
from fedqueue.history.lines import Job
from fedqueue.history.read import by_submission
from fedqueue.history.trace import write_trace

RUN: Final = 200_000  # jobs sorted at once: 8 MB, and some times as much while they are sorted
BLOCK: Final = 512  # jobs read from a run at a time, while all runs are merged
WIDTH: Final = 5


class TraceWriter:
    """Takes chunks; `finish` writes the file. What is unknown is kept as infinity, which can be compared."""

    def __init__(self, run: int = RUN) -> None:
        self._run = run
        self._held: list[Floats] = []
        self._count = 0
        self._runs: list[tuple[int, int]] = []  # (first row, rows) in the file
        self._file: IO[bytes] | None = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, rows: Floats) -> None:
        self._held.append(np.where(np.isnan(rows), inf, rows))
        self._count += len(rows)
        if self._count >= self._run:
            self._spill()

    def finish(self, path: Path, *, clock: bool) -> None:
        """`clock`: times of submission are Unix times. There must be a job."""
        merged = self._merged()
        first = next(merged)
        begin = first[0]
        shifted = ((row[0] - begin, *row[1:]) for row in chain((first,), merged))
        write_trace(path, begin if clock else None, shifted)

    def _merged(self) -> Iterator[Job]:
        if self._file is None:  # all of them are here
            return iter(list(map(tuple, self._sorted().tolist())))
        if self._count:
            self._spill()
        return heapq.merge(*(self._rows(begin, count) for begin, count in self._runs))

    def _sorted(self) -> Floats:
        rows = np.concatenate(self._held) if self._held else np.empty((0, WIDTH))
        self._held, self._count = [], 0
        found: Floats = rows[by_submission(rows)]
        return found

    def _spill(self) -> None:
        rows = self._sorted()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            begin = self._file.seek(0, os.SEEK_END) // (8 * WIDTH)
            self._file.write(rows.tobytes())
        except OSError as error:
            where = f"{tempfile.gettempdir()}: cannot be written: {error.strerror}"
            raise StorageError(f"{where}; set TMPDIR to a folder with room") from None
        self._runs.append((begin, len(rows)))

    def _rows(self, begin: int, count: int) -> Iterator[Job]:
        assert self._file is not None, "it was spilled"
        for place in range(begin, begin + count, BLOCK):
            self._file.seek(8 * WIDTH * place)
            data = self._file.read(8 * WIDTH * min(BLOCK, begin + count - place))
            yield from map(tuple, np.frombuffer(data).reshape(-1, WIDTH).tolist())
