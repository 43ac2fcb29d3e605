"""One simulation of one candidate, and what came of it at each facility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from fedqueue.config import Config
from fedqueue.protocol.aggregation import discount
from fedqueue.protocol.contract import JobId, UpdateKey, facility_of
from fedqueue.protocol.messages import (
    Command,
    Event,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    Record,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
)
from fedqueue.protocol.state import JobState, RunState

DAY: Final = 86_400.0
BETA: Final = 0.5
"""Of the harmonic discount by which stale updates count less here, whatever a strategy's own is."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What updates count for: those of one facility in one new model `reference * (steps / reference) ** returns`
    together, less if they are stale. So two jobs at once, from the same model and the same data, are not two rounds.

    >>> worth = Worth(returns=0.5, reference=100.0)
    >>> worth.of(400, staleness=0), worth.of(300, staleness=0, before=100)
    (200.0, 100.0)
    """

    returns: float = 0.5
    reference: float = 100.0  # steps: an update of so many counts as so many
    needed: float | None = None  # effective steps to the target, if there is one

    def of(self, steps: int, staleness: int, before: int = 0) -> float:
        """Of an update; `before` are the steps of its facility that are in the same model already."""
        fresh = self._fresh(before + steps) - self._fresh(before)
        return fresh * discount(staleness, "harmonic", BETA)

    def _fresh(self, steps: int) -> float:
        return float(self.reference * (steps / self.reference) ** self.returns)


@dataclass(slots=True)
class Share:
    """What one facility did in a simulation, or in several."""

    days: float = 0.0
    jobs: int = 0
    updates: int = 0  # that were aggregated
    steps: int = 0  # in them
    work: float = 0.0  # effective steps
    aimed: int = 0  # jobs that aimed at a cutoff
    missed: int = 0
    node_hours: float = 0.0
    waits: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)  # wall time asked for

    def add(self, other: Share) -> None:
        for name in ("days", "jobs", "updates", "steps", "work", "aimed", "missed", "node_hours"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waits.extend(other.waits)
        self.walls.extend(other.walls)

    @property
    def late_rate(self) -> float | None:
        return self.missed / self.aimed if self.aimed else None


@dataclass(slots=True)
class Outcome:
    """One candidate from one starting point."""

    days: float
    shares: dict[str, Share]
    target_days: float | None  # until the target is reached; beyond the simulated time at the mean rate

    def total(self, figure: str) -> float:
        """Of all facilities, a day."""
        return float(sum(getattr(share, figure) for share in self.shares.values())) / self.days

    @property
    def late_rate(self) -> float | None:
        aimed = sum(share.aimed for share in self.shares.values())
        return sum(share.missed for share in self.shares.values()) / aimed if aimed else None


class Meter:
    """A view of the state of one simulation."""

    def __init__(self, config: Config, worth: Worth, state: RunState) -> None:
        self._worth = worth
        self._state = state
        self._nodes = {facility.name: facility.nodes for facility in config.facility}
        self._shares = {facility.name: Share() for facility in config.facility}
        self._out: dict[JobId, JobState] = {}  # jobs of which no update has come
        self._arrived: dict[UpdateKey, int] = {}  # steps
        self._newest: dict[str, tuple[Any, int]] = {}  # a facility's newest model, and its steps in it
        self._work = 0.0
        self._reached_at: float | None = None
        state.views.append(self)

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        follow = _FOLLOWED.get(type(told))
        if follow is not None:
            follow(self, told, job)

    def outcome(self) -> Outcome:
        """Call it when the simulation is over."""
        now = self._state.at
        for job in self._out.values():
            share = self._shares[job.order.facility]
            if job.cutoff is not None and job.cutoff <= now:
                share.aimed += 1
                share.missed += 1
            if job.held_since is not None:
                self._hold(job, now - job.held_since)
        days = max(now, 1.0) / DAY
        for share in self._shares.values():
            share.days = days
        return Outcome(days, self._shares, self._target_days(days))

    def _target_days(self, days: float) -> float | None:
        if self._worth.needed is None or self._work <= 0:
            return None
        return self._reached_at / DAY if self._reached_at is not None else self._worth.needed * days / self._work

    def _submitted(self, command: SubmitJob, job: JobState) -> None:
        self._out[job.order.job_id] = job
        share = self._shares[job.order.facility]
        share.jobs += 1
        share.walls.append(job.order.wall_seconds)

    def _started(self, event: JobStarted, job: JobState) -> None:
        self._shares[job.order.facility].waits.append(event.admission_delay)

    def _stopped(self, event: JobEnded | JobRequeued, job: JobState) -> None:
        self._hold(job, event.held_seconds)
        self._close(job)

    def _failed(self, event: JobFailed, job: JobState) -> None:
        self._close(job)
        if job.phase != "ended":  # otherwise its nodes are counted
            self._hold(job, event.held_seconds)
        share = self._shares[job.order.facility]
        share.aimed += job.cutoff is not None
        share.missed += job.cutoff is not None

    def _refused(self, event: SubmitRefused, job: JobState) -> None:
        del self._out[event.job_id]
        self._shares[job.order.facility].jobs -= 1

    def _arrive(self, event: UpdateArrived, job: JobState) -> None:
        self._close(job)
        self._arrived[event.receipt.key] = event.receipt.steps_done

    def _close(self, job: JobState) -> None:
        if job.is_over:
            self._out.pop(job.order.job_id, None)

    def _record(self, command: Record, _: JobState | None) -> None:
        if command.kind == "fate":
            self._fate(command.facts)

    def _fate(self, facts: Any) -> None:
        job = str(facts["job"])
        share = self._shares[facility_of(job)]
        if facts.get("aimed"):
            share.aimed += 1
            share.missed += bool(facts.get("deferred"))
        steps = self._arrived.pop((job, int(facts["attempt"]), int(facts.get("part") or 0)), None)
        if steps is None or facts["fate"] != "aggregated":
            return
        model, before = self._newest.get(facility_of(job), (None, 0))
        if model != facts["version"]:
            before = 0
        self._newest[facility_of(job)] = facts["version"], before + steps
        worth = self._worth.of(steps, int(facts["staleness"]), before)
        share.updates += 1
        share.steps += steps
        share.work += worth
        self._work += worth
        needed = self._worth.needed
        if needed is not None and self._reached_at is None and self._work >= needed:
            self._reached_at = self._state.at

    def _hold(self, job: JobState, seconds: float) -> None:
        name = job.order.facility
        self._shares[name].node_hours += seconds / 3600 * self._nodes[name]


_FOLLOWED: Final[dict[type, Callable[[Meter, Any, Any], None]]] = {
    SubmitJob: Meter._submitted,
    Record: Meter._record,
    JobStarted: Meter._started,
    JobEnded: Meter._stopped,
    JobRequeued: Meter._stopped,
    JobFailed: Meter._failed,
    SubmitRefused: Meter._refused,
    UpdateArrived: Meter._arrive,
}
