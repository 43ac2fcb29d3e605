"""The figures of a run, counted as it goes: what `--json` prints and `summary.json` holds.

It listens to the same events and commands as the ledger, and keeps only open jobs, so its memory does not grow
with the length of a run. What is told again, or of an attempt that its scheduler took back, changes nothing here, as
in the strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fedqueue.protocol.messages import (
    AssignWork,
    Command,
    Event,
    JobEnded,
    JobFailed,
    JobId,
    JobRequeued,
    JobStarted,
    ModelReady,
    ModelScored,
    PostWork,
    Record,
    StopRun,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
)


def target_key(target: float) -> str:
    """How a target is called in a summary: with two decimals, or with all it has.

    >>> target_key(0.9), target_key(0.955)
    ('0.90', '0.955')
    """
    return f"{target:.2f}" if round(target, 2) == target else repr(target)


@dataclass(slots=True)
class _OpenJob:
    submitted_at: float
    nodes: int
    replaces: bool
    transfers: int = 0  # models sent to its facility for it
    cutoff: float | None = None  # that it aims at
    attempt: int = 0
    started: bool = False  # its attempt
    ended: bool = False  # its attempt
    held_since: float | None = None


class Tally:
    """Counts what happens. `round_length` (seconds) is what lateness is measured against."""

    def __init__(self, *, round_length: float, nodes: Mapping[str, int], targets: Sequence[float]) -> None:
        self._round_length = round_length
        self._nodes = nodes
        self._open: dict[JobId, _OpenJob] = {}
        self._now = 0.0
        self.rounds = 0
        self._stopped_because: str | None = None
        self._timed = 0  # jobs whose lateness is known
        self._late = 0
        self._late_sum = 0.0  # of arrival minus submission over the round length
        self._delay_max: float | None = None
        self._max_staleness = 0
        self._aimed = 0
        self._missed = 0
        self._node_seconds = 0.0
        self._jobs = {"submitted": 0, "completed": 0, "failed": 0, "resubmitted": 0}
        self._updates = {"admitted": 0, "deferred": 0, "rejected": 0, "expired": 0}
        self._steps = 0
        self._transfers = 0
        self._posted: dict[str, int] = {}  # newest version that lies at a facility
        self._best: float | None = None
        self._final: float | None = None  # of the newest version that has a score
        self._newest_scored = 0
        self._not_finite: set[int] = set()  # versions whose score was no finite number
        self._targets = tuple(targets)
        self._time_to: dict[float, float | None] = dict.fromkeys(self._targets)
        self._steps_to: dict[float, int | None] = dict.fromkeys(self._targets)

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        self._now = event.at
        handler = _EVENTS.get(type(event))
        if handler is not None:
            handler(self, event)
        for command in commands:
            if type(command) is SubmitJob:
                order = command.order
                self._jobs["submitted"] += 1
                replaces = order.replaces is not None
                self._jobs["resubmitted"] += replaces
                self._open[order.job_id] = _OpenJob(self._now, self._nodes[order.facility], replaces)
            elif type(command) is Record:
                if command.kind == "fate":
                    self._fate(command.facts)
            elif type(command) is StopRun:
                self._stopped_because = command.reason
            elif type(command) is AssignWork:
                self._transfers += 1  # a model travels to a facility
                self._open[command.job_id].transfers += 1
                self._open[command.job_id].cutoff = command.assignment.cutoff
            elif type(command) is PostWork and self._posted.get(command.facility) != command.standing.version:
                self._posted[command.facility] = command.standing.version
                self._transfers += 1

    def summary(self, *, strategy: str, seed: int, wall_seconds: float) -> dict[str, Any]:
        """The figures, in the order in which `--json` prints them. Call it when the run is over."""
        known_late = [job for job in self._open.values() if self._now - job.submitted_at >= self._round_length]
        timed, late = self._timed + len(known_late), self._late + len(known_late)
        known_missed = sum(job.cutoff is not None and job.cutoff <= self._now for job in self._open.values())
        aimed, missed = self._aimed + known_missed, self._missed + known_missed
        return {
            "strategy": strategy,
            "seed": seed,
            "rounds": self.rounds,
            "stopped": self._stopped_because,
            "virtual_seconds": self._now,
            "late_probability": late / timed if timed else None,
            "normalised_delay_mean": self._late_sum / self._late if self._late else None,
            "normalised_delay_max": self._delay_max,
            "max_staleness": self._max_staleness,
            "missed_cutoff": missed / aimed if aimed else None,
            "node_seconds": self._node_seconds + sum(self._held(job) for job in self._open.values()),
            "jobs": dict(self._jobs),
            "updates": dict(self._updates),
            "local_steps": self._steps,
            "model_transfers": self._transfers,
            "score": {"max": self._best, "final": self._final, "not_finite": len(self._not_finite)},
            "time_to": {target_key(target): at for target, at in self._time_to.items()},
            "steps_to": {target_key(target): steps for target, steps in self._steps_to.items()},
            "wall_seconds": wall_seconds,
        }

    @property
    def score(self) -> float | None:
        """Of the newest model that was scored; None also where that score is not finite."""
        return self._final

    def _current(self, job_id: JobId, attempt: int) -> _OpenJob | None:
        """The open job, if this is the attempt that counts."""
        job = self._open.get(job_id)
        return job if job is not None and job.attempt == attempt else None

    def _job_started(self, event: JobStarted) -> None:
        job = self._open.get(event.job_id)
        if job is None or event.attempt < job.attempt or (event.attempt == job.attempt and job.started):
            return
        job.attempt, job.started, job.ended = event.attempt, True, False
        job.held_since = event.at - event.ago - event.lingered
        if event.bound is not None:
            job.cutoff = event.bound.cutoff

    def _job_requeued(self, event: JobRequeued) -> None:
        job = self._open.get(event.job_id)
        if job is not None and event.attempt > job.attempt:
            self._stopped(job, event.held_seconds)
            job.attempt, job.started, job.ended = event.attempt, False, False

    def _job_ended(self, event: JobEnded) -> None:
        job = self._current(event.job_id, event.attempt)
        if job is not None and not job.ended:
            self._stopped(job, event.held_seconds)
            job.ended = True
            self._steps += event.steps_done

    def _job_failed(self, event: JobFailed) -> None:
        job = self._current(event.job_id, event.attempt)
        if job is not None:
            if not job.ended:  # otherwise its nodes are counted
                self._stopped(job, event.held_seconds)
            self._lost(event.job_id)

    def _stopped(self, job: _OpenJob, held_seconds: float) -> None:
        self._node_seconds += held_seconds * job.nodes
        job.held_since = None

    def _submit_refused(self, event: SubmitRefused) -> None:
        job = self._open.pop(event.job_id, None)
        if job is not None:  # the scheduler never had it, and no model was sent for it
            self._jobs["submitted"] -= 1
            self._jobs["resubmitted"] -= job.replaces
            self._transfers -= job.transfers

    def _update_rejected(self, event: UpdateRejected) -> None:
        if self._current(event.job_id, event.attempt) is not None:
            self._transfers += 1
            self._lost(event.job_id)

    def _lost(self, job_id: JobId) -> None:
        """It failed: no update of it will meet any cutoff."""
        job = self._open.pop(job_id)
        self._jobs["failed"] += 1
        self._aimed += job.cutoff is not None
        self._missed += job.cutoff is not None

    def _update_arrived(self, event: UpdateArrived) -> None:
        job = self._current(event.receipt.job_id, event.receipt.attempt)
        if job is None:
            return
        del self._open[event.receipt.job_id]
        self._transfers += 1  # a model travels back
        if not job.ended:  # its end was not heard of, and says nothing new any more
            self._steps += event.receipt.steps_done
            self._node_seconds += self._held(job)
        self._jobs["completed"] += 1
        ratio = (event.at - job.submitted_at) / self._round_length
        self._timed += 1
        self._delay_max = ratio if self._delay_max is None else max(self._delay_max, ratio)
        if ratio > 1:
            self._late += 1
            self._late_sum += ratio

    def _model_ready(self, event: ModelReady) -> None:
        self.rounds = max(self.rounds, event.version)

    def _model_scored(self, event: ModelScored) -> None:
        score = event.metrics["score"]
        if event.version >= self._newest_scored:
            self._newest_scored, self._final = event.version, score
        if score is None:
            self._not_finite.add(event.version)
            return
        self._best = score if self._best is None else max(self._best, score)
        for target in self._targets:
            if self._time_to[target] is None and score >= target:
                self._time_to[target] = event.at
                self._steps_to[target] = self._steps

    def _fate(self, facts: Mapping[str, Any]) -> None:
        fate, deferred = facts["fate"], bool(facts.get("deferred"))
        if fate == "aggregated":
            self._updates["deferred" if deferred else "admitted"] += 1
            self._max_staleness = max(self._max_staleness, facts["staleness"])
        elif fate in self._updates:
            self._updates[fate] += 1
        if facts.get("aimed"):
            self._aimed += 1
            self._missed += deferred

    def _held(self, job: _OpenJob) -> float:
        return 0.0 if job.held_since is None else (self._now - job.held_since) * job.nodes


_EVENTS: dict[type, Any] = {
    JobStarted: Tally._job_started,
    JobRequeued: Tally._job_requeued,
    JobEnded: Tally._job_ended,
    JobFailed: Tally._job_failed,
    SubmitRefused: Tally._submit_refused,
    UpdateArrived: Tally._update_arrived,
    UpdateRejected: Tally._update_rejected,
    ModelReady: Tally._model_ready,
    ModelScored: Tally._model_scored,
}


def finite(score: object) -> float | None:
    """A score, or None where it is not a number: such a model is never the best."""
    return float(score) if isinstance(score, int | float) and isfinite(score) else None


def best_of(scores: Mapping[int, float | None]) -> int | None:
    """The version with the highest score, the oldest of equals.

    >>> best_of({0: 0.5, 1: None, 2: 0.9, 3: 0.9})
    2
    """
    known = {version: score for version, score in sorted(scores.items()) if score is not None}
    return max(known, key=lambda version: known[version], default=None)
