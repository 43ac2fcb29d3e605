"""Clocks ten minutes apart, one process at a time: the agent's, the jobs', the coordinator's, in either direction.

The stamps of files come from the kernel and stay as they are, as those of a shared file system do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedqueue.protocol.contract import sequence_of
from fedqueue.protocol.messages import JobEnded, JobFailed, JobStarted, SetTimer, WorkTaken
from fedqueue.worker.participate import RESERVE_SECONDS
from tests.conftest import ONE_A_ROUND
from tests.faults.facts import ended_with
from tests.faults.harness import COORDINATOR, FACILITIES, SOURCE, Run, free_port, tree_of
from tests.faults.ledger_checks import Story, check_run

pytestmark = pytest.mark.waits(25)

SHIFT = 604.0
"""Seconds; whoever goes by the shifted clock aims at another cutoff, and is half a round of `LENGTHS` off its time."""
CLOSE = 2.0
"""Seconds by which a job may be told another time than is left until its cutoff: standing work has a way to come."""
WAITS = [1.5, 0.5]
STRATEGIES: dict[str, dict[str, Any]] = {
    "jit": {**ONE_A_ROUND, "min_steps": 3},
    "fedqueue": {"margin": 0.05, "min_train_budget": 0.05, "min_steps": 3},
    "jit that stays": {**ONE_A_ROUND, "min_steps": 3, "stay": 19.0},
}
LENGTHS = {"jit": 8.0, "fedqueue": 2.0}
"""Of rounds; only with just in time a job asks for the time."""
WALL = {"jit": 60.0, "fedqueue": 60.0, "jit that stays": 20.0}
ROUNDS = {"jit": 2, "fedqueue": 5, "jit that stays": 3}
JOB = """
import time
import fedqueue
from safetensors.numpy import load_file

with fedqueue.participate() as work:
    for part in work.parts():
        for step in part.steps():
            time.sleep(0.02)
        part.submit(load_file(part.model_path), metrics={"left": part.seconds_left()})
"""


def shim(folder: Path, seconds: float) -> Path:
    """A folder for PYTHONPATH and PATH: Python and `date` are off by so much."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}\n")
    (folder / "date").write_text(f'#!/bin/bash\nexec /bin/date --date="{seconds:+g} seconds" "$@"\n')
    (folder / "date").chmod(0o755)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seconds", [SHIFT, -SHIFT])
