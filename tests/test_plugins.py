"""A package from outside adds a scheduler, a listener, a strategy, a predictor and a command; ours stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.waits(10)

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "outside"
version = "1.0"

[project.entry-points."fedqueue.schedulers"]
bare = "outside:BareScheduler"
[project.entry-points."fedqueue.listeners"]
kinds = "outside:make_listener"
faulty = "outside:make_faulty_listener"
[project.entry-points."fedqueue.strategies"]
patient = "outside:Patient"
[project.entry-points."fedqueue.predictors"]
pessimist = "outside:pessimist"
[project.entry-points."fedqueue.commands"]
greet = "outside_greet"
broken = "outside:there_is_no_such_thing"

[tool.setuptools]
py-modules = ["outside", "outside_greet"]
"""

MODULE = '''
"""Written as its author would: with what FedQueue documents, and nothing else."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Literal

from fedqueue.protocol.predict import Static
from fedqueue.agent.schedulers import JobStatus
from fedqueue.protocol.strategies.fedavg import FedAvg


class Patient(FedAvg):
    name = "patient"


def pessimist(first, smoothing):
    return Static(1000.0)


class BareScheduler:
    """Starts every job at once, as a process of its own."""

    kind = "bare"

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        kind: Literal["bare"] = "bare"
        note: str
        min_wall_seconds: float = 1.0
        max_wall_seconds: float | None = None

    def __init__(self, settings, home):
        self._records = home / "bare"
        self._records.mkdir(exist_ok=True)
        (home / "note").write_text(settings.note)
        self._processes = {}

    def submit(self, request):
        with request.output.open("ab") as output:
            process = subprocess.Popen(["/bin/bash", str(request.script)], stdout=output, stderr=output,
                                       start_new_session=True)
        self._processes[str(process.pid)] = process
        (self._records / request.name).write_text(str(process.pid))
        return str(process.pid)

    def find(self, name):
        record = self._records / name
        return record.read_text() if record.exists() else None

    def poll(self, ids):
        found = {}
        for number in ids:
            process = self._processes.get(number)
            if process is not None:
                code = process.poll()
                found[number] = JobStatus(phase="running") if code is None else JobStatus(
                    phase="ended", outcome="completed" if code == 0 else "failed", exit_code=code)
        return found

    def cancel(self, job_id):
        try:
            os.killpg(int(job_id), signal.SIGTERM)
        except ProcessLookupError:
            pass

    def estimate(self, wall_seconds, waiting):
        return None

    def listing(self):
        return None


def make_listener(config, folder):
    path = os.path.join(os.environ["OUTSIDE_NOTES"], config.run.strategy)

    def listen(event, commands):
        with open(path, "a") as notes:
            notes.write(type(event).__name__ + "\\n")

    return listen


def make_faulty_listener(config, folder):
    def listen(event, commands):
        raise RuntimeError("it was never tested")

    return listen
'''

GREET = '''
"""Greet whoever asks."""

HELP = "greet somebody"


def add_arguments(parser):
    parser.add_argument("name")


def run(args):
    print(f"good day, {args.name}")
    return 0
'''

CONFIG = """
[run]
strategy = "patient"
rounds = 2
round_length = 5.0

[strategy.patient]
steps = 3

[strategy.fedqueue]
predictor = "conformal/pessimist"

[task]
name = "timing"

[[facility]]
name = "north"
steps_per_second = 10.0
queue = { kind = "fixed", delay = 0.1 }
scheduler = { kind = "bare", note = "hello" }
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "outside.py").write_text(MODULE)
    (source / "outside_greet.py").write_text(GREET)
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*argv, "--target", str(target), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def fedqueue(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OUTSIDE_NOTES": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "fedqueue", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_command_from_outside_is_a_verb_and_a_broken_one_stops_no_other(installed: Path, tmp_path: Path) -> None:
    done = fedqueue(installed, tmp_path, "greet", "operator")
    assert (done.returncode, done.stdout, done.stderr) == (0, "good day, operator\n", "")
    listed, named = (fedqueue(installed, tmp_path, word) for word in ("--help", "broken"))
    assert "greet somebody" in listed.stdout
    for done in (listed, named):
        assert "the plugin 'broken' of outside (commands) cannot be used: AttributeError" in done.stderr
    assert (listed.returncode, named.returncode) == (0, 2)


def test_a_command_loads_nothing_that_only_other_commands_need(tmp_path: Path) -> None:
    """What all commands import together takes ten times as long as looking at a run does."""
    code = "import sys; from fedqueue.cli import main; main(['journal', 'nowhere']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "fedqueue: error: nowhere" in done.stderr
    assert not {"numpy", "scipy", "urllib3", "fedqueue.config", "fedqueue.cli.serve"} & set(done.stdout.split())


def test_a_run_uses_the_scheduler_strategy_and_listener_from_outside(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(CONFIG)
    done = fedqueue(installed, tmp_path, "run", "my.toml", "--out", "real", "--json", "--no-plots")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
    assert (tmp_path / "real/facilities/north/note").read_text() == "hello"
    assert len(list((tmp_path / "real/facilities/north/bare").iterdir())) >= 2
    told = (tmp_path / "patient").read_text().splitlines()
    assert told.count("ModelReady") == 2
    assert "the listener 'faulty' failed and is not called again: RuntimeError: it was never tested" in done.stderr
    assert done.stderr.count("never tested") == 1
    assert fedqueue(installed, tmp_path, "replay", "real").returncode == 0, "the ledger's strategy is found again"


def test_a_simulation_uses_the_strategy_predictor_and_listener_from_outside(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(CONFIG)
    for strategy in ("patient", "fedqueue"):
        done = fedqueue(installed, tmp_path, "simulate", "my.toml", "--strategy", strategy, "--json", "--no-plots")
        assert done.returncode == 0, done.stderr
        assert "RunStarted" in (tmp_path / strategy).read_text()


def test_a_scheduler_from_outside_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(CONFIG.replace('"patient"', '"fedavg"').replace("patient", "fedavg"))
    done = fedqueue(tmp_path, tmp_path, "run", "my.toml", "--set", "strategy.fedqueue.predictor=ewma")
    assert done.returncode == 2
    assert "scheduler.kind: must be one of slurm, pbs, sge, local, found 'bare'" in done.stderr
