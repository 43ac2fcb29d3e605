"""What a queue did: one row for each job that started, in columns, by submission."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JobLog:
    """Jobs in order of submission. Times are seconds; those of submission count from the first job."""

    name: str
    submit: Floats
    wait: Floats  # from being eligible to the start
    run: Floats  # nan: unknown
    requested: Floats  # wall time; nan: unknown
    procs: Ints  # nodes or cores, whichever the log counts
    epoch: float | None = None  # Unix time of second 0; None: unknown

    def __len__(self) -> int:
        return len(self.submit)

    def only(self, which: NDArray[np.bool_]) -> JobLog:
        """Those jobs alone; second 0 stays where it was."""
        columns = {name: getattr(self, name)[which] for name in ("submit", "wait", "run", "requested", "procs")}
        return replace(self, **columns)

    def of_shape(self, procs: tuple[int, int] | None = None, max_requested: float | None = None) -> JobLog:
        """Jobs of so many processors, from the fewest to the most, that asked for so many seconds at the most."""
        return self.only(self.which(procs, max_requested))

    def which(self, procs: tuple[int, int] | None = None, max_requested: float | None = None) -> NDArray[np.bool_]:
        """Whether each job is of the shape."""
        return of_shape(self.procs, self.requested, procs, max_requested)

    def none_like(self, procs: tuple[int, int] | None, max_requested: float | None) -> str:
        """What to say when no job has this shape."""
        asked = [] if procs is None else [f"{procs[0]} to {procs[1]} processors"]
        asked += [] if max_requested is None else [f"at most {max_requested:g} s requested"]
        there = f"; its jobs have {self.procs.min()} to {self.procs.max()} processors" if len(self) else ""
        return f"no job has this shape ({', '.join(asked) or 'any'}){there}"


def of_shape(
    procs: Floats | Ints, requested: Floats, between: tuple[int, int] | None, max_requested: float | None
) -> NDArray[np.bool_]:
    found = np.ones(len(procs), dtype=np.bool_)
    if between is not None:
        found &= (procs >= between[0]) & (procs <= between[1])
    if max_requested is not None:
        found &= requested <= max_requested  # one that is not known is not at most anything
    return found
