"""The cifar100 task: its files, its images as they are trained on, its network, and a run of it."""

from __future__ import annotations

import hashlib
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedqueue import data
from fedqueue.config import Config, parse
from fedqueue.errors import DataError
from fedqueue.sim.runner import Learned, simulate
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import make_task
from fedqueue_reproduction import cifar100
from fedqueue_reproduction.fleet import run_many
from tests.conftest import facility


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was decoded is kept in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cifar100._samples.cache_clear()
    yield
    cifar100._samples.cache_clear()


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with 48 + 16 images of noise, 16 classes, stored as the real ones are."""
    folder = tmp_path / "data" / "cifar100"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(7)
    labels: dict[str, Any] = {}
    for part, names, count in (("train", ("train_0", "train_1"), 24), ("test", ("test",), 16)):
        images = [generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8) for _ in names]
        for name, piece in zip(names, images, strict=True):
            (folder / f"{name}.npy.xz").write_bytes(stored(piece))
        labels[f"{part}_fine"] = generator.permutation(np.arange(count * len(names)) % 16).astype(np.uint8)
        labels[f"{part}_sha256"] = hashlib.sha256(np.concatenate(images).tobytes()).hexdigest()
    np.savez(folder / "labels.npz", **labels)
    monkeypatch.setenv("FEDQUEUE_DATA", str(folder.parent))
    return folder


def stored(images: Any) -> bytes:
    """Green, red - green, blue - green, each pixel less the one above and the one to the left."""
    red, green, blue = images[:, 0], images[:, 1], images[:, 2]
    planes = np.stack([green, red - green, blue - green], 1)
    nothing = np.uint8(0)
    differences = np.diff(np.diff(planes, axis=3, prepend=nothing), axis=2, prepend=nothing)
    file = io.BytesIO()
    np.save(file, differences)
    return lzma.compress(file.getvalue(), preset=0)


def test_images_are_decoded_checked_and_kept(few: Path) -> None:
    generator = np.random.default_rng(7)
    first = generator.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    images, labels = cifar100.workload().train
    assert images.shape == (48, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert sorted(labels.tolist()) == sorted(3 * list(range(16)))
    assert np.array_equal(images[:24].numpy(), first)
    # Another process needs the labels alone.
    for name in ("train_0", "train_1"):
        (few / f"{name}.npy.xz").unlink()
    cifar100._samples.cache_clear()
    assert torch.equal(cifar100.workload().train[0], images)


def test_damaged_files_are_one_line_that_names_them(few: Path) -> None:
    whole = (few / "train_1.npy.xz").read_bytes()
    (few / "train_1.npy.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train_1\.npy\.xz cannot be read"):
        cifar100.workload()
    (few / "train_1.npy.xz").write_bytes((few / "train_0.npy.xz").read_bytes())
    with pytest.raises(DataError, match=r"cifar100: its train images are not those of its labels\.npz"):
        cifar100.workload()
    (few / "labels.npz").write_bytes(b"none")
    with pytest.raises(DataError, match=r"labels\.npz cannot be read"):
        cifar100.workload()
    (few / "labels.npz").unlink()
    with pytest.raises(DataError, match=r"cifar100/labels\.npz is missing; looked for"):
        cifar100.workload()


def test_the_real_images_have_the_published_means() -> None:
    if not any(path.exists() for path in data.candidates("cifar100/labels.npz")):
        pytest.skip(f"CIFAR-100 is not under {data.root()}: set FEDQUEUE_DATA to the folder that has it")
    found = cifar100.workload()
    assert (len(found.train[1]), len(found.test[1])) == (50_000, 10_000)
    assert torch.equal(torch.bincount(found.train[1]), torch.full((100,), 500))
    pixels = found.train[0].numpy()
    for channel, mean, deviation in zip(range(3), cifar100.MEAN, cifar100.DEVIATION, strict=True):
        assert pixels[:, channel].mean() / 255 == pytest.approx(mean, abs=1e-6)
        assert pixels[:, channel].std() / 255 == pytest.approx(deviation, abs=1e-6)


def cropped(image: Tensor, down: int, across: int, mirrored: bool) -> Tensor:
    wide = torch.zeros(3, 40, 40, dtype=torch.uint8)
    wide[:, 4:36, 4:36] = image
    piece = wide[:, down : down + 32, across : across + 32]
    return piece.flip(2) if mirrored else piece


def test_crops_and_flips_are_those_that_the_draws_say() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(1, 256, (400, 3, 32, 32), dtype=torch.uint8, generator=generator)
    draws = torch.randint(-(2**63), 2**63 - 1, (400,), generator=generator)
    altered = cifar100.crop_and_flip(images, draws)
    seen = set()
    for image, draw, found in zip(images, draws.tolist(), altered, strict=True):
        bits = draw % 2**64
        place = ((bits & 0xFFFF) * 9 // 65536, (bits >> 16 & 0xFFFF) * 9 // 65536, bool(bits >> 32 & 1))
        assert torch.equal(found, cropped(image, *place))
        seen.add(place)
    assert {down for down, _, _ in seen} == {across for _, across, _ in seen} == set(range(9))
    assert 150 < sum(bits % 2**64 >> 32 & 1 for bits in draws.tolist()) < 250


def test_the_network_is_resnet_18_and_takes_bytes() -> None:
    network = cifar100.ResNet18()
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_220_132
    assert len([name for name in network.state_dict() if name.endswith("running_var")]) == 20
    assert network(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 100)
    means = torch.tensor(cifar100.MEAN).view(3, 1, 1) * 255
    assert torch.allclose(means * network.scale + network.shift, torch.zeros(3, 1, 1), atol=1e-5)


def test_a_job_has_its_own_crops_and_learns(few: Path) -> None:
    task = make_task(TaskSettings(name="cifar100", partition="iid", batch_size=8), facilities=2, seed=1)
    start = task.initial_model()
    first = task.train(facility=0, model=start, steps=2, learning_rate=0.001, key=3)
    assert first.model["bn1.num_batches_tracked"] == 2
    task.score(first.model)
    again = task.train(facility=0, model=start, steps=2, learning_rate=0.001, key=3)
    assert all(torch.equal(first.model[name], again.model[name]) for name in start)
    other = task.train(facility=0, model=start, steps=2, learning_rate=0.001, key=4)
    assert not torch.equal(first.model["conv1.weight"], other.model["conv1.weight"])


def config_of(strategy: str, partition: str = "iid") -> Config:
    tree: dict[str, Any] = {
        "run": {"strategy": strategy, "seed": 2, "seconds": 8.0, "round_length": 4.0, "learning_rate": 0.001},
        "task": {"name": "cifar100", "partition": partition, "batch_size": 4},
        "strategy": {strategy: {"steps": 2}} if strategy in ("fedavg", "fedasync", "fedbuff") else {},
        "facility": [
            facility("east", steps_per_second=1.0, queue={"kind": "fixed", "delay": 0.5}),
            facility("west", steps_per_second=0.7, queue={"kind": "fixed", "delay": 1.0}),
        ],
    }
    for name in ("fedqueue", "jit"):
        tree["strategy"].setdefault(name, {})["min_steps"] = 1
    return parse(tree)


def losses(config: Config, learned: Learned | None = None) -> list[float]:
    seen: list[float] = []

    def listen(event: Any, _: object) -> None:
        if type(event).__name__ == "ModelScored":
            seen.append(event.metrics["loss"])

    simulate(config, listeners=[listen], learned=learned)
    return seen


@pytest.mark.parametrize(("strategy", "partition"), [("jit", "iid"), ("fedavg", "dirichlet")])
def test_runs_that_share_a_device_learn_as_alone(few: Path, strategy: str, partition: str) -> None:
    config = config_of(strategy, partition)
    alone = losses(config)
    together = dict(run_many([config, config], lambda i, learned: losses(config, learned), device="cpu", slots=2))
    assert together[0] == together[1]
    assert together[0] == pytest.approx(alone, rel=0.02)
