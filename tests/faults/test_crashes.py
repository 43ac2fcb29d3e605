"""A hundred and twenty seeded crash schedules: whatever is killed wherever, nothing is lost and nothing counts twice.

A longer run, and how to repeat one schedule: docs/faults.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedqueue.files import POINTS
from tests.faults.schedules import schedule_of

pytestmark = pytest.mark.waits(400)

ROOT = Path(__file__).parent.parent.parent
SCHEDULES = 120


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All schedules, in processes of their own: a fork needs a parent without threads."""
    found = tmp_path_factory.mktemp("crashes") / "outcomes.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--schedules", str(SCHEDULES), "--json", str(found)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = json.loads(found.read_text()) if found.exists() else []
    return {"outcomes": outcomes, "said": done.stdout[-2000:] + done.stderr[-20000:]}


def test_crash_schedules_lose_nothing_and_count_nothing_twice(crashes: dict[str, Any]) -> None:
    outcomes = crashes["outcomes"]
    assert len(outcomes) == SCHEDULES, crashes["said"]
    assert not [outcome["seed"] for outcome in outcomes if outcome["error"]], crashes["said"]
    assert sum(outcome["kills"] for outcome in outcomes) >= SCHEDULES


def test_in_half_of_them_jobs_stay_and_hand_in_part_after_part(crashes: dict[str, Any]) -> None:
    parts = [outcome["parts"] for outcome in crashes["outcomes"] if outcome["stays"]]
    assert len(parts) >= 0.4 * SCHEDULES
    # A run may be over before the first of its jobs goes on, if those were killed whom it waited for.
    assert sum(n >= 2 for n in parts) >= 0.9 * len(parts)


def test_in_some_of_them_a_federation_has_two_runs_at_once(crashes: dict[str, Any]) -> None:
    two = [outcome for outcome in crashes["outcomes"] if schedule_of(outcome["seed"]).beside]
    assert len(two) >= SCHEDULES / 8
    assert sum(outcome["kills"] for outcome in two) >= len(two)


@pytest.mark.parametrize("point", POINTS)
def test_failpoint_killed_a_process(crashes: dict[str, Any], point: str) -> None:
    assert any(point in outcome["hit"] for outcome in crashes["outcomes"])


def test_a_schedule_is_the_same_for_ever() -> None:
    assert schedule_of(7) == schedule_of(7)
    assert len({str(schedule_of(seed)) for seed in range(SCHEDULES)}) == SCHEDULES
