"""The cifar100 task: 60,000 colour images of 32 x 32 pixels in 100 classes, and the paper's ResNet-18."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedqueue import data
from fedqueue.errors import DataError
from fedqueue.training.workload import Samples, Workload

Pixels = npt.NDArray[np.uint8]

CLASSES = 100
MEAN = (0.50707516, 0.48654887, 0.44091784)
DEVIATION = (0.26733429, 0.25643846, 0.27615047)
"""Of red, green and blue over the training pixels scaled to 0..1, as published."""
PADDING = 4
PARTS = {"train": ("train_0", "train_1"), "test": ("test",)}


def workload() -> Workload:
    return Workload(
        make_model=ResNet18,
        train=_samples("train"),
        test=_samples("test"),
        augment=crop_and_flip,
        precision=torch.bfloat16,
        recordable=True,
    )


def crop_and_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Each image moved by up to 4 pixels, with black around it, and half of them mirrored.

    The bits of its draw say how: 16 for up and down, 16 for left and right, one for the mirror.
    """
    count, channels, height, width = images.shape
    wide = width + 2 * PADDING
    down = torch.arange(height, device=images.device) + _begin(draws)[:, None]
    across = torch.arange(width, device=images.device).expand(count, width)
    mirrored = (draws >> 32 & 1).bool()[:, None]
    across = torch.where(mirrored, across.flip(1), across) + _begin(draws >> 16)[:, None]
    chosen = (down[:, :, None] * wide + across[:, None, :]).view(count, 1, -1).expand(count, channels, -1)
    padded = functional.pad(images, (PADDING, PADDING, PADDING, PADDING))
    return padded.flatten(2).gather(2, chosen).view_as(images)


def _begin(bits: Tensor) -> Tensor:
    """The lowest 16 bits -> where the crop begins in the padded image, 0 to 8."""
    return (bits & 0xFFFF) * (2 * PADDING + 1) >> 16


class ResNet18(nn.Module):
    """For small images: a stem of 3 x 3 without pooling. Takes bytes. The names of the layers are torchvision's."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Not in the state dict: what is always the same need not travel.
        mean, deviation = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(DEVIATION).view(3, 1, 1)
        self.register_buffer("scale", 1 / (255 * deviation), persistent=False)
        self.register_buffer("shift", -mean / deviation, persistent=False)
        self.conv1 = _convolution(3, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(_Block(64, 64), _Block(64, 64))
        self.layer2 = nn.Sequential(_Block(64, 128, stride=2), _Block(128, 128))
        self.layer3 = nn.Sequential(_Block(128, 256, stride=2), _Block(256, 256))
        self.layer4 = nn.Sequential(_Block(256, 512, stride=2), _Block(512, 512))
        self.fc = nn.Linear(512, CLASSES)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        # Channels last is the quicker order for convolutions; the numbers a layer holds are the same.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(torch.float32) * self.scale + self.shift
        x = x.contiguous(memory_format=torch.channels_last)
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        outputs: Tensor = self.fc(x.mean((2, 3)))
        return outputs


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _convolution(before, after, stride)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = _convolution(after, after)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or before != after:
            short = nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(short, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        beside = x if self.downsample is None else self.downsample(x)
        x = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(x)) + beside)


def _convolution(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False)


@cache
def _samples(part: str) -> Samples:
    """Images (n, 3, 32, 32) of bytes and fine labels of "train" or "test"; read once a process."""
    labels = _labels(part)
    digest = labels["sha256"]
    kept = data.cache() / "cifar100" / f"{part}-{digest[:16]}.npy"
    try:
        # Processes that read the same file share its memory; what one of them wrote would be its own.
        pixels = np.load(kept, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError):  # not there, or not whole
        pixels = _decode(part, digest)
        _keep(kept, pixels)
    return torch.from_numpy(pixels), torch.from_numpy(labels["fine"].astype(np.int64))


def _labels(part: str) -> Mapping[str, Any]:
    path = data.find("cifar100/labels.npz")
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {"fine": stored[f"{part}_fine"], "sha256": str(stored[f"{part}_sha256"])}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _decode(part: str, digest: str) -> Pixels:
    """The stored planes green, red - green, blue - green, each pixel less its neighbours, as red, green, blue."""
    folder = data.find(f"cifar100/{PARTS[part][0]}.npy.xz").parent
    pieces = []
    for name in PARTS[part]:
        path = data.find(f"cifar100/{name}.npy.xz")
        try:
            stored = np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False)
        except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        planes = stored.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        green = planes[:, 0]
        pieces.append(np.stack([planes[:, 1] + green, green, planes[:, 2] + green], 1))
    pixels: Pixels = np.concatenate(pieces)
    if hashlib.sha256(pixels.data).hexdigest() != digest:
        raise DataError(f"{folder}: its {part} images are not those of its labels.npz; get a fresh copy of both")
    return pixels


def _keep(path: Path, pixels: Pixels) -> None:
    """For the next process; who cannot write there decodes again."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.save(file, pixels)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
