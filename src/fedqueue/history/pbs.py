"""Accounting logs of OpenPBS, PBS Professional and Torque: `date;type;job;key=value ...`, a file a day.

Only E records count, which say how a job ended. Their times are Unix times.
"""

from __future__ import annotations

import re
from math import nan
from typing import Final

from fedqueue.history.lines import PART_OF_JOB, Format, LoggedJob, Options, Tally, duration, job, number

_RECORD: Final = re.compile(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d;[A-Za-z]+;[^;]*;")


def begins(line: str) -> bool:
    return bool(_RECORD.match(line))


class PbsReader:
    def __init__(self, options: Options, tally: Tally) -> None:
        tally.base = 0.0
        tally.counts = "cores" if options.cores else "nodes"
        self._cores = options.cores

    def read(self, line: str) -> LoggedJob | str | None:
        if not line.strip():
            return None
        if not _RECORD.match(line):
            raise ValueError("not of the form `date;type;job;key=value ...`")
        _, kind, ident, text = line.split(";", 3)
        if kind != "E":
            return None
        if "[]" in ident:
            return PART_OF_JOB  # an array as a whole; its jobs have records of their own
        facts = dict(part.partition("=")[::2] for part in text.split())
        if _seconds(facts, "run_count") > 1:
            return "ran more than once, and only the last start is known"
        submitted, eligible = _waits_since(facts)
        return job(
            submitted,
            eligible,
            _seconds(facts, "start"),
            _seconds(facts, "end"),
            duration(facts["Resource_List.walltime"]) if facts.get("Resource_List.walltime") else nan,
            self._procs(facts),
        )

    def _procs(self, facts: dict[str, str]) -> float:
        select = facts.get("Resource_List.select", "") or facts.get("Resource_List.nodes", "")
        nodes = _seconds(facts, "Resource_List.nodect")
        cores = _seconds(facts, "Resource_List.ncpus")
        if self._cores:
            return cores if cores > 0 else _cores(select)
        if nodes > 0:
            return nodes
        return sum(count for count, _ in _parts(select)) if select else cores


def _waits_since(facts: dict[str, str]) -> tuple[float, float]:
    """Submission, and when it became eligible. A move from a routing queue sets qtime and etime anew: only ctime has
    the submission, and what the job waited in the queue before counts.

    >>> _waits_since({"ctime": "100", "qtime": "160", "etime": "160"})
    (100.0, nan)
    """
    created, queued, eligible = (_seconds(facts, key) for key in ("ctime", "qtime", "etime"))
    if created < queued:
        return created, nan if eligible <= queued else eligible
    return queued if queued > 0 else created, eligible


def _seconds(facts: dict[str, str], key: str) -> float:
    text = facts.get(key)
    return number(text) if text else nan


def _parts(select: str) -> list[tuple[int, str]]:
    """Each part of `2:ncpus=4+1:ncpus=8` or `2:ppn=4`: how many, of what."""
    found = []
    for part in select.split("+"):
        count, _, rest = part.partition(":")
        found.append((int(count), rest) if count.isdecimal() else (1, part))
    return found


def _cores(select: str) -> float:
    """
    >>> _cores("2:ncpus=4:mem=2gb+1:ncpus=8"), _cores("2:ppn=4")
    (16, 8)
    """
    if not select:
        return nan
    each = re.compile(r"(?:ncpus|ppn)=(\d+)")
    return sum(count * int(match[1] if (match := each.search(rest)) else 1) for count, rest in _parts(select))


PBS: Final = Format(name="pbs", article="a PBS accounting log", begins=begins, reader=PbsReader)
