"""What docs/jit.md says about late parts, held against ledgers of simulated runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main as fedqueue
from fedqueue_reproduction.lateness import main

CONFIG = """
[run]
strategy = "jit"
seconds = 1500.0
round_length = 10.0

[task]
name = "timing"

[[facility]]
name = "east"
steps_per_second = 10.0
slowdown = 1.5
startup_seconds = 1.0
latency_seconds = 0.2
queue = { kind = "lognormal", mean = 8.0, rho = 0.9 }

[[facility]]
name = "west"
steps_per_second = 3.0
latency_seconds = 0.2
queue = { kind = "lognormal", mean = 20.0, rho = 0.9 }
"""

OUTAGE = """
[[fault]]
kind = "outage"
facility = "east"
at = 700.0
seconds = 40.0
"""


def held_against(folder: Path, more: str, capsys: Any) -> dict[str, Any]:
    (folder / "c.toml").write_text(CONFIG + more)
    assert fedqueue(["simulate", str(folder / "c.toml"), "--no-plots", "--out", str(folder / "run")]) == 0
    capsys.readouterr()
    assert main([str(folder / "run"), "--json", str(folder / "found.json")]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert json.loads((folder / "found.json").read_text()).items() >= found.items()
    return found


def test_where_machine_and_link_are_steady_hardly_a_part_is_late_however_long_the_queue(
    tmp_path: Path, capsys: Any
) -> None:
    found = held_against(tmp_path, "", capsys)
    assert found["parts"] > 200
    assert found["late_once_learned"] < 0.01
    assert found["late"] <= found["markov"] < 0.1
    assert found["above_bound_if_neither_late_nor_behind"] == 0.0
    assert found["staleness"] <= 2
    assert found["excess_training"]["least"] < 0 < found["excess_training"]["most"], (
        "it is slower than it says at first"
    )


def test_a_link_that_is_down_makes_parts_late_and_shows_as_excess(tmp_path: Path, capsys: Any) -> None:
    found = held_against(tmp_path, OUTAGE, capsys)
    assert 0 < found["late_once_learned"] < found["markov"]
    assert found["excess_overhead"]["most"] > 10


def test_what_is_no_run_of_just_in_time_is_refused_in_one_line(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="nowhere: is no run folder and no ledger"):
        main([str(tmp_path / "nowhere")])
    (tmp_path / "c.toml").write_text(CONFIG.replace("jit", "fedavg"))
    assert fedqueue(["simulate", str(tmp_path / "c.toml"), "--no-plots", "--out", str(tmp_path / "run")]) == 0
    with pytest.raises(SystemExit, match="0 parts of jobs that bound their work; 20 are needed"):
        main([str(tmp_path / "run")])
