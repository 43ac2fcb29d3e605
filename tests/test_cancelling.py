"""A job that does not want to end: its cancel is sent once, and again only when the scheduler has had its time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from fedqueue.protocol.messages import JobStarted
from tests.faults.harness import Run, free_port, tree_of
from tests.pbs import StandIn, stand_in
from tests.slurm import clusters

pytestmark = pytest.mark.waits(10)

DEAF = "trap '' TERM; while true; do sleep 0.1; done"
"""Only SIGKILL ends it; and it says nothing in its folder, so that only its scheduler knows that it ended."""


@contextmanager
def deaf_run(folder: Path, scheduler: dict[str, Any]) -> Iterator[Run]:
    """A run whose one job is deaf and runs, when the operator stops the run."""
    tree = tree_of("fedavg", port=free_port(), options={"steps": 5}, facility=[{"name": "only"}])
    with Run(folder, tree, agent={"command": DEAF}, scheduler={"min_wall_seconds": 600.0, **scheduler}) as run:
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "only/0"), "its job runs")
        assert main(["stop", str(run.folder)]) == 0
        yield run


@pytest.fixture
def pbs(tmp_path: Path) -> Iterator[StandIn]:
    with stand_in(tmp_path) as made:
        yield made


def settings(pbs: StandIn, **changes: Any) -> dict[str, Any]:
    return {"kind": "pbs", "bin": str(pbs.bin), **changes}


def test_one_cancel_ends_it_however_often_the_agent_looks_and_is_started_again(tmp_path: Path, pbs: StandIn) -> None:
    pbs.kill_delay = 3.0
    with deaf_run(tmp_path, settings(pbs)) as run:
        job = pbs.of("-0")
        for _ in range(2):
            run.run_until(lambda: looked_after_cancel(pbs), "the agent looks at what came of its cancel")
            run.stop("only")
            run.start("only")
        run.run_to_end()
        assert job.state == "F"
        assert pbs.deletions(job) == 1


def looked_after_cancel(pbs: StandIn) -> bool:
    commands = [call[0] for call in pbs.calls]
    return "qdel" in commands and "qstat" in commands[commands.index("qdel") :]


def test_a_cancel_that_the_scheduler_forgot_is_sent_again_after_its_delay(tmp_path: Path, pbs: StandIn) -> None:
    pbs.kill_delay, pbs.lost_deletions = 0.1, 1
    with deaf_run(tmp_path, settings(pbs, kill_delay_seconds=1.0)) as run:
        run.run_to_end()
        assert pbs.of("-0").state == "F"
        assert pbs.deletions(pbs.of("-0")) == 2


def test_a_delay_that_is_longer_than_the_config_says_is_met_in_the_end(tmp_path: Path, pbs: StandIn) -> None:
    pbs.kill_delay = 3.0
    with deaf_run(tmp_path, settings(pbs, kill_delay_seconds=0.2)) as run:
        run.run_to_end()
        assert pbs.of("-0").state == "F"


def test_the_local_scheduler_and_slurm_end_it_too(tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    with deaf_run(folder, {"kind": "local"}) as run:
        run.run_to_end()
        (state,) = folder.glob("only/scheduler/jobs/*/state.json")
        assert json.loads(state.read_text())["outcome"] == "cancelled"
    with clusters(1) as (cluster,):
        folder = tmp_path / "slurm"
        folder.mkdir()
        with deaf_run(folder, {"kind": "slurm", "conf": str(cluster.conf), "partition": "batch"}) as run:
            run.run_to_end()
        log = (cluster.folder / "log" / "slurmctld.log").read_text()
        assert log.count("REQUEST_KILL_JOB") == 1
