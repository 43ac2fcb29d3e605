"""Scores a run's models at a facility, as jobs of its own scheduler, by the command in its own config.

The command takes part as a training job does; `work.purpose` is "evaluate", and it hands in metrics alone, one of
them "score".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedqueue import PROTOCOL
from fedqueue.agent.job_folder import JobFolder, script
from fedqueue.agent.model_cache import ModelCache
from fedqueue.agent.schedulers import JobRequest, SchedulerUnreachableError, SubmitRefusedError, clamp_wall
from fedqueue.agent.station import Station
from fedqueue.errors import StorageError
from fedqueue.failpoints import failpoint

WALL_SECONDS = 1800.0


class Evaluation:
    """One model at a time, the newest that is asked for. What a killed agent had begun is found by its name."""

    def __init__(self, station: Station, model_cache: ModelCache, worker: Path | None) -> None:
        self._station = station
        self._model_cache = model_cache
        self._worker = worker
        self._wanted: Mapping[str, Any] | None = None
        self._version: int | None = None  # under way
        self._model: Mapping[str, Any] | None = None  # of that version
        self._job = ""
        self._missing_since: float | None = None  # monotonic
        # Scored, or in vain. What was reported before we were killed may be on its way still.
        reports = station.memory.reports.values()
        self._done: set[int] = {report["version"] for report in reports if report["kind"] == "scored"}

    def want(self, asked: Mapping[str, Any] | None) -> None:
        if asked is not None and self._station.settings.evaluate_command is None:
            if -1 not in self._done:
                self._station.say("the run wants its models scored here, but agent.evaluate_command is not set")
                self._done.add(-1)
            return
        self._wanted = asked

    def models(self) -> list[Mapping[str, Any]]:
        """That must be at hand: of the version under way, and of the newest."""
        asked = self._wanted["model"] if self._wanted is not None else None
        return [model for model in (self._model, asked) if model is not None]

    def turn(self) -> None:
        try:
            if self._version is not None:
                self._look(self._version)
            elif self._wanted is not None and int(self._wanted["version"]) not in self._done:
                path = self._model_cache.path(self._wanted["model"])
                if path.exists():
                    self._model = self._wanted["model"]
                    self._begin(int(self._wanted["version"]), str(path))
        except (SchedulerUnreachableError, StorageError) as error:
            if not self._job:
                self._version = None  # not begun: the next turn asks again
            if isinstance(error, StorageError):
                raise
        except SubmitRefusedError as refused:
            if refused.transient:
                self._station.trouble("scoring", f"models cannot be scored now: {refused.reason}")
                self._version = self._model = None  # the next turn asks again, for the newest then
            else:
                self._station.say(f"model {self._version} cannot be scored: {refused.reason}")
                self._end()

    def stop(self) -> None:
        """The run is over: nobody waits for a score any more."""
        if self._version is not None and self._job:
            with suppress(SchedulerUnreachableError):
                self._station.scheduler.cancel(self._job)

    def _folder(self, version: int) -> JobFolder:
        return JobFolder(self._model_cache.home, f"eval-{version}")

    def _begin(self, version: int, model: str) -> None:
        folder = self._folder(version)
        name = f"fq-{self._station.notes.memory.journal_id[:8]}-eval-{version}"
        self._version, self._job, self._missing_since = version, "", None
        found = self._station.scheduler.find(name)
        wall = clamp_wall(WALL_SECONDS, self._station.scheduling)
        if found is None:
            self._station.check_cap(wall)
            text = script(
                folder,
                command=self._station.settings.evaluate_command or "",
                before=self._station.settings.before,
                environment=self._station.settings.environment,
                python_path=self._worker,
                label=f"evaluation of model {version}",
            )
            folder.prepare(self._order(version, model, wall), text)
            request = JobRequest(name=name, script=folder.script, folder=folder.path, wall_seconds=wall)
            found = self._station.scheduler.submit(request)
            failpoint("agent.scoring")
        self._job, self._station.scoring_wall = found, wall
        self._station.fine("scoring")

    def _order(self, version: int, model: str, wall: float) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "job_id": f"{self._station.facility}/eval-{version}",
            "facility": self._station.facility,
            "round": version,
            "purpose": "evaluate",
            "wall_seconds": wall,
            "nodes": self._station.nodes,
            "standing": str(self._model_cache.standing_path),
            "state_dir": str(self._model_cache.home / "state"),
            "model": model,
            "assignment": {"base_version": version, "steps": 1, "learning_rate": 1.0, "train_budget": None},
        }

    def _look(self, version: int) -> None:
        folder = self._folder(version)
        result = folder.result(folder.attempts() - 1)
        if result is not None:
            if "score" in result.metrics:
                self._station.notes.note(
                    self._station.notes.report(kind="scored", version=version, metrics=result.metrics)
                )
            else:
                self._station.say(f"model {version} was not scored: its job handed in no metric of the name score")
            self._end()
            return
        status = self._station.scheduler.poll([self._job]).get(self._job)
        if status is not None and status.phase != "ended":
            return
        self._missing_since = self._missing_since or time.monotonic()
        if time.monotonic() - self._missing_since > self._station.settings.grace_seconds:
            self._station.say(
                f"model {version} was not scored: its job left no scores; see jobs/eval-{version}/output.txt"
            )
            self._end()

    def _end(self) -> None:
        if self._version is not None:
            self._done.add(self._version)
            self._count(self._folder(self._version))
        self._version = self._model = None
        self._station.scoring_wall = 0.0

    def _count(self, folder: JobFolder) -> None:
        """What it held of the facility's node-hours."""
        stamp, finished = folder.started(folder.attempts() - 1), folder.finished(folder.attempts() - 1)
        if stamp is not None:
            held = max(0.0, (finished or self._station.clock.now()) - stamp)
            self._station.notes.note({"kind": "closed", "sequence": -1, "node_seconds": held * self._station.nodes})
