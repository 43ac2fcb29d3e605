"""Grid Engine by its own commands: qsub, qstat -xml (what lives), qacct (what has ended), qdel.

Tried against Son of Grid Engine 8.1.9. What it does not tell, we do not make up: a job that was deleted while it
waited leaves no trace at all and is absent; one that died of SIGKILL may have been deleted or not, its outcome is
unknown. `qstat -j -xml` is not always XML (it writes `<job ids>`), so single values are picked out of it.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from fedqueue.agent.schedulers.base import (
    JobRequest,
    JobStatus,
    Outcome,
    Scheduler,
    SchedulerUnreachableError,
    SgeSettings,
    SubmitRefusedError,
    clamp_wall,
)
from fedqueue.agent.schedulers.command import Answer, environment, program, run, user

UNREACHABLE = re.compile(
    r"commlib error|unable to (send message|contact|connect)|qmaster.*not reachable|can.?t (connect|resolve|get)"
    r"|SGE_ROOT|timeout|timed out",
    re.IGNORECASE,
)
TRANSIENT = re.compile(
    r"jobs are allowed per user|job count|max_u?_?jobs|temporarily|try again|disabled", re.IGNORECASE
)
RESCHEDULED = ("24", "25")  # `failed` of an incarnation that was migrated or put back into the queue
HOLDERS = {"u": "its owner", "o": "an operator", "s": "the system"}  # by the letter that qstat -s and qrls take
OVER_LIMIT = "37"
BY_SIGNAL = "100"
# `failed` of a job that its node could not run: before it, or because of its shepherd or its spool folder.
NODE_FAULTS = {str(code) for code in (*range(1, 24), 26, 27, 28, 29, 30, 38)}


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A living job in the list of qstat."""

    job_id: str
    name: str
    state: str
    started_at: float | None


