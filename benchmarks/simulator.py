"""What the simulator costs: events a second, its share beside training, its memory, and the use of two cores."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.figure import Figure
from fedqueue import data
from fedqueue.config import Config, load
from fedqueue.sim.learning import RealLearning
from fedqueue.sim.runner import simulate
from fedqueue.sim.simulation import Simulation, make_plan, make_strategy
from fedqueue.sim.site import Site
from fedqueue.training.tasks import StateDict, Task, Trained, workload_of

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
REPEATS = 3


def events_a_second() -> list[Figure]:
    def rate(folder: Path | None) -> float:
        count = 0

        def listen(*_: object) -> None:
            nonlocal count
            count += 1

        began = time.perf_counter()
        simulate(load(EXPERIMENTS / "timing.toml", ["run.rounds=8000"]), folder=folder, listeners=[listen])
        return count / (time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as home:
        off = [rate(None) for _ in range(REPEATS)]
        on = []
        for i in range(REPEATS):
            (folder := Path(home) / str(i)).mkdir()
            on.append(rate(folder))
    return [
        Figure("timing only: events a second on one core", statistics.median(off), "1/s", "at least 50,000"),
        Figure("timing only, with the ledger: events a second", statistics.median(on), "1/s", "at least 20,000"),
    ]


def memory() -> list[Figure]:
    def peak(rounds: int) -> int:
        config = load(EXPERIMENTS / "timing.toml", [f"run.rounds={rounds}", "run.strategy=jit"])
        tracemalloc.start()
        simulate(config)
        _, top = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return top

    peak(200)
    return [Figure("memory that a further round takes", (peak(8000) - peak(1000)) / 7000, "bytes", "at most 25")]


class _Timed(Task):
    """Notes how long it is trained and scored, and what was asked of it."""

    def __init__(self, config: Config) -> None:
        super().__init__(workload_of(config.task), config.task, len(config.facility), config.run.seed)
        self.seconds = 0.0
        self.asked: list[tuple[int, int, float]] = []  # facility, steps, rate

    def train(
        self,
        *,
        facility: int,
        model: StateDict,
        steps: int,
        learning_rate: float,
        key: int,
        during: Iterable[object] | None = None,
        drift: StateDict | None = None,
        change: StateDict | None = None,
    ) -> Trained:
        self.asked.append((facility, steps, learning_rate))
        began = time.perf_counter()
        done = super().train(facility=facility, model=model, steps=steps, learning_rate=learning_rate, key=key)
        self.seconds += time.perf_counter() - began
        return done

    def score(self, model: StateDict) -> dict[str, float]:
        began = time.perf_counter()
        done = super().score(model)
        self.seconds += time.perf_counter() - began
        return done


def beside_training() -> list[Figure]:
    """The simulator's own seconds over those of a bare PyTorch loop with the same model, batches and steps."""
    name = "mnist" if any(p.exists() for p in data.candidates("mnist/train-images-idx3-ubyte.gz")) else "digits"
    config = load(EXPERIMENTS / "mnist.toml", [f"task.name={name}", "run.strategy=jit", "run.seconds=12.5"])
    own, whole = [], []
    for _ in range(REPEATS):
        torch.set_num_threads(config.task.threads)
        task = _Timed(config)
        began = time.perf_counter()
        _simulation(config, task).run()
        simulated = time.perf_counter() - began
        bare = _bare_loop(task, config)
        own.append((simulated - task.seconds) / bare)
        whole.append(task.seconds / bare)
    return [
        Figure(f"{name}: simulator beside training, over a bare loop", 100 * statistics.median(own), "%", "at most 3"),
        Figure(f"{name}: training and scoring, over a bare loop", statistics.median(whole), "x"),
    ]


def _simulation(config: Config, task: Task) -> Simulation:
    sites = [Site(i, facility, config, config.run.seed) for i, facility in enumerate(config.facility)]
    strategy = make_strategy(config, make_plan(config, sites, task.data_sizes()))
    return Simulation(config, sites, RealLearning(task), strategy)


def _bare_loop(task: _Timed, config: Config) -> float:
    """Seconds of a plain loop over the steps that the simulation asked for."""
    from fedqueue.training.workload import load_workload

    workload = load_workload(config.task.name, {})
    inputs, targets = workload.train
    module = workload.make_model()
    module.load_state_dict(task.initial_model())
    module.train()
    sizes = task.data_sizes()
    began = time.perf_counter()
    for facility, steps, rate in task.asked:
        optimizer = torch.optim.Adam(module.parameters(), lr=rate, fused=True)
        order = torch.randperm(sizes[facility])
        size = min(config.task.batch_size, sizes[facility])
        for step in range(steps):
            place = step * size % (sizes[facility] - size + 1)
            batch = order[place : place + size]
            optimizer.zero_grad()
            torch.autograd.backward(workload.loss(module(inputs[batch]), targets[batch]))
            optimizer.step()
    return time.perf_counter() - began


def two_processes() -> list[Figure]:
    """`fedqueue compare` with one process and with two, start-up included."""

    def seconds(jobs: int) -> float:
        with tempfile.TemporaryDirectory() as home:
            command = [sys.executable, "-m", "fedqueue", "compare", str(EXPERIMENTS / "mnist.toml"), "--json"]
            command += ["--strategies", "fedqueue,jit", "--seeds", "8", "--jobs", str(jobs), "--out", f"{home}/out"]
            command += ["--no-plots", "--set", "task.name=digits", "run.seconds=400"]
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            return time.perf_counter() - began

    ratio = seconds(1) / seconds(2)
    return [Figure("compare, 16 runs: --jobs 2 over --jobs 1, one torch thread each", ratio, "x", "at least 1.7")]


def measure() -> list[Figure]:
    torch.set_num_threads(1)
    parts: list[Callable[[], list[Figure]]] = [events_a_second, memory, beside_training, two_processes]
    return [figure for part in parts for figure in part()]
