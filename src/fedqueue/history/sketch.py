"""Quantiles of any number of waits in a fixed amount of memory: counts in bins whose width grows with the value."""

from __future__ import annotations

from math import ceil, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedqueue.history.joblog import Floats, Ints

ERROR: Final = 0.01  # a quantile is within this share of the exact one
_GROWTH: Final = 1 + ERROR
_LEAST: Final = 1e-3  # seconds; anything less is 0
_MOST: Final = 1e12
_FIRST: Final = ceil(log(_LEAST) / log(_GROWTH))
BINS: Final = ceil(log(_MOST) / log(_GROWTH)) - _FIRST + 2  # the first is for 0


class Sketch:
    """One distribution a cell. A quantile is the smallest value that this share of the values do not exceed, to within
    1 % of it."""

    def __init__(self, cells: int = 1) -> None:
        self._counts: NDArray[np.int64] = np.zeros((cells, BINS), dtype=np.int64)
        self._sums: Floats = np.zeros((cells, BINS))

    def add(self, values: Floats, cells: Ints | int = 0) -> None:
        with np.errstate(divide="ignore"):
            bins = np.ceil(np.log(values) / log(_GROWTH)) - _FIRST + 1
        places = np.where(values < _LEAST, 0, np.clip(bins, 0, BINS - 1)).astype(np.int64)
        where = cells * BINS + places
        np.add.at(self._counts.reshape(-1), where, 1)
        np.add.at(self._sums.reshape(-1), where, values)

    def count(self, cell: int | None = None) -> int:
        return int(self._of(cell).sum())

    def merged(self, cells: Ints) -> Sketch:
        """Cells put together: value i of `cells` says into which of the new cells the old one i goes."""
        made = Sketch(int(cells.max()) + 1)
        np.add.at(made._counts, cells, self._counts)
        np.add.at(made._sums, cells, self._sums)
        return made

    def quantile(self, level: float, cell: int | None = None) -> float | None:
        """None of no value."""
        counts = self._of(cell)
        whole = int(counts.sum())
        if not whole:
            return None
        place = int(np.searchsorted(np.cumsum(counts), max(1, ceil(level * whole - 1e-9))))
        if place == 0:
            return 0.0
        sums = self._sums[:, place] if cell is None else self._sums[cell, place]
        return float(sums.sum() / counts[place])  # their mean: exact where all of a bin are the same

    def _of(self, cell: int | None) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._counts.sum(axis=0) if cell is None else self._counts[cell]
        return found
