"""A task: a model and each facility's data, ready to be trained and scored."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedqueue.aggregate import StateDict
from fedqueue.errors import ConfigError, FedQueueError, TaskError
from fedqueue.plugins import plugins
from fedqueue.protocol.roles import buffer_roles
from fedqueue.training.settings import TaskSettings
from fedqueue.training.trainer import (
    batches,
    copy_state,
    derive_seed,
    make_optimizer,
    products_in,
    sample_draws,
    seeded,
    train_steps,
)
from fedqueue.training.workload import Workload

__all__ = ["StateDict", "Task", "TaskSettings", "Trained", "Workload", "make_task"]

BUILT_IN = {
    "digits": "fedqueue.training.digits:workload",
    "mnist": "fedqueue.training.mnist:workload",
}
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
        """What its buffers are, by name: see `fedqueue.protocol.roles`."""
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
    ) -> Trained:
        """Train `model` on one facility's data for `steps` steps, or until `during` has no more to give.

        `key` selects the random numbers; the same arguments give the same bits, whatever ran before.
        """
        if steps < 1:
            raise ValueError(f"steps must be 1 or more, found {steps}")
        part, size = self._parts[facility], self._settings.batch_size
        job_seed = seed_of_job(self._seed, facility, key)
        with _blaming(self.name, f"training for facility {facility}"), seeded(job_seed, self._device):
            # Of its own, so that the order of the samples does not hang on how the model draws its dropout.
            schedule = batches(part, size, steps, torch.Generator().manual_seed(job_seed))
            trained, done, total = self._go_through(schedule, model, learning_rate, job_seed, during)
        return Trained(model=trained, samples=done * min(size, len(part)), loss=float(total) / max(1, done))

    def _go_through(
        self,
        schedule: Iterator[Tensor],
        model: StateDict,
        learning_rate: float,
        job_seed: int,
        during: Iterable[object] | None,
    ) -> tuple[StateDict, int, Tensor]:
        """The trained model, how many steps were done, and the sum of their losses."""
        if during is not None:
            schedule = (batch for _, batch in zip(during, schedule, strict=False))
        self._module.load_state_dict(model)
        optimizer = make_optimizer(self._module, self._settings, learning_rate)
        counted = count()
        counting = _counting(schedule, counted)
        augment = augmentation(self._workload, job_seed)
        with products_in(self._workload, self._device):
            total = train_steps(self._module, optimizer, self._workload.loss, self._train, counting, augment)
        return copy_state(self._module), next(counted), total

    def score(self, model: StateDict) -> dict[str, float]:
        """At least "score" (the accuracy by default; higher is better) and "loss", on the test samples."""
        inputs, targets = self._test
        with _blaming(self.name, "scoring"):
            self._module.load_state_dict(model)
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


def _counting(schedule: Iterable[Tensor], counted: Iterator[int]) -> Iterator[Tensor]:
    for batch in schedule:
        next(counted)
        yield batch


@contextmanager
def _blaming(name: str, doing: str) -> Iterator[None]:
    """What goes wrong inside is the workload's code or a model that does not fit it: say so in one line."""
    try:
        yield
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
    with seeded(derive_seed("model", seed), torch.device("cpu")), _blaming(settings.name, "making the model"):
        return workload.make_model()


def share_out(workload: Workload, settings: TaskSettings, facilities: int, seed: int) -> list[Tensor]:
    """The numbers of each facility's training samples."""
    targets = workload.train[1]
    chosen = _chosen(len(targets), settings.train_samples, "train_samples", seed)
    if chosen is None:
        return _split(targets, settings, facilities, seed)
    return [chosen[part] for part in _split(targets[chosen], settings, facilities, seed)]


def chosen_for_test(workload: Workload, settings: TaskSettings, seed: int) -> Tensor | None:
    """The numbers of the test samples that are used; None: all."""
    return _chosen(len(workload.test[1]), settings.test_samples, "test_samples", seed)


def _chosen(available: int, count: int | None, field: str, seed: int) -> Tensor | None:
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


def load_workload(name: str, options: Mapping[str, object]) -> Workload:
    """Call the function that `name` stands for; example: `load_workload("my_study:make", {"width": 64})`.

    Modules are looked for in the current folder and on PYTHONPATH. Raises `TaskError` in one line.
    """
    place = BUILT_IN.get(name, name)
    module_name, colon, function_name = place.partition(":")
    if colon and module_name and function_name:
        function = _find_function(name, module_name, function_name)
    else:
        added = plugins("workloads")
        if name not in added:
            known = ", ".join(map(repr, [*BUILT_IN, *added]))
            raise TaskError(f"task {name!r} is not known; use one of {known}, or your own as 'module:function'")
        function = added[name]
    try:
        workload = function(**options)
    except FedQueueError:
        raise
    except Exception as error:
        raise TaskError(f"task {name!r}: its function raised {describe(error)}") from error
    if not isinstance(workload, Workload):
        raise TaskError(f"task {name!r}: its function must return a Workload, not {type(workload).__name__}")
    for part, pair in (("train", workload.train), ("test", workload.test)):
        _check_samples(name, part, pair)
    return workload


def _find_function(name: str, module_name: str, function_name: str) -> Callable[..., object]:
    # An installed command does not look in the current folder, where a user's file is; `python -m` does.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(
                f"task {name!r}: there is no module {module_name!r} in the current folder or on PYTHONPATH"
            ) from error
        raise TaskError(f"task {name!r}: module {error.name!r} is not installed") from error
    except Exception as error:
        raise TaskError(f"task {name!r}: importing {module_name!r} raised {describe(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TaskError(f"task {name!r}: module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def _check_samples(name: str, part: str, pair: object) -> None:
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(tensor, Tensor) for tensor in pair)):
        raise TaskError(f"task {name!r}: {part} must be a pair of tensors, inputs and targets")
    inputs, targets = pair
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        raise TaskError(
            f"task {name!r}: {part} needs as many inputs as targets and at least one, "
            f"found shapes {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )


def describe(error: Exception) -> str:
    """The error's type and the first line of its text: a message stays one line."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
