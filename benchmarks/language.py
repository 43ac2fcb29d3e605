"""Steps of a language model of 135 million parameters on a GPU: as the task does them, against a loop by hand.

All have the same packed sequences, bfloat16, fused AdamW and clipped gradients, and everything on the device. The loop
by hand is measured as it is written, and compiled as a whole. Without a GPU there is nothing to measure.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figure import Figure
from fedqueue.training.causal_settings import CausalSettings
from fedqueue.training.job import TaskSettings
from fedqueue.training.pretrained import alike_layers
from fedqueue.training.recorded_steps import RecordedSteps
from fedqueue.training.sequences import IGNORED, Sequences

ROWS = 8
LENGTH = 512
SEQUENCES = 64
STEPS = 20
REPEATS = 3
RATE = 1e-4
EXAMPLE = 128
"""Tokens; the second half of them is learnt."""


def measure() -> list[Figure]:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
    sequences = _sequences(config.vocab_size)
    name = f"135 million parameters, {torch.cuda.get_device_name()}"
    eager = _rate(lambda: _by_hand(copy.deepcopy(model), sequences, tuned=False))
    tuned = _rate(lambda: _by_hand(copy.deepcopy(model), sequences, tuned=True))
    recorded = _rate(lambda: _recorded(copy.deepcopy(model), sequences, compiled=False))
    compiled = _rate(lambda: _recorded(copy.deepcopy(model), sequences, compiled=True))
    return [
        Figure(f"{name}: tokens a second, a loop by hand", eager[0], "1/s"),
        Figure(f"{name}: tokens a second, that loop compiled", tuned[0], "1/s"),
        Figure(f"{name}: memory of the compiled loop", tuned[1], "GB"),
        Figure(f"{name}: tokens a second, recorded steps", recorded[0], "1/s"),
        Figure(f"{name}: tokens a second, recorded steps, compiled layers", compiled[0], "1/s"),
        Figure(f"{name}: memory of these", compiled[1], "GB"),
        Figure(f"{name}: recorded and compiled, over the compiled loop", compiled[0] / tuned[0], "x", "at least 0.85"),
    ]


def _sequences(vocabulary: int) -> Sequences:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (SEQUENCES, LENGTH), generator=generator, dtype=torch.int32)
    positions = torch.arange(EXAMPLE, dtype=torch.int32).repeat(LENGTH // EXAMPLE).expand(SEQUENCES, LENGTH)
    learnt = (positions >= EXAMPLE // 2) & (positions < EXAMPLE - 1)
    targets = tokens.roll(-1, dims=1).where(learnt, IGNORED)
    examples = torch.full((SEQUENCES,), LENGTH // EXAMPLE)
    made = Sequences(tokens=tokens, positions=positions.contiguous(), targets=targets, examples=examples)
    return made.to(torch.device("cuda"))


def _schedule() -> list[Tensor]:
    return [torch.arange(ROWS) + ROWS * (step % (SEQUENCES // ROWS)) for step in range(STEPS)]


def _by_hand(model: Any, sequences: Sequences, *, tuned: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def loss_of(tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens, position_ids=positions, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    loss = torch.compile(loss_of, dynamic=False) if tuned else loss_of
    schedule = [rows.cuda() for rows in _schedule()]

    def loop() -> None:
        for rows in schedule:
            optimizer.zero_grad()
            parts = (part[rows].long() for part in (sequences.tokens, sequences.positions, sequences.targets))
            loss(*parts).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return loop


def _recorded(model: Any, sequences: Sequences, *, compiled: bool) -> Callable[[], None]:
    if compiled:
        for layer in alike_layers(model):
            layer.compile(dynamic=False)
    settings = TaskSettings(name="causal-lm", optimizer="adamw", device="cuda", batch_size=ROWS)
    options = CausalSettings(model="made here", precision="bfloat16", compile=compiled)
    steps = RecordedSteps(model, settings, options, rows=ROWS, length=LENGTH, positions=True)

    def loop() -> None:
        steps.go(sequences, _schedule(), RATE)

    return loop


def _rate(make: Callable[[], Callable[[], None]]) -> tuple[float, float]:
    """Tokens a second, the median of a few times; and the memory it took, in GB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    work = make()
    work()
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return STEPS * ROWS * LENGTH / statistics.median(taken), (torch.cuda.max_memory_reserved() - before) / 1e9
