"""From experiments to records: all runs that are wanted, in processes on the CPU or side by side on one GPU."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from fedqueue.config import Config, load
from fedqueue.errors import ConfigError, FedQueueError, ProtocolError, TaskError
from fedqueue.processes import run_all
from fedqueue.protocol.messages import Command, Event
from fedqueue.sim.runner import TIMING, Learned
from fedqueue.training.causal_settings import CAUSAL_LM
from fedqueue_reproduction.experiment import Cell, Experiment
from fedqueue_reproduction.record import fingerprint, run_record

Device = Literal["cpu", "cuda"]

Winner = Callable[[Cell], Sequence[str]]
"""The changes that a tuned row takes from its grid."""

_REPORTS: Final = 50  # about so many times a run says how far it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of an experiment: all that another process needs."""

    experiment: str
    row: str
    setting: str
    seed: int
    path: Path  # of its config
    changes: tuple[str, ...]
    config: str  # fingerprint
    keep: frozenset[str]
    seconds: float  # virtual, that it should take
    trains: bool

    def __str__(self) -> str:
        under = f" ({self.setting})" if self.setting else ""
        return f"{self.experiment}: {self.row}{under}, seed {self.seed}"


class Meter:
    """Virtual seconds done by all runs together, whichever process they are in."""

    def __init__(self) -> None:
        self._shared = multiprocessing.get_context("spawn").Value("d", 0.0)

    def add(self, seconds: float) -> None:
        with self._shared.get_lock():
            self._shared.value += seconds

    @property
    def seconds(self) -> float:
        return float(self._shared.value)


def runs_of(
    experiment: Experiment, seeds: Sequence[int], *, quick: bool = False, winner: Winner = lambda cell: ()
) -> list[Run]:
    """All runs of an experiment, seed after seed, and row after row: one that is cut short has compared the first rows
    under all settings over the same seeds."""
    runs = []
    order = [row.name for row in experiment.rows]
    for cell in sorted(experiment.cells(quick=quick), key=lambda cell: order.index(cell.row.name)):
        changes = winner(cell)
        config = experiment.config_of(cell, seeds[0], quick=quick, winner=changes)
        for seed in seeds:
            path, made = experiment.run_of(cell, seed, quick=quick, winner=changes)
            runs.append(
                Run(
                    experiment=experiment.name,
                    row=cell.row.name,
                    setting=cell.setting,
                    seed=seed,
                    path=path,
                    changes=made,
                    config=fingerprint(replace(config, run=replace(config.run, seed=seed))),
                    keep=experiment.keep,
                    seconds=_length(config),
                    trains=config.task.name != TIMING,
                )
            )
    return sorted(runs, key=lambda run: run.seed)


def execute(
    runs: Sequence[Run],
    *,
    device: Device = "cpu",
    processes: int = 1,
    go_on: Callable[[], bool] = lambda: True,
    meter: Meter | None = None,
) -> Generator[tuple[Run, dict[str, Any]], None, None]:
    """Every run with its record, as it is done. No run begins once `go_on` says no. An error names its run.

    On a GPU every process has a share of the runs, and keeps many of them under way: simulating them takes a core."""
    meter = meter or Meter()
    if device == "cpu":
        yield from run_all(_work, runs, processes, go_on=go_on, prepare=_use, given=(meter,))
        return
    _use(meter)
    yield from run_all(_work, [run for run in runs if not run.trains], 1, go_on=go_on)
    trained = [run for run in runs if run.trains]
    if processes == 1 or len(trained) < 2:
        yield from _on_one_device(trained, go_on)
    else:
        yield from _in_shares(trained, min(processes, len(trained)), go_on, meter)


def check_device(device: Device) -> str | None:
    """What the GPU is called, or None for the CPU; an error if torch cannot use it."""
    if device == "cpu":
        return None
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("--device cuda: torch is not installed; pip install 'fedqueue[train]'")
    import torch  # only who asks for a GPU pays for loading it here

    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; leave it out to run on the CPU")
    return str(torch.cuda.get_device_name())


def _on_one_device(runs: Sequence[Run], go_on: Callable[[], bool]) -> Iterator[tuple[Run, dict[str, Any]]]:
    if not runs:
        return
    from fedqueue_reproduction.fleet import run_many
    from fedqueue_reproduction.side_by_side import run_side_by_side

    configs = [load(run.path, (*run.changes, "task.device=cuda")) for run in runs]
    for runner, are_language in ((run_many, False), (run_side_by_side, True)):
        own = [place for place, config in enumerate(configs) if (config.task.name == CAUSAL_LM) == are_language]

        def work(number: int, learned: Learned, own: Sequence[int] = own) -> dict[str, Any] | None:
            return _record(runs[own[number]], configs[own[number]], learned) if go_on() else None

        for number, record in runner([configs[place] for place in own], work, device="cuda"):
            if record is not None:
                yield runs[own[number]], record


def _in_shares(
    runs: Sequence[Run], processes: int, go_on: Callable[[], bool], meter: Meter
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Each process takes every so manieth run."""
    spawn = multiprocessing.get_context("spawn")
    found, over = spawn.Queue(), spawn.Event()
    shares = [runs[first::processes] for first in range(processes)]
    workers = [spawn.Process(target=_share, args=(share, found, over, meter), daemon=True) for share in shares]
    for worker in workers:
        worker.start()
    try:
        busy = len(workers)
        while busy:
            if not go_on():
                over.set()
            try:
                said = found.get(timeout=1.0)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise TaskError("a process was killed, perhaps for want of memory; try fewer --jobs") from None
                continue
            if said is None:
                busy -= 1
            elif isinstance(said, BaseException):
                raise said
            else:
                yield said
    finally:
        for worker in workers:
            worker.terminate()


def _share(runs: Sequence[Run], found: Any, over: Any, meter: Meter) -> None:
    """What one of the processes does: its records go into the queue, then None; or the error that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    _use(meter)
    try:
        for done in _on_one_device(runs, lambda: not over.is_set()):
            found.put(done)
        found.put(None)
    except FedQueueError as error:
        found.put(error)


def _work(run: Run) -> tuple[Run, dict[str, Any]]:
    return run, _record(run, load(run.path, run.changes))


def _record(run: Run, config: Config, learned: Learned | None = None) -> dict[str, Any]:
    told = _Told(run.seconds)
    try:
        figures = run_record(config, learned, keep=run.keep, listeners=[told])
    except FedQueueError as error:
        raise type(error)(f"{run}: {error}") from error
    except Exception as error:
        if os.environ.get("FEDQUEUE_TRACEBACK"):
            raise
        raise ProtocolError(f"{run}: ours: {type(error).__name__}: {error}; please report it") from error
    told.finish()
    return {"row": run.row, "setting": run.setting, "seed": run.seed, "config": run.config, **figures}


class _Told:
    """A listener that tells the meter how far its run is."""

    def __init__(self, seconds: float) -> None:
        self._length = seconds
        self._told = 0.0

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        if event.at - self._told >= self._length / _REPORTS:
            self._tell(min(event.at, self._length))

    def finish(self) -> None:
        self._tell(self._length)

    def _tell(self, at: float) -> None:
        if _meter is not None:
            _meter.add(at - self._told)
        self._told = at


_meter: Meter | None = None


def _use(meter: Meter) -> None:
    """A pool hands shared memory over when a process begins, and not with its work."""
    global _meter
    _meter = meter


def _length(config: Config) -> float:
    by_rounds = None if config.run.rounds is None else config.run.rounds * config.run.round_length
    return min(seconds for seconds in (config.run.seconds, by_rounds) if seconds is not None)