class SgeScheduler(Scheduler):
    kind = "sge"

    def __init__(self, settings: SgeSettings) -> None:
        self.settings = settings

    def submit(self, request: JobRequest) -> str:
        answer = self._call("qsub", *self._options(request), str(request.script))
        # With a warning it says "Unable to run job", then that the job has been submitted, and it has.
        match = re.search(r"^(\d+)\s*$", answer.out, re.MULTILINE) if answer.code == 0 else None
        match = match or re.search(r"Your job (\d+) .*has been submitted", answer.out + answer.err)
        if match is None:
            raise refusal(answer)
        return match[1]

    def find(self, name: str) -> str | None:
        ids = [int(job.job_id) for job in self._listed().values() if job.name == name]
        if not ids:
            ids = [int(record["jobnumber"]) for record in self._records(name) if record.get("jobname") == name]
        return str(max(ids)) if ids else None

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        listed = self._listed()
        found = {job_id: self._living(listed[job_id]) if job_id in listed else self._ended(job_id) for job_id in ids}
        held = self._held() if any("h" in listed[job_id].state for job_id in ids if job_id in listed) else {}
        return {
            job_id: replace(status, held=held.get(job_id)) if status.phase == "waiting" else status
            for job_id, status in found.items()
            if status is not None
        }

    def cancel(self, job_id: str) -> None:
        answer = self._call("qdel", job_id)
        if answer.code != 0 and "does not exist" not in answer.out + answer.err:
            raise SchedulerUnreachableError(f"qdel: {answer.said}")

    # Inside ---------------------------------------------------------------------------------------------------

    def _options(self, request: JobRequest) -> list[str]:
        settings = self.settings
        seconds = int(clamp_wall(request.wall_seconds, settings))
        options = ["-terse", "-N", request.name, "-o", str(request.output), "-j", "y", "-wd", str(request.folder)]
        options += ["-S", "/bin/bash", "-l", f"h_rt={seconds}"]
        if request.after is not None:
            # The account string is all that is kept after a job's end: by it we know since when it was eligible.
            options += ["-hold_jid", request.after, "-A", f"after.{request.after}"]
        if settings.queue is not None:
            options += ["-q", settings.queue]
        if settings.project is not None:
            options += ["-P", settings.project]
        if settings.parallel_environment is not None:
            options += ["-pe", settings.parallel_environment, str(settings.slots)]
        return [*options, *settings.extra]

    def _listed(self, *which: str) -> dict[str, Listed]:
        answer = self._ask("qstat", "-xml", "-u", user(), *which)
        if answer.code != 0:
            raise SchedulerUnreachableError(f"qstat: {answer.said}")
        return read_list(answer.out)

    def _held(self) -> dict[str, str]:
        """Who holds which job. The letter h of its state also stands for a job that waits for another."""
        found = {}
        for kind, who in HOLDERS.items():
            for job_id in self._listed("-s", f"h{kind}"):
                release = f"qrls -h {kind} {job_id}"
                found[job_id] = f"held by {who} (qstat -s h{kind}); to let it start: `{release}`"
        return found

    def _living(self, job: Listed) -> JobStatus | None:
        detail = self._ask("qstat", "-j", job.job_id, "-xml")
        if detail.code != 0 or "<unknown_jobs" in detail.out:  # it has ended since the list was made
            return self._ended(job.job_id)
        submitted = picked(detail.out, "JB_submission_time")
        runs = (
            sum(record.get("failed") in RESCHEDULED for record in self._records(job.job_id)) if "R" in job.state else 0
        )
        held = "h" in job.state
        return read_living(
            job,
            eligible_at=None
            if held
            else self._eligible(float(submitted or 0) or None, picked(detail.out, "JB_account")),
            incarnation=max(runs, 1) if "R" in job.state else 0,
            message=picked(detail.out, "JAT_message", "QIM_message", "MES_message") or "",
        )

    def _ended(self, job_id: str) -> JobStatus | None:
        records = self._records(job_id)
        if not records or records[-1].get("failed") in RESCHEDULED:  # in between two runs, seen by neither command
            return None
        last = records[-1]
        return read_ended(last, self._eligible(epoch(last.get("qsub_time")), last.get("account")), len(records) - 1)

    def _eligible(self, submitted: float | None, account: str | None) -> float | None:
        """When it was submitted, or when the job before it ended, if that was later."""
        match = re.fullmatch(r"after\.(\d+)", account or "")
        if match is None or submitted is None:
            return submitted
        ends = [epoch(record.get("end_time")) for record in self._records(match[1])]
        return max([submitted, *(end for end in ends if end is not None)])

    def _records(self, job: str) -> list[dict[str, str]]:
        """One a run that has ended, the oldest first; by id or by name."""
        answer = self._ask("qacct", "-j", job)
        if answer.code != 0:
            if re.search(r"not found|no jobs running since startup", answer.err + answer.out):
                return []
            raise SchedulerUnreachableError(f"qacct: {answer.said}")
        return read_records(answer.out)

    def _ask(self, name: str, *arguments: str) -> Answer:
        """With times in UTC. Not for qsub: a job may inherit what qsub has."""
        return self._call(name, *arguments, TZ="UTC")

    def _call(self, name: str, *arguments: str, **changes: str) -> Answer:
        settings = self.settings
        env = environment({"SGE_ROOT": settings.root, "SGE_CELL": settings.cell, **settings.environment, **changes})
        return run([program(settings.bin, name), *arguments], env, settings.timeout_seconds)


def refusal(answer: Answer) -> SubmitRefusedError | SchedulerUnreachableError:
    lines = [line.strip() for line in (answer.err + answer.out).splitlines() if line.strip() not in ("", "Exiting.")]
    reason = re.sub(r"^Unable to run job: ", "", "; ".join(lines)) or answer.said
    if UNREACHABLE.search(reason):
        return SchedulerUnreachableError(f"qsub: {reason}")
    return SubmitRefusedError(reason, transient=bool(TRANSIENT.search(reason)))


