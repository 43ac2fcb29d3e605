"""Jobs that stay, and what is done to them between two parts: nothing that was handed in is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.schedulers import LocalScheduler, LocalSettings
from fedqueue.cli import main
from fedqueue.protocol.messages import (
    JobEnded,
    JobFailed,
    JobRequeued,
    JobSubmitted,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
)
from tests.faults.facts import check, ended_with
from tests.faults.harness import COORDINATOR, Run, free_port, tree_of
from tests.faults.ledger_checks import Story
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(8)

LONG = 600.0


def make(base: Path, strategy: str = "fedasync", scheduler: dict[str, float] | None = None, **agent: Any) -> Run:
    """It goes on until it is told to stop."""
    least = {"min_steps": 3} if strategy == "jit" else {"steps": 5}
    tree = tree_of(strategy, rounds=100_000, port=free_port(), options={**least, "stay": LONG})
    return Run(base, tree, agent=agent, scheduler=scheduler)


def parts(run: Run, job: str, attempt: int = 0) -> set[int]:
    """That arrived."""
    if not run.happened(UpdateArrived):
        return set()
    return {part for found, n, part in run.story().receipts if (found, n) == (job, attempt)}


def finish(run: Run) -> Story:
    assert main(["stop", str(run.folder)]) == 0
    run.run_to_end()
    return check(run, rounds=2)


def handed_in(run: Run, part: int) -> bool:
    return (run.home("north") / f"jobs/0/attempt-0/part-{part}/result.json").exists()


def test_a_killed_job_loses_no_part_that_it_handed_in_while_its_agent_was_away(tmp_path: Path) -> None:
    with make(tmp_path, grace_seconds=0.0) as run:  # nothing but what it handed in holds up the word that it failed
        run.start()
        run.run_until(lambda: run.happened(WorkTaken, "north/0") and parts(run, "north/0") >= {0}, "north stays")
        taken = max(parts(run, "north/0")) + 1
        run.run_until(lambda: run.happened(WorkTaken) and handed_in(run, taken), "it hands in another part")
        run.stop("north")
        for state in run.jobs_running("north"):
            LocalScheduler(LocalSettings(), run.home("north")).cancel(state["name"])
        wait_for(lambda: not run.jobs_running("north"), "its job is gone")
        last = max(n for n in range(100) if n == 0 or handed_in(run, n))
        run.start("north")
        run.run_until(lambda: run.happened(JobFailed, "north/0"), "it is known that it failed")
        story = finish(run)
        assert {("north/0", 0, part) for part in range(last + 1)} <= set(story.receipts)
        (failed,) = [event for event in story.events(JobFailed) if event.job_id == "north/0"]
        order = [event for event, _ in story.steps]
        arrived = [
            place
            for place, event in enumerate(order)
            if isinstance(event, UpdateArrived) and event.receipt.job_id == "north/0"
        ]
        assert max(arrived) < order.index(failed), "first what it handed in, then that it failed"
        ended_with(run, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "point", "heard"),
    [
        ("fedasync", "worker.written", {0}),
        ("jit", "worker.written", {0}),
        ("jit", "worker.handed_in", {0, 1}),
        ("fedasync", "worker.found", {0, 1}),  # its agent has laid the work into its folder
        ("fedasync", "worker.taken", {0, 1}),
        ("jit", "worker.taken", {0, 1}),
    ],
)
def test_a_job_that_is_killed_between_two_parts_loses_at_most_the_one_it_trains(
    strategy: str, point: str, heard: set[int], tmp_path: Path
) -> None:
    arm = f'case "$job" in */north/jobs/0) export FEDQUEUE_FAILPOINT={point}:2;; esac'
    with make(tmp_path, strategy, before=[arm]) as run:
        run.start()
        run.run_until(lambda: run.happened(JobFailed, "north/0"), "its first job at north is killed")
        run.run_until(lambda: len(parts(run, "north/1")) >= 2, "the next one stays")
        story = finish(run)
        (failed,) = story.events(JobFailed)
        assert failed.job_id == "north/0"
        assert {part for job, _, part in story.receipts if job == "north/0"} == heard
        taken = {event.part for event in story.events(WorkTaken) if event.job_id == "north/0"}
        assert taken - heard <= {max(heard) + 1}
        assert not story.events(UpdateRejected)
        ended_with(run)


def test_what_an_attempt_handed_in_before_its_scheduler_took_it_back_counts(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.start()
        run.run_until(lambda: len(parts(run, "north/0")) >= 2, "north has handed in twice")
        (state,) = run.jobs_running("north")
        LocalScheduler(LocalSettings(), run.home("north")).requeue(state["name"])
        run.run_until(lambda: bool(parts(run, "north/0", 1)), "it runs again and hands in")
        story = finish(run)
        assert story.events(JobRequeued)
        assert not story.events(JobFailed)
        ended_with(run)


def hand_in_undelivered(run: Run) -> int:
    """A part that north's first job has handed in, and that did not reach the coordinator, which stood still meanwhile;
    north's agent is dead."""
    for part in range(1, 100):
        run.run_until(lambda part=part: taken(run, part), f"it trains part {part}")  # type: ignore[misc]
        coordinator = run.actors[COORDINATOR].process
        assert coordinator is not None
        os.kill(coordinator.pid, signal.SIGSTOP)
        try:
            run.run_until(lambda part=part: handed_in(run, part), "it needs nobody for that")  # type: ignore[misc]
            run.stop("north")
        finally:
            os.kill(coordinator.pid, signal.SIGCONT)
        run.run_until(lambda: is_served(run), "the coordinator answers again")
        if part not in parts(run, "north/0"):
            return part
        run.start("north")
    raise AssertionError("everything was delivered: this shows nothing")


def taken(run: Run, part: int) -> bool:
    return (run.home("north") / f"jobs/0/attempt-0/part-{part}/taken.json").exists()


def is_served(run: Run) -> bool:
    return main(["status", str(run.folder)]) == 0


def test_a_part_whose_file_is_gone_is_rejected_and_its_job_goes_on(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.start()
        part = hand_in_undelivered(run)
        (run.home("north") / f"jobs/0/attempt-0/part-{part}/update.safetensors").unlink()
        run.start("north")
        run.run_until(lambda: run.happened(UpdateRejected, "north/0"), "it is known that it is lost")
        run.run_until(lambda: max(parts(run, "north/0")) > part, "the job goes on")
        story = finish(run)
        (rejected,) = story.events(UpdateRejected)
        assert rejected.key == ("north/0", 0, part)
        assert "is not there, but its result is" in rejected.reason
        ended_with(run, -signal.SIGKILL)


def test_a_job_that_gets_no_more_work_ends_well_and_it_is_known_what_it_asked_for(tmp_path: Path) -> None:
    """Its site allows less wall time than is ordered."""
    with make(tmp_path, scheduler={"max_wall_seconds": LONG / 2}) as run:
        run.start()
        run.run_until(lambda: run.happened(WorkTaken, "south/0"), "south stays")
        assert main(["drain", str(run.folder), "south"]) == 0
        run.run_until(lambda: run.happened(JobEnded, "south/0"), "it gives its nodes back")
        story = finish(run)
        assert not story.events(JobFailed)
        (submitted,) = [event for event in story.events(JobSubmitted) if event.job_id == "south/0"]
        assert submitted.wall_seconds == LONG / 2
        (ended,) = [event for event in story.events(JobEnded) if event.job_id == "south/0"]
        assert {("south/0", 0, part) for part in range(ended.parts)} <= set(story.receipts)
