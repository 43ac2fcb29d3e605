"""The slots of a device for networks that cannot be stacked: each has a step of its own, and all run side by side.

The kernels of a network such as ResNet-18 nearly fill an accelerator, and it normalises over the samples of one batch.
So every slot has its own step, recorded once as a graph and replayed on a stream of its own: what one leaves idle of
the device, another uses. A result does not depend on who trained beside it, since each step has its own memory and
always the same kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedqueue.aggregate import StateDict
from fedqueue.protocol.aggregation import split_moments
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import AUGMENTATION, Task, draws, products_in, signed
from fedqueue.training.workload import Samples, Workload
from fedqueue_reproduction.recorded import Adam, Scorer, SlotJob, capture, put, quick, why_not_adam
from fedqueue_reproduction.rows import Rows

Named = dict[str, Tensor]

COUNTER = "num_batches_tracked"
"""What a normalisation with a momentum counts and never looks at: left out of a row."""
MOST_STEPS = 1024  # of a job, before the step must be recorded again with more room


STEPS_AHEAD = 4
"""An accelerator is given so many steps before the first of them must be done: enough to keep it busy."""


def why_not_in_lanes(workload: Workload, module: nn.Module, settings: TaskSettings) -> str | None:
    """Why steps of this task cannot be recorded; None if they can."""
    if not workload.recordable:
        return "its workload does not say that its steps are recordable"
    for name, layer in module.named_modules():
        if isinstance(layer, _DropoutNd):
            return f"its layer {name} draws random numbers"
        if isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
            return f"its layer {name} has no momentum"
    for name, tensor in module.state_dict().items():
        if tensor.dtype != torch.float32 and not name.endswith(COUNTER):
            return f"its {name} is {tensor.dtype}"
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return "some of its parameters do not train"
    if settings.proximal:
        return "its loss has a proximal term"
    return why_not_adam(workload, settings)


def rows_of(module: nn.Module, roles: Mapping[str, str] | None = None) -> Rows:
    """Parameters and running statistics; what is not in the state dict, or only counts, is left out."""
    stored = module.state_dict()
    moving = [(n, t) for n, t in module.named_buffers() if n in stored and not n.endswith(COUNTER)]
    return Rows(module.named_parameters(), moving, roles, channels_last=True)


class Lanes:
    """As `Slots`: jobs are loaded, advanced and taken by the number of their slot."""

    def __init__(self, workload: Workload, rows: Rows, samples: Samples, *, slots: int, batch_size: int) -> None:
        self._device = samples[0].device
        # Compiled once: all lanes go through the same kernels.
        draw, loss = batch_of(workload, self._device), loss_of(workload, self._device)
        self._lanes = [Lane(draw, loss, rows, samples, batch_size) for _ in range(slots)]

    def load(self, jobs: dict[int, SlotJob]) -> None:
        """Put jobs into slots; whatever a slot held is gone."""
        for number, job in jobs.items():
            self._lanes[number].load(job)

    def advance(self, steps: int) -> None:
        """So many steps in every slot; one that has done all of its own stays as it is."""
        busy = [lane for lane in self._lanes if lane.left]
        if self._device.type != "cuda":
            for lane in busy:
                lane.advance(steps)
            return
        current = torch.cuda.current_stream(self._device)
        for lane in busy:
            lane.record()
            lane.stream.wait_stream(current)
        for _ in range(steps):  # in turn, so that all lanes have work from the beginning
            for lane in busy:
                lane.advance(1)
        for lane in busy:
            current.wait_stream(lane.stream)

    def take(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """The rows of these slots, in memory of their own, and whether all of a slot's values are finite."""
        rows = torch.stack([self._lanes[number].collect() for number in numbers])
        return rows, rows.isfinite().all(dim=1)

    def losses(self, number: int) -> Tensor:
        """The sum over the steps that the job in this slot has done."""
        return self._lanes[number].losses


