"""Steps of a language model on an accelerator, recorded once and replayed.

A small model's step is thousands of short kernels, and Python starts them more slowly than they are done. Recorded as
one graph, they follow each other without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedqueue.moments import Moments
from fedqueue.training.causal_settings import CausalSettings
from fedqueue.training.job import TaskSettings
from fedqueue.training.sequences import IGNORED, Sequences

STEPS_AHEAD = 4
"""An accelerator is given so many steps before the first of them must be done: enough to keep it busy, and who counts
steps and looks at the clock is not far ahead."""
WARM_UP_STEPS = 3
ALIGNMENT = 64
"""Tokens; a sequence is filled up to a multiple of it, as matrix kernels like it."""


def why_not_recorded(model: Any, settings: TaskSettings, options: CausalSettings) -> str | None:
    """Why steps of this model cannot be recorded; None if they can."""
    if settings.device != "cuda":
        return "it is not on an accelerator"
    if settings.optimizer == "sgd" or settings.proximal:
        return "its optimizer is not plain Adam or AdamW"
    if options.checkpointing:
        return "it is checkpointed"
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return "its attention takes no mask of ours"
    if getattr(model.config, "sliding_window", None) is not None:
        return "its attention does not look at all that came before"
    if getattr(model.config, "attention_dropout", None) or any(
        isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules()
    ):
        return "it draws random numbers"
    return None


class RecordedSteps:
    """Steps of batches of one size. What a step reads and writes lies always at the same place."""

    def __init__(
        self,
        model: Any,
        settings: TaskSettings,
        options: CausalSettings,
        *,
        rows: int,
        length: int,
        positions: bool,
    ) -> None:
        """`rows` sequences of `length` tokens are a batch; `positions`: the model takes them."""
        self._model, self._options, self._takes_positions = model, options, positions
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        shape = (rows, -(-length // ALIGNMENT) * ALIGNMENT)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._positions = torch.zeros_like(self._tokens)
        self._targets = torch.full_like(self._tokens, IGNORED)
        kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
        rate = torch.zeros((), device=self._device)
        self._optimizer = kind(
            self._parameters,
            lr=rate,
            weight_decay=settings.weight_decay,
            fused=True,
            capturable=self._device.type == "cuda",
        )
        self._total = torch.zeros((), device=self._device)
        self._graph = self._record() if self._device.type == "cuda" else None
        """On a processor a step is done as it is written."""

    def go(
        self,
        sequences: Sequences,
        schedule: Iterable[Tensor],
        learning_rate: float,
        go_on: Callable[[torch.optim.Optimizer, bool], Moments] | None = None,
    ) -> tuple[int, int, float]:
        """Trains the model as it is; how many steps, of how many examples, and the sum of their losses. `go_on` has
        the optimizer go on from shared moments."""
        self._begin(learning_rate)
        adam = None if go_on is None else go_on(self._optimizer, True)
        done, samples = 0, 0
        begun: deque[torch.cuda.Event] = deque()
        length = sequences.tokens.shape[1]
        for rows in schedule:
            chosen = rows.to(self._device, non_blocking=True)
            self._tokens[:, :length] = sequences.tokens[chosen]
            self._positions[:, :length] = sequences.positions[chosen]
            self._targets[:, :length] = sequences.targets[chosen]
            if adam is not None:
                self._set_rate(learning_rate * adam.warmth(done + 1))
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
                begun.append(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
                begun[-1].record()
                if len(begun) > STEPS_AHEAD:
                    begun.popleft().synchronize()
            done, samples = done + 1, samples + int(sequences.examples[rows].sum())
        return done, samples, float(self._total)

    def _begin(self, learning_rate: float) -> None:
        self._model.train()
        self._set_rate(learning_rate)
        state = [tensor for parameter in self._optimizer.state.values() for tensor in parameter.values()]
        if state:
            torch._foreach_zero_(state)
        self._total.zero_()
        # What a shorter batch of other files leaves at the end of a sequence.
        self._tokens.zero_()
        self._positions.zero_()
        self._targets.fill_(IGNORED)

    def _set_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"].fill_(learning_rate)  # a tensor, of which the recorded step knows the place

    def _record(self) -> torch.cuda.CUDAGraph:
        """The model is as it was afterwards."""
        before = [parameter.detach().clone() for parameter in self._parameters]
        self._begin(0.0)
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_STEPS):  # libraries take their working memory now, not while recording
                self._step()
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            self._step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, before)
        return graph

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        learnt = (self._targets != IGNORED).sum().clamp(min=1)
        size = self._options.sequences_at_once or len(self._tokens)
        for tokens, positions, targets in zip(
            *(torch.split(part, size) for part in (self._tokens, self._positions, self._targets)), strict=True
        ):
            loss = self._sum_of_losses(tokens, positions, targets) / learnt
            loss.backward()  # type: ignore[no-untyped-call]
            self._total += loss.detach()
        if self._options.gradient_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._options.gradient_norm, foreach=True)
        self._optimizer.step()

    def _sum_of_losses(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        where = {"position_ids": positions} if self._takes_positions else {}
        is_half = self._options.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=is_half, cache_enabled=False):
            logits = self._model(tokens, attention_mask=seen(positions), use_cache=False, **where).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def seen(positions: Tensor) -> Tensor:
    """Which tokens (rows, 1, of each, by each) sees: those before it in its own example, which begins at position 0.

    >>> seen(torch.tensor([[0, 1, 0]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    example = (positions == 0).cumsum(1)
    before = torch.ones(2 * positions.shape[1:], dtype=torch.bool, device=positions.device).tril()
    return ((example[:, :, None] == example[:, None, :]) & before)[:, None]
