"""The training loop, and the random numbers it runs on: plain PyTorch, the same bits for the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fedqueue.aggregate import StateDict
from fedqueue.training.settings import TaskSettings
from fedqueue.training.workload import Workload


def derive_seed(*parts: object) -> int:
    """A seed below 2**63 that depends on every part. Example: `derive_seed("train", seed, key)`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own random numbers start from `seed` inside and go on undisturbed afterwards."""
    processor_state = torch.get_rng_state()
    accelerator_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        # Not torch.manual_seed: that would also reseed accelerators whose state is not put back.
        torch.default_generator.manual_seed(seed)
        if accelerator_state is not None:
            torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(processor_state)
        if accelerator_state is not None:
            torch.cuda.set_rng_state(accelerator_state, device)


def make_optimizer(module: nn.Module, settings: TaskSettings, learning_rate: float) -> torch.optim.Optimizer:
    """A fresh optimizer over the parameters that train."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decay = settings.weight_decay
    # One call a step instead of several a tensor: a fifth of a small network's time. Not for complex numbers.
    fused = True if all(parameter.is_floating_point() for parameter in parameters) else None
    if settings.optimizer == "sgd":
        momentum = settings.momentum
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, weight_decay=decay, fused=fused)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=learning_rate, weight_decay=decay, fused=fused)


def batches(part: Tensor, batch_size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Sample numbers for each of `steps` steps: full batches from shuffled epochs over `part`.

    What is left of an epoch after its last full batch is not used; another shuffle leaves out others. A part
    smaller than a batch is one batch.
    """
    size = min(batch_size, len(part))
    an_epoch = len(part) // size
    for start in range(0, steps, an_epoch):
        count = min(an_epoch, steps - start)
        order = torch.randperm(len(part), generator=generator)[: count * size]
        yield from part[order.to(part.device)].view(count, size)


def train_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    samples: tuple[Tensor, Tensor],
    schedule: Iterator[Tensor],
    augment: Callable[[int, Tensor], Tensor] | None = None,
) -> Tensor:
    """One optimizer step for each batch in `schedule`; the sum of their losses, still on the device.

    `augment` turns the inputs of a step, counted from 0, into what the module is given.
    """
    inputs, targets = samples
    module.train()
    total = torch.zeros((), device=inputs.device)
    for step, chosen in enumerate(schedule):
        optimizer.zero_grad()
        given = inputs[chosen] if augment is None else augment(step, inputs[chosen])
        loss = loss_function(module(given), targets[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.detach()  # not .item(): that would wait for the device in each step
    return total


def products_in(workload: Workload, device: torch.device) -> AbstractContextManager[object]:
    """The workload's precision on an accelerator; on the processor everything has that of its tensors."""
    if device.type != "cuda" or workload.precision == torch.float32:
        return nullcontext()
    return torch.autocast("cuda", workload.precision, cache_enabled=False)


def copy_state(module: nn.Module) -> StateDict:
    """The module's parameters and buffers, contiguous, in memory of their own, on the module's device."""
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }


# Random numbers that are a hash of what they are for, and so the same on every device and in every company. A generator
# on an accelerator draws other numbers than one on the processor, and a step that is recorded once and replayed for
# many jobs cannot be given a generator for each.

AUGMENTATION = 63
"""The layer that draws for the samples of a step, where others count those of the network."""

_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


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
