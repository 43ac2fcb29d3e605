"""Runs of language models on one device, each in a thread with a model and a stream of its own.

Their steps are recorded, so a thread has little to do but to have them replayed, and what one leaves idle of the device
another uses. A run's results do not depend on the others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from fedqueue.config import Config
from fedqueue.sim.learning import Learning
from fedqueue.sim.runner import Learned, learning_with
from fedqueue.training.causal_lm import CausalTask
from fedqueue.training.causal_settings import read_options
from fedqueue.training.pretrained import Source

T = TypeVar("T")

AT_ONCE = 8
"""Runs: a model of 135 million parameters with its optimizer and its versions takes some ten gigabytes a run."""


def run_side_by_side(
    configs: Sequence[Config],
    work: Callable[[int, tuple[Learning, Sequence[int] | None]], T],
    *,
    device: str = "cuda",
    at_once: int = AT_ONCE,
) -> Iterator[tuple[int, T]]:
    """`work(i, learned)` for every config; (i, what it returned) as they finish. An error in one of them is raised."""
    torch.set_float32_matmul_precision("high")
    sources: dict[str, Source] = {}
    for first in range(0, len(configs), at_once):
        numbers = range(first, min(first + at_once, len(configs)))
        # One after the other, before any runs: nothing else may happen on a device while steps are recorded.
        learned = {number: _learned(configs[number], sources) for number in numbers}
        found: queue.Queue[tuple[int, Any]] = queue.Queue()
        for number in numbers:
            arguments = (number, learned.pop(number), work, found, device)
            threading.Thread(target=_run, args=arguments, daemon=True).start()
        for _ in numbers:
            number, result = found.get()
            if isinstance(result, BaseException):
                raise result
            yield number, result


def _learned(config: Config, sources: dict[str, Source]) -> Learned:
    key = repr(config.task.options)
    if key not in sources:
        sources[key] = Source(read_options(config.task.options), keeps=True)
    task = CausalTask(config.task, len(config.facility), config.run.seed, sources[key])
    task.record_steps()
    return learning_with(task, config)


def _run(
    number: int, learned: Learned, work: Callable[[int, Learned], Any], found: queue.Queue[tuple[int, Any]], device: str
) -> None:
    try:
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():  # type: ignore[no-untyped-call]
            result = work(number, learned)
        found.put((number, result))
    except BaseException as error:
        found.put((number, error))
