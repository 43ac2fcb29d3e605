"""A server of this version and the agents of 0.1: real ones, from this repository's own history."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from fedqueue.protocol.messages import UpdateArrived
from tests.coordinators import Served, serving
from tests.faults.ledger_checks import Story, check_fates
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(15)

ROOT = Path(__file__).parent.parent
BUILDS = {"north": "9074cc9", "south": "3812406"}
"""The last commits at which version 0.1.0 spoke protocols 1 and 2."""

AGENT = """
[agent]
home = "home"
command = "{python} {script}"
poll_seconds = 0.3
[agent.environment]
PYTHONPATH = "{libraries}"
[scheduler]
kind = "local"
"""
SCRIPT = """
import time
import fedqueue
from safetensors.numpy import load_file
with fedqueue.participate() as work:
    for _ in work.steps():
        time.sleep(0.02)
    work.submit({name: values + 0.01 for name, values in load_file(work.model_path).items()})
"""


def source_of(build: str, folder: Path) -> Path:
    """The package as it was then."""
    found = subprocess.run(["git", "archive", build, "src"], cwd=ROOT, capture_output=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"the history of this checkout has no commit {build}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


@contextmanager
def older_agent(served: Served, name: str, folder: Path) -> Iterator[Path]:
    """Enrolled and at work; its log."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(source_of(BUILDS[name], folder))}
    script, config, invitation = folder / "train.py", folder / "agent.toml", folder / "invitation"
    script.write_text(SCRIPT)
    config.write_text(AGENT.format(python=sys.executable, script=script, libraries=environment["PYTHONPATH"]))
    config.chmod(0o600)
    assert main(["invite", str(served.folder), name, "--out", str(invitation)]) == 0
    fedqueue = [sys.executable, "-m", "fedqueue"]
    enroll = [*fedqueue, "enroll", str(config), "--invitation", str(invitation)]
    subprocess.run(enroll, env=environment, check=True, capture_output=True, cwd=folder)
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen([*fedqueue, "agent", str(config)], env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        yield folder / "agent.log"
        assert agent.wait(LONGEST) == 0, (folder / "agent.log").read_text()
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize("strategy", ["fedqueue", "jit"])
def test_agents_of_the_version_before_bring_a_run_to_its_end(strategy: str, tmp_path: Path) -> None:
    """Jobs that stay are asked of them too, and hand in once."""
    options = {"stay": "auto"} if strategy == "jit" else {}
    how: dict[str, Any] = {"strategy": strategy, "options": options, "round_length": 1.5, "rounds": 2, "seconds": 300.0}
    server = {"wait_for": 2, "startup_allowance_seconds": 5.0}
    with serving(tmp_path, tuple(BUILDS), ends=True, server=server, **how) as served:
        with (
            older_agent(served, "north", tmp_path / "north") as north,
            older_agent(served, "south", tmp_path / "south") as south,
        ):
            wait_for(
                lambda: served.process.poll() is not None,
                "the end of the run",
                lambda: "\n".join([served.said()[-2000:], *(log.read_text()[-2000:] for log in (north, south))]),
            )
        story = Story(served.folder)
    check_fates(story)
    assert {event.receipt.job_id.partition("/")[0] for event in story.events(UpdateArrived)} == set(BUILDS)
    assert max(story.versions) == 2
