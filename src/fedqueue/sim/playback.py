"""Runs a recording again in virtual time, and says how each update fares now.

With the run's own strategy, what operators, clocks and networks did happens again when it did, and so does what was
heard of jobs that a pause, a failure or a lost connection touched. All other jobs are simulated from their measured
durations, which is what is checked; but what jobs that stay did is what was heard of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from heapq import heappush
from math import inf
from statistics import fmean
from typing import Any

from fedqueue.config import Config
from fedqueue.metrics import Tally
from fedqueue.protocol.contract import Assignment, JobId, UpdateKey, facility_of
from fedqueue.protocol.messages import (
    Aggregate,
    CancelJob,
    Event,
    JobEnded,
    JobFailed,
    JobStarted,
    ModelReady,
    Record,
    SetTimer,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
)
from fedqueue.sim.learning import Learning
from fedqueue.sim.recorded import CUTOFF, RecordedSite, Recording
from fedqueue.sim.simulation import JOBS, Simulation, make_strategy
from fedqueue.sim.site import SimJob, Site

Fates = dict[UpdateKey, tuple[str, int | None]]

FIRST = 1 << 60
"""More than there are events: what is played back comes before what is simulated for the same second."""
SAME = 1e-6  # seconds: an order at the same time as in the run, but for rounding
DRIFT = 0.01
"""Seconds: a timer is one of the run if it is due so close to it. The lengths of rounds are chosen from measured times,
which are the same but for rounding, and their sums drift apart by that."""


class Measured(Learning):
    """Nothing is trained again: how far updates agreed is on record."""

    def __init__(self, agreements: Mapping[int, float]) -> None:
        super().__init__(0.0)
        self._agreements = agreements

    def aggregate(self, command: Aggregate) -> float | None:
        return self._agreements.get(command.to_version) if command.agreement else None


class Playback(Simulation):
    """A simulation in which recorded events happen again, in the order of the ledger."""

    def play(self, recording: Recording) -> None:
        self._courses = recording.courses
        self._rang_late = recording.rang_late
        self._newest = 0
        self._works: dict[UpdateKey, Assignment | None] = {}  # that parts of played jobs were made of
        for heard in recording.outside:
            self._when(heard.event.at, heard.seq, self._tell, heard.event)
        self.run()

    def _submit_job(self, command: SubmitJob) -> None:
        course = self._courses.get(command.order.job_id)
        if course is None:
            super()._submit_job(command)
            return
        site = self._sites[command.order.facility]
        job = site.accept(command.order, self._now)
        job.eligible_at = self._now  # nobody else starts it
        late = self._now - course.ordered_at
        for heard in course.heard:
            at = heard.event.at + (late if abs(late) > SAME else 0.0)
            self._when(max(at, self._now), heard.seq, self._hear, site, job, heard.event)

    def _set_timer(self, command: SetTimer) -> None:
        rang_late = self._rang_late.get(command.key, [])
        due, at = min(rang_late, key=lambda timer: abs(timer[0] - command.at), default=(inf, inf))
        if abs(due - command.at) <= DRIFT:  # what was in hand then came first
            command = dataclasses.replace(command, at=at + SAME)
        super()._set_timer(command)

    def _hear(self, site: Site, job: SimJob, event: Event) -> None:
        """It happens to this job as it did in the run."""
        if job.state == "gone":  # it was cancelled here
            return
        over = SubmitRefused | JobFailed
        if isinstance(event, over if job.order.stay is not None else over | UpdateRejected | UpdateArrived):
            site.jobs.pop(job.id, None)
            self._close(site, job)
        elif isinstance(event, JobEnded):
            job.state = "ended"
            self._free_chained(site, job)
        elif isinstance(event, JobStarted):
            job.state = "running"
        self._tell(self._fitted(job, dataclasses.replace(event, at=self._now)))

    def _fitted(self, job: SimJob, event: Event) -> Event:
        """It trained from the version that it was given here; one that is not made here cannot be named."""
        if isinstance(event, JobStarted | WorkTaken):
            if event.attempt > job.attempt and job.order.stay is not None:
                job.work = None  # it begins anew
            job.attempt, job.part = event.attempt, event.part if isinstance(event, WorkTaken) else 0
            if event.bound is not None:
                version = min(event.bound.base_version, self._newest)
                job.work = dataclasses.replace(event.bound, base_version=version)
                event = dataclasses.replace(event, bound=job.work)
            self._works[job.key] = job.work
            return event
        if isinstance(event, UpdateArrived):
            work = self._works.get(event.receipt.key) or job.work
            version = work.base_version if work is not None else self._newest
            return dataclasses.replace(event, receipt=dataclasses.replace(event.receipt, base_version=version))
        return event

    def _cancel_job(self, command: CancelJob) -> None:
        """Of one that stays, the recording says how it ended."""
        course = self._courses.get(command.job_id)
        job = self._sites[facility_of(command.job_id)].jobs.get(command.job_id)
        if course is None or job is None or job.order.stay is None:
            super()._cancel_job(command)

    def _tell(self, event: Event) -> None:
        if isinstance(event, ModelReady):
            self._newest = event.version
        super()._tell(event)

    def _when(self, at: float, seq: int, act: Callable[..., None], *args: Any) -> None:
        heappush(self._heap, (at, JOBS, seq - FIRST, act, args))


@dataclasses.dataclass(frozen=True)
class Played:
    """What came of it."""

    fates: Fates
    ordered: dict[JobId, float]
    cutoffs: dict[str, float]
    tally: Tally


def simulate_recording(recording: Recording, config: Config) -> Played:
    """Run the config's strategy over the recording, in virtual time."""
    same = config.run.strategy == recording.strategy
    config = dataclasses.replace(config, fault=[])  # what struck is in the recording
    sites = [
        RecordedSite(i, f.name, recording.jobs[f.name], config, same_strategy=same)
        for i, f in enumerate(config.facility)
    ]
    strategy = make_strategy(config, recording.plan)
    played = Played({}, {}, {}, Tally.of(config, strategy.state, targets=[]))

    def collect(event: Event, commands: Sequence[object]) -> None:
        for command in commands:
            if isinstance(command, SubmitJob):
                played.ordered[command.order.job_id] = event.at
            elif isinstance(command, SetTimer) and command.key.startswith(CUTOFF):
                played.cutoffs[command.key] = command.at
            elif isinstance(command, Record) and command.kind == "fate":
                facts = command.facts
                version = facts.get("version")
                played.fates[str(facts["job"]), int(facts["attempt"] or 0), int(facts.get("part") or 0)] = (
                    str(facts["fate"]),
                    version if isinstance(version, int) else None,
                )

    if not same:  # what was decided and came of it says nothing of what another one decides
        recording = dataclasses.replace(recording, courses={}, outside=[], rang_late={}, agreements={})
    typical = fmean(recording.model_seconds.values()) if recording.model_seconds else 0.0
    simulation = Playback(
        config,
        sites,
        Measured(recording.agreements),
        strategy,
        [collect],
        aggregate_seconds=lambda version: recording.model_seconds.get(version, typical),
    )
    simulation.play(recording)
    return played
