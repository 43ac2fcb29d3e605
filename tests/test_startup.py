"""Jobs that take long to start: the wall time of a facility's first jobs holds the start-up too."""

from __future__ import annotations

import json
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedqueue.protocol.contract import WALL_TIME
from fedqueue.protocol.messages import JobFailed, SubmitJob
from tests.faults.harness import WORKER, Run, free_port, tree_of

pytestmark = pytest.mark.waits(20)

STARTUP = 7.0
"""Seconds; the steps of a job take a tenth of one, a round half of one."""


def run_with(folder: Path, strategy: str = "fedavg", **tables: Any) -> tuple[list[float], list[str]]:
    """What was asked of the scheduler for each job, in seconds, and why jobs failed."""
    tables = {"facility": [{"name": "only"}], **tables}
    tree = tree_of(strategy, rounds=2, port=free_port(), options={"steps": 5}, **tables)
    command = f"sleep {STARTUP}; exec {shlex.join([sys.executable, '-I', '-S', str(WORKER), json.dumps({})])}"
    with Run(folder, tree, agent={"command": command}, scheduler={"min_wall_seconds": 1.0}) as run:
        run.start()
        run.run_to_end()
        story = run.story()
    asked = [command.order.wall_seconds for command in story.commands(SubmitJob)]
    return asked, [event.reason for event in story.events(JobFailed)]


def test_a_start_up_that_nobody_knows_is_allowed_for_until_it_has_been_seen(tmp_path: Path) -> None:
    asked, failed = run_with(tmp_path, server={"startup_allowance_seconds": 300.0})
    assert not failed
    assert asked[0] > 300.0
    assert all(STARTUP < wall < 100.0 for wall in asked[1:])


def test_a_start_up_that_the_config_knows_is_in_the_first_request(tmp_path: Path) -> None:
    asked, failed = run_with(tmp_path, facility=[{"name": "only", "startup_seconds": STARTUP + 2.0}])
    assert not failed
    assert STARTUP + 2.0 < asked[0] < 100.0


@pytest.mark.parametrize("strategy", ["fedavg", "fedasync"])
def test_a_job_that_ran_into_its_wall_time_doubles_what_is_asked(tmp_path: Path, strategy: str) -> None:
    asked, failed = run_with(tmp_path, strategy)
    assert failed
    assert all(reason.startswith(WALL_TIME) for reason in failed)
    tries = asked[: len(failed) + 1]
    assert all(later >= 2 * earlier for earlier, later in pairwise(tries))
    assert len(failed) <= 2, tries
