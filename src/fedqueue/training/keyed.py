"""Random numbers that are a hash of what they are for, and so the same on every device and in every company.

A generator on an accelerator draws other numbers than one on the processor, and a step that is recorded once and
replayed for many jobs cannot be given a generator for each. A hash of key, step and place can be worked out anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AUGMENTATION = 63
"""The layer that draws for the samples of a step, where others count those of the network."""

_ODD: Sequence[int] = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def draws(keys: Tensor, steps: Tensor, layer: int, count: int) -> Tensor:
    """Whole numbers (keys, count), every bit at random; `keys` and `steps` are whole numbers of one dimension."""
    places = torch.arange(count, device=keys.device)
    return _mix(_mix(keys + _mix(steps * 64 + layer))[:, None] + places * _ODD[0])


def sample_draws(key: int, step: int, count: int, device: torch.device) -> Tensor:
    """One number for each of a step's samples, as `draws` gives them to the layer `AUGMENTATION`."""
    return draws(torch.tensor([signed(key)], device=device), torch.tensor([step], device=device), AUGMENTATION, count)[
        0
    ]


def signed(key: int) -> int:
    """A key of up to 64 bits as torch's whole numbers hold it.

    >>> signed(2**64 - 1)
    -1
    """
    return (key + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """Whole numbers that differ a little -> numbers that differ in every bit (64-bit arithmetic that wraps)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _ODD[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _ODD[2]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
