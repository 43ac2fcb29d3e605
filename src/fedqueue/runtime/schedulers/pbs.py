"""PBS by its own commands: qsub, qstat -x -f -F json (one id a call), qselect (to find a job by name), qdel.

Tried against recordings of OpenPBS 23.06 only, never against a live server from this code.
"""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

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

# Exit codes of its commands. An unknown id and a dead server both print good JSON without jobs: the code tells.
FINISHED = 35
UNKNOWN_ID = 153
NO_QUEUE = 170  # also for an id that is none
NO_CONNECTION = (162, 255)

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
NODE_FAULTS = range(-12, 0)  # Exit_status when the node could not start the job or lost it; in no recording
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
        answer = self._call("qselect", "-x", "-u", user(), "-N", name)
        if answer.code != 0:
            raise SchedulerUnreachableError(f"qselect: {answer.said}")
        ids = answer.out.split()
        return ids[-1] if ids else None

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        found = {}
        for job_id in ids:  # two ids in a call would give the first job only, and say nothing
            # Its times are text in the time zone of qstat, and name no zone.
            answer = self._call("qstat", "-x", "-f", "-F", "json", job_id, TZ="UTC")
            if answer.code in (UNKNOWN_ID, NO_QUEUE):
                continue
            if answer.code != 0:
                raise SchedulerUnreachableError(f"qstat: {answer.said}")
            found[job_id] = read_answer(answer.out, job_id)
        return found

    def cancel(self, job_id: str) -> None:
        answer = self._call("qdel", job_id)
        if answer.code not in (0, FINISHED, UNKNOWN_ID):
            raise SchedulerUnreachableError(f"qdel: {answer.said}")

    def estimate(self, wall_seconds: float, waiting: Sequence[str]) -> float | None:
        """That of the newest of ours that waits: PBS plans for jobs that it has, and only if it was set up to."""
        if not waiting:
            return None
        answer = self._call("qstat", "-f", "-F", "json", waiting[-1], TZ="UTC")
        return read_estimates(answer.out, time.time()).get(waiting[-1]) if answer.code == 0 else None

    def listing(self) -> None:
        return None

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
    if answer.code in NO_CONNECTION or "cannot connect" in reason:
        return SchedulerUnreachableError(f"qsub: {reason}")
    return SubmitRefusedError(reason, transient=any(words in reason.lower() for words in TRANSIENT))


def read_answer(text: str, job_id: str) -> JobStatus:
    """The one job in the answer of qstat."""
    try:
        jobs = json.loads(text, strict=False).get("Jobs", {})  # values may hold bare control characters
        job = jobs[job_id] if job_id in jobs else next(iter(jobs.values()))
    except (ValueError, AttributeError, StopIteration):
        return JobStatus(phase="unknown", reason="qstat: no job in its answer")
    return read_status(job)


def read_estimates(text: str, now: float) -> dict[str, float]:
    """Seconds until start by job id, from `qstat -f -F json`. Only what is queued counts: the record of a job keeps its
    last estimate after it ran.

    >>> job = '{"job_state": "Q", "estimated": {"start_time": "Thu Jan  1 00:02:08 1970"}}'
    >>> read_estimates('{"Jobs": {"36.pbs-host": ' + job + '}}', now=100.0)
    {'36.pbs-host': 28.0}
    """
    try:
        jobs = json.loads(text, strict=False).get("Jobs", {})  # values may hold bare control characters
    except (ValueError, AttributeError):
        return {}
    found = {}
    for name, job in jobs.items() if isinstance(jobs, Mapping) else ():
        estimated = job.get("estimated") if isinstance(job, Mapping) and job.get("job_state") == "Q" else None
        said = estimated.get("start_time") if isinstance(estimated, Mapping) else None
        # Some versions print the number of seconds.
        moment = float(said) if isinstance(said, int | float) else epoch(said) if isinstance(said, str) else None
        if moment is not None:
            found[str(name)] = max(0.0, moment - now)
    return found


def read_status(job: dict[str, Any]) -> JobStatus:
    state, comment = str(job.get("job_state", "")), str(job.get("comment", ""))
    phase = PHASES.get(state, "unknown")
    code = job.get("Exit_status") if phase == "ended" else None
    runs = int(job.get("run_count", 0))
    dropped = phase == "ended" and code is None and job.get("substate") != DELETED
    return JobStatus(
        phase=phase,
        reason=f"dropped because of its dependency {job.get('depend', '')}".strip() if dropped else comment or state,
        never_starts=comment if phase == "waiting" and comment.startswith("Can Never Run") else None,
        eligible_at=epoch(job.get("etime")),  # qtime counts holds and dependencies
        started_at=epoch(job.get("stime")) if phase in ("running", "ended") else None,
        ended_at=_ended_at(job) if phase == "ended" else None,  # while a second run goes on it is that of the first
        incarnation=runs if phase == "waiting" else max(runs - 1, 0),
        outcome=_outcome(job, code) if phase == "ended" else None,
        exit_code=None if code is None or code < 0 else code - 128 if code > 256 else code,
    )


def _outcome(job: dict[str, Any], code: int | None) -> Outcome:
    """An end without Exit_status is a job that never ran, whatever the substate: not a success."""
    if job.get("substate") == DELETED or code is None:
        return "cancelled"
    if code == OVER_WALL_TIME:
        return "timeout"
    if code in NODE_FAULTS:
        return "node_fail"
    return "completed" if code == 0 else "failed"


def _ended_at(job: dict[str, Any]) -> float | None:
    """A job that never ran has no obituary, but a place in the history."""
    history = job.get("history_timestamp")
    return epoch(job.get("obittime")) or (None if history is None else float(history))


def epoch(text: str | None) -> float | None:
    """'Mon Nov 16 05:51:14 2026', UTC."""
    try:
        return None if text is None else float(calendar.timegm(time.strptime(text, "%a %b %d %H:%M:%S %Y")))
    except ValueError:
        return None
