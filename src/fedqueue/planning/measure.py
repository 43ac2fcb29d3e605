"""One simulation of one candidate, and what came of it at each facility."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fedqueue.config import Config
from fedqueue.protocol.contract import JobId, facility_of
from fedqueue.protocol.messages import (
    AssignWork,
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
from fedqueue.protocol.weigh import discount

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


@dataclass(slots=True)
class _Open:
    cutoff: float | None = None
    held_since: float | None = None


class Meter:
    """A listener that follows one simulation."""

    def __init__(self, config: Config, worth: Worth) -> None:
        self._worth = worth
        self._nodes = {facility.name: facility.nodes for facility in config.facility}
        self._shares = {facility.name: Share() for facility in config.facility}
        self._open: dict[JobId, _Open] = {}
        self._arrived: dict[JobId, int] = {}  # steps
        self._newest: dict[str, tuple[Any, int]] = {}  # a facility's newest model, and its steps in it
        self._work = 0.0
        self._reached_at: float | None = None
        self._now = 0.0

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        self._now = event.at
        handler = _EVENTS.get(type(event))
        if handler is not None:
            handler(self, event)
        for command in commands:
            kind = type(command)
            if kind is SubmitJob:
                order = command.order  # type: ignore[union-attr]
                self._open[order.job_id] = _Open()
                share = self._shares[order.facility]
                share.jobs += 1
                share.walls.append(order.wall_seconds)
            elif kind is AssignWork:
                self._open[command.job_id].cutoff = command.assignment.cutoff  # type: ignore[union-attr]
            elif kind is Record and command.kind == "fate":  # type: ignore[union-attr]
                self._fate(command.facts)  # type: ignore[union-attr]

    def outcome(self) -> Outcome:
        """Call it when the simulation is over."""
        for job, state in self._open.items():
            share = self._shares[facility_of(job)]
            if state.cutoff is not None and state.cutoff <= self._now:
                share.aimed += 1
                share.missed += 1
            if state.held_since is not None:
                self._hold(job, self._now - state.held_since)
        days = max(self._now, 1.0) / DAY
        for share in self._shares.values():
            share.days = days
        return Outcome(days, self._shares, self._target_days(days))

    def _target_days(self, days: float) -> float | None:
        if self._worth.needed is None or self._work <= 0:
            return None
        return self._reached_at / DAY if self._reached_at is not None else self._worth.needed * days / self._work

    def _started(self, event: JobStarted) -> None:
        job = self._open.get(event.job_id)
        if job is not None:
            self._shares[facility_of(event.job_id)].waits.append(event.admission_delay)
            job.held_since = event.at - event.ago - event.lingered
            if event.bound is not None:
                job.cutoff = event.bound.cutoff

    def _stopped(self, event: JobEnded | JobRequeued) -> None:
        job = self._open.get(event.job_id)
        if job is not None:
            self._hold(event.job_id, event.held_seconds)
            job.held_since = None

    def _failed(self, event: JobFailed) -> None:
        job = self._open.pop(event.job_id, None)
        if job is not None:
            self._hold(event.job_id, event.held_seconds)
            share = self._shares[facility_of(event.job_id)]
            share.aimed += job.cutoff is not None
            share.missed += job.cutoff is not None

    def _refused(self, event: SubmitRefused) -> None:
        if self._open.pop(event.job_id, None) is not None:
            share = self._shares[facility_of(event.job_id)]
            share.jobs -= 1

    def _arrive(self, event: UpdateArrived) -> None:
        if self._open.pop(event.receipt.job_id, None) is not None:
            self._arrived[event.receipt.job_id] = event.receipt.steps_done

    def _fate(self, facts: Any) -> None:
        job = str(facts["job"])
        share = self._shares[facility_of(job)]
        if facts.get("aimed"):
            share.aimed += 1
            share.missed += bool(facts.get("deferred"))
        steps = self._arrived.pop(job, None)
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
            self._reached_at = self._now

    def _hold(self, job: JobId, seconds: float) -> None:
        name = facility_of(job)
        self._shares[name].node_hours += seconds / 3600 * self._nodes[name]


_EVENTS: dict[type, Any] = {
    JobStarted: Meter._started,
    JobEnded: Meter._stopped,
    JobRequeued: Meter._stopped,
    JobFailed: Meter._failed,
    SubmitRefused: Meter._refused,
    UpdateArrived: Meter._arrive,
}
