"""A task: a model and each facility's data, ready to be trained and scored. Plain PyTorch, the same bits for the same
inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedqueue.aggregate import StateDict
from fedqueue.errors import ConfigError, FedQueueError, TaskError, describe
from fedqueue.moments import Moments
from fedqueue.plugins import plugins
from fedqueue.protocol.aggregation import buffer_roles, split_moments
from fedqueue.training.causal_settings import CAUSAL_LM
from fedqueue.training.job import TaskSettings
from fedqueue.training.workload import Workload, load_workload

__all__ = ["StateDict", "Task", "TaskSettings", "Trained", "Workload", "make_task"]

Indices = npt.NDArray[np.int64]
SCORE_CHUNK = 128
"""Test samples in one forward pass; with a thousand, whose activations leave the cache, it takes twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one job's training gave."""

    model: StateDict
    """Tensors of its own, on the task's device."""
    samples: int
    """Samples that went through the steps, repeats counted."""
    loss: float
    """Mean over the steps done."""


def make_task(settings: TaskSettings, facilities: int, seed: int) -> Task:
    """Load the task that `settings` name and share out its samples; sets torch's threads and determinism too.

    Example: `make_task(TaskSettings(name="digits"), facilities=4, seed=42)`.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch finds no CUDA device; use 'cpu'")
    # Some of the accelerator's quickest convolutions differ in the last bits from call to call.
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(settings.threads)
    if settings.name == CAUSAL_LM:
        from fedqueue.training.causal_lm import CausalTask  # loads transformers

        return CausalTask(settings, facilities, seed)
    workload = workload_of(settings)
    quicker = plugins("tasks").values() if settings.device == "cuda" else ()
    kind: type[Task] = next((kind for kind in quicker if kind.why_not(workload, settings) is None), Task)
    return kind(workload, settings, facilities, seed)


def workload_of(settings: TaskSettings) -> Workload:
    # A function that makes its data at random makes the same data in every process and for every run's seed.
    with seeded(derive_seed("workload", settings.name), torch.device("cpu")):
        return load_workload(settings.name, settings.options)


class Task:
    """A workload, its samples on the device, one module for all jobs. Facilities are numbered from 0, in the config's
    order."""

    def __init__(self, workload: Workload, settings: TaskSettings, facilities: int, seed: int) -> None:
        self.name = settings.name
        self._settings = settings
        self._seed = seed
        self._workload = workload
        self._device = torch.device(settings.device)
        self._parts = [part.to(self._device) for part in share_out(workload, settings, facilities, seed)]
        tested = chosen_for_test(workload, settings, seed)
        self._train = (workload.train[0].to(self._device), workload.train[1].to(self._device))
        test = workload.test if tested is None else (workload.test[0][tested], workload.test[1][tested])
        self._test = (test[0].to(self._device), test[1].to(self._device))
        self._module = first_module(workload, settings, seed).to(self._device)
        self._initial = copy_state(self._module)

    def initial_model(self) -> StateDict:
        """The first model: the same seed gives the same bits."""
        return {name: tensor.clone() for name, tensor in self._initial.items()}

    def declared_roles(self) -> dict[str, str]:
        """What its buffers are, by name: see `fedqueue.protocol.aggregation`."""
        return buffer_roles(self._module)

    def data_sizes(self) -> tuple[int, ...]:
        """Training samples of each facility."""
        return tuple(len(part) for part in self._parts)

    def train(
        self,
        *,
        facility: int,
        model: StateDict,
        steps: int,
        learning_rate: float,
        key: int,
        during: Iterable[object] | None = None,
        drift: StateDict | None = None,
        change: StateDict | None = None,
    ) -> Trained:
        """Train `model` on one facility's data for `steps` steps, or until `during` has no more to give.

        `key` selects the random numbers; the same arguments give the same bits, whatever ran before. `drift` times the
        learning rate is added to the parameters after each step. If there are shared moments beside the model, Adam
        goes on from them, and from the `change` that led to the model (`fedqueue.moments`).
        """
        if steps < 1:
            raise ValueError(f"steps must be 1 or more, found {steps}")
        part, size = self._parts[facility], self._settings.batch_size
        job_seed = seed_of_job(self._seed, facility, key)
        with blaming(self.name, f"training for facility {facility}"), seeded(job_seed, self._device):
            # Of its own, so that the order of the samples does not hang on how the model draws its dropout.
            schedule = batches(part, size, steps, torch.Generator().manual_seed(job_seed))
            trained, done, total = self._go_through(schedule, model, learning_rate, job_seed, during, drift, change)
        return Trained(model=trained, samples=done * min(size, len(part)), loss=float(total) / max(1, done))

    def _go_through(
        self,
        schedule: Iterator[Tensor],
        model: StateDict,
        learning_rate: float,
        job_seed: int,
        during: Iterable[object] | None,
        drift: StateDict | None,
        change: StateDict | None,
    ) -> tuple[StateDict, int, Tensor]:
        """The trained model, how many steps were done, and the sum of their losses."""
        if during is not None:
            schedule = (batch for _, batch in zip(during, schedule, strict=False))
        weights, moments = split_moments(model)
        self._module.load_state_dict(weights)
        optimizer = make_optimizer(self._module, self._settings, learning_rate)
        adam = None
        if moments:
            adam = Moments(optimizer, self._module.named_parameters(), moments, change, learning_rate)
        if drift is not None:
            named = ((name, p) for name, p in self._module.named_parameters() if p.requires_grad)
            optimizer.register_step_post_hook(drifting(named, drift, learning_rate))
        counted = count()
        counting = _counting(schedule, counted)
        augment = augmentation(self._workload, job_seed)
        with products_in(self._workload, self._device):
            pull = proximal_pull(self._module, self._settings.proximal)
            total = train_steps(self._module, optimizer, self._workload.loss, self._train, counting, augment, pull)
        learned = {} if adam is None else adam.end()
        return {**copy_state(self._module), **learned}, next(counted), total

    def score(self, model: StateDict) -> dict[str, float]:
        """At least "score" (the accuracy by default; higher is better) and "loss", on the test samples."""
        inputs, targets = self._test
        with blaming(self.name, "scoring"):
            self._module.load_state_dict(split_moments(model)[0])
            self._module.eval()
            with torch.inference_mode(), products_in(self._workload, self._device):
                outputs = torch.cat([self._module(chunk) for chunk in torch.split(inputs, SCORE_CHUNK)])
                loss = float(self._workload.loss(outputs, targets))
                if self._workload.score is not None:
                    score = float(self._workload.score(outputs, targets))
                elif _is_integer(targets):
                    score = float((outputs.argmax(dim=1) == targets).to(torch.float64).mean())
                else:
                    score = -loss
        return {"score": score, "loss": loss}

    def examine(self, model: StateDict) -> dict[str, float]:
        """What is worth measuring of a model that a run ends with, beyond its score."""
        return {}


def _counting(schedule: Iterable[Tensor], counted: Iterator[int]) -> Iterator[Tensor]:
    for batch in schedule:
        next(counted)
        yield batch


@contextmanager
def blaming(name: str, doing: str) -> Iterator[None]:
    """What goes wrong inside is the workload's code or a model that does not fit it: say so in one line."""
    try:
        yield
    except FedQueueError:  # which says so already
        raise
    except Exception as error:
        raise TaskError(f"task {name!r}: {doing} raised {describe(error)}") from error


