"""Facilities that are absent at a cutoff and stand in with an update they had before: from memory and from files, and
at what price."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedqueue import tensorsum
from fedqueue.aggregate import StateDict
from fedqueue.config import parse
from fedqueue.protocol.messages import Aggregate
from fedqueue.sim.learning import RealLearning
from fedqueue.sim.runner import simulate
from fedqueue.tensorfile import write
from fedqueue.tensorsum import FileContribution
from fedqueue.training.tasks import make_task
from tests.conftest import facility


class InFiles(RealLearning):
    """Makes each model from files too, as a coordinator does, and compares them."""

    def __init__(self, folder: Path, task: Any) -> None:
        super().__init__(task)
        self._folder = folder
        self.again = 0
        self.agreements: Counter[bool] = Counter()

    def aggregate(self, command: Aggregate) -> float | None:
        files = []
        for share in command.weights:
            trained, base = self._updates[share.key]
            self.again += share.again
            paths = (
                self._file("-".join(map(str, share.key)).replace("/", "-"), trained),
                self._file(f"v{base}", self._models[base]),
            )
            files.append(FileContribution(weight=share.weight, trained=paths[0], base=paths[1], base_key=base))
        current = self._file(f"v{command.from_version}", self._models[command.from_version])
        found = super().aggregate(command)
        wanted = self._models[command.to_version]
        if files:
            is_first = command.from_version == 0
            tensorsum.aggregate(current, files, command.rule, out := self._folder / "out", from_first=is_first)
            made = load_file(out)
            assert made.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(made[name], tensor), f"{name} of model {command.to_version}"
        fresh = [file for file, share in zip(files, command.weights, strict=True) if not share.again]
        assert found == (pytest.approx(tensorsum.agreement(fresh)) if command.agreement else None)
        self.agreements[found is not None] += 1
        return found

    def _file(self, name: str, tensors: StateDict) -> Path:
        path = self._folder / name
        if not path.exists():
            save_file(tensors, path)
        return path


@pytest.mark.parametrize("strategy", ["jit", "fedqueue"])
def test_models_with_stand_ins_are_the_same_from_memory_and_from_files_to_the_bit(
    strategy: str, tmp_path: Path
) -> None:
    options = {"stay": 12.0, "rounds": "auto"} if strategy == "jit" else {}
    config = parse(
        {
            "run": {"strategy": strategy, "seed": 4, "rounds": 25, "round_length": 3.0, "learning_rate": 0.003},
            "task": {"name": "digits", "dirichlet_alpha": 0.5},
            "strategy": {strategy: {"absent": 0.7, "min_steps": 5, **options}},
            "facility": [facility("east"), facility("west", steps_per_second=2.0), facility("north")],
            "fault": [{"kind": kind, "probability": 0.2} for kind in ("preempt", "fail", "corrupt", "duplicate")],
        }
    )
    task = make_task(config.task, len(config.facility), config.run.seed)
    learning = InFiles(tmp_path, task)
    assert simulate(config, learned=(learning, task.data_sizes()))["rounds"] == 25
    assert learning.again >= 10
    assert learning.agreements[True] >= (5 if strategy == "jit" else 0)


MEASURE = """
import sys, threading
from pathlib import Path
from fedqueue.tensorsum import FileContribution, aggregate

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

folder, old, peak, done = Path(sys.argv[1]), int(sys.argv[2]), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

start = anonymous()
watching = threading.Thread(target=watch)
watching.start()
base = [folder / (f"base{n}" if n < old else "now") for n in range(6)]
shares = [
    FileContribution(weight=1 / 6, trained=folder / f"update{n}", base=base[n], base_key=base[n].name)
    for n in range(6)
]
aggregate(folder / "now", shares, "add_deltas", folder / "out")
done.set()
watching.join()
print(peak - start)
"""


def test_stand_ins_need_no_more_memory_than_updates_that_are_new(tmp_path: Path) -> None:
    """Six updates of 96 MB, of which none or four were made from models of their own."""
    layer = np.full(2_000_000, 1.0, np.float32)
    write(tmp_path / "now", {f"layer{i}": layer for i in range(12)})
    for name in (*(f"update{n}" for n in range(6)), *(f"base{n}" for n in range(4))):
        (tmp_path / name).hardlink_to(tmp_path / "now")

    def peak(old: int) -> int:
        argv = [sys.executable, "-c", MEASURE, str(tmp_path), str(old)]
        run = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return int(run.stdout)

    all_new, stand_ins = peak(0), peak(4)
    assert stand_ins < all_new + (4 << 20), (all_new, stand_ins)
    assert stand_ins < 60 << 20
