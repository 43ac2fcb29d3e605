"""The digits task: 1797 handwritten digits of 8 x 8 pixels, and a small network. Seconds on a laptop."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from fedqueue.training.workload import Samples, Workload

SPLIT_SEED = 20240229
"""Fixed: every run, whatever its seed, is scored on the same fifth of the samples."""


def workload() -> Workload:
    train, test = _samples()
    return Workload(make_model=_make_model, train=train, test=test)


def _make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def _samples() -> tuple[Samples, Samples]:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    inputs = torch.from_numpy(pixels[order]).to(torch.float32) / 16.0  # a pixel is 0 to 16
    targets = torch.from_numpy(labels[order]).to(torch.int64)
    held_out = len(labels) // 5
    return (inputs[held_out:], targets[held_out:]), (inputs[:held_out], targets[:held_out])
