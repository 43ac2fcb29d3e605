"""Models that a facility scores: by an agent that comes and goes, by jobs that are lost, and at the end of the run."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedqueue.protocol.messages import ModelReady, ModelScored
from tests.faults.facts import check, ended_with
from tests.faults.harness import COORDINATOR, FACILITIES, WORKER, Run, free_port, tree_of

pytestmark = pytest.mark.waits(20)

SCORE = shlex.join([sys.executable, "-I", "-S", str(WORKER)])
PATIENCE = 600.0
"""Seconds that the coordinator waits for the last score: longer than any test."""


def scored_by_north(base: Path, command: str, *, rounds: int = 3, **agent: Any) -> Run:
    tree = tree_of(
        "fedavg",
        rounds=rounds,
        port=free_port(),
        options={"steps": 5},
        evaluation={"where": "north", "timeout_seconds": PATIENCE},
    )
    return Run(base, tree, agent={"evaluate_command": command, **agent}, scheduler={"slots": 2})


def scores(run: Run) -> set[int]:
    return {event.version for event in run.story().events(ModelScored)}


def last(run: Run) -> int:
    return max(event.version for event in run.story().events(ModelReady))


def test_an_agent_that_only_visits_brings_every_score_that_its_jobs_made(tmp_path: Path) -> None:
    """A score takes longer than a visit, and rounds do not wait for it."""
    with scored_by_north(tmp_path, f"sleep 1; exec {SCORE}", rounds=6) as run:
        for name in FACILITIES:
            run.actors[name].argv.append("--once")
            run.actors[name].visits = True
        run.start()
        run.run_until(lambda: run.actors[COORDINATOR].done, "the end of the run")
        results = run.home("north").glob("jobs/eval-*/attempt-*/result.json")
        made = {int(path.parent.parent.name.removeprefix("eval-")) for path in results}
        assert len(made) >= 2
        assert scores(run) == made
        assert last(run) in made, "the last model is scored before the run ends"
        assert "no score" not in run.log(COORDINATOR)
        check(run, rounds=6)


def test_a_job_that_scores_and_is_lost_is_tried_again(tmp_path: Path) -> None:
    """Each first try is killed, also the one for the last model."""
    first = 'mkdir "$FEDQUEUE_JOB/killed" 2>/dev/null && kill -9 $$'
    with scored_by_north(tmp_path, f"{first}; exec {SCORE}") as run:
        run.start()
        run.run_to_end()
        begun = {int(path.name.removeprefix("eval-")) for path in run.home("north").glob("jobs/eval-*")}
        assert last(run) in begun
        assert scores(run) == begun
        assert "no score" not in run.log(COORDINATOR)
        check(run)
        ended_with(run)


def test_a_model_that_cannot_be_scored_is_named_with_the_reason_and_the_run_ends_without_waiting(
    tmp_path: Path,
) -> None:
    with scored_by_north(tmp_path, "echo the test samples are not here >&2; exit 3", rounds=2) as run:
        began = time.monotonic()
        run.start()
        run.run_to_end()
        assert time.monotonic() - began < PATIENCE
        assert not scores(run)
        said = run.log(COORDINATOR)
        assert f"model {last(run)} gets no score: " in said
        assert "the test samples are not here" in said
        assert "longer than a round" not in said
        check(run, rounds=2)
        ended_with(run)


def test_the_last_model_is_scored_when_its_agent_is_killed_and_comes_back_late(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with scored_by_north(tmp_path, f"while [ -e {gate} ]; do sleep 0.05; done; exec {SCORE}") as run:
        run.start()
        run.run_until(lambda: "waits for the score" in run.log(COORDINATOR), "the coordinator waits for its score")
        run.stop("north")
        gate.unlink()
        run.run_until(lambda: run.actors["south"].done, "south goes, since nobody needs it")
        run.start("north")
        run.run_to_end()
        assert last(run) in scores(run)
        summary = json.loads((run.folder / "summary.json").read_text())
        assert summary["score"]["final"] == 0.5
        check(run)
        ended_with(run, -signal.SIGKILL)
