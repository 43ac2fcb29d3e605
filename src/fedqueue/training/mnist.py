"""The mnist task: 70,000 handwritten digits of 28 x 28 pixels, and the network of the paper."""

from __future__ import annotations

import gzip
import zlib
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedqueue import data
from fedqueue.errors import DataError
from fedqueue.training.workload import Samples, Workload

MEAN, DEVIATION = 0.1307, 0.3081
"""Of the training pixels scaled to 0..1, as commonly used."""


def workload() -> Workload:
    return Workload(make_model=_make_model, train=_samples("train"), test=_samples("t10k"))


def _make_model() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    # Channels last is the quicker order for convolutions; the numbers a layer holds are the same.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@cache
def _samples(part: str) -> Samples:
    """Normalised images (n, 1, 28, 28) and labels of "train" or "t10k"; read once a process."""
    images = torch.from_numpy(_read(f"mnist/{part}-images-idx3-ubyte.gz", header_bytes=16))
    labels = torch.from_numpy(_read(f"mnist/{part}-labels-idx1-ubyte.gz", header_bytes=8))
    inputs = images.to(torch.float32).div_(255.0).sub_(MEAN).div_(DEVIATION)
    return inputs.view(-1, 1, 28, 28), labels.to(torch.int64)


def _read(name: str, *, header_bytes: int) -> npt.NDArray[np.uint8]:
    path = data.find(name)
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return np.frombuffer(content, np.uint8, offset=header_bytes).copy()  # torch wants memory it may write
