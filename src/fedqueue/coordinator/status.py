"""How a real run gets on, in numbers that a person asks for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fedqueue.protocol.reports import Trouble
from fedqueue.protocol.service import FacilityStatus, OpenJob, RunStatus

if TYPE_CHECKING:
    from fedqueue.coordinator.access import Access
    from fedqueue.coordinator.coordinator import Coordinator
    from fedqueue.protocol.state import JobState, RunState


def status(coordinator: Coordinator, access: Access) -> RunStatus:
    """For `fedqueue status` and whoever else asks."""
    run, enrolled = coordinator.state, access.enrolled()
    return RunStatus(
        run=coordinator.config.run.name,
        strategy=coordinator.config.run.strategy,
        state=in_words(run),
        run_seconds=round(coordinator.now, 1),
        model=run.newest,
        score=coordinator.tally.score,
        unscored=len(coordinator.outcomes.unscored()),
        folder=str(coordinator.folder),
        facilities=[_facility(coordinator, name, enrolled) for name in coordinator.presence],
    )


def in_words(run: RunState) -> str:
    """
    >>> from fedqueue.protocol.state import RunState
    >>> in_words(RunState(["north"]))
    'waiting for facilities'
    """
    if run.stopped is not None:
        return f"over: {run.stopped}"
    if not run.started:
        return "waiting for facilities"
    if not run.held:
        return "running"
    too = "; an operator paused it too" if run.paused else ""
    return f"paused: {run.hindrance}{too}" if run.hindrance else "paused"


def _facility(coordinator: Coordinator, name: str, enrolled: set[str]) -> FacilityStatus:
    presence, state = coordinator.presence[name], coordinator.state.facilities[name]
    planned, strategy = coordinator.strategy.facilities[name], coordinator.strategy
    why, until = _why_idle(coordinator, name, enrolled)
    return FacilityStatus(
        name=name,
        state=_state(coordinator, name, enrolled),
        heard_seconds_ago=round(time.monotonic() - presence.heard, 1) if presence.ever else None,
        host=presence.host,
        jobs=len(state.jobs),
        open_jobs=[_open_job(job, coordinator.now) for job in state.jobs.values()],
        idle_because=why,
        until_seconds=None if until is None else round(max(0.0, until - coordinator.now), 1),
        troubles=[
            Trouble(reason=trouble.reason, seconds=round(time.monotonic() - presence.spoke + trouble.seconds, 1))
            for trouble in presence.troubles
        ],
        ordered=state.ordered,
        steps_per_second=_rounded(planned.steps_per_second),
        expected_delay=_rounded(strategy.forecast(planned).mean),
        overhead=_rounded(planned.overhead),
        node_seconds=round(coordinator.tally.node_seconds(name), 1),
        idle_node_seconds=round(coordinator.tally.idle_node_seconds(name), 1),
    )


def _state(coordinator: Coordinator, name: str, enrolled: set[str]) -> str:
    here = coordinator.state.facilities[name]
    if name not in enrolled:
        return "not enrolled"
    if not coordinator.presence[name].ever and not here.ordered:
        return "not seen yet"
    return "away" if here.away and here.status != "drained" else here.status


def _open_job(job: JobState, now: float) -> OpenJob:
    state, since = _doing(job)
    return OpenJob(
        job=job.order.job_id,
        attempt=job.attempt,
        state=state,
        seconds=round(max(0.0, now - since), 1),
        idle_seconds=round(job.idle_at(now), 1),
    )


def _doing(job: JobState) -> tuple[str, float]:
    """And since when."""
    if job.phase == "ended":
        return "handing in", job.since
    if job.phase != "running" or not job.stays:
        return job.phase, job.since
    if (since := job.out_of_work_since) is not None:
        return "waiting for the next model" if job.assignment is not None else "waiting for work", since
    if job.taken_at is None:
        return f"about to take part {job.part}", job.since if job.settled_at is None else job.settled_at
    return f"training part {job.part}", job.taken_at


def _why_idle(coordinator: Coordinator, name: str, enrolled: set[str]) -> tuple[str | None, float | None]:
    """Why a facility has no job; None: it has one. And until when, on the run clock."""
    run, strategy, presence = coordinator.state, coordinator.strategy, coordinator.presence[name]
    here = run.facilities[name]
    if run.stopped is not None:
        return f"the run is over: {run.stopped}", None
    if name not in enrolled:
        return "it is not enrolled: `fedqueue invite` makes an invitation", None
    if not run.started:
        missing = [other for other, p in coordinator.presence.items() if not p.ever]
        return ("its agent has not been heard of" if name in missing else f"waits for {', '.join(missing)}"), None
    if here.away:
        silent = "since this coordinator started" if not presence.ever else f"for {_long(presence.heard)}"
        return f"away: not heard of {silent}; jobs that it has may go on", None
    if here.jobs:
        return None, None
    if run.held:
        return "the run is paused", None
    if here.status == "drained":
        return "drained: it gets no new job until `fedqueue join`", None
    if here.status in ("suspended", "out"):
        forever = "; mend it, then `fedqueue join`" if here.until is None else ""
        return f"{here.reason}{forever}", here.until
    if strategy.facilities[name].lacks is not None and here.cap_left is not None:
        return f"its cap on node-hours leaves {max(0.0, here.cap_left.seconds):.0f} s for a job now, too little", None
    if here.refusal is not None:
        return f"its scheduler did not take a job: {here.refusal}", run.timer(f"retry/{name}")
    return _why_nothing_is_offered(coordinator), run.timer("cutoff/")


def _why_nothing_is_offered(coordinator: Coordinator) -> str:
    """Of a facility that could work: the strategy waits for something."""
    run = coordinator.state
    if run.making:
        return f"nothing is offered until model {max(run.making)} is made"
    busy = [other for other, there in run.facilities.items() if there.jobs and not there.away]
    if run.timer("cutoff/") is None and busy:
        return f"nothing is offered until the updates of {', '.join(busy)} are here"
    return "nothing is offered before the next model"


def _long(since: float) -> str:
    return f"{time.monotonic() - since:.0f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
