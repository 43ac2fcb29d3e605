"""How several processes of one job do the same. No pickle.

Part of the worker: Python 3.9; torch is loaded only where there are several processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedqueue.worker.job_folder import Header, Ranks, Tensors, torch_type

DEVICES = {"nccl": "cuda", "xccl": "xpu"}
"""Backends that only move tensors of an accelerator."""


def sum_over_ranks(*values: int) -> list[int]:
    """Each value summed over the ranks; every rank has to call this."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.int64, device=_device())
    dist.all_reduce(tensor)
    return [int(value) for value in tensor.tolist()]


def wait_for_all() -> None:
    """Returns when every rank has called it."""
    import torch.distributed as dist

    device = _device()
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def broadcast_model(ranks: Ranks, load: Callable[[], Tensors], header: Header) -> Tensors:
    """A state dict on every rank, in processor memory; only the first has to `load` it.

    Every rank has read the small header before: names, types and shapes need no other way to travel.
    """
    import torch
    import torch.distributed as dist

    if ranks.first:
        state = load()
    else:
        state = {name: torch.empty(shape, dtype=torch_type(kind)) for name, (kind, shape) in header.items()}
    device = _device()
    for name in sorted(header):
        if state[name].numel():
            raw = state[name].contiguous().view(-1).view(torch.uint8)  # bytes: backends lack some types
            moved = raw.to(device)
            dist.broadcast(moved, src=0)
            if not ranks.first:
                raw.copy_(moved)
    return state


def _device() -> Any:
    import torch
    import torch.distributed as dist

    kind = DEVICES.get(str(dist.get_backend()), "cpu")
    return torch.device(kind, getattr(torch, kind).current_device()) if kind != "cpu" else torch.device("cpu")
