"""Scores a run's models at a facility, as jobs of its own scheduler, by the command in its own config.

The command takes part as a training job does; `work.purpose` is "evaluate", and it hands in metrics alone, one of
them "score". What is under way is in the journal: an agent that comes and goes finds it again. A job that is lost is
tried again; what cannot be scored is told to the coordinator with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from fedqueue.agent.jobs import JobFolder, Jobs
from fedqueue.agent.journal import Closed, Entry, NotScored, Scoring, ScoringOver
from fedqueue.agent.schedulers import JobRequest, SchedulerUnreachableError, SubmitRefusedError
from fedqueue.agent.transfers import ModelCache
from fedqueue.files import failpoint
from fedqueue.protocol.contract import REASON_LENGTH, Assignment, EvaluationRequest, ModelFile, Order
from fedqueue.protocol.reports import Scored

MOST_TRIES: Final = 3
"""Jobs for one model."""


class Evaluation:
    """One model at a time, the newest that is asked for."""

    def __init__(self, jobs: Jobs, model_cache: ModelCache) -> None:
        self._jobs = jobs
        self._model_cache = model_cache
        self.wanted: EvaluationRequest | None = None  # which the coordinator asks for
        self._missing_since: float | None = None  # monotonic

    def models(self) -> list[ModelFile]:
        """That must be at hand: of the version under way, and of the newest."""
        asked = self.wanted.model if self.wanted is not None else None
        under_way = self._scoring.model if self._scoring is not None else None
        return [model for model in (under_way, asked) if model is not None]

    def can_begin(self) -> bool:
        """Whether a model that is asked for is here, and nobody has begun with it."""
        wanted = self.wanted
        if wanted is None or self._scoring is not None or not self._model_cache.path(wanted.model).exists():
            return False
        memory = self._jobs.memory
        reports = (found.report for found in memory.reports.values())
        told = any(isinstance(report, Scored) and report.version == wanted.version for report in reports)
        return wanted.version not in memory.unscored and not told

    def turn(self) -> None:
        try:
            if self._scoring is None and self.wanted is not None and self.can_begin():
                self._begin(self.wanted)
            if self._scoring is not None and self._scoring.job is None:
                self._submit(self._scoring)
            elif self._scoring is not None:
                self._look(self._scoring)
        except SchedulerUnreachableError as error:  # the next turn asks again
            self._jobs.trouble("scoring", f"models cannot be scored now: the scheduler did not answer: {error}")
        except SubmitRefusedError as refused:
            if self._scoring is not None and not refused.transient:
                self._give_up(self._scoring.version, refused.reason)
                return
            self._jobs.trouble("scoring", f"models cannot be scored now: {refused.reason}")
            if self._scoring is not None:
                self._jobs.notes.note(ScoringOver())  # the next turn begins with the newest
        else:
            self._jobs.fine("scoring")

    def stop(self) -> None:
        """The run is over: nobody waits for a score any more."""
        if self._scoring is not None:
            if self._scoring.job is not None:
                with suppress(SchedulerUnreachableError):
                    self._jobs.scheduler.cancel(self._scoring.job)
            self._jobs.notes.note(ScoringOver())

    @property
    def _scoring(self) -> Scoring | None:
        return self._jobs.memory.scoring

    def _folder(self, version: int) -> JobFolder:
        return JobFolder(self._jobs.home, f"eval-{version}")

    def _begin(self, wanted: EvaluationRequest) -> None:
        version = wanted.version
        if self._jobs.settings.evaluate_command is None:
            self._give_up(version, "agent.evaluate_command is not set at the facility")
            return
        try:
            self._jobs.check_cap(self._jobs.scoring_wall)
        except SubmitRefusedError as refused:
            if refused.transient:
                raise
            self._give_up(version, refused.reason)
            return
        self._note(Scoring(model=wanted.model))

    def _note(self, *entries: Entry) -> None:
        self._missing_since = None
        self._jobs.notes.note(*entries)

    def _submit(self, scoring: Scoring) -> None:
        again = f"-{scoring.tries}" if scoring.tries else ""
        name = f"fq-{self._jobs.memory.journal_id[:8]}-eval-{scoring.version}{again}"
        found = self._jobs.scheduler.find(name)  # an agent before us may have been killed while it asked
        if found is None:
            wall, folder = self._jobs.scoring_wall, self._folder(scoring.version)
            self._jobs.check_cap(wall)
            order = Order(
                job_id=f"{self._jobs.facility}/eval-{scoring.version}",
                facility=self._jobs.facility,
                round=scoring.version,
                wall_seconds=wall,
                purpose="evaluate",
            )
            work = Assignment(base_version=scoring.version, steps=1, learning_rate=1.0)
            command, model = self._jobs.settings.evaluate_command or "", self._model_cache.path(scoring.model)
            self._jobs.prepare(folder, name, order, command, work, model)
            request = JobRequest(name=name, script=folder.script, folder=folder.path, wall_seconds=wall)
            found = self._jobs.scheduler.submit(request)
            failpoint("agent.scoring")
        self._jobs.notes.note(replace(scoring, job=found))
        self._jobs.log.info(f"the job that scores model {scoring.version} ({found}) is at the scheduler")

    def _look(self, scoring: Scoring) -> None:
        folder = self._folder(scoring.version)
        results = (folder.result(attempt) for attempt in reversed(range(folder.attempts())))
        result = next((result for result in results if result is not None), None)
        if result is not None:
            self._scored(scoring, result.trained.metrics)
            return
        status = self._jobs.scheduler.poll([scoring.job or ""]).get(scoring.job or "")
        if status is not None and status.phase != "ended":
            self._missing_since = None
            return
        self._missing_since = self._missing_since or time.monotonic()
        if time.monotonic() - self._missing_since <= self._jobs.settings.grace_seconds:
            return  # file systems lag: its result may be about to show
        how = "is not known to the scheduler any more" if status is None else f"ended ({status.outcome})"
        if scoring.tries + 1 < MOST_TRIES:
            self._jobs.log.info(
                f"the job that scores model {scoring.version} {how} and left no scores; another is begun"
            )
            self._note(self._held(folder), Scoring(model=scoring.model, tries=scoring.tries + 1))
        else:
            reason = f"{MOST_TRIES} jobs left no scores; the last {how}; {folder.ends_with(self._jobs.home)}"
            self._give_up(scoring.version, reason, self._held(folder))

    def _scored(self, scoring: Scoring, metrics: Mapping[str, float | None]) -> None:
        notes, held = self._jobs.notes, self._held(self._folder(scoring.version))
        if "score" in metrics:
            report = notes.report(Scored, version=scoring.version, metrics=dict(metrics))
            notes.note(report, ScoringOver(), held)
            self._jobs.log.info(f"model {scoring.version} is scored ({scoring.job}): {metrics['score']}")
        else:
            self._give_up(scoring.version, "its job handed in no metric of the name score", held)

    def _give_up(self, version: int, reason: str, *more: Entry) -> None:
        self._jobs.log.warning(f"model {version} cannot be scored: {reason}")
        unscored = NotScored(version=version, reason=reason[:REASON_LENGTH])
        self._jobs.notes.note(unscored, ScoringOver(), *more)

    def _held(self, folder: JobFolder) -> Closed:
        """What its last job held of the facility's node-hours, for the journal."""
        stamp, finished = folder.started(folder.attempts() - 1), folder.finished(folder.attempts() - 1)
        held = max(0.0, (finished or self._jobs.clock.now()) - stamp) if stamp is not None else 0.0
        return Closed(node_seconds=held * self._jobs.nodes)
