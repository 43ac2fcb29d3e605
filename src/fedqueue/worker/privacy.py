"""What a site may ask of its jobs: an update that says little of the data behind it.

The change from the base model is made no longer than `clip` (L2, over all parameters), and each of its numbers gets
noise of `noise * clip`. What layers measured and counters go back as they came. How much all that was ever handed in
says together is for the agent to reckon (agent/privacy.py). Part of the worker: Python 3.9; torch is loaded only for
its own tensors.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from fedqueue.protocol.aggregation import MOVING
from fedqueue.protocol.contract import Privacy
from fedqueue.worker.job_folder import Tensors, is_torch


def made_private(chosen: Mapping[str, Any], base: Path, roles: Mapping[str, str], privacy: Privacy) -> Tensors:
    """These tensors, trained from the model in `base`, as they may be handed in."""
    numbers = _Torch(base) if any(map(is_torch, chosen.values())) else _Numpy(base)
    moving = [name for name in chosen if roles[name] in MOVING]
    norm = sqrt(sum(numbers.square(numbers.change(name, chosen[name])) for name in moving))
    part = 1.0 if norm <= privacy.clip else privacy.clip / norm
    made: Tensors = {}
    for name, value in chosen.items():
        if name in moving:
            change = numbers.change(name, value)
            made[name] = numbers.moved(name, change * part + numbers.noise(change, privacy.noise * privacy.clip))
        else:
            made[name] = numbers.base[name]
    return made


class _Torch:
    def __init__(self, base: Path) -> None:
        import torch
        from safetensors.torch import load_file

        self._torch = torch
        self.base: Tensors = load_file(str(base))
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))

    def _precise(self, value: Any) -> Any:
        value = (value if is_torch(value) else self._torch.as_tensor(value)).detach().to("cpu")
        return (self._torch.view_as_real(value) if value.is_complex() else value).double()

    def change(self, name: str, value: Any) -> Any:
        return self._precise(value) - self._precise(self.base[name])

    @staticmethod
    def square(change: Any) -> float:
        return float(change.square().sum())

    def noise(self, like: Any, deviation: float) -> Any:
        return deviation * self._torch.randn(like.shape, dtype=like.dtype, generator=self._generator)

    def moved(self, name: str, change: Any) -> Any:
        base = self.base[name]
        moved = self._precise(base) + change
        return (self._torch.view_as_complex(moved) if base.is_complex() else moved).to(base.dtype)


class _Numpy:
    def __init__(self, base: Path) -> None:
        import numpy
        from safetensors.numpy import load_file

        self._numpy = numpy
        self.base: Tensors = load_file(str(base))
        self._generator = numpy.random.Generator(numpy.random.PCG64(int.from_bytes(os.urandom(16), "little")))

    def _precise(self, value: Any) -> Any:
        array = self._numpy.ascontiguousarray(value)
        if array.dtype.kind == "c":
            array = array.view(array.real.dtype).reshape((*array.shape, 2))
        return array.astype(self._numpy.float64)

    def change(self, name: str, value: Any) -> Any:
        return self._precise(value) - self._precise(self.base[name])

    def square(self, change: Any) -> float:
        return float(self._numpy.square(change).sum())

    def noise(self, like: Any, deviation: float) -> Any:
        return self._generator.normal(0.0, deviation, like.shape)

    def moved(self, name: str, change: Any) -> Any:
        base = self.base[name]
        moved = self._precise(base) + change
        if base.dtype.kind == "c":
            moved = moved.view(self._numpy.complex128)[..., 0]
        return moved.astype(base.dtype)