def read_list(text: str) -> dict[str, Listed]:
    """Every job in `qstat -xml`, by id."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise SchedulerUnreachableError(f"qstat: its answer is not XML: {error}") from None
    found = {}
    for job in root.iter("job_list"):
        job_id = (job.findtext("JB_job_number") or "").strip()
        found[job_id] = Listed(
            job_id=job_id,
            name=(job.findtext("JB_name") or "").strip(),
            state=(job.findtext("state") or "").strip(),
            started_at=epoch(job.findtext("JAT_start_time")),
        )
    return found


def read_living(job: Listed, *, eligible_at: float | None, incarnation: int, message: str) -> JobStatus:
    """By the letters of its state, such as qw, hqw, r, Rr, dr, Eqw."""
    if "E" in job.state:
        why = message or "the scheduler put it into state E"
        return JobStatus(phase="waiting", reason=job.state, never_starts=why, incarnation=incarnation)
    running = bool(set(job.state) & set("rtsST"))
    waiting = "q" in job.state
    return JobStatus(
        phase="running" if running else "waiting" if waiting else "unknown",
        reason=f"{job.state} {message}".strip() if waiting else job.state,
        eligible_at=eligible_at,
        started_at=job.started_at if running else None,
        incarnation=incarnation,
    )


def read_ended(record: dict[str, str], eligible_at: float | None, incarnation: int) -> JobStatus:
    failed = record.get("failed", "")
    status = re.match(r"\d+", record.get("exit_status", ""))
    code = int(status[0]) if status else None
    limit = re.search(r"h_rt=(\d+)", record.get("category", ""))
    ran = re.match(r"[\d.]+", record.get("ru_wallclock", ""))
    over = limit is not None and ran is not None and float(ran[0]) >= float(limit[1])
    outcome: Outcome
    if failed == OVER_LIMIT or (failed == BY_SIGNAL and over):
        outcome = "timeout"
    elif failed == BY_SIGNAL and code == 137:
        outcome = "unknown"
    elif failed in NODE_FAULTS:
        outcome = "node_fail"
    elif failed == "0" and code is not None:
        outcome = "completed" if code == 0 else "failed"
    else:
        outcome = "failed" if failed.isdigit() else "unknown"
    return JobStatus(
        phase="ended",
        reason=f"failed {failed} {record.get('failed_text', '')}".strip() if failed != "0" else f"exit {code}",
        eligible_at=eligible_at,
        started_at=epoch(record.get("start_time")),
        ended_at=epoch(record.get("end_time")),
        incarnation=incarnation,
        outcome=outcome,
        exit_code=code,
    )


def read_records(text: str) -> list[dict[str, str]]:
    """The blocks of `qacct -j`.

    >>> read_records("=====\\njobnumber    2\\nfailed       25  : rescheduling\\n")
    [{'jobnumber': '2', 'failed': '25', 'failed_text': 'rescheduling'}]
    """
    records: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith("====="):
            records.append({})
        elif records:
            key, _, value = line.partition(" ")
            records[-1][key] = value.strip()
            if key == "failed":
                code, _, words = value.partition(":")
                records[-1] |= {"failed": code.strip(), "failed_text": words.strip()}
                if not words:
                    del records[-1]["failed_text"]
    return records


def picked(text: str, *keys: str) -> str | None:
    """The first value of the first of these elements that is there."""
    for key in keys:
        match = re.search(rf"<{key}>([^<]*)</{key}>", text)
        if match:
            return match[1].replace("&quot;", '"').replace("&amp;", "&").strip()
    return None


def epoch(text: str | None) -> float | None:
    """'2026-11-16T13:47:01' or 'Mon Nov 16 13:47:01 2026', UTC; the year 1970 stands for none."""
    for pattern in ("%Y-%m-%dT%H:%M:%S", "%a %b %d %H:%M:%S %Y"):
        try:
            seconds = float(calendar.timegm(time.strptime((text or "").strip(), pattern)))
        except ValueError:
            continue
        return seconds if seconds > 0 else None
    return None
