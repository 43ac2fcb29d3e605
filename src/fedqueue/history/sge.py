"""Grid Engine's accounting file: colon-separated, its fields as `man accounting` numbers them (there from 1)."""

from __future__ import annotations

import re
from math import nan
from typing import Final

from fedqueue.history.lines import NEVER_STARTED, PART_OF_JOB, Format, LoggedJob, Options, Tally, duration, job

JOB, SUBMISSION, START, END, FAILED = 5, 8, 9, 10, 11
SLOTS, TASK, CATEGORY, PE_TASK = 34, 35, 39, 41
FIELDS: Final = 45  # more: a colon in the category, or the further fields of other builds
RESCHEDULED: Final = ("24", "25")  # this incarnation was put back into the queue
_REMEMBERED: Final = 10_000  # rescheduled jobs whose next incarnation is awaited
_LIMIT: Final = re.compile(r"\bh_rt=(\d+:\d\d:\d\d|\d+)")
_MILLISECONDS: Final = 1e11  # a Unix time above this counts them


def begins(line: str) -> bool:
    fields = line.split(":")
    return len(fields) > CATEGORY and all(fields[place].isdecimal() for place in (JOB, SUBMISSION, START, END, SLOTS))


class SgeReader:
    """Grid Engine keeps the first submission time of a job that it put back: only the first wait of such a job is one,
    and the following incarnations are left out."""

    def __init__(self, options: Options, tally: Tally) -> None:
        tally.base = 0.0
        tally.counts = "slots"
        self._again: dict[tuple[str, str], None] = {}

    def read(self, line: str) -> LoggedJob | str | None:
        if len(line) <= 2 or line.startswith("#"):
            return None
        fields = line.rstrip("\n").split(":")
        if len(fields) <= CATEGORY:
            raise ValueError(f"{len(fields)} fields instead of {FIELDS}")
        if len(fields) > PE_TASK and fields[PE_TASK] != "NONE" and len(fields) <= FIELDS:
            return PART_OF_JOB
        submit, start, end = (_time(fields[place]) for place in (SUBMISSION, START, END))
        slots = int(fields[SLOTS])
        key = (fields[JOB], fields[TASK])
        if key in self._again:
            if fields[FAILED].strip() not in RESCHEDULED:
                del self._again[key]
            return "ran more than once, and its wait in between is not known"
        if fields[FAILED].strip() in RESCHEDULED:
            self._again[key] = None
            if len(self._again) > _REMEMBERED:
                del self._again[next(iter(self._again))]
        if not start > 0:
            return NEVER_STARTED
        limit = _LIMIT.search(":".join(fields[CATEGORY:]))
        return job(submit, nan, start, end, duration(limit[1]) if limit else nan, slots)


def _time(text: str) -> float:
    """Unix time in seconds, from seconds or milliseconds."""
    value = int(text)
    if value < 0 or value > 1000 * _MILLISECONDS:
        raise ValueError(f"{text!r} is no Unix time")
    return value / 1000 if value > _MILLISECONDS else float(value)


SGE: Final = Format(name="sge", article="a Grid Engine accounting file", begins=begins, reader=SgeReader)
