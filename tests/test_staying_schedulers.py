"""Jobs that stay on PBS (a stand-in) and on a real Grid Engine: killed between two parts, run again, and nothing that
was handed in is lost. (On Slurm: test_slurm_end_to_end.py and test_slurm_ddp.py.)"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from fedqueue.protocol.messages import JobFailed, JobRequeued, UpdateArrived, UpdateRejected, WorkTaken
from tests.faults.harness import Run, free_port, tree_of
from tests.faults.ledger_checks import check_run
from tests.gridengine import grid_engine
from tests.pbs import stand_in

pytestmark = pytest.mark.waits(12)

Rerun = Callable[[], object]
"""Takes the first job back into the queue: its processes are killed, and it runs again."""


@contextmanager
def pbs(folder: Path) -> Iterator[tuple[dict[str, Any], Rerun]]:
    with stand_in(folder) as made:
        settings = {"kind": "pbs", "bin": str(made.bin), "min_wall_seconds": 600.0}
        yield settings, lambda: subprocess.run([made.bin / "qrerun", made.of("-0").id], check=True, timeout=600)


@contextmanager
def sge(folder: Path) -> Iterator[tuple[dict[str, Any], Rerun]]:
    with grid_engine() as engine:
        given = {name: value for name, value in vars(engine.settings()).items() if value is not None}
        yield (
            given,
            lambda: engine.call("qmod", "-rj", min(re.findall(r"^ *(\d+)", engine.call("qstat"), re.M), key=int)),
        )


def parts(run: Run, attempt: int) -> list[int]:
    """Of the first job, that arrived."""
    if not run.happened(UpdateArrived):
        return []
    return sorted(part for job, n, part in run.story().receipts if (job, n) == ("only/0", attempt))


@pytest.mark.parametrize("scheduler", [pbs, sge])
def test_a_job_that_stays_is_killed_and_run_again_and_every_part_counts(
    tmp_path: Path, scheduler: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options, only = {"min_steps": 3, "stay": 300.0}, [{"name": "only"}]
    tree = tree_of("jit", rounds=100_000, port=free_port(), options=options, facility=only, run={"round_length": 1.0})
    with scheduler(tmp_path) as (settings, rerun), Run(tmp_path, tree, scheduler=settings) as run:
        run.start()
        run.run_until(lambda: len(parts(run, 0)) >= 3, "it has handed in three parts")
        rerun()
        run.run_until(lambda: len(parts(run, 1)) >= 3, "it runs again, and hands in three more")
        assert main(["stop", str(run.folder)]) == 0
        run.run_to_end()
        story = check_run(run.folder, [run.home("only")], rounds=4)  # replay is in it
        for attempt in (0, 1):
            found = parts(run, attempt)
            assert found == list(range(len(found))), "one after the other"
            taken = [e.part for e in story.events(WorkTaken) if (e.job_id, e.attempt) == ("only/0", attempt)]
            # It may have handed in the last one before anybody looked.
            assert set(found[:-1]) - {0} <= set(taken)
        assert [(event.job_id, event.attempt) for event in story.events(JobRequeued)] == [("only/0", 1)]
        assert not story.events(JobFailed)
        assert not story.events(UpdateRejected)
        capsys.readouterr()
        assert main(["retrace", str(run.folder)]) == 0, capsys.readouterr().out
