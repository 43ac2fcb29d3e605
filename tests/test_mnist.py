"""The controlled setting with its real model and data; experiments/results has more seeds and methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedqueue import data
from fedqueue.config import load
from fedqueue.errors import DataError
from fedqueue.sim.runner import simulate
from fedqueue.training.workload import load_workload

CONFIG = Path(__file__).parent.parent / "experiments" / "mnist.toml"


def test_with_training_jit_reaches_the_target_before_the_others() -> None:
    """CNN, Dirichlet 0.5, rho 0.9, two seeds."""
    if not any(p.exists() for p in data.candidates("mnist/train-images-idx3-ubyte.gz")):
        pytest.skip(f"MNIST is not under {data.root()}: set FEDQUEUE_DATA to the folder that has it")
    reached: dict[str, float] = {}
    for strategy in ("jit", "fedavg", "fedqueue"):
        for seed in (1, 2):
            chosen = (f"run.strategy={strategy}", f"run.seed={seed}")
            changes = (*chosen, "run.stop_at_score=0.90", "task.test_samples=2000")
            seconds = simulate(load(CONFIG, changes))["time_to"]["0.90"]
            reached[strategy] = reached.get(strategy, 0.0) + seconds / 2
    assert reached["fedavg"] <= 30
    assert reached["fedqueue"] <= 40
    assert reached["jit"] < min(reached["fedavg"], reached["fedqueue"])


def test_images_are_those_of_the_data_folder_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process read before: a run that needs what is gone says so, and does not train for hours."""
    if not any(p.exists() for p in data.candidates("mnist/train-images-idx3-ubyte.gz")):
        pytest.skip(f"MNIST is not under {data.root()}: set FEDQUEUE_DATA to the folder that has it")
    assert len(load_workload("mnist", {}).train[1]) == 60_000
    monkeypatch.setenv("FEDQUEUE_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(data, "MIRRORS", ())
    with pytest.raises(DataError, match=r"mnist/train-images-idx3-ubyte\.gz"):
        load_workload("mnist", {})
