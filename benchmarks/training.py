"""Local steps a second, against a plain PyTorch loop in the same run: on the processor, and on an accelerator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.figure import Figure
from fedqueue import data
from fedqueue.config import load
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import make_task, workload_of
from fedqueue.training.workload import Samples, Workload
from fedqueue_reproduction.recorded import SlotJob
from fedqueue_reproduction.slots import Slots
from fedqueue_reproduction.stacked import Stack

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
REPEATS = 3
RATE = 0.003
BATCHED = 96


def _settings() -> TaskSettings:
    config = load(EXPERIMENTS / "mnist.toml", [])
    has_mnist = any(p.exists() for p in data.candidates("mnist/train-images-idx3-ubyte.gz"))
    return config.task if has_mnist else TaskSettings(name="digits")


def _plain_loop(workload: Workload, samples: Samples, batch_size: int, steps: int) -> Callable[[], None]:
    """A loop as one writes it by hand: the data on the device, one fused Adam, nothing waits for the device."""
    inputs, targets = samples
    module = workload.make_model().to(inputs.device)
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE, fused=True)
    order = torch.randperm(len(inputs)).to(inputs.device)

    def loop() -> None:
        for step in range(steps):
            place = step * batch_size % (len(inputs) - batch_size + 1)
            batch = order[place : place + batch_size]
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(module(inputs[batch]), targets[batch]))
            optimizer.step()

    return loop


def on_the_processor() -> list[Figure]:
    settings = _settings()
    torch.set_num_threads(1)
    task = make_task(settings, facilities=1, seed=1)
    workload = workload_of(settings)
    steps = 150 if settings.name == "mnist" else 1500
    plain = _plain_loop(workload, workload.train, settings.batch_size, steps)
    model = task.initial_model()

    def ours() -> None:
        task.train(facility=0, model=model, steps=steps, learning_rate=RATE, key=1)

    ratio = statistics.median(_seconds(plain) / _seconds(ours) for _ in range(REPEATS))
    return [Figure(f"{settings.name}, processor: steps a second, over a plain loop", ratio, "x", "at least 0.95")]


def on_an_accelerator() -> list[Figure]:
    settings = _settings()
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    workload = workload_of(settings)
    samples = (workload.train[0].to(device), workload.train[1].to(device))
    plain = _rate(_plain_loop(workload, samples, settings.batch_size, 300), 300)
    module = workload.make_model()
    stack = Stack(module)
    row = stack.flatten(dict(module.state_dict())).to(device)
    facilities = len(load(EXPERIMENTS / "mnist.toml", []).facility)

    def batched(slots: int, steps: int = 100) -> float:
        found = Slots(stack, samples, slots=slots, batch_size=settings.batch_size)
        drawn = torch.randint(0, len(samples[0]), (slots, 10 * steps, settings.batch_size))
        found.load({i: SlotJob(row, drawn[i], RATE, i) for i in range(slots)})
        return _rate(lambda: found.advance(steps), steps * slots)

    one, many = batched(facilities), batched(BATCHED)
    name = f"{settings.name}, {torch.cuda.get_device_name()}"
    return [
        Figure(f"{name}: steps a second, a plain eager loop", plain, "1/s"),
        Figure(f"{name}: one run of {facilities} facilities, over that loop", one / plain, "x", "at least 3"),
        Figure(f"{name}: {BATCHED} jobs in a launch, over that loop", many / plain, "x", "at least 10"),
        Figure(f"{name}: steps a second, {BATCHED} jobs in a launch", many, "1/s", "at least 3,334"),
    ]


def _rate(work: Callable[[], None], steps: int) -> float:
    """Steps a second, the median of a few times."""
    return steps / statistics.median([_seconds(work) for _ in range(REPEATS + 1)][1:])


def _seconds(work: Callable[[], None]) -> float:
    _settle()
    began = time.perf_counter()
    work()
    _settle()
    return time.perf_counter() - began


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure() -> list[Figure]:
    return [*on_the_processor(), *(on_an_accelerator() if torch.cuda.is_available() else [])]
