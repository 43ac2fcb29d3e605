"""What a facility and its coordinator believe of each other's jobs differs: one of them was set back, or lost files.

`fedavg` waits for everybody, so a job that one side alone believes in would stand in its way for ever.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from fedqueue.protocol.messages import JobFailed, JobStarted, JobSubmitted, UpdateArrived
from tests.faults.facts import ended_with, updates
from tests.faults.harness import COORDINATOR, Run, free_port, tree_of
from tests.faults.ledger_checks import Story, check_end, check_fates, check_models, check_timers
from tests.faults.worker import step_of
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(15)

ROUNDS = 4
LONG = 600.0
"""Seconds that nobody waits in vain: a job which waits or runs for so long was ended by its agent."""


def make(base: Path, *, slow: int | None = None, waits: int | None = None) -> Run:
    """A run of fedavg in which one job of north, by number, is slow or waits for long."""
    tree = tree_of("fedavg", rounds=ROUNDS, port=free_port(), options={"steps": 5})
    run = Run(base, tree, scheduler={"min_wall_seconds": LONG})
    extra = {"extra_waits": [LONG if number == waits else 0.0 for number in range(50)]}
    run.wishes = {"odd": {str(slow): "slow"}, "slow_seconds": LONG}
    run.write_agent("north", {}, {"min_wall_seconds": LONG, **extra})
    return run


def leave(run: Run, name: str) -> None:
    """End it as an operator does."""
    actor = run.actors[name]
    assert actor.process is not None
    os.kill(actor.process.pid, signal.SIGTERM)
    wait_for(lambda: actor.process is not None and actor.process.poll() is not None, f"{name} ends")
    run.stop(name)


def keep(folder: Path, *elsewhere: str) -> Path:
    """A copy as a backup has it; what a scheduler knows of its jobs is not in it, nor what lies on other disks."""
    copy = folder.with_name(f"{folder.name}-before")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("scheduler", *elsewhere), symlinks=True)
    return copy


def restore(folder: Path, copy: Path, *elsewhere: str) -> None:
    for path in folder.iterdir():
        if path.name not in ("scheduler", *elsewhere):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(copy, folder, dirs_exist_ok=True, symlinks=True)


def finish(run: Run) -> Story:
    """The run comes to its end, all is accounted for, and no job is left at the scheduler."""
    run.run_to_end()
    story = run.story()
    check_end(story, ROUNDS)
    check_fates(story)
    check_timers(story)
    check_models(story, step_of)
    ended_with(run, 130, -signal.SIGTERM, -signal.SIGKILL)
    return story


def why(story: Story, job: str) -> str:
    (failed,) = [event for event in story.events(JobFailed) if event.job_id == job]
    assert failed.transient
    return failed.reason


def test_a_home_restored_from_an_older_copy_gives_up_what_it_does_not_know(tmp_path: Path) -> None:
    """Its reports, its orders and its lease are older than what the coordinator has seen of it."""
    with make(tmp_path, slow=2) as run:
        run.start()
        run.run_until(lambda: run.happened(JobSubmitted, "north/1"), "the second job at north")
        leave(run, "north")
        copy = keep(run.home("north"))
        for _ in range(2):  # its lease is given to one process after the other
            run.start("north")
            run.run_until(lambda: run.happened(JobStarted, "north/2"), "the job that the copy does not know")
            leave(run, "north")
        restore(run.home("north"), copy)
        run.start("north")
        story = finish(run)
        assert "older copy" in why(story, "north/2")
        assert "older copy" in run.log("north")
        assert len(updates(story, "north")) >= ROUNDS - 1
        assert not [event for event in story.events(JobFailed) if event.job_id.startswith("south/")]


def test_a_home_restored_while_its_job_runs_goes_on_with_that_job(tmp_path: Path) -> None:
    """The copy has the order and not the submission: the job is found at the scheduler, and not submitted again."""
    with make(tmp_path) as run:
        run.actors["north"].points = ["agent.ordered:2"]
        run.start()
        run.run_until(lambda: run.actors["north"].hit == ["agent.ordered"], "north has its second order")
        copy = keep(run.home("north"), "jobs")
        run.run_until(lambda: run.happened(JobStarted, "north/1"), "it runs")
        leave(run, "north")
        restore(run.home("north"), copy, "jobs")
        run.start("north")
        story = finish(run)
        assert not story.events(JobFailed)
        assert len(list(run.home("north").glob("scheduler/jobs/*-1"))) == 1
        assert ("north/1", 0, 0) in story.receipts


def test_a_lost_journal_gives_its_jobs_up_and_ends_them(tmp_path: Path) -> None:
    """The lease and the job folders are still there."""
    with make(tmp_path, slow=1) as run:
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "north/1"), "a job at north")
        leave(run, "north")
        (run.home("north") / "journal.jsonl").unlink()
        assert (run.home("north") / "lease.json").exists()
        run.start("north")
        story = finish(run)
        assert "lost its journal" in why(story, "north/1")


@pytest.mark.parametrize(
    ("kind", "lost"),
    [({"waits": 1}, "jobs/1"), ({"slow": 1}, "jobs/1"), ({"slow": 1}, "jobs/1/attempt-0")],
    ids=["waits", "runs", "attempt"],
)
def test_a_job_whose_folder_is_lost_is_ended_and_replaced(tmp_path: Path, kind: dict[str, Any], lost: str) -> None:
    with make(tmp_path, **kind) as run:
        run.start()
        event = JobStarted if "slow" in kind else JobSubmitted
        run.run_until(lambda: run.happened(event, "north/1"), "a job at north")
        shutil.rmtree(run.home("north") / lost)
        story = finish(run)
        assert f"{lost} is gone" in why(story, "north/1")


def test_a_coordinator_restored_from_an_older_copy_goes_on_from_there(tmp_path: Path) -> None:
    """It gives numbers to orders that its facilities have had, and knows nothing of the jobs they have."""
    with make(tmp_path) as run:
        run.start()
        run.run_until(lambda: run.happened(UpdateArrived), "the first update")
        leave(run, COORDINATOR)
        copy = keep(run.folder)
        before = len(run.story().steps)
        run.start(COORDINATOR)
        run.run_until(lambda: run.happened(JobStarted, "north/2"), "jobs that the copy does not know")
        leave(run, COORDINATOR)
        restore(run.folder, copy)
        assert len(run.story().steps) == before
        run.start(COORDINATOR)
        finish(run)
