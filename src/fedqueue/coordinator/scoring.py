"""Scores of new models, made beside the coordinator by processes of their own, so that no round waits for one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from fedqueue import tensorfile
from fedqueue.config import Config
from fedqueue.coordinator.coordinator import Coordinator, Scorer
from fedqueue.errors import ConfigError
from fedqueue.protocol.messages import finite_or_none

STORED: Final = "config.json"
"""The run's config in its folder: plain values and where relative paths begin."""
TASK: Final = "task.json"
"""What of it jobs and scorers need."""

TRIES: Final = 2  # of one model, before the run goes on without its score


def make_scorer(config: Config, folder: Path) -> Callable[[Coordinator], Scorer] | None:
    """None: nothing is scored beside the coordinator."""
    evaluation = config.evaluation
    if not is_scored_here(config):
        return None
    if evaluation.command is not None:
        command = ["/bin/bash", "-c", evaluation.command]
        return lambda coordinator: ScoringThread(coordinator, _OneByOne(command, config), evaluation.timeout_seconds)
    argv = [sys.executable, "-m", "fedqueue.training.scorer", str(folder / TASK)]
    return lambda coordinator: ScoringThread(coordinator, _Standing(argv, folder), evaluation.timeout_seconds)


def is_scored_here(config: Config) -> bool:
    has_scores = config.task.name != "timing" and config.worker.command is None
    return config.evaluation.where == "coordinator" and (config.evaluation.command is not None or has_scores)


class Way(Protocol):
    """To the score of a model."""

    def ask(self, version: int, model: Path, timeout: float) -> dict[str, float | None]: ...

    def stop(self) -> None: ...


class ScoringThread:
    """One thread that asks for one score at a time, of the newest model: what became older meanwhile is skipped."""

    def __init__(self, coordinator: Coordinator, way: Way, timeout_seconds: float) -> None:
        self._coordinator = coordinator
        self._way = way
        self._timeout = timeout_seconds
        self._asked: queue.Queue[tuple[int, Path] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
        self._thread.start()

    def score(self, version: int, model: Path) -> None:
        self._asked.put((version, model))

    def close(self) -> None:
        self._asked.put(None)
        self._way.stop()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            while not self._asked.empty():
                self._settle(asked[0], None)
                asked = self._asked.get()
                if asked is None:
                    return
            version, model = asked
            metrics = None
            try:
                self._coordinator.store.verify(model.stem)
            except tensorfile.TensorFileError as error:
                self._cannot(version, error)
                continue
            for _ in range(TRIES):
                try:
                    metrics = self._way.ask(version, model, self._timeout)
                    break
                except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
                    self._coordinator.say(f"model {version} could not be scored: {error}")
            self._settle(version, metrics)

    def _cannot(self, version: int, error: tensorfile.TensorFileError) -> None:
        self._coordinator.ask(lambda: self._coordinator.not_scored(version, error))

    def _settle(self, version: int, metrics: dict[str, float | None] | None) -> None:
        self._coordinator.ask(lambda: self._coordinator.scored(version, metrics))


def read_metrics(given: Any) -> dict[str, float | None]:
    """Numbers by name, one of them "score"; null stands for one that is not finite."""
    if not isinstance(given, dict) or "score" not in given:
        raise ValueError('metrics must be a JSON object with at least "score"')
    return finite_or_none({str(name): None if value is None else float(value) for name, value in given.items()})


class _Standing:
    """A process that stays and is asked line by line; begun anew when it dies."""

    def __init__(self, argv: Sequence[str], folder: Path) -> None:
        self._argv = argv
        self._log = folder / "scorer.log"
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def ask(self, version: int, model: Path, timeout: float) -> dict[str, float | None]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"version": version, "model": str(model)}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            timer.cancel()
        if not answer:
            raise ValueError(f"the scorer ended; see {self._log.name} in the run folder")
        return read_metrics(json.loads(answer)["metrics"])

    def stop(self) -> None:
        self._stopped = True
        if self._process is not None:
            self._end(self._process)

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        with suppress(OSError), process:  # closes its pipes, and waits for it
            pass

    def _running(self) -> subprocess.Popen[str]:
        if self._stopped:
            raise ValueError("the coordinator is stopping")
        if self._process is not None and self._process.poll() is not None:
            self._end(self._process)
            self._process = None
        if self._process is None:
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    preexec_fn=_politely,
                )
        return self._process


def _politely() -> None:
    """Rounds come first."""
    os.nice(5)


class _OneByOne:
    """A command of the user's own for each model: it prints a JSON object of metrics as its last line."""

    def __init__(self, command: Sequence[str], config: Config) -> None:
        self._command = command
        self._folder = config.folder

    def ask(self, version: int, model: Path, timeout: float) -> dict[str, float | None]:
        environment = {**os.environ, "FEDQUEUE_MODEL": str(model), "FEDQUEUE_VERSION": str(version)}
        done = subprocess.run(
            self._command,
            cwd=self._folder,
            env=environment,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise ValueError(f"the evaluation command ended with exit code {done.returncode}: {done.stderr[-300:]}")
        return read_metrics(json.loads(lines[-1]))

    def stop(self) -> None:
        pass


def first_model(config: Config, folder: Path, target: Path) -> Sequence[int]:
    """Have the task make the first model; the sizes of the facilities' data."""
    argv = [sys.executable, "-m", "fedqueue.training.scorer", str(folder / TASK), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"the task {config.task.name!r} could not make the first model: {said[-1]}")
    sizes: list[int] = json.loads(done.stdout)["sizes"]
    return sizes
