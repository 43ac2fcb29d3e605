"""PBS by its own commands: qsub, qstat -x -f -F json (one id a call), qselect (to find a job by name), qdel.

Tried against recordings of OpenPBS 23.06 only, never against a live server from this code. What is in no recording
(other codes, a server without a history, JSON that is none) is from its source and its issues.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import nan
from typing import Any

from fedqueue.forecasting.state import Listed
from fedqueue.history.lines import duration
from fedqueue.runtime.schedulers.base import (
    JobRequest,
    JobStatus,
    Outcome,
    Phase,
    SchedulerUnreachableError,
    SubmitRefusedError,
)
from fedqueue.runtime.schedulers.command import Answer, environment, program, run, user
from fedqueue.runtime.schedulers.settings import PbsSettings, clamp_wall

# Exit codes of its commands: the last byte of the error's number, 15001 and up, or 255. An unknown id and a dead server
# both print good JSON without jobs: the code tells.
FINISHED = 35
NO_HISTORY = 36
UNKNOWN_ID = 153
NO_QUEUE = 170  # also for an id that is none
EXITING = (168, 202, 237)  # not in this state, exits already, is being deleted
# No connection (162, 186, 255), an error inside the server (163), a broken exchange (183, 208), no connection to spare
# (185), going down (212): the job may or may not be there.
UNREACHABLE = (162, 163, 183, 185, 186, 208, 212, 255)
# Too many jobs of ours (38, 39, 198), try again (104), the queue is closed (173), resources unavailable (196).
FOR_NOW = (38, 39, 104, 173, 196, 198)

PHASES: dict[str, Phase] = {
    "Q": "waiting",
    "H": "waiting",
    "W": "waiting",
    "T": "waiting",  # on its way to another server
    "R": "running",
    "E": "running",  # it exits; how is not said yet
    "S": "running",
    "U": "running",
    "B": "running",
    "F": "ended",
    "X": "ended",
}
DELETED = 91  # substate
OVER_WALL_TIME = -29  # Exit_status
# Exit_status when the node could not start the job or lost it, or a hook of the site said no.
NODE_FAULTS = range(-20, 0)
NEVER = "Can Never Run"  # how a comment begins
NOT_LAUNCHED = "too many failed attempts to run"  # in the comment of a job that PBS holds for it
TRANSIENT = ("would exceed", "maximum number of jobs", "temporarily", "try again")  # in the words of a refusal


class PbsScheduler:
    kind = "pbs"

    def __init__(self, settings: PbsSettings) -> None:
        self.settings = settings

    def submit(self, request: JobRequest) -> str:
        after = request.after
        if after is not None and not self.poll([after]):
            after = None  # forgotten, so it has ended; qsub would take the dependency and then drop the job
        answer = self._call("qsub", *self._options(request, after))
        if answer.code != 0:
            raise refusal(answer)
        job_id = answer.out.strip()
        if not job_id or len(job_id.split()) != 1:
            raise SchedulerUnreachableError(f"qsub: no job id in its answer {answer.out.strip()!r}")
        return job_id

    def find(self, name: str) -> str | None:
        answer = self._ask("qselect", "-u", user(), "-N", name)
        if answer.code != 0:
            raise SchedulerUnreachableError(f"qselect: {answer.said}")
        ids = answer.out.split()
        return ids[-1] if ids else None

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        found = {}
        for job_id in ids:  # two ids in a call would give the first job only, and say nothing
            # Its times are text in the time zone of qstat, and name no zone.
            answer = self._ask("qstat", "-f", "-F", "json", job_id, TZ="UTC")
            if answer.code in (UNKNOWN_ID, NO_QUEUE):
                continue
            if answer.code != 0:
                raise SchedulerUnreachableError(f"qstat: {answer.said}")
            found[job_id] = read_answer(answer.out, job_id)
        return found

    def cancel(self, job_id: str) -> None:
        answer = self._call("qdel", job_id)
        if answer.code not in (0, FINISHED, UNKNOWN_ID, *EXITING):
            raise SchedulerUnreachableError(f"qdel: {answer.said}")

    def estimate(self, wall_seconds: float, waiting: Sequence[str]) -> float | None:
        """That of the newest of ours that waits: PBS plans for jobs that it has, and only if it was set up to."""
        if not waiting:
            return None
        answer = self._call("qstat", "-f", "-F", "json", waiting[-1], TZ="UTC")
        return read_estimates(answer.out, time.time()).get(waiting[-1]) if answer.code == 0 else None

    def listing(self) -> dict[str, Listed]:
        answer = self._call("qstat", "-f", "-F", "json", TZ="UTC")
        if answer.code != 0:
            raise SchedulerUnreachableError(f"qstat: {answer.said}")
        return read_listing(answer.out)

    def _options(self, request: JobRequest, after: str | None) -> list[str]:
        settings = self.settings
        chunk = {"ncpus": settings.cpus_per_node, "ngpus": settings.gpus_per_node, "mem": settings.memory}
        select = ":".join(
            [str(settings.nodes), *(f"{key}={value}" for key, value in chunk.items() if value is not None)]
        )
        seconds = int(clamp_wall(request.wall_seconds, settings))
        wall = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        options = ["-N", request.name, "-l", f"select={select}", "-l", f"walltime={wall}"]
        # Joined, and written where it belongs at once (-k oed); else it appears when the job has ended.
        options += ["-j", "oe", "-o", str(request.output), "-k", "oed"]
        if settings.place is not None:
            options += ["-l", f"place={settings.place}"]
        if settings.queue is not None:
            options += ["-q", settings.queue]
        if settings.account is not None:
            options += ["-A", settings.account]
        if after is not None:
            options += ["-W", f"depend=afterany:{after}"]
        # The executable form: a script would get a login shell above it, which dies of the signals meant for the job.
        return [*options, *settings.extra, "--", "/bin/bash", "-l", str(request.script)]

    def _ask(self, name: str, *arguments: str, **changes: str) -> Answer:
        """Also of what has ended. A server that keeps no history refuses to be asked for it; what has ended is unknown
        to it."""
        answer = self._call(name, "-x", *arguments, **changes)
        if answer.code == NO_HISTORY or "maintain job history" in answer.err:
            return self._call(name, *arguments, **changes)
        return answer

    def _call(self, name: str, *arguments: str, **changes: str) -> Answer:
        settings = self.settings
        return run([program(settings.bin, name), *arguments], environment(changes), settings.timeout_seconds)


def refusal(answer: Answer) -> SubmitRefusedError | SchedulerUnreachableError:
    """What the failure of qsub means.

    >>> refusal(Answer(code=188, out="", err="qsub: Job violates queue and/or server resource limits")).transient
    False
    """
    lines = [line for line in answer.err.splitlines() if line.startswith("qsub: ")]  # its usage may follow
    reason = (lines[0] if lines else answer.said).removeprefix("qsub: ")
    if answer.code in UNREACHABLE or "cannot connect" in reason:
        return SchedulerUnreachableError(f"qsub: {reason}")
    transient = answer.code in FOR_NOW or any(words in reason.lower() for words in TRANSIENT)
    return SubmitRefusedError(reason, transient=transient)


def read_answer(text: str, job_id: str) -> JobStatus:
    """The one job in the answer of qstat."""
    number = job_id.partition(".")[0]  # the name of the server may follow, short or long
    try:
        jobs = json.loads(text, strict=False).get("Jobs")  # values may hold bare control characters
        job = next((job for name, job in jobs.items() if name.partition(".")[0] == number), None)
    except ValueError:
        job = picked(text) if re.search(rf'"{re.escape(number)}[."]', text) else None
    except AttributeError:
        job = None
    if not isinstance(job, Mapping):
        return JobStatus(phase="unknown", reason="qstat: no job in its answer")
    return read_status(job)


def picked(text: str) -> dict[str, str]:
    """The fields of a job from an answer that is no JSON. It has a line for each field, and variables of the job break
    it: 005 stands there as a number, quotes and backslashes as they are. The first of a name counts.

    >>> picked('"job_state":"F",\\n"Variable_List":{\\n"CODE":005\\n},\\n"Exit_status":7\\n')
    {'job_state': 'F', 'CODE': '005', 'Exit_status': '7'}
    """
    found: dict[str, str] = {}
    for name, quoted, number in re.findall(r'^\s*"(\w+)":\s*(?:"(.*)"|([-\d]+)),?\s*$', text, re.MULTILINE):
        found.setdefault(name, quoted or number)
    return found


def read_estimates(text: str, now: float) -> dict[str, float]:
    """Seconds until start by job id, from `qstat -f -F json`. Only what is queued counts: the record of a job keeps its
    last estimate after it ran.

    >>> job = '{"job_state": "Q", "estimated": {"start_time": "Thu Jan  1 00:02:08 1970"}}'
    >>> read_estimates('{"Jobs": {"36.pbs-host": ' + job + '}}', now=100.0)
    {'36.pbs-host': 28.0}
    """
    found = {}
    for name, job in read_jobs(text).items():
        estimated = job.get("estimated") if job.get("job_state") == "Q" else None
        said = estimated.get("start_time") if isinstance(estimated, Mapping) else None
        moment = epoch(said)  # in some versions it is the number of seconds
        if moment is not None:
            found[name] = max(0.0, moment - now)
    return found


def read_listing(text: str) -> dict[str, Listed]:
    """Jobs by id, from `qstat -f -F json`: those that wait for their turn or run, not what is held."""
    found = {}
    for name, job in read_jobs(text).items():
        state, asked = job.get("job_state"), job.get("Resource_List")
        if state not in ("Q", "R", "E") or not isinstance(asked, Mapping):
            continue
        eligible, nodes = epoch(job.get("etime")), whole(asked.get("nodect"))
        started = None if state == "Q" else epoch(job.get("stime"))
        if eligible is None or nodes is None or (state != "Q" and started is None):
            continue
        try:
            limit = duration(str(asked.get("walltime")))
        except ValueError:  # it asked for none
            limit = nan
        found[name] = Listed(submitted=eligible, started=started, requested=limit, procs=nodes)
    return found


def read_jobs(text: str) -> dict[str, Mapping[str, Any]]:
    """All jobs of an answer by id. If a variable of one breaks the JSON, the others are read all the same."""
    try:
        jobs = json.loads(text, strict=False).get("Jobs")  # values may hold bare control characters
    except AttributeError:
        return {}
    except ValueError:
        jobs = {}
        for name, job in re.findall(r'^\t\t"([^"]+)":\t(\{\n.*?^\t\t\})', text, re.DOTALL | re.MULTILINE):
            with suppress(ValueError):
                jobs[name] = json.loads(job, strict=False)
    if not isinstance(jobs, Mapping):
        return {}
    return {str(name): job for name, job in jobs.items() if isinstance(job, Mapping)}


def read_status(job: Mapping[str, Any]) -> JobStatus:
    state, comment = str(job.get("job_state", "")), str(job.get("comment") or "")
    phase = PHASES.get(state, "unknown")
    code = whole(job.get("Exit_status")) if phase == "ended" else None
    runs = whole(job.get("run_count")) or 0
    incarnation = runs if phase == "waiting" else max(runs - 1, 0)
    dropped = phase == "ended" and code is None and whole(job.get("substate")) != DELETED
    not_launched = phase == "waiting" and NOT_LAUNCHED in comment
    never = not_launched or (phase == "waiting" and comment.startswith(NEVER))
    return JobStatus(
        phase=phase,
        reason=f"dropped because of its dependency {job.get('depend', '')}".strip() if dropped else comment or state,
        never_starts=comment if never else None,
        bad_luck=not_launched,
        name=job.get("Job_Name"),
        eligible_at=_eligible_at(job, phase, incarnation),
        started_at=epoch(job.get("stime")) if phase in ("running", "ended") else None,
        ended_at=_ended_at(job) if phase == "ended" else None,  # while a second run goes on it is that of the first
        incarnation=incarnation,
        outcome=_outcome(job, code) if phase == "ended" else None,
        exit_code=None if code is None or code < 0 else code - 128 if code > 256 else code,
    )


def _eligible_at(job: Mapping[str, Any], phase: Phase, incarnation: int) -> float | None:
    """qtime counts holds and dependencies, etime does not. A rerun keeps both; such a job is eligible since its run
    before ended, which is forgotten when the next one has."""
    etime, obit = epoch(job.get("etime")), epoch(job.get("obittime"))
    if incarnation == 0 or etime is None:
        return etime
    return max(etime, obit) if obit is not None and phase != "ended" else None


def _outcome(job: Mapping[str, Any], code: int | None) -> Outcome:
    """An end without Exit_status is a job that never ran, whatever the substate: not a success."""
    if whole(job.get("substate")) == DELETED or code is None:
        return "cancelled"
    if code == OVER_WALL_TIME:
        return "timeout"
    if code in NODE_FAULTS:
        return "node_fail"
    return "completed" if code == 0 else "failed"


def _ended_at(job: Mapping[str, Any]) -> float | None:
    """A job that never ran has no obituary, but a place in the history."""
    return epoch(job.get("obittime")) or epoch(job.get("history_timestamp"))


def whole(value: object) -> int | None:
    """A whole number, in quotes or not.

    >>> [whole(value) for value in (-29, "271", "many", None)]
    [-29, 271, None, None]
    """
    text = str(value)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def epoch(value: object) -> float | None:
    """'Mon Nov 16 05:51:14 2026', UTC, or seconds, as in history_timestamp."""
    seconds = whole(value)
    if seconds is not None:
        return float(seconds)
    try:
        return float(calendar.timegm(time.strptime(str(value), "%a %b %d %H:%M:%S %Y")))
    except ValueError:
        return None
