"""A job that handed in when it was told to stop, and that its scheduler runs again: its nodes are for others."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from fedqueue.agent.schedulers import LocalScheduler, LocalSettings
from fedqueue.protocol.messages import JobFailed, JobRequeued, JobStarted, Record, SubmitRefused
from tests.faults.facts import check, ended_with
from tests.faults.harness import Run, free_port, tree_of
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(12)

WALL = 60.0
HELD = 8.0
"""Seconds that the second incarnation holds its node before anybody can see it."""


def hands_in_on_a_signal(base: Path, **agent: float) -> Run:
    """The first job of north waits until it is told to stop, and hands in; run again, it hangs."""
    tree = tree_of("fedavg", rounds=2, port=free_port(), options={"steps": 5})
    run = Run(base, tree)
    run.wishes = {"odd": {"0": "signal"}}
    run.write_agent("north", agent, {"min_wall_seconds": WALL})
    return run


def requeue(run: Run) -> None:
    """As an operator or preemption does, once it runs."""
    first = run.home("north") / "jobs/0/attempt-0"
    run.run_until(lambda: (first / "listens").exists(), "the first job of north runs")
    LocalScheduler(LocalSettings(), run.home("north")).requeue(run.jobs_running("north")[0]["name"])
    wait_for(lambda: (first / "result.json").exists(), "it hands in")


def test_a_job_run_again_after_it_handed_in_is_ended_and_what_it_handed_in_counts(tmp_path: Path) -> None:
    with hands_in_on_a_signal(tmp_path) as run:
        run.start()
        requeue(run)
        run.run_to_end()
        story = check(run, rounds=2)
        assert ("north/0", 0, 0) in story.receipts
        assert not story.events(JobFailed)
        assert not story.events(JobRequeued)
        ended_with(run)


def test_it_is_ended_by_the_next_agent_and_its_time_counts(tmp_path: Path) -> None:
    """The scheduler does not answer when it is told to end the job, and the agent is killed. What the second run of
    the job held is more than the cap leaves for another job."""
    room = WALL + HELD / 2
    with hands_in_on_a_signal(tmp_path, node_hours=room / 3600) as run:
        home = run.home("north")
        again = home / "jobs/0/attempt-1/started"
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "north/0"), "the first job of north runs")
        run.stop("north")
        requeue(run)
        wait_for(lambda: again.exists() and run.jobs_running("north")[0]["phase"] == "running", "it runs again")
        (home / "scheduler").rename(home / "away")
        (home / "scheduler").write_text("not a folder")
        run.start("north")
        run.run_until(lambda: "run again" in run.log("north"), "the agent knows that it is to be ended")
        run.stop("north")
        wait_for(lambda: time.time() - again.stat().st_mtime > HELD, "it held its node for a while")
        (home / "scheduler").unlink()
        (home / "away").rename(home / "scheduler")
        assert run.jobs_running("north"), "it was ended before: this shows nothing"
        run.start("north")
        run.run_to_end()
        story = check(run, rounds=2)
        assert ("north/0", 0, 0) in story.receipts
        assert not story.events(SubmitRefused), "the coordinator knew that nothing fits"
        (out,) = [c.facts for c in story.commands(Record) if c.kind == "suspended"]
        assert (out["facility"], out["until"]) == ("north", None)
        assert "its cap on node-hours leaves" in str(out["reason"])
        ended_with(run, -signal.SIGKILL)
