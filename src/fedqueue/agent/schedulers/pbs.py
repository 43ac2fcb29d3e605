"""PBS by its own commands: qsub, qstat -x -f -F json (one id a call), qselect (to find a job by name), qdel.

Tried against recordings of OpenPBS 23.06, and against a stand-in that does what a live one was seen to do. What is in
no recording (other codes, a server without a history, JSON that is none) is from its source and its issues.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import nan
from typing import Any

from fedqueue.agent.schedulers.base import (
    JobRequest,
    JobStatus,
    Outcome,
    PbsSettings,
    Phase,
    SchedulerUnreachableError,
    SubmitRefusedError,
    clamp_wall,
)
from fedqueue.agent.schedulers.command import Answer, environment, program, run, user
from fedqueue.forecasting.state import Listed
from fedqueue.history.lines import duration

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
WAITS_FOR_ANOTHER = 22  # substate of a job that is held because of its dependency
HOLDERS = {"o": "an operator", "p": "an administrator", "u": "its owner"}
NEVER = "Can Never Run"  # how a comment begins
NOT_LAUNCHED = "too many failed attempts to run"  # in the comment of a job that PBS holds for it
TRANSIENT = ("would exceed", "maximum number of jobs", "temporarily", "try again")  # in the words of a refusal

# In an answer that is no JSON: a job, from its id to the brace that stands where its line began; and a field of it.
JOB = re.compile(r'^([ \t]+)"(\d[^"]*)":\s*(\{\n.*?^\1\})', re.DOTALL | re.MULTILINE)
FIELD = re.compile(
    r'^([ \t]*"[^"\n]*":)(?![ \t]*\{\n)([ \t]*)(.*?)(,?)$(?=\n(?:[ \t]*"[^"\n]*":|[ \t]*\}))', re.DOTALL | re.MULTILINE
)


class PbsScheduler:
    kind = "pbs"

    def __init__(self, settings: PbsSettings) -> None:
        self.settings = settings

    def submit(self, request: JobRequest) -> str:
        after = request.after
        if after is not None and self._is_over(after):
            after = None  # of one that is forgotten qsub would take the dependency and then drop the job
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
            job = self._record(job_id)
            if job is not None:
                found[job_id] = self._status(job_id, job)
        return found

    def cancel(self, job_id: str) -> None:
        answer = self._call("qdel", job_id)
        if answer.code not in (0, FINISHED, UNKNOWN_ID, *EXITING):
            raise SchedulerUnreachableError(f"qdel: {answer.said}")

    def estimate(self, wall_seconds: float) -> None:
        """None: it plans only jobs that it has."""

    def planned(self, job_id: str) -> float | None:
        """If it was set up to plan."""
        answer = self._call("qstat", "-f", "-F", "json", job_id, TZ="UTC")
        return read_estimates(answer.out).get(job_id) if answer.code == 0 else None

    def listing(self) -> dict[str, Listed]:
        answer = self._call("qstat", "-f", "-F", "json", TZ="UTC")
        if answer.code != 0:
            raise SchedulerUnreachableError(f"qstat: {answer.said}")
        return read_listing(answer.out)

    def _record(self, job_id: str) -> Mapping[str, Any] | None:
        """What PBS says of a job, empty if that cannot be understood; None: it knows no such job."""
        # Its times are text in the time zone of qstat, and name no zone.
        answer = self._ask("qstat", "-f", "-F", "json", job_id, TZ="UTC")
        if answer.code in (UNKNOWN_ID, NO_QUEUE):
            return None
        if answer.code != 0:
            raise SchedulerUnreachableError(f"qstat: {answer.said}")
        return read_answer(answer.out, job_id)

    def _status(self, job_id: str, job: Mapping[str, Any]) -> JobStatus:
        """With its id, and with what only the record of the job before it can tell."""
        status, before = read_status(job), predecessor(job)
        if status.never_starts is None:
            status = replace(status, held=held(job, job_id))
        if before is None or status.incarnation > 0:
            return status
        if waits_for_another(job) and self._is_over(before):
            job = self._record(job_id) or {}  # it may have been released in between
            status = read_status(job)
            if waits_for_another(job):
                why = f"it comes after {before}, which is gone, and PBS holds it all the same"
                return replace(status, never_starts=why, bad_luck=True)
        if moved(job):  # it was not eligible while it waited for the other
            ended = read_status(self._record(before) or {}).ended_at
            since = max(ended, epoch(job.get("ctime")) or 0.0) if ended is not None else epoch(job.get("etime"))
            status = replace(status, eligible_at=since)
        return status

    def _is_over(self, job_id: str) -> bool:
        job = self._record(job_id)
        return job is None or PHASES.get(str(job.get("job_state"))) == "ended"

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


def read_answer(text: str, job_id: str) -> Mapping[str, Any]:
    """The one job in the answer of qstat; empty if there is none that can be understood."""
    number = job_id.partition(".")[0]  # the name of the server may follow, short or long
    return next((job for name, job in read_jobs(text).items() if name.partition(".")[0] == number), {})


def read_estimates(text: str) -> dict[str, float]:
    """The whole wait that is planned, in seconds, by job id, from `qstat -f -F json`. Only what is queued counts: the
    record of a job keeps its last estimate after it ran.

    >>> job = '{"job_state": "Q", "ctime": "100", "etime": "100", "estimated": {"start_time": "128"}}'
    >>> read_estimates('{"Jobs": {"36.pbs-host": ' + job + '}}')
    {'36.pbs-host': 28.0}
    """
    found = {}
    for name, job in read_jobs(text).items():
        estimated = job.get("estimated") if job.get("job_state") == "Q" else None
        said = estimated.get("start_time") if isinstance(estimated, Mapping) else None
        moment, since = epoch(said), _first_eligible_at(job)  # in some versions it is the number of seconds
        if moment is not None and since is not None:
            found[name] = max(0.0, moment - since)
    return found


def read_listing(text: str) -> dict[str, Listed]:
    """Jobs by id, from `qstat -f -F json`: those that wait for their turn or run, not what is held."""
    found = {}
    for name, job in read_jobs(text).items():
        state, asked = job.get("job_state"), job.get("Resource_List")
        if state not in ("Q", "R", "E") or not isinstance(asked, Mapping):
            continue
        eligible, nodes = _first_eligible_at(job), nodes_of(asked)
        if eligible is None or nodes is None:
            continue
        started = None if state == "Q" else epoch(job.get("stime"))  # of one that starts just now it comes later
        try:
            limit = duration(str(asked.get("walltime")))
        except ValueError:  # it asked for none
            limit = nan
        found[name] = Listed(submitted=eligible, started=started, requested=limit, procs=nodes)
    return found


def read_jobs(text: str) -> dict[str, Mapping[str, Any]]:
    """All jobs of an answer by id. If a variable of one breaks the JSON, each is mended and read by itself."""
    try:
        answer = json.loads(text, strict=False)  # values may hold bare control characters
        jobs = answer.get("Jobs") if isinstance(answer, Mapping) else None
    except ValueError:
        jobs = {}
        for _, name, job in JOB.findall(text):
            with suppress(ValueError):
                jobs[name] = json.loads(mended(job), strict=False)
    if not isinstance(jobs, Mapping):
        return {}
    return {str(name): job for name, job in jobs.items() if isinstance(job, Mapping)}


def mended(text: str) -> str:
    """JSON of a job whose variables are no JSON values. Each field has a line of its own, whatever the indentation: PBS
    prints what looks like a number to it as it is (.5, nan, +5, 005), and quotes and backslashes too.

    >>> mended('{\\n"Variable_List":{\\n"W":.5,\\n"SAID":"a "b" c"\\n},\\n"substate":42\\n}')
    '{\\n"Variable_List":{\\n"W":".5",\\n"SAID":"a \\\\"b\\\\" c"\\n},\\n"substate":42\\n}'
    """
    return FIELD.sub(_mended_field, text)


def _mended_field(field: re.Match[str]) -> str:
    name, gap, value, end = field.groups()
    try:
        json.loads(value, strict=False)
    except ValueError:
        quoted = len(value) > 1 and value[0] == value[-1] == '"'
        value = json.dumps(value[1:-1] if quoted else value)
    return f"{name}{gap}{value}{end}"


def read_status(job: Mapping[str, Any]) -> JobStatus:
    if not job:
        return JobStatus(phase="unknown", reason="qstat: no job in its answer")
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
    """A rerun keeps etime; such a job is eligible since its run before ended, which is forgotten when the next one
    has."""
    eligible, obit = _first_eligible_at(job), epoch(job.get("obittime"))
    if incarnation == 0 or eligible is None:
        return eligible
    return max(eligible, obit) if obit is not None and phase != "ended" else None


def _first_eligible_at(job: Mapping[str, Any]) -> float | None:
    """qtime counts holds and dependencies, etime does not. A routing queue gives no etime, and a move to another queue
    sets both anew: only ctime has the submission."""
    etime, created = epoch(job.get("etime")), epoch(job.get("ctime"))
    if etime is None:
        return created if job.get("job_state") == "Q" else None
    return created if moved(job) else etime


def moved(job: Mapping[str, Any]) -> bool:
    """Whether it came from another queue, and was eligible when it came."""
    created, queued, etime = (epoch(job.get(name)) for name in ("ctime", "qtime", "etime"))
    return None not in (created, queued, etime) and created < queued and etime == queued  # type: ignore[operator]


def predecessor(job: Mapping[str, Any]) -> str | None:
    """The job that it comes after. Its attribute is gone once that has ended, what qsub was given stays.

    >>> predecessor({"Submit_arguments": "-N a -W depend=afterany:35.pbs-host -- /bin/bash"})
    '35.pbs-host'
    """
    said = f"{job.get('depend', '')} {job.get('Submit_arguments', '')}"
    match = re.search(r"afterany:(\d+[^\s@:,]*)", said)
    return match[1] if match else None


def waits_for_another(job: Mapping[str, Any]) -> bool:
    return job.get("job_state") == "H" and whole(job.get("substate")) == WAITS_FOR_ANOTHER


def held(job: Mapping[str, Any], job_id: str) -> str | None:
    """A system hold is for PBS itself to release: it waits for another job, or could not be launched.

    >>> held({"job_state": "H", "Hold_Types": "u"}, "37.pbs-host")
    'held by its owner (Hold_Types u); to let it start: `qrls 37.pbs-host`'
    """
    kinds = str(job.get("Hold_Types", ""))
    kind = next((kind for kind in HOLDERS if kind in kinds), None)
    if job.get("job_state") != "H" or kind is None:
        return None
    release = f"qrls {job_id}" if kind == "u" else f"qrls -h {kind} {job_id}"
    return f"held by {HOLDERS[kind]} (Hold_Types {kinds}); to let it start: `{release}`"


def nodes_of(asked: Mapping[str, Any]) -> int | None:
    """PBS counts the nodes when a job comes into the queue in which it will run.

    >>> nodes_of({"select": "2:ncpus=4+1:ncpus=8"})
    3
    """
    counted = whole(asked.get("nodect"))
    if counted is not None or not asked.get("select"):
        return counted
    return sum(whole(part.partition(":")[0]) or 1 for part in str(asked["select"]).split("+"))


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
