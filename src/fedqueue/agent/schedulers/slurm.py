"""Slurm by its own commands: sbatch, scontrol show job, squeue (to find a job by name), scancel.

Tried against Slurm 22.05. Accounting (sacct) is not needed: a job that Slurm has forgotten is simply absent.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Sequence
from math import nan

from fedqueue.agent.schedulers.base import (
    JobRequest,
    JobStatus,
    Outcome,
    Phase,
    SchedulerUnreachableError,
    SlurmSettings,
    SubmitRefusedError,
    clamp_wall,
    last_line,
)
from fedqueue.agent.schedulers.command import Answer, environment, program, run, user
from fedqueue.forecasting.state import Listed
from fedqueue.history.lines import duration

PHASES: dict[str, Phase] = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "REQUEUE_FED": "waiting",
    "SPECIAL_EXIT": "waiting",
    "CONFIGURING": "waiting",  # it has its nodes, and they boot
    "RUNNING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "SIGNALING": "running",
    "RESIZING": "running",
    "STAGE_OUT": "running",
    "COMPLETING": "running",  # its processes are being ended; how it ended is not said yet
}
OUTCOMES: dict[str, Outcome] = {
    "COMPLETED": "completed",
    "FAILED": "failed",
    "OUT_OF_MEMORY": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
}
# Reasons of a waiting job that time does not cure. A limit on what runs at once is not one of them.
NEVER = re.compile(
    r"DependencyNeverSatisfied|BadConstraints|Partition(NodeLimit|TimeLimit|Config)|Invalid(Account|QOS)|ReservationDeleted"
    r"|launch_failed_requeued_held|(Assoc|QOS)Max\w+PerJob\w*|(Assoc|QOS)Grp(?!\w*Run)\w*Minutes\w*"
    r"|(Assoc|QOS)MaxWallDuration\w*|(Assoc|QOS)GrpWall\w*",
    re.IGNORECASE,
)
HELD = re.compile(r"(JobHeldUser)|JobHeldAdmin|job_?requeued_?(in_)?held(_state)?", re.IGNORECASE)
LISTING = "%i|%T|%V|%S|%l|%D"  # id, state, submission, start, limit, nodes
BAD_LUCK = re.compile(r"launch_failed_requeued_held")  # of these, what is no fault of what was asked for
UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connect(ion)? (failure|refused)|communication|timed out|zero bytes"
    r"|authentication|munge|standby|unable to determine this slurmd|could not establish a configuration source"
    r"|unable to (establish controller|resolve)|error reading response|connection reset",
    re.IGNORECASE,
)
TRANSIENT = re.compile(
    r"\w*submit\w*limit|temporarily|try again|too many|queue is full|max(imum)? job count|in progress"
)


class SlurmScheduler:
    kind = "slurm"

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings

    def submit(self, request: JobRequest) -> str:
        answer = self._call("sbatch", *self._options(request), str(request.script))
        if answer.code != 0:
            raise refusal(answer)
        job_id = answer.out.strip().partition(";")[0]  # ID or ID;CLUSTER
        if not job_id.isdigit():
            raise SchedulerUnreachableError(f"sbatch: no job id in its answer {last_line(answer.out)!r}")
        return job_id

    def find(self, name: str) -> str | None:
        answer = self._ask("squeue", "--noheader", "--states=all", f"--name={name}", f"--user={user()}", "--format=%A")
        if answer.code != 0:
            raise SchedulerUnreachableError(f"squeue: {answer.said}")
        ids = sorted((int(word) for word in answer.out.split() if word.isdigit()), reverse=True)
        return str(ids[0]) if ids else None

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        found = {}
        for job_id in ids:  # 6 ms each; `squeue` and `scontrol` of all jobs of a large machine take seconds
            answer = self._ask("scontrol", "--oneliner", "show", "job", job_id)
            if answer.code == 0:
                found[job_id] = read_status(answer.out)
            elif "Invalid job id" not in answer.err + answer.out:
                raise SchedulerUnreachableError(f"scontrol: {answer.said}")
        return found

    def cancel(self, job_id: str) -> None:
        answer = self._ask("scancel", job_id)
        gone = re.search(r"invalid job id|already complet|job not found", answer.err, re.IGNORECASE)
        if answer.code != 0 and not gone:
            raise SchedulerUnreachableError(f"scancel: {answer.said}")

    def estimate(self, wall_seconds: float) -> float | None:
        """sbatch tests it; some sites forbid that."""
        answer = self._ask("sbatch", "--test-only", *self._shape(wall_seconds), "--wrap=true")
        if answer.code != 0:
            return None
        now = read_clock(self._ask("sdiag").out)  # a controller that keeps it to itself is believed to have our time
        return read_test_only(answer.err + answer.out, time.time() if now is None else now)

    def planned(self, job_id: str) -> float | None:
        answer = self._ask("scontrol", "--oneliner", "show", "job", job_id)
        return read_plan(answer.out) if answer.code == 0 else None

    def listing(self) -> dict[str, Listed]:
        answer = self._ask("squeue", "--all", "--noheader", "--states=PENDING,RUNNING", f"--format={LISTING}")
        if answer.code != 0:
            raise SchedulerUnreachableError(f"squeue: {answer.said}")
        return read_listing(answer.out)

    def _options(self, request: JobRequest) -> list[str]:
        output = str(request.output).replace("%", "%%")  # sbatch reads % as the start of a pattern
        given = {
            "job-name": request.name,
            "output": output,
            "open-mode": "append",
            "chdir": request.folder,
            "dependency": None if request.after is None else f"afterany:{request.after}",
        }
        own = [f"--{key}={value}" for key, value in given.items() if value is not None]
        return ["--parsable", *own, *self._shape(request.wall_seconds)]

    def _shape(self, wall_seconds: float) -> list[str]:
        """What every job of ours asks for."""
        settings = self.settings
        given = {
            "time": int(clamp_wall(wall_seconds, settings) // 60),
            "account": settings.account,
            "partition": settings.partition,
            "qos": settings.qos,
            "nodes": settings.nodes,
            "ntasks-per-node": settings.tasks_per_node,
            "cpus-per-task": settings.cpus_per_task,
            "gpus-per-node": settings.gpus_per_node,
            "mem": settings.memory,
            "constraint": settings.constraint,
            "reservation": settings.reservation,
        }
        return [*(f"--{key}={value}" for key, value in given.items() if value is not None), *settings.extra]

    def _ask(self, name: str, *arguments: str) -> Answer:
        """With times in UTC. Not for sbatch: a job inherits what sbatch has."""
        return self._call(name, *arguments, TZ="UTC", SLURM_TIME_FORMAT="standard", LC_ALL="C")

    def _call(self, name: str, *arguments: str, **changes: str) -> Answer:
        env = environment({"SLURM_CONF": self.settings.conf, **changes})
        return run([program(self.settings.bin, name), *arguments], env, self.settings.timeout_seconds)


def refusal(answer: Answer) -> SubmitRefusedError | SchedulerUnreachableError:
    """What the failure of sbatch means.

    >>> text = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    >>> refusal(Answer(code=1, out="", err=text)).transient
    False
    """
    lines = [
        re.sub(r"^(sbatch: )?(error: )?(Batch job submission failed: )?", "", line.strip())
        for line in answer.err.splitlines()
        if line.strip()
    ]
    reason = "; ".join(dict.fromkeys(lines)) or answer.said  # Slurm says which limit it was a line earlier
    if UNREACHABLE.search(reason):
        return SchedulerUnreachableError(f"sbatch: {reason}")
    return SubmitRefusedError(reason, transient=bool(TRANSIENT.search(reason.lower())))


def read_status(line: str) -> JobStatus:
    """One line of `scontrol --oneliner show job`.

    >>> read_status("JobId=7 JobName=a JobState=PENDING Reason=Priority Dependency=(null) Restarts=1").incarnation
    1
    """
    state = field(line, "JobState") or ""
    reason = " ".join(word for word in (state, field(line, "Reason")) if word and word != "None")
    restarts = field(line, "Restarts") or "0"
    incarnation = int(restarts) if restarts.isdigit() else 0
    outcome = OUTCOMES.get(state)
    phase = "ended" if outcome is not None else PHASES.get(state, "unknown")
    if state == "COMPLETING" and incarnation and field(line, "PreemptEligibleTime") is None:
        return JobStatus(
            phase="waiting", reason="REQUEUED", incarnation=incarnation, name=field(line, "JobName")
        )  # its times are those of neither run
    nodes = field(line, "NodeList")  # a job that was cancelled while it waited has a StartTime too, but no nodes
    ran = phase == "running" or (phase == "ended" and nodes is not None)
    return JobStatus(
        phase=phase,
        reason=reason,
        never_starts=field(line, "Reason") if phase == "waiting" and NEVER.search(reason) else None,
        bad_luck=phase == "waiting" and BAD_LUCK.search(reason) is not None,
        held=held(line) if phase == "waiting" else None,
        name=field(line, "JobName"),
        eligible_at=epoch(field(line, "EligibleTime")),
        started_at=epoch(field(line, "StartTime")) if ran else None,  # of a waiting job it is a guess
        ended_at=epoch(field(line, "EndTime")) if phase == "ended" else None,  # of a running job it is the limit
        incarnation=incarnation,
        outcome=outcome,
        exit_code=exit_code(field(line, "ExitCode")) if ran and phase == "ended" else None,
    )


def held(line: str) -> str | None:
    """
    >>> held("JobId=7 JobName=a JobState=PENDING Reason=JobHeldUser Dependency=(null)")
    'held by its owner (JobHeldUser); to let it start: `scontrol release 7`'
    """
    match = HELD.search(field(line, "Reason") or "")
    if match is None or NEVER.search(line):
        return None
    who = "its owner" if match[1] else "an administrator"
    return f"held by {who} ({match[0]}); to let it start: `scontrol release {field(line, 'JobId')}`"


def read_test_only(text: str, now: float) -> float | None:
    """Seconds until start, from what `sbatch --test-only` printed with TZ=UTC (on standard error); None: it cannot say.

    >>> read_test_only("sbatch: Job 6 to start at 1970-01-01T00:05:08 using 1 processors on nodes x1", now=8.0)
    300.0
    """
    said = re.search(r"\bto start at (\S+)", text)
    moment = epoch(said[1]) if said else None
    return None if moment is None else max(0.0, moment - now)


def read_clock(text: str) -> float | None:
    """The controller's clock, epoch seconds, from what `sdiag` printed.

    >>> read_clock("***\\nsdiag output at Wed Nov 18 22:05:00 2026 (1795039500)\\nData since ...")
    1795039500.0
    """
    said = re.search(r"^sdiag output at .*\((\d+)\)", text, re.MULTILINE)
    return float(said[1]) if said else None


def read_plan(line: str) -> float | None:
    """The whole wait that is planned, in seconds, from a line of `scontrol --oneliner show job`.

    >>> times = "EligibleTime=1970-01-01T00:01:40 StartTime=1970-01-01T00:02:08"
    >>> read_plan(f"JobId=7 JobState=PENDING Reason=Resources {times}")
    28.0
    """
    start, eligible = epoch(field(line, "StartTime")), epoch(field(line, "EligibleTime"))
    if start is None or eligible is None or PHASES.get(field(line, "JobState") or "") != "waiting":
        return None
    return max(0.0, start - eligible)


def read_listing(text: str) -> dict[str, Listed]:
    """Jobs by id, from `squeue --format=LISTING`. Lines that we do not understand are left out.

    >>> read_listing("7|RUNNING|1970-01-01T00:00:05|1970-01-01T00:00:09|1:00:00|2")["7"].started
    9.0
    """
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != LISTING.count("|") + 1 or not cells[-1].isdigit():
            continue
        submitted = epoch(cells[2])
        started = epoch(cells[3]) if cells[1] == "RUNNING" else None  # of a waiting job it is a guess
        if submitted is None or (cells[1] == "RUNNING" and started is None):
            continue
        try:
            limit = duration(cells[4])
        except ValueError:  # UNLIMITED, NOT_SET
            limit = nan
        found[cells[0]] = Listed(submitted=submitted, started=started, requested=limit, procs=int(cells[5]))
    return found


def field(line: str, key: str) -> str | None:
    """The value of the first KEY=VALUE; values may hold spaces.

    >>> field("JobId=7 Reason=Nodes required for job are DOWN Dependency=(null)", "Reason")
    'Nodes required for job are DOWN'
    """
    match = re.search(rf"(?:^|\s){key}=(.*?)(?=\s+[A-Za-z][\w/:.-]*=|\s*$)", line, re.DOTALL)
    value = match[1].strip() if match else ""
    return None if value in ("", "(null)", "N/A") else value


def epoch(text: str | None) -> float | None:
    """'2026-11-16T05:51:14', UTC."""
    try:
        return None if text is None else float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except ValueError:  # Unknown
        return None


def exit_code(text: str | None) -> int | None:
    """'CODE:SIGNAL'."""
    match = re.fullmatch(r"(\d+):(\d+)", text or "")
    if match is None:
        return None
    return 128 + int(match[2]) if int(match[2]) else int(match[1])
