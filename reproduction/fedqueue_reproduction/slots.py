"""The slots of a device: jobs of any runs side by side, one step of all of them at a time.

A slot holds one job's parameters, its Adam state, its rate, its batches and how far it is. `advance` does the next
steps of all slots; on an accelerator a step is one captured graph, replayed. Everything a job's result depends on is
its own, and every slot goes through the same kernels, so a result does not depend on who trained beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedqueue.training.settings import TaskSettings
from fedqueue.training.workload import Samples, Workload
from fedqueue_reproduction.stacked import Stack, cross_entropy, keyed_drop, quick, why_not

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam as torch has it by default
NO_SAMPLE = -1
SCORE_CHUNK = 2500  # test samples in one forward pass


@dataclass(frozen=True, slots=True)
class SlotJob:
    """What a slot is given to do."""

    row: Tensor
    """The parameters to start from, flat, on the device."""
    batches: Tensor
    """Sample numbers (steps, batch size, or less where a facility has fewer samples)."""
    learning_rate: float
    key: int
    """Selects the random numbers of dropout."""

    @property
    def steps(self) -> int:
        return len(self.batches)


def why_not_in_slots(workload: Workload, module: nn.Module, settings: TaskSettings) -> str | None:
    """Why jobs of this task cannot share a launch; None if they can."""
    if workload.loss is not nn.functional.cross_entropy or workload.score is not None:
        return "it has a loss or a score of its own"
    if settings.optimizer != "adam" or settings.weight_decay:
        return "its optimizer is not plain Adam"
    return why_not(module)


class Slots:
    def __init__(self, stack: Stack, samples: Samples, *, slots: int, batch_size: int, most_steps: int = 256) -> None:
        self._stack = stack
        self._inputs, self._targets = samples
        self._device = self._inputs.device
        self._batch_size = batch_size
        self.count = slots
        width = stack.width
        self._rows = self._zeros(slots, width)  # the parameters
        self._first, self._second = self._zeros(slots, width), self._zeros(slots, width)  # Adam's moments
        self._gradients = self._zeros(slots, width)
        self._rate = self._zeros(slots, 1)
        self._done = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._steps = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._keys = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._every = torch.arange(slots, device=self._device)
        self._batches = self._room(most_steps)
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, jobs: dict[int, SlotJob]) -> None:
        """Put jobs into slots; whatever a slot held is gone."""
        if not jobs:
            return
        longest = max(job.steps for job in jobs.values())
        if longest > self._batches.shape[1]:
            room = self._room(2 * longest)
            room[:, : self._batches.shape[1]] = self._batches
            self._batches, self._graph = room, None
        batches = torch.full((len(jobs), longest, self._batch_size), NO_SAMPLE, dtype=torch.int32)
        for mine, job in zip(batches, jobs.values(), strict=True):
            mine[: job.steps, : job.batches.shape[1]] = job.batches
        facts = [(number, job.steps, _signed(job.key)) for number, job in jobs.items()]
        numbers, steps, keys = put(torch.tensor(facts), self._device).unbind(1)
        self._rows[numbers] = torch.stack([job.row for job in jobs.values()])
        self._first[numbers], self._second[numbers] = 0.0, 0.0
        self._done[numbers], self._steps[numbers], self._keys[numbers] = 0, steps, keys
        rates = torch.tensor([[job.learning_rate] for job in jobs.values()], dtype=torch.float32)
        self._rate[numbers] = put(rates, self._device)
        self._batches[numbers, :longest] = put(batches, self._device)

    def advance(self, steps: int) -> None:
        """So many steps in every slot; one that has done all of its own stays as it is."""
        if self._device.type != "cuda":
            for _ in range(steps):
                self._step()
            return
        if self._graph is None:
            self._graph = self._capture()
        for _ in range(steps):
            self._graph.replay()

    def take(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """The parameters of these slots, in memory of their own, and whether all of a slot's are finite."""
        rows = self._rows[put(torch.tensor(numbers), self._device)]
        return rows, rows.isfinite().all(dim=1)

    def _step(self) -> None:
        chosen = self._batches[self._every, self._done.clamp(max=self._batches.shape[1] - 1)].to(torch.int64)
        used = chosen != NO_SAMPLE
        chosen = chosen.clamp(min=0)
        with torch.enable_grad():
            leaves = {name: view.detach().requires_grad_() for name, view in self._stack.unflatten(self._rows).items()}
            outputs = self._stack.outputs(leaves, self._inputs[chosen], keyed_drop(self._keys, self._done))
            loss = cross_entropy(outputs, self._targets[chosen], used).sum()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        for place, gradient in zip(self._stack.places, gradients, strict=True):
            self._gradients[:, place.start : place.stop] = gradient.reshape(self.count, -1)
        unfinished = self._done < self._steps
        self._done += 1
        number = self._done.to(torch.float64)[:, None]
        root = torch.sqrt(1 - BETA2**number).to(torch.float32)
        size = self._rate / (1 - BETA1**number).to(torch.float32) * unfinished[:, None]
        quick(_adam, self._rows)(self._rows, self._gradients, self._first, self._second, size, root)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """A step, recorded. The slots are as they were afterwards."""
        state = (self._rows, self._first, self._second, self._done)
        kept = [tensor.clone() for tensor in state]
        graph = capture(self._step, self._device)
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        return graph

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float32, device=self._device)

    def _room(self, steps: int) -> Tensor:
        shape = (self.count, steps, self._batch_size)
        return torch.full(shape, NO_SAMPLE, dtype=torch.int32, device=self._device)


