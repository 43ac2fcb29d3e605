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

AT_ONCE = 4
"""Runs: more keep an accelerator no busier, and each takes some ten gigabytes with its optimizer and its versions."""


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
    for numbers in _alike(configs):
        config = configs[numbers[0]]
        options = repr(config.task.options)
        if options not in sources:
            sources[options] = Source(read_options(config.task.options), keeps=True)
        # One after the other, before any runs: nothing else may happen on a device while steps are recorded.
        tasks = [_task(config, sources[options]) for _ in range(min(at_once, len(numbers)))]
        _finish(device)
        found: queue.Queue[tuple[int, CausalTask, Any]] = queue.Queue()
        waiting = list(reversed(numbers))

        def begin(
            task: CausalTask, waiting: list[int] = waiting, found: queue.Queue[tuple[int, CausalTask, Any]] = found
        ) -> None:
            if waiting:
                arguments = (waiting.pop(), task, configs, work, found, device)
                threading.Thread(target=_run, args=arguments, daemon=True).start()

        for task in tasks:
            begin(task)
        for _ in numbers:
            number, task, result = found.get()
            begin(task)
            if isinstance(result, BaseException):
                raise result
            yield number, result


def _alike(configs: Sequence[Config]) -> Iterator[list[int]]:
    """The numbers of those that one task will do for."""
    groups: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        groups.setdefault(repr((config.task, len(config.facility), config.run.seed)), []).append(number)
    return iter(groups.values())


def _task(config: Config, source: Source) -> CausalTask:
    task = CausalTask(config.task, len(config.facility), config.run.seed, source)
    task.record_steps()
    return task


def _run(
    number: int,
    task: CausalTask,
    configs: Sequence[Config],
    work: Callable[[int, Learned], Any],
    found: queue.Queue[tuple[int, CausalTask, Any]],
    device: str,
) -> None:
    try:
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():  # type: ignore[no-untyped-call]
            result = work(number, learning_with(task, configs[number]))
        _finish(device)
        found.put((number, task, result))
    except BaseException as error:
        found.put((number, task, error))


def _finish(device: str) -> None:
    """What one stream was given is done before another has the same tensors."""
    if device == "cuda":
        torch.cuda.synchronize()