class Lane:
    """One slot. Whatever its step reads and writes is here, always at the same place."""

    def __init__(
        self,
        draw: Callable[[Samples, Tensor, Tensor, Tensor], Samples],
        loss: Callable[[Named, Named, Tensor, Tensor], Tensor],
        rows: Rows,
        samples: Samples,
        batch_size: int,
    ) -> None:
        self._draw, self._loss = draw, loss
        self._samples = samples
        device = samples[0].device
        self._row = torch.zeros(rows.width, device=device)
        parameters = self._row[: rows.trained_width]
        gradients = torch.zeros_like(parameters)
        self._leaves = {place.name: place.of(self._row).detach().requires_grad_() for place in rows.trained}
        self._gradients = [place.of(gradients) for place in rows.trained]
        # Statistics are written by the network itself, so they have memory of their own while it trains: a compiler
        # takes tensors that share memory, some of them written, for one.
        self._kept = {place.name: place.of(self._row) for place in rows.places if place.name not in self._leaves}
        self._statistics = {name: torch.zeros_like(view) for name, view in self._kept.items()}
        self._adam = Adam(parameters[None], gradients[None])
        self._always = torch.ones(1, dtype=torch.bool, device=device)
        self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._done, self._key = self._first.clone(), self._first.clone()
        self.losses = torch.zeros((), device=device)
        self._batches = torch.zeros(MOST_STEPS, batch_size, dtype=torch.int32, device=device)
        self._size = batch_size
        self.left = 0
        """Steps to do."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the size of a batch

    @property
    def stream(self) -> torch.cuda.Stream:
        assert self._stream is not None
        return self._stream

    def load(self, job: SlotJob) -> None:
        device = self._row.device
        self.left, self._size = job.batches.shape
        if self.left > len(self._batches):
            self._batches = torch.zeros(2 * self.left, self._batches.shape[1], dtype=torch.int32, device=device)
            self._graphs.clear()
        self._batches[: self.left, : self._size] = put(job.batches.to(torch.int32), device)
        self._row.copy_(job.row)
        _copy(self._statistics.values(), self._kept.values())
        self._adam.restart(self._first, put(torch.tensor([[job.learning_rate]]), device))
        self._key.copy_(put(torch.tensor([signed(job.key)]), device))
        self._done.zero_()
        self.losses.zero_()

    def collect(self) -> Tensor:
        """The row as it is now."""
        _copy(self._kept.values(), self._statistics.values())
        return self._row

    def record(self) -> None:
        """Capture the step, if it is not yet; everything is as it was afterwards."""
        if self._size in self._graphs:
            return
        state = (self._row, *self._statistics.values(), *self._adam.moments, self._done, self.losses)
        kept = [tensor.clone() for tensor in state]
        self._graphs[self._size] = capture(self._step, self._row.device, self.stream)
        _copy(state, kept)

    def advance(self, steps: int) -> None:
        for _ in range(min(steps, self.left)):
            if self._stream is None:
                self._step()
            else:
                with torch.cuda.stream(self._stream):
                    self._graphs[self._size].replay()
            self.left -= 1

    def _step(self) -> None:
        inputs, targets = self._draw(self._samples, self._batches[:, : self._size], self._done, self._key)
        with torch.enable_grad():
            loss = self._loss(self._leaves, self._statistics, inputs, targets)
            found = torch.autograd.grad(loss, list(self._leaves.values()))
        _copy(self._gradients, found)
        self._done += 1
        self._adam.step(self._done, self._always)
        self.losses += loss.detach()


def batch_of(workload: Workload, device: torch.device) -> Callable[[Samples, Tensor, Tensor, Tensor], Samples]:
    """What a step is given, as a function of all samples, the sample numbers of every step, the number of the step and
    the key of its job."""
    augment = workload.augment
    take = quick(_take, torch.empty(0, device=device))
    alter = None if augment is None else quick(augment, torch.empty(0, device=device))

    def batch(samples: Samples, batches: Tensor, step: Tensor, key: Tensor) -> Samples:
        inputs, targets = take(samples, batches, step)
        if alter is not None:
            # Not compiled: a compiler takes the counting in it for small numbers, and its products for too large ones.
            inputs = alter(inputs, draws(key, step, AUGMENTATION, len(inputs))[0])
        return inputs, targets

    return batch


def _take(samples: Samples, batches: Tensor, step: Tensor) -> Samples:
    chosen = batches[step][0].to(torch.int64)
    return samples[0][chosen], samples[1][chosen]


def loss_of(workload: Workload, device: torch.device) -> Callable[[Named, Named, Tensor, Tensor], Tensor]:
    """The loss of a training step as a function of parameters, statistics (which it renews), inputs and targets."""
    module = workload.make_model().to(device).train()
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            layer.num_batches_tracked = None

    def loss(parameters: Named, statistics: Named, inputs: Tensor, targets: Tensor) -> Tensor:
        with products_in(workload, device):
            return workload.loss(functional_call(module, {**parameters, **statistics}, (inputs,)), targets)

    return quick(loss, torch.empty(0, device=device))


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """All of them in few kernels."""
    if into := list(targets):
        torch._foreach_copy_(into, list(sources))


class RecordedTask(Task):
    """A task alone on a device: one lane, and a graph that scores, as a fleet of runs has them for many."""

    @staticmethod
    def why_not(workload: Workload, settings: TaskSettings) -> str | None:
        """Why it is not for this workload; None if it is."""
        return why_not_in_lanes(workload, workload.make_model(), settings) if workload.recordable else "not recordable"

    def __init__(self, workload: Workload, settings: TaskSettings, facilities: int, seed: int) -> None:
        super().__init__(workload, settings, facilities, seed)
        self._rows = rows_of(self._module)
        self._lanes = Lanes(workload, self._rows, self._train, slots=1, batch_size=settings.batch_size)
        self._scorer = Scorer(workload, self._rows, self._test)

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
        if drift is not None or split_moments(model)[1]:  # of which what is recorded knows nothing
            return super()._go_through(schedule, model, learning_rate, job_seed, during, drift, change)
        job = SlotJob(self._rows.flatten(model), torch.stack(list(schedule)), learning_rate, job_seed)
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
        return state, done, self._lanes.losses(0)

    def score(self, model: StateDict) -> dict[str, float]:
        score, loss = self._scorer.score(self._rows.flatten(model), None).tolist()
        return {"score": score, "loss": loss}
