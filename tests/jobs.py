"""A job as an agent and a batch script lay it out, for tests of the worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedqueue import PROTOCOL
from tests import waiting

ROOT = Path(__file__).parent.parent
LAUNCHER_VARIABLES = ("WORLD_SIZE", "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def save(path: Path, **tensors: np.ndarray[Any, Any]) -> Path:
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def standing_of(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "number": 7,
        "version": 3,
        "model": str(model),
        "next_cutoff": time.time() + 100.0,
        "round_length": 100.0,
        "steps_per_second": 2.0,
        "overhead": 1.0,
        "min_steps": 1,
        "learning_rate": 0.01,
        "lr_scaling": "none",
        "least_steps": None,
        "patience": 0.0,
        **changes,
    }


def make_job(
    home: Path,
    model: Path | None = None,
    *,
    standing: dict[str, Any] | None = None,
    started: float | None = None,
    steps: int = 3,
    train_budget: float | None = None,
    attempt: int = 0,
    **changes: Any,
) -> dict[str, str]:
    """The files an agent and a batch script lay down; returns the environment of the job."""
    model = model or save(home / "models" / "v3.safetensors", w=np.ones((2, 3), np.float32), b=np.zeros(3, np.float32))
    folder = home / "jobs" / "3"
    (folder / f"attempt-{attempt}").mkdir(parents=True)
    if standing is not None:
        (home / "standing.json").write_text(json.dumps(standing))
    assignment = {"base_version": 3, "steps": steps, "learning_rate": 0.01, "train_budget": train_budget}
    order = {
        "protocol": PROTOCOL,
        "job_id": "north/3",
        "facility": "north",
        "round": 2,
        "purpose": "train",
        "wall_seconds": 120.0,
        "nodes": 2,
        "standing": str(home / "standing.json"),
        "state_dir": str(home / "state"),
        "model": str(model) if standing is None else None,
        "assignment": assignment if standing is None else None,
        **changes,
    }
    (folder / "order.json").write_text(json.dumps(order))
    stamp = folder / f"attempt-{attempt}" / "started"
    stamp.write_text("somewhere\n")
    if started is not None:
        os.utime(stamp, (started, started))
    return {"FEDQUEUE_JOB": str(folder), "FEDQUEUE_ATTEMPT": str(attempt)}


def result_of(home: Path, attempt: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "jobs" / "3" / f"attempt-{attempt}" / "result.json").read_text())
    return found


def update_of(home: Path, attempt: int = 0) -> dict[str, Any]:
    from safetensors.numpy import load_file

    found: dict[str, Any] = load_file(home / "jobs" / "3" / f"attempt-{attempt}" / "update.safetensors")
    return found


def has_result(home: Path) -> bool:
    return bool(list(home.glob("jobs/3/attempt-*/result.json")))


def enter(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """This process is in that job, and in no launcher's."""
    for name in (*LAUNCHER_VARIABLES, "FEDQUEUE_JOB", "FEDQUEUE_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


TRAINED = {"w": np.full((2, 3), 2.0, np.float32), "b": np.ones(3, np.float32), "frozen": np.zeros(1000)}


def run_script(home: Path, environment: dict[str, str], body: str, **options: Any) -> subprocess.Popen[str]:
    """A training script of its own process, with the package from this tree."""
    script = home / "train.py"
    script.write_text(body)
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    return subprocess.Popen(
        [options.pop("python", sys.executable), str(script)],
        env={**inherited, "PYTHONPATH": str(ROOT / "src"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
        **options,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    def true() -> bool:
        assert path.exists() or process.poll() is None, process.communicate()[1]
        return path.exists()

    waiting.wait_for(true, str(path), every=0.01)


def torchrun(tmp_path: Path, environment: dict[str, str], body: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(body)
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py"]
    return subprocess.run(
        command,
        env={**inherited, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )


def check_ended(job: subprocess.CompletedProcess[str]) -> None:
    """It ended well; or torch aborted a process at its very end, as it does now and then with gloo, with or without
    FedQueue. Whether a result is there is for the caller to check, as it is for an agent."""
    assert job.returncode == 0 or "terminate called without an active exception" in job.stderr, job.stderr