def seed_of_job(seed: int, facility: int, key: int) -> int:
    return derive_seed("train", seed, facility, key)


def augmentation(workload: Workload, key: int) -> Callable[[int, Tensor], Tensor] | None:
    """What a job with this key does to the inputs of its steps, if anything."""
    augment = workload.augment
    if augment is None:
        return None
    return lambda step, inputs: augment(inputs, sample_draws(key, step, len(inputs), inputs.device))


def first_module(workload: Workload, settings: TaskSettings, seed: int) -> nn.Module:
    """With the parameters of the first model; made on the processor, so that it is the same for every device."""
    with seeded(derive_seed("model", seed), torch.device("cpu")), blaming(settings.name, "making the model"):
        return workload.make_model()


def share_out(workload: Workload, settings: TaskSettings, facilities: int, seed: int) -> list[Tensor]:
    """The numbers of each facility's training samples."""
    return share_out_targets(workload.train[1], settings, facilities, seed)


def share_out_targets(targets: Tensor, settings: TaskSettings, facilities: int, seed: int) -> list[Tensor]:
    """The same, of samples with these targets."""
    chosen = chosen_samples(len(targets), settings.train_samples, "train_samples", seed)
    if chosen is None:
        return _split(targets, settings, facilities, seed)
    return [chosen[part] for part in _split(targets[chosen], settings, facilities, seed)]


def chosen_for_test(workload: Workload, settings: TaskSettings, seed: int) -> Tensor | None:
    """The numbers of the test samples that are used; None: all."""
    return chosen_samples(len(workload.test[1]), settings.test_samples, "test_samples", seed)


def chosen_samples(available: int, count: int | None, field: str, seed: int) -> Tensor | None:
    """The numbers of so many samples, chosen by the run's seed; None: all."""
    if count is None or count == available:
        return None
    if count > available:
        raise ConfigError(f"{field} is {count} but the task has only {available}")
    generator = torch.Generator().manual_seed(derive_seed(field, seed))
    return torch.randperm(available, generator=generator)[:count]


