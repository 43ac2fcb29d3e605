"""Scores of new models: which are wanted, and by whom they are made.

Beside the coordinator processes of their own make them, so that no round waits for one; or a facility does.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from fedqueue import tensorfile
from fedqueue.config import Config
from fedqueue.errors import ConfigError
from fedqueue.metrics import best_of
from fedqueue.protocol.messages import ModelScored, finite_or_none
from fedqueue.protocol.reports import Unscored

if TYPE_CHECKING:
    from fedqueue.coordinator.coordinator import Coordinator

log = logging.getLogger(__name__)

STORED: Final = "config.json"
"""The run's config in its folder: plain values and where relative paths begin."""
TASK: Final = "task.json"
"""What of it jobs and scorers need."""

TRIES: Final = 2  # of one model, before the run goes on without its score


class Scorer(Protocol):
    """Scores models beside the coordinator."""

    def score(self, version: int, model: Path) -> None:
        """Begin; `Scores.scored` is told what comes of it."""

    def close(self) -> None: ...


class Scores:
    """The scores of a run, in the thread of its coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._evaluation = coordinator.config.evaluation
        self.scorer: Scorer | None = None  # beside the coordinator, once that is open; None: nothing is scored there
        self._under_way: set[int] = set()
        self._waiting: set[int] = set()  # of these, those whose files are waited for
        self._asked: int | None = None  # at a facility
        self._over_since: float | None = None  # monotonic
        self._unscorable: set[int] = set()  # models that a facility has tried to score

    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()

    def begin(self, version: int) -> None:
        """Have a new model scored here, if that is where it is done."""
        path = self._coordinator.store.path(self._coordinator.outcomes.models[version])
        if self.scorer is not None and self._coordinator.counts_on(path.stem):
            self._under_way.add(version)
            self.scorer.score(version, path)

    def begin_again(self) -> None:
        """What was wrong with files is mended."""
        again, self._waiting = sorted(self._waiting), set()
        for version in again:
            self.begin(version)

    def failed(self, version: int, error: Exception) -> None:
        """Its file cannot be used now; it is scored when that is mended."""
        self._waiting.add(version)
        digest = self._coordinator.outcomes.models[version]
        self._coordinator.cannot_use(digest, f"model {version} cannot be scored", error)

    def scored(self, version: int, metrics: dict[str, float | None] | None) -> None:
        """A score came, or None: there will be none."""
        self._under_way.discard(version)
        if metrics is not None and version not in self._coordinator.outcomes.scores:
            event = ModelScored(at=self._coordinator.now, version=version, metrics=metrics)
            self._coordinator.tell(event, origin=f"score/{version}")
        self._coordinator.pump()

    def came(self, event: ModelScored) -> None:
        """It is on record. Says which models older than this one will get no score any more."""
        self._asked = None
        scores, unscored = self._coordinator.outcomes.scores, self._coordinator.outcomes.unscored()
        before = max((other for other in scores if other < event.version), default=-1)
        passed = [other for other in unscored if before < other < event.version and self.wants(other)]
        if passed:
            which = f"model {passed[0]}" if len(passed) == 1 else f"{len(passed)} models, {passed[0]} to {passed[-1]},"
            why = "scoring takes longer than a round, or failed"
            if self._evaluation.where in self._coordinator.names:  # which says itself what failed
                why = f"newer models came before {self._evaluation.where} could begin"
            log.info(f"{which} passed over without a score: {why}")
        if event.metrics.get("score") is None:
            log.warning(f"the score of model {event.version} is not a finite number")

    def are_awaited(self) -> bool:
        """Whether the end of the run has to wait for one."""
        newest, at_facility = self._coordinator.state.newest, self._evaluation.where in self._coordinator.names
        return bool(self._under_way) or (at_facility and self.wants(newest) and not self.waited_long_enough())

    # Which model is best --------------------------------------------------------------------------------

    @property
    def best(self) -> int | None:
        """The version with the best score of those that are kept; None: none has one, or the best is not kept."""
        if self._coordinator.config.model.keep == "needed":
            return None
        models, scores = self._coordinator.outcomes.models, self._coordinator.outcomes.scores
        return best_of({v: score for v, score in scores.items() if self._coordinator.store.counts_on(models[v])})

    def needed(self) -> set[int]:
        """Versions whose files must stay for the sake of scores."""
        # The best also while its file is gone: when somebody puts it back, it stays.
        keep_best = self._coordinator.config.model.keep == "best"
        best = best_of(self._coordinator.outcomes.scores) if keep_best else None
        return self._under_way | {version for version in (best, self.best, self._asked) if version is not None}

    # At a facility --------------------------------------------------------------------------------------

    def wants(self, version: int) -> bool:
        return version not in self._coordinator.outcomes.scores and version not in self._unscorable

    def asks_for(self, version: int) -> None:
        """A facility is asked for it. The first since the last score is likely to be under way: its file stays, in case
        it turns out the best."""
        if self._asked is None:
            self._asked = version

    def given_up(self, facility: str, given_up: Sequence[Unscored]) -> None:
        """The facility that scores models says which it cannot score."""
        if self._evaluation.where != facility:
            return
        for found in given_up:
            if self.wants(found.version) and found.version in self._coordinator.outcomes.models:
                self._unscorable.add(found.version)
                log.warning(f"model {found.version} gets no score: {found.reason}")

    def waited_long_enough(self) -> bool:
        """Whether a facility that scores models has had its time for the last one."""
        coordinator, seconds = self._coordinator, self._evaluation.timeout_seconds
        if coordinator.left_as == coordinator.state.stopped:
            return True  # who serves a run that is over changes none of its figures
        if self._over_since is None:
            self._over_since = time.monotonic()
            newest, where = coordinator.state.newest, self._evaluation.where
            log.info(f"waits for the score of model {newest} by {where}, for {seconds:g} s at most")
        return time.monotonic() - self._over_since > seconds


# Beside the coordinator ---------------------------------------------------------------------------------


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
                    log.warning(f"model {version} could not be scored: {error}")
            self._settle(version, metrics)

    def _cannot(self, version: int, error: tensorfile.TensorFileError) -> None:
        self._coordinator.ask(lambda: self._coordinator.scores.failed(version, error))

    def _settle(self, version: int, metrics: dict[str, float | None] | None) -> None:
        self._coordinator.ask(lambda: self._coordinator.scores.scored(version, metrics))


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
