"""What tests of faults ask of a run, and small disks to fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedqueue.protocol.contract import UpdateKey
from tests.faults.harness import (
    FACILITIES,
    Run,
)
from tests.faults.ledger_checks import Story, check_run
from tests.waiting import wait_for


def check(run: Run, rounds: int = 3) -> Story:
    return check_run(run.folder, [run.home(name) for name in FACILITIES], rounds=rounds)


def updates(story: Story, facility: str) -> list[UpdateKey]:
    return [key for key in story.receipts if key[0].startswith(f"{facility}/")]


def ended_with(run: Run, *codes: int) -> None:
    """No process ended in a way that the test did not bring about."""
    for actor in run.actors.values():
        assert set(actor.codes) <= {0, *codes}, run.tails()


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    place.mkdir(parents=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "none", str(place)], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"a small disk needs the right to mount: {mount.stderr.decode().strip()}")
    try:
        yield
    finally:
        wait_for(lambda: not subprocess.run(["umount", str(place)], capture_output=True).returncode, f"{place} is free")


def fill(place: Path, leave: int = 0) -> Path:
    """A file that takes all the room but `leave` bytes."""
    ballast = place / "ballast"
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, max(0, ballast.stat().st_size - leave))
    return ballast
