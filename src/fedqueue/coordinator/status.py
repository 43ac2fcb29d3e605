"""How a run gets on, in numbers that a person asks for: of a coordinator at work, or of a ledger alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedqueue.metrics import Tally
from fedqueue.protocol.reports import Trouble
from fedqueue.protocol.service import FacilityStatus, OpenJob, RunStatus
from fedqueue.protocol.state import JobState, Outcomes, RunState

if TYPE_CHECKING:
    from fedqueue.coordinator.access import Access
    from fedqueue.coordinator.coordinator import Coordinator, Presence
    from fedqueue.protocol.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a run. The last three only its coordinator knows, and only while it is at work."""

    name: str
    folder: Path
    state: RunState
    tally: Tally
    outcomes: Outcomes
    strategy_name: str
    now: float  # on the run clock
    strategy: Strategy | None = None
    presence: Mapping[str, Presence] | None = None
    enrolled: set[str] | None = None


def status(coordinator: Coordinator, access: Access) -> RunStatus:
    """For `fedqueue status` and whoever else asks."""
    run = coordinator.config.run
    return status_of(
        Known(
            name=run.name,
            folder=coordinator.folder,
            state=coordinator.state,
            tally=coordinator.tally,
            outcomes=coordinator.outcomes,
            strategy_name=run.strategy,
            now=coordinator.now,
            strategy=coordinator.strategy,
            presence=coordinator.presence,
            enrolled=access.enrolled(),
        )
    )


def status_of(known: Known) -> RunStatus:
    return RunStatus(
        run=known.name,
        strategy=known.strategy_name,
        state=in_words(known.state),
        run_seconds=round(known.now, 1),
        model=known.state.newest,
        score=known.tally.score,
        unscored=len(known.outcomes.unscored()),
        folder=str(known.folder),
        facilities=[_facility(known, name) for name in known.state.facilities],
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


def _facility(known: Known, name: str) -> FacilityStatus:
    presence = known.presence[name] if known.presence is not None else None
    state, strategy = known.state.facilities[name], known.strategy
    planned = strategy.facilities[name] if strategy is not None else None
    why, until = _why_idle(known, name)
    return FacilityStatus(
        name=name,
        state=_state(known, name),
        heard_seconds_ago=round(time.monotonic() - presence.heard, 1)
        if presence is not None and presence.ever
        else None,
        host=presence.host if presence is not None else "",
        jobs=len(state.jobs),
        open_jobs=[_open_job(job, known.now) for job in state.jobs.values()],
        idle_because=why,
        until_seconds=None if until is None else round(max(0.0, until - known.now), 1),
        troubles=[] if presence is None else _troubles(presence),
        ordered=state.ordered,
        steps_per_second=_rounded(planned.steps_per_second) if planned is not None else None,
        expected_delay=_rounded(strategy.forecast(planned).mean)
        if strategy is not None and planned is not None
        else None,
        overhead=_rounded(planned.overhead) if planned is not None else None,
        node_seconds=round(known.tally.node_seconds(name), 1),
        idle_node_seconds=round(known.tally.idle_node_seconds(name), 1),
    )


def _troubles(presence: Presence) -> list[Trouble]:
    since = time.monotonic() - presence.spoke
    return [Trouble(reason=found.reason, seconds=round(since + found.seconds, 1)) for found in presence.troubles]


def _state(known: Known, name: str) -> str:
    here = known.state.facilities[name]
    if known.enrolled is not None and name not in known.enrolled:
        return "not enrolled"
    if known.presence is not None and not known.presence[name].ever and not here.ordered:
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


def _why_idle(known: Known, name: str) -> tuple[str | None, float | None]:
    """Why a facility has no job; None: it has one. And until when, on the run clock."""
    run = known.state
    here = run.facilities[name]
    if run.stopped is not None:
        return f"the run is over: {run.stopped}", None
    if known.enrolled is not None and name not in known.enrolled:
        return "it is not enrolled: `fedqueue invite` makes an invitation", None
    if not run.started:
        missing = [other for other, p in (known.presence or {}).items() if not p.ever]
        if known.presence is None:
            return "the run has not begun", None
        return ("its agent has not been heard of" if name in missing else f"waits for {', '.join(missing)}"), None
    if here.away:
        return f"away: not heard of{_silent(known, name)}; jobs that it has may go on", None
    if here.jobs:
        return None, None
    if run.held:
        return "the run is paused", None
    if here.status == "drained":
        return "drained: it gets no new job until `fedqueue join`", None
    if here.status in ("suspended", "out"):
        forever = "; mend it, then `fedqueue join`" if here.until is None else ""
        return f"{here.reason}{forever}", here.until
    lacks = known.strategy.facilities[name].lacks if known.strategy is not None else None
    if lacks is not None and here.cap_left is not None:
        return f"its cap on node-hours leaves {max(0.0, here.cap_left.seconds):.0f} s for a job now, too little", None
    if here.refusal is not None:
        return f"its scheduler did not take a job: {here.refusal}", run.timer(f"retry/{name}")
    return _why_nothing_is_offered(run), run.timer("cutoff/")


def _why_nothing_is_offered(run: RunState) -> str:
    """Of a facility that could work: the strategy waits for something."""
    if run.making:
        return f"nothing is offered until model {max(run.making)} is made"
    busy = [other for other, there in run.facilities.items() if there.jobs and not there.away]
    if run.timer("cutoff/") is None and busy:
        return f"nothing is offered until the updates of {', '.join(busy)} are here"
    return "nothing is offered before the next model"


def _silent(known: Known, name: str) -> str:
    if known.presence is None:
        return ""
    presence = known.presence[name]
    return f" for {time.monotonic() - presence.heard:.0f} s" if presence.ever else " since this coordinator started"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
