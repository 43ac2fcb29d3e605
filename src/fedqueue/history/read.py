"""Read a scheduler's log, whichever: its content says what it is.

Line by line and never whole, so that `chunks` takes as much memory for a gigabyte as for a megabyte.
"""

from __future__ import annotations

import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from fedqueue.errors import DataError
from fedqueue.history.joblog import Floats, JobLog
from fedqueue.history.ledgers import ledger_jobs, ledger_of
from fedqueue.history.lines import Format, LoggedJob, Options, Reader, Tally, open_text, unreadable
from fedqueue.history.pbs import PBS
from fedqueue.history.sacct import SACCT
from fedqueue.history.sge import SGE
from fedqueue.history.swf import SWF
from fedqueue.history.trace import NEEDED, TRACE

HEADED: Final = (TRACE, SACCT)  # one header line says what they are
FORMATS: Final[tuple[Format, ...]] = (*HEADED, SWF, PBS, SGE)
KNOWN: Final = "our trace CSV, SWF, sacct -P, PBS accounting, Grid Engine accounting, our ledgers"
FIRST_LINES: Final = 100  # of them one must show what the file is
MOST_BROKEN: Final = 0.1  # share of lines that cannot be understood; more, and the file is something else
CHUNK: Final = 8192  # jobs at a time
LONGEST: Final = 1 << 22  # characters of a line; a longer one is several broken ones
DAY_FILE: Final = re.compile(r"\d{8}(?:\.gz)?$")  # of a PBS accounting folder

UNREADABLE: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)


def read_log(path: Path, options: Options | None = None) -> JobLog:
    """All jobs of a log that started, in order of submission. About 150 bytes a job while it reads, 40 afterwards."""
    tally = Tally()
    return as_log(path.name, chunks(jobs(path, options or Options(), tally)), tally, str(path))


def as_log(name: str, parts: Iterable[Floats], tally: Tally, where: str) -> JobLog:
    """From chunks; DataError if there is no job in them."""
    found = list(parts)
    if not found:
        raise DataError(f"{where}: {nothing(tally)}")
    rows = np.concatenate(found)
    del found
    rows = rows[by_submission(rows)]
    first = float(rows[0, 0])
    submit, wait, run, requested, procs = (rows[:, place].copy() for place in range(rows.shape[1]))
    return JobLog(
        name=name,
        submit=submit - first,
        wait=wait,
        run=run,
        requested=requested,
        procs=procs.astype(np.int64),
        epoch=None if tally.base is None else tally.base + first,
    )


def by_submission(rows: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Order of rows by submission, then by the other columns: the same jobs are the same log, however they came."""
    order: np.ndarray[tuple[int], np.dtype[np.int64]] = np.lexsort(rows.T[::-1])
    return order


def chunks(found: Iterator[LoggedJob], size: int = CHUNK) -> Iterator[Floats]:
    """Jobs as rows of numbers, some thousands at a time."""
    while part := list(islice(found, size)):
        yield np.array(part, dtype=np.float64)


def jobs(path: Path, options: Options, tally: Tally) -> Iterator[LoggedJob]:
    """Each job that started, in the order of the file; what else is there is counted in `tally`.

    A run folder is read by its ledger, a folder of PBS accounting files day by day.
    """
    try:
        ledger = ledger_of(path)
        if ledger is not None:
            yield from ledger_jobs(ledger, options, tally)
            return
        for file in day_files(path) if path.is_dir() else [path]:
            made = recognise(file)
            if made is None:
                raise DataError(unknown(file))
            with open_text(file) as text:
                lines = iter(partial(text.readline, LONGEST), "")
                yield from parse(lines, made, file, options, tally)
    except UNREADABLE as error:
        raise unreadable(path, error) from None


def day_files(folder: Path) -> list[Path]:
    """Of a PBS accounting folder, in order; a day on which nothing happened has an empty one."""
    found = sorted(file for file in folder.iterdir() if DAY_FILE.match(file.name) and file.stat().st_size)
    if not found:
        raise DataError(f"{folder}: is neither a run folder nor one of PBS accounting files (named YYYYMMDD)")
    return found


def parse(lines: Iterable[str], made: Format, where: Path, options: Options, tally: Tally) -> Iterator[LoggedJob]:
    """Jobs of lines in a format."""
    tally.format = made.name
    before, broken_before = tally.lines, tally.broken
    try:
        reader = made.reader(options, tally)
        read = _counted(reader, tally)
        for place, line in enumerate(lines, 1):
            found = read(line, place)
            if found is not None:
                tally.jobs += 1
                yield found
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    broken, whole = tally.broken - broken_before, tally.lines - before
    if broken > MOST_BROKEN * whole:
        raise DataError(
            f"{where}: cannot be read as {made.article}: {tally.first_broken}; "
            f"{broken} of {whole} lines are not as they must be"
        )


def _counted(reader: Reader, tally: Tally) -> Callable[[str, int], LoggedJob | None]:
    def read(line: str, place: int) -> LoggedJob | None:
        try:
            found = reader.read(line)
        except (ValueError, IndexError, OverflowError) as error:
            tally.broken += 1
            if tally.first_broken is None:
                tally.first_broken = f"line {place}: {error}"
            return None
        if isinstance(found, str):
            tally.dropped[found] += 1
            return None
        return found

    return read


def recognise(path: Path) -> Format | None:
    """The format of a text file, by its first lines; None: none of ours."""
    first = _first_lines(path)
    for one in HEADED:
        if any(map(one.begins, first)):
            return one
    matches = {one.name: sum(map(one.begins, first)) for one in FORMATS}
    best = max(FORMATS, key=lambda one: matches[one.name])
    return best if matches[best.name] else None


def is_log(path: Path) -> bool:
    """Whether a file is a log of one of the known formats; DataError if it cannot be read."""
    try:
        return ledger_of(path) is not None or recognise(path) is not None
    except UNREADABLE as error:
        raise unreadable(path, error) from None


def _first_lines(path: Path) -> list[str]:
    with open_text(path) as text:
        return list(islice(iter(partial(text.readline, 10_000), ""), FIRST_LINES))


def unknown(path: Path) -> str:
    """What is wrong with a file of no format."""
    first = _first_lines(path)
    place, seen = next(((n, line.strip()) for n, line in enumerate(first, 1) if line.strip()), (0, ""))
    if not seen:
        return f"{path}: is empty; known are {KNOWN}"
    shown = "".join(c if c.isprintable() else "?" for c in seen[:50])
    if seen.split()[:1] == ["JobID"] or set(seen) == {"-", " "}:
        return f"{path}: line {place} looks like sacct in columns of blanks; run sacct with -P"
    if seen.count("|") > 3:
        return f"{path}: line {place} looks like sacct without its header; run it without -n: {shown!r}"
    if seen.count(",") + seen.count(";") + seen.count("\t") > 2:
        return f"{path}: line {place}: {shown!r} is no header we know; a CSV needs the columns {', '.join(NEEDED)}"
    return f"{path}: line {place} is of no log we know: {shown!r}; known are {KNOWN}"


def nothing(tally: Tally) -> str:
    """Why there is no job."""
    left_out = ", ".join(f"{count} {why}" for why, count in tally.dropped.most_common())
    return f"holds no job that started{f' ({left_out})' if left_out else ''}"