@pytest.mark.parametrize("shifted", ["agent", "job", COORDINATOR])
def test_a_clock_that_is_minutes_off_changes_nothing(
    tmp_path: Path, shifted: str, seconds: float, strategy: str
) -> None:
    stays, name, rounds = strategy == "jit that stays", strategy.partition(" ")[0], ROUNDS[strategy]
    length = {"round_length": LENGTHS[name]}
    tree = tree_of(name, rounds=rounds, port=free_port(), options=STRATEGIES[strategy], run=length)
    off = shim(tmp_path / "shim", seconds)
    there = {"PYTHONPATH": f"{off}:{SOURCE}", "PATH": f"{off}:{os.environ['PATH']}"}
    (tmp_path / "train.py").write_text(JOB)
    agent = {
        "command": f"exec {sys.executable} {tmp_path}/train.py",
        "environment": there if shifted == "job" else {"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
    }
    scheduler = {"extra_waits": WAITS, "min_wall_seconds": WALL[strategy]}
    with Run(tmp_path, tree, agent=agent, scheduler=scheduler) as run:
        for name in FACILITIES if shifted == "agent" else [COORDINATOR] if shifted == COORDINATOR else []:
            run.actors[name].environment = there
        run.start()
        run.run_to_end()
        homes = [run.home(name) for name in FACILITIES]
        story = check_run(run.folder, homes, rounds=rounds, step=lambda job, attempt, part, place: 0.0)
        assert not story.events(JobFailed)
        check_delays(run, story)
        check_budgets(story, run, WALL[strategy])
        assert any(event.part > 0 for event in story.events(WorkTaken)) == stays
        ended_with(run)


@pytest.mark.parametrize("seconds", [SHIFT, -SHIFT])
def test_a_lease_holds_on_hosts_whose_clocks_are_minutes_off(tmp_path: Path, seconds: float) -> None:
    off = shim(tmp_path / "shim", seconds)
    with (off / "sitecustomize.py").open("a") as file:
        file.write("import socket\nsocket.gethostname = lambda: 'elsewhere'\n")
    with Run(tmp_path, tree_of("fedasync", port=free_port(), options={"steps": 5})) as run:
        run.start(COORDINATOR, "north")
        run.run_until((run.home("north") / "lease.json").exists, "the first agent")
        second = subprocess.run(
            [sys.executable, "-m", "fedqueue", "agent", str(run.toml("north"))],
            env={**os.environ, "PYTHONPATH": f"{off}:{SOURCE}"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert second.returncode == 10, second.stderr
        left = re.search(r"stop that one, or try again in (\d+) s if it is gone", second.stderr)
        assert left is not None, second.stderr
        assert 0 < int(left[1]) <= 121
        run.start("south")
        run.run_to_end()
        ended_with(run)


def check_delays(run: Run, story: Story) -> None:
    """Waits are those of the queue, and what a job held is what lies between its files."""
    for event in story.events(JobStarted):
        job = job_folder(run, event.job_id)
        (state,) = run.base.glob(f"{job.parent.parent.name}/scheduler/jobs/fq-*-{job.name}/state.json")
        queue = json.loads(state.read_text())
        assert event.admission_delay == pytest.approx(queue["started_at"] - queue["eligible_at"], abs=0.05)
        assert event.admission_delay > min(WAITS) - 0.1
    assert len(story.events(JobEnded)) >= 2
    for ended in story.events(JobEnded):
        attempt = job_folder(run, ended.job_id) / "attempt-0"
        end = attempt / "left.json" if (attempt / "left.json").exists() else attempt / "result.json"
        held = end.stat().st_mtime - (attempt / "started").stat().st_mtime
        assert ended.held_seconds == pytest.approx(held, abs=0.05)
        assert ended.held_seconds >= ended.train_seconds - 0.1


def check_budgets(story: Story, run: Run, wall: float) -> None:
    """A job that takes its work when it starts, or from part to part, has what is left until the cutoff that it aims
    at; and no job believes that its wall time is over, or that it has ten minutes more."""
    cutoffs = [c.at for c in story.commands(SetTimer)]
    taken: list[JobStarted | WorkTaken] = [*story.events(JobStarted), *story.events(WorkTaken)]
    taken = [event for event in taken if event.bound is not None]
    held_since = {began.job_id: began.at - began.ago - began.lingered for began in story.events(JobStarted)}
    for event, late in zip(taken, lateness(run, taken), strict=True):
        assert event.bound is not None
        assert event.bound.cutoff is not None
        assert event.bound.train_budget is not None
        assert min(abs(event.bound.cutoff - at) for at in cutoffs) < 1e-6 or event.bound.cutoff > max(cutoffs)
        left = event.bound.cutoff - (event.at - event.ago - late)
        assert event.bound.train_budget <= left + CLOSE
        has_held = (event.at - event.ago) - held_since[event.job_id]
        left = min(left, wall - RESERVE_SECONDS - has_held)
        assert event.bound.train_budget >= left - CLOSE - 1.0  # what it learnt to keep free for handing in
    for ended in story.events(JobEnded):
        for path in (job_folder(run, ended.job_id) / "attempt-0").rglob("result.json"):
            result = json.loads(path.read_text())
            assert result["stopped_by"] in ("steps", "deadline")
            assert result["metrics"]["left"] < 60.0


def lateness(run: Run, taken: Sequence[JobStarted | WorkTaken]) -> list[float]:
    """Seconds by which each of these is on record later than the one that was told the fastest: messages take their
    time on a busy machine. When a job took its work the stamp of its file says."""
    moments = []
    for event in taken:
        attempt = job_folder(run, event.job_id) / "attempt-0"
        if isinstance(event, JobStarted):
            path = attempt / "bound.json"
            moments.append(path.stat().st_mtime - json.loads(path.read_text())["startup_seconds"])
        else:
            path = (attempt if event.part == 0 else attempt / f"part-{event.part}") / "taken.json"
            moments.append(path.stat().st_mtime)
    offsets = [moment - (event.at - event.ago) for moment, event in zip(moments, taken, strict=True)]
    return [max(offsets) - offset for offset in offsets]


def job_folder(run: Run, job_id: str) -> Path:
    return run.home(job_id.partition("/")[0]) / "jobs" / str(sequence_of(job_id))
