"""What the local scheduler does beyond the contract of test_schedulers.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedqueue.agent.schedulers import SubmitRefusedError, localjob
from tests.sites import Site, is_alive, local_site
from tests.waiting import wait_for


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Site]:
    with local_site(tmp_path, slots=1) as made:
        made.slots = 1
        yield made


def pid_of(site: Site, job_id: str, key: str = "pid") -> int:
    state = site.folder / "scheduler" / "jobs" / job_id / "state.json"
    return int(json.loads(state.read_text())[key])


def test_job_whose_process_was_killed_is_a_node_failure_and_leaves_nothing_behind(local: Site) -> None:
    job_id = local.submit("sleep 600")
    local.wait(job_id, "running")
    script = pid_of(local, job_id, "group")
    os.kill(pid_of(local, job_id), signal.SIGKILL)
    status = local.wait(job_id, "ended")
    assert (status.outcome, status.exit_code) == ("node_fail", None)
    wait_for(lambda: not is_alive(script), "the end of its script")
    assert local.wait(job_id, "ended") == status, "the same at the next poll"
    assert local.wait(local.submit("true"), "ended").outcome == "completed", "its slot is free"


def test_job_that_died_while_it_waited_does_not_block_the_queue(local: Site) -> None:
    (running,) = local.fill(60)
    waiting = local.submit("true")
    behind = local.submit("true")
    for job_id in (waiting, behind):
        wait_for(lambda: local.wait(job_id, "waiting").eligible_at is not None, "its place in the queue")  # noqa: B023
    os.kill(pid_of(local, waiting), signal.SIGKILL)
    local.scheduler.cancel(running)
    assert local.wait(behind, "ended").outcome == "completed"
    assert local.wait(waiting, "ended").outcome == "node_fail"


def test_first_come_is_first_served(local: Site) -> None:
    ids = [local.submit("sleep 0.1") for _ in range(4)]
    starts = [local.wait(job_id, "ended").started_at or 0.0 for job_id in ids]
    assert starts == sorted(starts)


def test_extra_waits_come_in_turn_and_count_as_waiting(local: Site) -> None:
    scheduler = local.scheduler_with(extra_waits=[0.0, 1.5], slots=2)
    ids = [scheduler.submit(local.request("true")) for _ in range(2)]
    first, second = (local.wait(job_id, "ended") for job_id in ids)
    assert (second.started_at or 0.0) - (second.eligible_at or 0.0) >= 1.5
    assert (first.started_at or 0.0) < (second.started_at or 0.0)


def test_name_is_taken_once(local: Site) -> None:
    request = local.request("true")
    local.scheduler.submit(request)
    with pytest.raises(SubmitRefusedError, match="already"):
        local.scheduler.submit(request)
    local.wait(request.name, "ended")
    with pytest.raises(SubmitRefusedError, match="already"):
        local.scheduler.submit(request)


def test_agent_that_died_before_the_job_had_a_process_submits_it_again(local: Site) -> None:
    request = local.request("true")
    folder = local.folder / "scheduler" / "jobs" / request.name
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "record.json").write_text("{}")  # as far as it came
    assert local.scheduler.find(request.name) is None
    assert local.scheduler.poll([request.name]) == {}
    assert local.wait(local.scheduler.submit(request), "ended").outcome == "completed"


def test_job_that_ignores_sigterm_is_killed(local: Site) -> None:
    job_id = local.submit("trap '' TERM; echo ready; while true; do sleep 1; done", wall=1.0)
    local.wait(job_id, "running")
    script = pid_of(local, job_id, "group")
    status = local.wait(job_id, "ended")
    assert (status.outcome, status.exit_code) == ("timeout", 128 + signal.SIGKILL)
    assert not is_alive(script)


def test_process_of_a_job_loads_nothing_but_a_little_of_the_standard_library() -> None:
    program = (
        "import runpy, sys; "
        f"runpy.run_path({localjob.__file__!r}); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    answer = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=600)
    assert set(answer.stdout.split()) <= {"__main__"}, answer.stderr
