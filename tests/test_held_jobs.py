"""A job that a person holds is why its facility idles: the agent says so, and what to do about it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from tests.faults.harness import Run, free_port, tree_of
from tests.gridengine import grid_engine
from tests.pbs import stand_in
from tests.slurm import clusters

pytestmark = pytest.mark.waits(8)

Call = Callable[..., object]


@contextmanager
def pbs(folder: Path) -> Iterator[tuple[dict[str, Any], Call]]:
    with stand_in(folder) as made:
        settings = {"kind": "pbs", "bin": str(made.bin), "extra": ["-h"]}
        yield settings, lambda name, *rest: subprocess.run([made.bin / name, *rest], check=True, timeout=600)


@contextmanager
def slurm(folder: Path) -> Iterator[tuple[dict[str, Any], Call]]:
    with clusters(1) as (cluster,):
        yield {"kind": "slurm", "conf": str(cluster.conf), "partition": "batch", "extra": ["--hold"]}, cluster.call


@contextmanager
def sge(folder: Path) -> Iterator[tuple[dict[str, Any], Call]]:
    with grid_engine() as engine:
        given = {name: value for name, value in vars(engine.settings(extra=["-h"])).items() if value is not None}
        yield given, engine.call


@pytest.mark.parametrize("scheduler", [pbs, slurm, sge])
def test_a_held_job_is_named_with_the_command_that_releases_it(
    tmp_path: Path, scheduler: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tree_of("fedavg", rounds=2, port=free_port(), options={"steps": 5}, facility=[{"name": "only"}])
    with scheduler(tmp_path) as (settings, call), Run(tmp_path, tree, scheduler=settings) as run:
        run.start()
        for number in range(2):
            line = f"job {number} is held by its owner"
            run.run_until(lambda line=line: line in run.log("only"), "the held job is named")  # type: ignore[misc]
            run.run_until(lambda line=line: line in status(run, capsys), "and in what the operator sees")  # type: ignore[misc]
            (told,) = (told for told in run.log("only").splitlines() if line in told)
            call(*told.split("`")[1].split())  # as a person would who reads it
        run.run_to_end()
        assert run.log("only").count("held jobs: well again") == 2


def status(run: Run, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["status", str(run.folder)]) == 0
    return capsys.readouterr().out
