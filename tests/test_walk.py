"""A newcomer who follows a real round opens few files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.walk import walk

pytestmark = pytest.mark.waits(60)

MOST = 40
"""Of the package."""
ON_THE_WAY = (
    "agent/agent.py",
    "agent/schedulers/local.py",
    "coordinator/coordinator.py",
    "protocol/strategies/fedqueue.py",
    "tensorsum.py",
    "training/tasks.py",
    "worker/participate.py",
)


def test_a_real_round_enters_few_files(tmp_path: Path) -> None:
    found = walk(tmp_path)
    assert set(found) == {"coordinator", "scorer", "agent", "job"}
    files = set().union(*found.values())
    assert files.issuperset(ON_THE_WAY), "the walk goes all the way round"
    assert len(files) <= MOST, sorted(files)
