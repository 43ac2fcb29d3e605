"""What schedulers say, and what it means to us; what settings and requests take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedqueue.agent.schedulers import (
    JobRequest,
    SchedulerSettings,
    SchedulerUnreachableError,
    SubmitRefusedError,
    clamp_wall,
    make_scheduler,
)
from fedqueue.agent.schedulers.command import Answer, run
from fedqueue.agent.schedulers.pbs import read_status as read_pbs
from fedqueue.agent.schedulers.pbs import refusal as pbs_refusal
from fedqueue.agent.schedulers.sge import refusal as sge_refusal
from fedqueue.agent.schedulers.slurm import read_status as read_slurm
from fedqueue.agent.schedulers.slurm import refusal as slurm_refusal
from fedqueue.errors import ConfigError
from fedqueue.protocol.codec import read
from tests.sites import is_alive
from tests.waiting import wait_for


@dataclass(frozen=True, kw_only=True)
class Holder:
    scheduler: SchedulerSettings


def answer(err: str, code: int = 1) -> Answer:
    return Answer(code=code, out="", err=err)


FAILED = "sbatch: error: Batch job submission failed: "
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (f"{FAILED}Invalid account or account/partition combination specified", "Invalid account or"),
        (f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)", "Requested time limit"),
        (
            f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{FAILED}{POLICY}",
            "QOSMaxWallDurationPerJobLimit; Job violates",
        ),
        (f"sbatch: error: AssocMaxNodeHours\n{FAILED}{POLICY}", "AssocMaxNodeHours; Job violates"),
    ],
)
def test_what_slurm_will_never_take_is_permanent(said: str, reason: str) -> None:
    error = slurm_refusal(answer(said))
    assert isinstance(error, SubmitRefusedError)
    assert error.reason.startswith(reason)
    assert not error.transient


@pytest.mark.parametrize(
    "said",
    [
        f"sbatch: error: AssocGrpSubmitJobsLimit\n{FAILED}{POLICY}",
        f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{FAILED}{POLICY}",
        f"{FAILED}Resource temporarily unavailable",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
    ],
)
def test_full_queue_of_slurm_is_transient(said: str) -> None:
    error = slurm_refusal(answer(said))
    assert isinstance(error, SubmitRefusedError)
    assert error.transient


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (slurm_refusal, f"{FAILED}Unable to contact slurm controller (connect failure)"),
        (slurm_refusal, f"{FAILED}Socket timed out on send/recv operation"),
        (slurm_refusal, f"{FAILED}Zero Bytes were transmitted or received"),
        (
            sge_refusal,
            "error: commlib error: got select error (Connection refused)\n"
            'Unable to run job: unable to send message to qmaster using port 1 on host "a": got send error\nExiting.',
        ),
    ],
)
def test_job_may_exist_when_the_answer_was_lost(
    read: Callable[[Answer], SubmitRefusedError | SchedulerUnreachableError], said: str
) -> None:
    assert isinstance(read(answer(said)), SchedulerUnreachableError)


def test_full_queue_of_grid_engine_is_transient() -> None:
    said = "Unable to run job: job rejected: Only 10 jobs are allowed per user (current job count: 10)\nExiting."
    error = sge_refusal(answer(said))
    assert isinstance(error, SubmitRefusedError)
    assert (error.transient, error.reason.partition(":")[0]) == (True, "job rejected")


def test_state_that_slurm_invents_tomorrow_is_unknown() -> None:
    status = read_slurm("JobId=7 JobName=a JobState=DREAMING Reason=Because it can Dependency=(null) Restarts=0")
    assert (status.phase, status.reason, status.outcome) == ("unknown", "DREAMING Because it can", None)
    assert read_slurm("gibberish").phase == "unknown"


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("DependencyNeverSatisfied", True),
        ("QOSMaxWallDurationPerJobLimit", True),
        ("AssocGrpCPUMinutesLimit", True),
        ("InvalidAccount", True),
        ("AssocGrpCPURunMinutesLimit", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("Priority", False),
        ("Nodes required for job are DOWN, DRAINED or reserved", False),
    ],
)
def test_reason_that_time_does_not_cure_never_starts(reason: str, never: bool) -> None:
    line = f"JobId=7 JobName=a JobState=PENDING Reason={reason} Dependency=(null) Restarts=0"
    assert read_slurm(line).never_starts == (reason if never else None)
    assert not read_slurm(line).bad_luck


def test_job_that_slurm_could_not_launch_waits_in_vain_by_bad_luck() -> None:
    line = "JobId=7 JobName=a JobState=PENDING Reason=launch_failed_requeued_held Dependency=(null) Restarts=1"
    status = read_slurm(line)
    assert (status.never_starts, status.bad_luck, status.name) == ("launch_failed_requeued_held", True, "a")


def test_call_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(SchedulerUnreachableError, match="no answer in"):
        run(["bash", "-c", f"sleep 600 & echo $! > {note}; wait"], dict(os.environ), 0.5)
    wait_for(lambda: not is_alive(int(note.read_text())), "the end of what it started")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (173, "Queue is not enabled"),
        (196, "Resource temporarily unavailable"),
        (198, "Maximum number of jobs already in queue"),
        (38, "would exceed queue workq's per-user limit"),
        (104, "Try again"),
    ],
)
def test_pbs_that_takes_no_job_for_now_is_transient(code: int, words: str) -> None:
    """The codes are those of the errors in its source."""
    error = pbs_refusal(answer(f"qsub: {words}", code))
    assert isinstance(error, SubmitRefusedError)
    assert (error.reason, error.transient) == (words, True)


@pytest.mark.parametrize("code", [163, 183, 185, 186, 208, 212])
def test_submission_to_pbs_that_broke_off_may_have_left_a_job(code: int) -> None:
    assert isinstance(pbs_refusal(answer("qsub: Batch protocol error", code)), SchedulerUnreachableError)


def test_values_of_pbs_of_other_types_than_recorded_are_no_crash() -> None:
    """Versions differ in what they put into quotes."""
    quoted = {"job_state": "F", "substate": "93", "Exit_status": "271", "run_count": "2", "stime": 1794808371}
    status = read_pbs(quoted)
    assert (status.outcome, status.exit_code, status.incarnation) == ("failed", 143, 1)
    assert status.started_at == 1794808371.0
    values: tuple[object, ...] = (None, True, "", "many", [], {}, 1.5)
    for value in values:
        odd = dict.fromkeys(("substate", "Exit_status", "run_count", "etime", "stime", "obittime", "comment"), value)
        status = read_pbs({"job_state": "F", "history_timestamp": value, **odd})
        assert (status.outcome, status.exit_code) == ("cancelled", None)


@pytest.mark.parametrize(
    ("code", "outcome"), [(-1, "node_fail"), (-3, "node_fail"), (-14, "node_fail"), (-20, "node_fail"), (-27, "failed")]
)
def test_pbs_what_the_node_did_is_not_the_fault_of_the_job(code: int, outcome: str) -> None:
    assert read_pbs({"job_state": "F", "substate": 93, "Exit_status": code}).outcome == outcome


def test_pbs_job_that_its_nodes_could_not_launch_waits_in_vain_and_another_need_not() -> None:
    """After twenty tries PBS holds it, and only an operator could release it."""
    held = {"job_state": "H", "run_count": 21, "comment": "job held, too many failed attempts to run"}
    status = read_pbs(held)
    assert (status.phase, status.never_starts, status.bad_luck) == ("waiting", held["comment"], True)
    assert read_pbs({"job_state": "H", "comment": "Job held by user on Mon Nov 16 05:51:24 2026"}).never_starts is None


@pytest.mark.parametrize("kind", ["slurm", "pbs", "sge", "local"])
def test_settings_of_every_kind_are_read_from_plain_tables(kind: str, tmp_path: Path) -> None:
    settings = read(Holder, {"scheduler": {"kind": kind, "max_wall_seconds": 3600}}, "facility").scheduler
    assert make_scheduler(settings, tmp_path).kind == kind
    assert (clamp_wall(1.0, settings), clamp_wall(1e6, settings)) == (settings.min_wall_seconds, 3600.0)
    with pytest.raises(ConfigError, match="max_wall_seconds must be"):
        read(Holder, {"scheduler": {"kind": kind, "max_wall_seconds": 0.5}}, "facility")


@pytest.mark.parametrize("name", ["", "1-job", "-x", "a_b", "a b", "a" * 61])
def test_name_that_some_scheduler_would_change_or_refuse_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="name must be"):
        JobRequest(name=name, script=Path("/a"), folder=Path("/b"), wall_seconds=1.0)
