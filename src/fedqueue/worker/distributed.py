"""Several processes in one job: who is first, and how all of them do the same. No pickle.

Part of the worker: Python 3.9; torch is loaded only where there are several processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedqueue.worker.handin import Header, ParticipateError, Tensors

ENVIRONMENTS = (
    ("WORLD_SIZE", ("RANK", "SLURM_PROCID")),  # torchrun, and scripts that set it themselves
    ("PMI_SIZE", ("PMI_RANK",)),  # mpiexec of PBS sites
    ("OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
    ("SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",)),  # srun; the batch script itself has no step
)
"""Where launchers say how many processes there are and which one this is; the first that is set holds."""

DEVICES = {"nccl": "cuda", "xccl": "xpu"}
"""Backends that only move tensors of an accelerator."""


class Ranks(NamedTuple):
    """This process among those of the job.

    >>> Ranks.of({"WORLD_SIZE": "4", "RANK": "2"})
    Ranks(size=4, rank=2)
    """

    size: int
    rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Ranks:
        for size_name, rank_names in ENVIRONMENTS:
            if size_name in environment:
                rank_name = next((name for name in rank_names if name in environment), None)
                try:
                    size, rank = int(environment[size_name]), int(environment[rank_name]) if rank_name else 0
                except ValueError as error:
                    raise ParticipateError(f"{size_name} or {rank_name} is not a number: {error}") from error
                if size > 1 and rank_name is None:
                    raise ParticipateError(f"{size_name} is {size}, but {' or '.join(rank_names)} is not set")
                return cls(size, rank)
        return cls(1, 0)

    @classmethod
    def here(cls) -> Ranks:
        return cls.of(os.environ)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def connected(self) -> bool:
        """Whether there are several and they can talk."""
        if self.size == 1 or "torch" not in sys.modules:
            return False
        import torch.distributed as dist

        return dist.is_available() and dist.is_initialized()

    def total(self, *values: int) -> list[int]:
        """Each value summed over the ranks; every rank has to call this."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.int64, device=_device())
        dist.all_reduce(tensor)
        return [int(value) for value in tensor.tolist()]

    def wait_for_all(self) -> None:
        """Returns when every rank has called it."""
        if self.connected:
            import torch.distributed as dist

            device = _device()
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def broadcast_model(ranks: Ranks, path: Path, header: Header) -> Tensors:
    """The state dict in a safetensors file on every rank, in processor memory; only the first reads the file.

    Every rank has read the small header before: names, types and shapes need no other way to travel.
    """
    import torch
    import torch.distributed as dist

    if ranks.first:
        from safetensors.torch import load_file

        state = load_file(str(path))
    else:
        state = {name: torch.empty(shape, dtype=_dtype(kind)) for name, (kind, shape) in header.items()}
    device = _device()
    for name in sorted(header):
        if state[name].numel():
            raw = state[name].contiguous().view(-1).view(torch.uint8)  # bytes: backends lack some types
            moved = raw.to(device)
            dist.broadcast(moved, src=0)
            if not ranks.first:
                raw.copy_(moved)
    return state


def _accelerator() -> Any:
    """The part of torch that drives the accelerator this process has used; None: it has used none."""
    torch = sys.modules.get("torch")
    found = (getattr(torch, kind, None) for kind in ("cuda", "xpu"))
    return next((part for part in found if part is not None and part.is_initialized()), None)


def await_device() -> bool:
    """Returns when the accelerator has done all it was given; False: there is none."""
    accelerator = _accelerator()
    if accelerator is not None:
        accelerator.synchronize()
    return accelerator is not None


def device_in_use() -> str:
    """The accelerator's name, or "cpu"."""
    accelerator = _accelerator()
    return "cpu" if accelerator is None else str(accelerator.get_device_name())


def _device() -> Any:
    import torch
    import torch.distributed as dist

    kind = DEVICES.get(str(dist.get_backend()), "cpu")
    return torch.device(kind, getattr(torch, kind).current_device()) if kind != "cpu" else torch.device("cpu")


def _dtype(kind: str) -> Any:
    import torch

    names = {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U8": "uint8",
        "U16": "uint16",
        "U32": "uint32",
        "U64": "uint64",
        "BOOL": "bool",
        "C64": "complex64",
    }
    found = getattr(torch, names.get(kind, ""), None)
    if found is None:
        raise ParticipateError(f"the model has a tensor of type {kind}, which this torch does not have")
    return found
