"""The slots of a device: jobs of any runs side by side, one step of all of them at a time.

A slot holds one job's parameters, its Adam state, its rate, its batches and how far it is. `advance` does the next
steps of all slots; on an accelerator a step is one captured graph, replayed. Everything a job's result depends on is
its own, and every slot goes through the same kernels, so a result does not depend on who trained beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import signed
from fedqueue.training.workload import Samples, Workload
from fedqueue_reproduction.recorded import Adam, SlotJob, capture, put, quick, why_not_adam
from fedqueue_reproduction.stacked import Stack, cross_entropy, keyed_drop, why_not

NO_SAMPLE = -1


def why_not_in_slots(workload: Workload, module: nn.Module, settings: TaskSettings) -> str | None:
    """Why jobs of this task cannot share a launch; None if they can."""
    if workload.augment is not None:
        return "it augments its samples"
    return why_not_adam(workload, settings) or why_not(module)


class Slots:
    def __init__(self, stack: Stack, samples: Samples, *, slots: int, batch_size: int, most_steps: int = 256) -> None:
        self._stack = stack
        self._inputs, self._targets = samples
        self._device = self._inputs.device
        self._batch_size = batch_size
        self.count = slots
        width = stack.width
        self._rows = self._zeros(slots, width)  # the parameters
        self._gradients = self._zeros(slots, width)
        self._begun_at = self._zeros(slots, width)  # the parameters that a job was loaded with
        self._proximals = self._zeros(slots, 1)
        self._drifts = self._zeros(slots, width)
        self._adam = Adam(self._rows, self._gradients)
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
        facts = [(number, job.steps, signed(job.key)) for number, job in jobs.items()]
        numbers, steps, keys = put(torch.tensor(facts), self._device).unbind(1)
        self._rows[numbers] = self._begun_at[numbers] = torch.stack([job.row for job in jobs.values()])
        proximals = torch.tensor([[job.proximal] for job in jobs.values()], dtype=torch.float32)
        self._proximals[numbers] = put(proximals, self._device)
        still = torch.zeros_like(self._rows[0])
        self._drifts[numbers] = torch.stack([still if job.drift is None else job.drift for job in jobs.values()])
        self._done[numbers], self._steps[numbers], self._keys[numbers] = 0, steps, keys
        rates = torch.tensor([[job.learning_rate] for job in jobs.values()], dtype=torch.float32)
        self._adam.restart(numbers, put(rates, self._device))
        for number, job in jobs.items():
            if job.second is not None:
                self._adam.go_on(number, job.second, job.first)
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

    def second_moments(self, numbers: list[int]) -> Tensor:
        """Of these slots, whose jobs are done."""
        chosen = put(torch.tensor(numbers), self._device)
        return self._adam.second_moments(chosen, self._steps[chosen])

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
        quick(_pull, self._rows)(self._gradients, self._rows, self._begun_at, self._proximals)
        self._adam.step(self._done, unfinished, self._drifts)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """A step, recorded. The slots are as they were afterwards."""
        state = (self._rows, *self._adam.moments, self._done)
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


def _pull(gradients: Tensor, rows: Tensor, begun_at: Tensor, strengths: Tensor) -> None:
    """Adds the gradient of strength/2 * |row - begun_at|^2."""
    gradients.add_((rows - begun_at) * strengths)
