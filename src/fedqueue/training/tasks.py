"""A task: a model and each facility's data, ready to be trained and scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import Tensor, nn

from fedqueue.aggregate import StateDict
from fedqueue.errors import ConfigError, TaskError
from fedqueue.protocol.roles import buffer_roles
from fedqueue.training import partition
from fedqueue.training.keyed import sample_draws
from fedqueue.training.lanes import Lanes, rows_of, why_not_in_lanes
from fedqueue.training.recorded import Scorer, SlotJob, products_in
from fedqueue.training.settings import TaskSettings
from fedqueue.training.trainer import (
    batches,
    copy_state,
    derive_seed,
    make_optimizer,
    seeded,
    train_steps,
)
from fedqueue.training.workload import Samples, Workload, describe, load_workload

__all__ = ["StateDict", "Task", "TaskSettings", "Trained", "Workload", "make_task"]

STEPS_AHEAD = 4
"""An accelerator is given so many steps before the first of them must be done: enough to keep it busy."""
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


class Task(Protocol):
    """What a driver needs to know of a task. Facilities are numbered from 0, in the config's order."""

    name: str

    def initial_model(self) -> StateDict:
        """The first model: the same seed gives the same bits."""

    def declared_roles(self) -> dict[str, str]:
        """What its buffers are, by name: see `fedqueue.protocol.roles`."""

    def data_sizes(self) -> tuple[int, ...]:
        """Training samples of each facility."""

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

    def score(self, model: StateDict) -> dict[str, float]:
        """At least "score" (the accuracy by default; higher is better) and "loss", on the test samples."""


def make_task(settings: TaskSettings, facilities: int, seed: int) -> Task:
    """Load the task that `settings` name and share out its samples; sets torch's threads and determinism too.

    Example: `make_task(TaskSettings(name="digits"), facilities=4, seed=42)`.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch finds no CUDA device; use 'cpu'")
    # Some of the accelerator's quickest convolutions differ in the last bits from call to call.
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(settings.threads)
    return WorkloadTask(workload_of(settings), settings, facilities, seed)


def workload_of(settings: TaskSettings) -> Workload:
    # A function that makes its data at random makes the same data in every process and for every run's seed.
    with seeded(derive_seed("workload", settings.name), torch.device("cpu")):
        return load_workload(settings.name, settings.options)


class WorkloadTask:
    """The one implementation of `Task`: a workload, its samples on the device, one module for all jobs."""

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
        self._recorded: RecordedTraining | None = None
        if self._device.type == "cuda" and why_not_in_lanes(workload, self._module, settings) is None:
            self._recorded = RecordedTraining(workload, self._module, settings, self._train, self._test)

    def initial_model(self) -> StateDict:
        return {name: tensor.clone() for name, tensor in self._initial.items()}

    def declared_roles(self) -> dict[str, str]:
        return buffer_roles(self._module)

    def data_sizes(self) -> tuple[int, ...]:
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
        if steps < 1:
            raise ValueError(f"steps must be 1 or more, found {steps}")
        part, size = self._parts[facility], self._settings.batch_size
        job_seed = seed_of_job(self._seed, facility, key)
        with _blaming(self.name, f"training for facility {facility}"), seeded(job_seed, self._device):
            # Of its own, so that the order of the samples does not hang on how the model draws its dropout.
            schedule = batches(part, size, steps, torch.Generator().manual_seed(job_seed))
            if self._recorded is not None:
                job = SlotJob(self._recorded.row_of(model), torch.stack(list(schedule)), learning_rate, job_seed)
                return self._recorded.train(model, job, during)
            if during is not None:
                schedule = (batch for _, batch in zip(during, schedule, strict=False))
            self._module.load_state_dict(model)
            optimizer = make_optimizer(self._module, self._settings, learning_rate)
            counted = count()
            counting = _counting(schedule, counted)
            augment = augmentation(self._workload, job_seed)
            with products_in(self._workload, self._device):
                total = train_steps(self._module, optimizer, self._workload.loss, self._train, counting, augment)
        done = next(counted)
        loss = float(total) / max(1, done)
        return Trained(model=copy_state(self._module), samples=done * min(size, len(part)), loss=loss)

    def score(self, model: StateDict) -> dict[str, float]:
        inputs, targets = self._test
        with _blaming(self.name, "scoring"):
            if self._recorded is not None:
                return self._recorded.score(model)
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


class RecordedTraining:
    """Training and scoring of one task by graphs, as a fleet of runs does it with many."""

    def __init__(
        self, workload: Workload, module: nn.Module, settings: TaskSettings, train: Samples, test: Samples
    ) -> None:
        self._device = train[0].device
        self._rows = rows_of(module)
        self._lanes = Lanes(workload, self._rows, train, slots=1, batch_size=settings.batch_size)
        self._scorer = Scorer(workload, self._rows, test)

    def row_of(self, model: StateDict) -> Tensor:
        return self._rows.flatten(model)

    def train(self, model: StateDict, job: SlotJob, during: Iterable[object] | None) -> Trained:
        self._lanes.load({0: job})
        done = job.steps
        if during is None:
            self._lanes.advance(done)
        else:
            done = 0
            begun: deque[torch.cuda.Event] = deque()
            for _ in zip(during, range(job.steps), strict=False):
                self._lanes.advance(1)
                done += 1
                if self._device.type == "cuda":  # who counts steps and looks at the clock must not be far ahead
                    begun.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                    begun[-1].record()
                    if len(begun) > STEPS_AHEAD:
                        begun.popleft().synchronize()
        trained = self._rows.unflatten(self._lanes.take([0])[0][0])
        # What the row leaves out counts steps.
        state = {
            name: trained[name].clone(memory_format=torch.contiguous_format)
            if name in trained
            else old.to(self._device) + done
            for name, old in model.items()
        }
        loss = float(self._lanes.losses(0)) / max(1, done)
        return Trained(model=state, samples=done * job.batches.shape[1], loss=loss)

    def score(self, model: StateDict) -> dict[str, float]:
        score, loss = self._scorer.score(self.row_of(model), None).tolist()
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
        return [torch.from_numpy(part) for part in partition.iid(n, facilities, seed)]
    if not (_is_integer(targets) and targets.ndim == 1):
        raise ConfigError(
            f"partition 'dirichlet' needs one integer label a sample, but task {settings.name!r} "
            f"has {targets.dtype} targets of shape {tuple(targets.shape)}; use 'iid'"
        )
    # A full batch for everyone, unless that would even out a small data set.
    least = max(1, min(settings.batch_size, n // (2 * facilities)))
    parts = partition.dirichlet(targets.cpu().numpy(), facilities, settings.dirichlet_alpha, seed, least=least)
    return [torch.from_numpy(part) for part in parts]


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