def _adam(rows: Tensor, gradients: Tensor, first: Tensor, second: Tensor, size: Tensor, root: Tensor) -> None:
    """One step in place; `size` is the rate over the first moment's bias, `root` that of the second's bias."""
    first.lerp_(gradients, 1 - BETA1)
    second.mul_(BETA2).addcmul_(gradients, gradients, value=1 - BETA2)
    rows.sub_(first * size / (second.sqrt() / root + EPSILON))


class Scorer:
    """Scores models one by one on the same samples; on an accelerator as one captured graph."""

    def __init__(self, module: nn.Module, stack: Stack, samples: Samples) -> None:
        self._inputs, self._targets = samples
        self._row = torch.zeros(stack.width, dtype=torch.float32, device=self._inputs.device)
        self._module = module.to(self._inputs.device).eval()
        views = stack.unflatten(self._row)
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(False)
            parameter.data = views[name]
        if self._inputs.ndim == 4 and self._inputs.is_cuda:
            self._inputs = self._inputs.to(memory_format=torch.channels_last)  # as quick convolutions have it
        self._outputs = quick(self._module, self._row)
        self._losses, self._hits = torch.empty(0), torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    def score(self, row: Tensor, chosen: Tensor | None) -> Tensor:
        """(accuracy, mean loss) on the chosen samples, or on all; on the device."""
        self._row.copy_(row)
        if self._row.device.type != "cuda":
            self._look()
        else:
            if self._graph is None:
                self._graph = capture(self._look, self._row.device)
            self._graph.replay()
        losses, hits = self._losses, self._hits
        if chosen is not None:
            losses, hits = losses[chosen], hits[chosen]
        return torch.stack([hits.to(torch.float64).mean(), losses.to(torch.float64).mean()])

    def _look(self) -> None:
        with torch.no_grad():
            outputs = torch.cat([self._outputs(chunk) for chunk in torch.split(self._inputs, SCORE_CHUNK)])
            self._losses = nn.functional.cross_entropy(outputs, self._targets, reduction="none")
            self._hits = outputs.argmax(dim=1) == self._targets


def capture(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Records what `step` does on the device; it is done a few times on the way."""
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(3):  # libraries take their workspaces now, not while recording
            step()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _signed(key: int) -> int:
    """A key of up to 64 bits as torch's whole numbers hold it."""
    return (key + 2**63) % 2**64 - 2**63
