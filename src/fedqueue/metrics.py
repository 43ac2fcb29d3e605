"""The figures of a run, counted as it goes: what `--json` prints and `summary.json` holds.

A view of the run's state: it is told what took effect, and keeps only the jobs that are out, so its memory does not
grow with the length of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fedqueue.config import Config
from fedqueue.protocol.contract import JobId
from fedqueue.protocol.messages import (
    AssignWork,
    Command,
    Event,
    JobEnded,
    JobFailed,
    JobRequeued,
    ModelScored,
    PostWork,
    Record,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
)
from fedqueue.protocol.state import JobState, RunState

Summary = dict[str, Any]
"""The figures of a run by their names, as they are in summary.json and in tables for people."""


def target_key(target: float) -> str:
    """How a target is called in a summary: with two decimals, or with all it has.

    >>> target_key(0.9), target_key(0.955)
    ('0.90', '0.955')
    """
    return f"{target:.2f}" if round(target, 2) == target else repr(target)


class Tally:
    """Counts what happens in the run of this state. `round_length` (seconds) is what lateness is measured against."""

    def __init__(
        self, state: RunState, *, round_length: float, nodes: Mapping[str, int], targets: Sequence[float]
    ) -> None:
        self._state = state
        self._round_length = round_length
        self._nodes = nodes
        self._out: dict[JobId, JobState] = {}  # jobs of which nothing has come yet; cancelled ones stay
        self._timed = 0  # jobs whose lateness is known
        self._late = 0
        self._late_sum = 0.0  # of arrival minus submission over the round length
        self._delay_max: float | None = None
        self._max_staleness = 0
        self._aimed = 0
        self._missed = 0
        self._node_seconds = dict.fromkeys(nodes, 0.0)
        self._idle_seconds = dict.fromkeys(nodes, 0.0)  # of these, without work, of jobs that are not out
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
        state.views.append(self)

    @classmethod
    def of(cls, config: Config, state: RunState, targets: Sequence[float] | None = None) -> Tally:
        """For a run of this config; `targets` instead of its own."""
        return cls(
            state,
            round_length=getattr(config.options(), "round_length", None) or config.run.round_length,
            nodes={facility.name: facility.nodes for facility in config.facility},
            targets=config.run.targets if targets is None else targets,
        )

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        count = _COUNTED.get(type(told))
        if count is not None:
            count(self, told, job)

    def summary(self, *, strategy: str, seed: int, wall_seconds: float) -> Summary:
        """The figures, in the order in which `--json` prints them. Call it when the run is over."""
        now, out = self._state.at, self._out.values()
        known_late = sum(now - job.ordered_at >= self._round_length for job in out)
        timed, late = self._timed + known_late, self._late + known_late
        known_missed = sum(job.cutoff is not None and job.cutoff <= now for job in out)
        aimed, missed = self._aimed + known_missed, self._missed + known_missed
        return {
            "strategy": strategy,
            "seed": seed,
            "rounds": self._state.newest,
            "stopped": self._state.stopped,
            "virtual_seconds": now,
            "late_probability": late / timed if timed else None,
            "normalised_delay_mean": self._late_sum / self._late if self._late else None,
            "normalised_delay_max": self._delay_max,
            "max_staleness": self._max_staleness,
            "missed_cutoff": missed / aimed if aimed else None,
            "node_seconds": sum(map(self.node_seconds, self._nodes)),
            "idle_node_seconds": sum(map(self.idle_node_seconds, self._nodes)),
            "jobs": dict(self._jobs),
            "updates": dict(self._updates),
            "local_steps": self._steps,
            "model_transfers": self._transfers,
            "score": {"max": self._best, "final": self._final, "not_finite": len(self._not_finite)},
            "time_to": {target_key(target): at for target, at in self._time_to.items()},
            "steps_to": {target_key(target): steps for target, steps in self._steps_to.items()},
            "wall_seconds": wall_seconds,
        }

    def node_seconds(self, facility: str) -> float:
        """That jobs of it have held until now."""
        return self._node_seconds[facility] + sum(map(self._held, self._out_at(facility)))

    def idle_node_seconds(self, facility: str) -> float:
        """Of those, without work: what its jobs say of themselves, and of those that are out until now."""
        idle = sum(job.idle_at(self._state.at) for job in self._out_at(facility))
        return self._idle_seconds[facility] + idle * self._nodes[facility]

    def _out_at(self, facility: str) -> list[JobState]:
        return [job for job in self._out.values() if job.order.facility == facility]

    @property
    def score(self) -> float | None:
        """Of the newest model that was scored; None also where that score is not finite."""
        return self._final

    def _submit_job(self, command: SubmitJob, job: JobState) -> None:
        self._jobs["submitted"] += 1
        self._jobs["resubmitted"] += job.order.replaces is not None
        self._out[job.order.job_id] = job

    def _assign_work(self, command: AssignWork, job: JobState) -> None:
        self._transfers += 1  # a model travels to a facility

    def _post_work(self, command: PostWork, _: None) -> None:
        if self._posted.get(command.facility) != command.standing.version:
            self._posted[command.facility] = command.standing.version
            self._transfers += 1

    def _job_requeued(self, event: JobRequeued, job: JobState) -> None:
        self._hold(job, event.held_seconds)

    def _job_ended(self, event: JobEnded, job: JobState) -> None:
        self._hold(job, event.held_seconds)
        if not job.stays:  # of one that stays, steps count as parts arrive
            self._steps += event.steps_done
        elif job.is_over:
            self._completed(job)

    def _job_failed(self, event: JobFailed, job: JobState) -> None:
        if job.phase != "ended":  # otherwise its nodes are counted
            self._hold(job, event.held_seconds)
        self._lost(job)

    def _submit_refused(self, event: SubmitRefused, job: JobState) -> None:
        del self._out[event.job_id]  # the scheduler never had it, and no model was sent for it
        self._jobs["submitted"] -= 1
        self._jobs["resubmitted"] -= job.order.replaces is not None
        self._transfers -= job.assignment is not None

    def _update_rejected(self, event: UpdateRejected, job: JobState) -> None:
        self._transfers += 1
        if not job.stays:
            self._lost(job)
        elif job.is_over:
            self._completed(job)

    def _completed(self, job: JobState) -> None:
        """It is over, and did not fail."""
        if self._close(job):
            self._jobs["completed"] += 1

    def _lost(self, job: JobState) -> None:
        """It failed: no update of it will meet any cutoff."""
        self._close(job)
        self._jobs["failed"] += 1
        self._aimed += job.cutoff is not None
        self._missed += job.cutoff is not None

    def _update_arrived(self, event: UpdateArrived, job: JobState) -> None:
        self._transfers += 1  # a model travels back
        if job.stays:
            self._steps += event.receipt.steps_done
            if job.is_over:
                self._completed(job)
            if event.receipt.part:  # it waited in no queue
                return
        else:
            self._completed(job)
            if job.phase != "ended":  # its end was not heard of, and says nothing new any more
                self._steps += event.receipt.steps_done
                self._node_seconds[job.order.facility] += self._held(job)
        ratio = (event.at - job.ordered_at) / self._round_length
        self._timed += 1
        self._delay_max = ratio if self._delay_max is None else max(self._delay_max, ratio)
        if ratio > 1:
            self._late += 1
            self._late_sum += ratio

    def _model_scored(self, event: ModelScored, _: None) -> None:
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

    def _record(self, command: Record, _: JobState | None) -> None:
        if command.kind == "fate":
            self._fate(command.facts)

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

    def _close(self, job: JobState) -> bool:
        """Whether it was out until now."""
        facility = job.order.facility
        was_out = self._out.pop(job.order.job_id, None) is not None
        if was_out:
            self._idle_seconds[facility] += job.idle_seconds * self._nodes[facility]
        return was_out

    def _hold(self, job: JobState, seconds: float) -> None:
        self._node_seconds[job.order.facility] += seconds * self._nodes[job.order.facility]

    def _held(self, job: JobState) -> float:
        """Node-seconds that a job which is out has held its nodes."""
        return 0.0 if job.held_since is None else (self._state.at - job.held_since) * self._nodes[job.order.facility]


_COUNTED: Final[dict[type, Callable[[Tally, Any, Any], None]]] = {
    SubmitJob: Tally._submit_job,
    AssignWork: Tally._assign_work,
    PostWork: Tally._post_work,
    Record: Tally._record,
    JobRequeued: Tally._job_requeued,
    JobEnded: Tally._job_ended,
    JobFailed: Tally._job_failed,
    SubmitRefused: Tally._submit_refused,
    UpdateArrived: Tally._update_arrived,
    UpdateRejected: Tally._update_rejected,
    ModelScored: Tally._model_scored,
}


def best_of(scores: Mapping[int, float | None]) -> int | None:
    """The version with the highest score, the oldest of equals.

    >>> best_of({0: 0.5, 1: None, 2: 0.9, 3: 0.9})
    2
    """
    known = {version: score for version, score in sorted(scores.items()) if score is not None}
    return max(known, key=lambda version: known[version], default=None)
