"""Runs a recording again in virtual time, and says how each update fares now.

With the run's own strategy, what operators, clocks and networks did happens again when it did, and so does what was
heard of jobs that a pause, a failure or a lost connection touched. All other jobs are simulated from their measured
durations, which is what is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from heapq import heappush
from statistics import fmean
from typing import Any

from fedqueue.config import Config
from fedqueue.metrics import Tally
from fedqueue.protocol.contract import JobId
from fedqueue.protocol.messages import (
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
)
from fedqueue.sim.learning import Learning
from fedqueue.sim.recorded import RecordedSite, Recording
from fedqueue.sim.simulation import JOBS, Simulation, make_strategy
from fedqueue.sim.site import SimJob, Site

Fates = dict[tuple[str, int], tuple[str, int | None]]

FIRST = 1 << 60
"""More than there are events: what is played back comes before what is simulated for the same second."""
SAME = 1e-6  # seconds: an order at the same time as in the run, but for rounding


class Playback(Simulation):
    """A simulation in which recorded events happen again, in the order of the ledger."""

    def play(self, recording: Recording) -> None:
        self._courses = recording.courses
        self._rang_late = recording.rang_late
        self._newest = 0
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
        late = self._rang_late.get((command.key, command.at))
        if late is not None:  # what was in hand then came first
            command = dataclasses.replace(command, at=late + SAME)
        super()._set_timer(command)

    def _hear(self, site: Site, job: SimJob, event: Event) -> None:
        """It happens to this job as it did in the run."""
        if job.state == "gone":  # it was cancelled here
            return
        if isinstance(event, SubmitRefused | JobFailed | UpdateRejected | UpdateArrived):
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
        if isinstance(event, JobStarted) and event.bound is not None:
            version = min(event.bound.base_version, self._newest)
            job.work = dataclasses.replace(event.bound, base_version=version)
            return dataclasses.replace(event, bound=job.work)
        if isinstance(event, UpdateArrived):
            version = job.work.base_version if job.work is not None else self._newest
            return dataclasses.replace(event, receipt=dataclasses.replace(event.receipt, base_version=version))
        return event

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
    played = Played({}, {}, Tally.of(config, strategy.state, targets=[]))

    def collect(event: Event, commands: Sequence[object]) -> None:
        for command in commands:
            if isinstance(command, SubmitJob):
                played.ordered[command.order.job_id] = event.at
            elif isinstance(command, Record) and command.kind == "fate":
                facts = command.facts
                version = facts.get("version")
                played.fates[str(facts["job"]), int(facts["attempt"] or 0)] = (
                    str(facts["fate"]),
                    version if isinstance(version, int) else None,
                )

    typical = fmean(recording.model_seconds.values()) if recording.model_seconds else 0.0
    simulation = Playback(
        config,
        sites,
        Learning(0.0),
        strategy,
        [collect],
        aggregate_seconds=lambda version: recording.model_seconds.get(version, typical),
    )
    simulation.play(recording if same else dataclasses.replace(recording, courses={}, outside=[], rang_late={}))
    return played