def _split(targets: Tensor, settings: TaskSettings, facilities: int, seed: int) -> list[Tensor]:
    """The places of each facility's samples among these."""
    n = len(targets)
    if n < facilities:
        raise ConfigError(f"{n} training samples are too few for {facilities} facilities")
    if settings.partition == "iid":
        return [torch.from_numpy(part) for part in iid(n, facilities, seed)]
    if not (_is_integer(targets) and targets.ndim == 1):
        raise ConfigError(
            f"partition 'dirichlet' needs one integer label a sample, but task {settings.name!r} "
            f"has {targets.dtype} targets of shape {tuple(targets.shape)}; use 'iid'"
        )
    # A full batch for everyone, unless that would even out a small data set.
    least = max(1, min(settings.batch_size, n // (2 * facilities)))
    parts = dirichlet(targets.cpu().numpy(), facilities, settings.dirichlet_alpha, seed, least=least)
    return [torch.from_numpy(part) for part in parts]


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def iid(n: int, parts: int, seed: int) -> list[Indices]:
    """Evenly at random; sizes differ by one at most. Example: `iid(10, 3, seed=0)` has sizes 4, 3, 3."""
    _check_enough(n, parts)
    order = np.random.default_rng(seed).permutation(n)
    return [np.sort(part) for part in np.array_split(order, parts)]


def dirichlet(
    labels: npt.NDArray[np.integer], parts: int, alpha: float, seed: int, *, least: int | None = None
) -> list[Indices]:
    """Skewed by label: each class is split by its own draw from a symmetric Dirichlet distribution.

    A small `alpha` gives each class to few parts. A part with fewer than `least` samples is filled up from
    the then largest part. `least` is by default a fiftieth of an even share, one at least; it is never more
    than an even share.
    """
    n = len(labels)
    _check_enough(n, parts)
    generator = np.random.default_rng(seed)
    pieces: list[list[Indices]] = [[] for _ in range(parts)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(parts, alpha))
        cuts = np.floor(np.cumsum(shares[:-1]) * len(members)).astype(np.int64)
        for part, piece in enumerate(np.split(members, cuts)):
            pieces[part].append(piece)
    # Shuffled, so that what is handed over below is a fair sample of the giver's classes.
    split = [generator.permutation(np.concatenate(piece)) for piece in pieces]
    _fill_up(split, min(n // parts, max(1, n // (50 * parts)) if least is None else least))
    return [np.sort(part) for part in split]


def _fill_up(split: list[Indices], least: int) -> None:
    for receiver in range(len(split)):
        while (need := least - len(split[receiver])) > 0:
            # The largest part has more than `least` as long as another has less: all together have enough.
            giver = max(range(len(split)), key=lambda part: len(split[part]))
            given = min(need, len(split[giver]) - least)
            split[receiver] = np.concatenate([split[receiver], split[giver][-given:]])
            split[giver] = split[giver][:-given]


def _check_enough(n: int, parts: int) -> None:
    if parts < 1:
        raise ValueError(f"parts must be 1 or more, found {parts}")
    if n < parts:
        raise ValueError(f"{n} samples cannot be split into {parts} parts")


# The training loop -----------------------------------------------------------------------------------


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


def proximal_pull(module: nn.Module, strength: float) -> Callable[[], None] | None:
    """Adds the gradient of strength/2 * |w - w_now|^2 to those of the module's parameters; None: there is none."""
    if not strength:
        return None
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    base = [parameter.detach().clone() for parameter in parameters]

    def pull() -> None:
        for parameter, start in zip(parameters, base, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start, alpha=strength)

    return pull


def drifting(named: Iterable[tuple[str, Tensor]], drift: StateDict, learning_rate: float) -> Callable[..., None]:
    """Adds drift * learning_rate to these parameters."""
    moved = [(parameter.detach(), drift[name]) for name, parameter in named]

    def move(*_: object) -> None:
        for parameter, way in moved:
            parameter.add_(way, alpha=learning_rate)

    return move


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
    pull: Callable[[], None] | None = None,
) -> Tensor:
    """One optimizer step for each batch in `schedule`; the sum of their losses, still on the device.

    `augment` turns the inputs of a step, counted from 0, into what the module is given. `pull` adds to the gradients.
    """
    inputs, targets = samples
    module.train()
    total = torch.zeros((), device=inputs.device)
    for step, chosen in enumerate(schedule):
        optimizer.zero_grad()
        given = inputs[chosen] if augment is None else augment(step, inputs[chosen])
        loss = loss_function(module(given), targets[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        if pull is not None:
            pull()
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
