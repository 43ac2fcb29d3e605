"""What a plan costs: four facilities, each with a year or less of a recorded queue."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figure import Figure
from fedqueue.data import find
from fedqueue.errors import DataError

TRACES = {
    "theta": "anl-theta-2021.csv.gz",
    "kth": "kth-sp2-1996.csv.gz",
    "gaia": "unilu-gaia-2014.csv.gz",
    "curie": "cea-curie-2012.csv.gz",
}
HEAD = '[run]\nname = "four"\nseconds = 1_209_600.0\n\n[task]\nname = "timing"\n'
FACILITY = '\n[[facility]]\nname = "{}"\nnodes = 4\nsteps_per_second = 10.0\nstartup_seconds = 30.0\n'


def measure() -> list[Figure]:
    try:
        logs = {name: find(f"traces/{file}") for name, file in TRACES.items()}
    except DataError as error:
        print(f"no plan is measured: {error}")
        return []
    with tempfile.TemporaryDirectory() as home:
        config = Path(home) / "four.toml"
        config.write_text(HEAD + "".join(FACILITY.format(name) for name in logs))
        histories = [word for name, path in logs.items() for word in ("--history", f"{name}={path}")]
        command = [sys.executable, "-m", "fedqueue", "plan", str(config), *histories, "--jobs", "2", "--json"]
        before, began = os.times(), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        wall, after = time.perf_counter() - began, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return [
        Figure("plan for four facilities, two processes", wall, "s", "at most 120"),
        Figure("plan for four facilities, two processes: processor time", spent, "s"),
    ]
