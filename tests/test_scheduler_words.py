"""What schedulers say, and what it means to us; what settings and requests take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedqueue.errors import ConfigError
from fedqueue.runtime.schedulers import (
    JobRequest,
    SchedulerSettings,
    SchedulerUnreachableError,
    SubmitRefusedError,
    clamp_wall,
    make_scheduler,
)
from fedqueue.runtime.schedulers.command import Answer, run
from fedqueue.runtime.schedulers.sge import refusal as sge_refusal
from fedqueue.runtime.schedulers.slurm import read_status as read_slurm
from fedqueue.runtime.schedulers.slurm import refusal as slurm_refusal
from fedqueue.settings import read
from tests.sites import is_alive
from tests.slurm import wait_for


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
    wait_for(lambda: not is_alive(int(note.read_text())), 20.0, "the end of what it started")


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
