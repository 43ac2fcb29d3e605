"""Training steps on an accelerator that are recorded once and replayed: what a graph is made of.

A job's whole state is one flat row (`rows.py`) and a few numbers beside it, always at the same place, so
that a recorded step can be replayed for any job. `lanes` trains networks of any kind with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from fedqueue.moments import TRUST
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import products_in
from fedqueue.training.workload import Samples, Workload
from fedqueue_reproduction.rows import Rows

T = TypeVar("T")

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam as torch has it by default
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
    proximal: float = 0.0
    """mu: how strongly each step is pulled back to the row it started from."""
    drift: Tensor | None = None
    """A row that is added to the parameters after each step, times the learning rate."""
    second: Tensor | None = None
    """The second moments that Adam goes on from, and counts as `TRUST` steps; None: it begins anew."""
    first: Tensor | None = None
    """The first moments likewise; None: they begin anew."""

    @property
    def steps(self) -> int:
        return len(self.batches)


def why_not_adam(workload: Workload, settings: TaskSettings) -> str | None:
    """Why `Adam` and `Scorer` below are not what this task wants; None if they are."""
    if workload.loss is not nn.functional.cross_entropy or workload.score is not None:
        return "it has a loss or a score of its own"
    if settings.optimizer != "adam" or settings.weight_decay:
        return "its optimizer is not plain Adam"
    return None


class Adam:
    """Adam as torch has it by default, for parameters that are rows: each has its rate and its number of steps."""

    def __init__(self, rows: Tensor, gradients: Tensor) -> None:
        self._rows, self._gradients = rows, gradients
        self.moments = (torch.zeros_like(rows), torch.zeros_like(rows))
        self._rates = torch.zeros(len(rows), 1, device=rows.device)
        self._counts = torch.zeros(2, len(rows), 1, dtype=torch.float64, device=rows.device)

    def restart(self, numbers: Tensor, rates: Tensor) -> None:
        """The rows of these numbers begin anew with these rates, one a row."""
        for moment, count in zip(self.moments, self._counts, strict=True):
            moment[numbers], count[numbers] = 0.0, 0.0
        self._rates[numbers] = rates

    def go_on(self, number: int, second: Tensor, first: Tensor | None) -> None:
        """This row has moments, for which it counts some steps."""
        self.moments[1][number], self._counts[1, number] = second * (1 - BETA2**TRUST), TRUST
        if first is not None:
            self.moments[0][number], self._counts[0, number] = first, TRUST

    def second_moments(self, numbers: Tensor, done: Tensor) -> Tensor:
        """Of these rows after so many steps, without the bias of where they began."""
        return self.moments[1][numbers] / (1 - BETA2 ** (done[:, None] + self._counts[1, numbers])).to(torch.float32)

    def step(self, done: Tensor, moving: Tensor, drifts: Tensor | None = None) -> None:
        """A step of every row, its `done`th, and its drift times its rate; those that are not `moving` stay where they
        are."""
        number = done.to(torch.float64)[:, None]
        root = torch.sqrt(1 - BETA2 ** (number + self._counts[1])).to(torch.float32)
        size = self._rates / (1 - BETA1 ** (number + self._counts[0])).to(torch.float32) * moving[:, None]
        quick(_adam, self._rows)(self._rows, self._gradients, *self.moments, size, root)
        if drifts is not None:
            quick(_drift, self._rows)(self._rows, drifts, self._rates * moving[:, None])


def _adam(rows: Tensor, gradients: Tensor, first: Tensor, second: Tensor, size: Tensor, root: Tensor) -> None:
    """One step in place; `size` is the rate over the first moment's bias, or 0 where a row stays as it is, `root` that
    of the second's bias."""
    first.copy_(torch.where(size > 0, first.lerp(gradients, 1 - BETA1), first))
    second.copy_(torch.where(size > 0, (second * BETA2).addcmul(gradients, gradients, value=1 - BETA2), second))
    rows.sub_(first * size / (second.sqrt() / root + EPSILON))


def _drift(rows: Tensor, drifts: Tensor, size: Tensor) -> None:
    rows.add_(drifts * size)


class Scorer:
    """Scores models one by one on the same samples; on an accelerator as one captured graph."""

    def __init__(self, workload: Workload, rows: Rows, samples: Samples) -> None:
        self._workload = workload
        self._inputs, self._targets = samples
        self._row = torch.zeros(rows.width, dtype=torch.float32, device=self._inputs.device)
        self._module = workload.make_model().to(self._inputs.device).eval().requires_grad_(False)
        held = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        for name, view in rows.unflatten(self._row).items():
            held[name].data = view
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
        with torch.no_grad(), products_in(self._workload, self._row.device):
            outputs = torch.cat([self._outputs(chunk) for chunk in torch.split(self._inputs, SCORE_CHUNK)])
            self._losses = nn.functional.cross_entropy(outputs, self._targets, reduction="none")
            self._hits = outputs.argmax(dim=1) == self._targets


def capture(
    step: Callable[[], None], device: torch.device, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Records what `step` does on the device; it is done a few times on the way. A graph that shall run beside others
    needs the stream on which it will be replayed: libraries keep working memory for each."""
    aside = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(3):  # libraries take their workspaces now, not while recording
            step()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is doing."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def quick(function: Callable[..., T], like: Tensor) -> Callable[..., T]:
    """On an accelerator, compiled into one kernel if that can be done: half of a step's time is copying about."""
    return _compiled(function) if like.is_cuda and has_triton() else function


@cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    return torch.compile(function, dynamic=False)
