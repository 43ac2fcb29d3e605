"""How a real run gets on, in numbers that a person asks for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedqueue.coordinator.access import Access
    from fedqueue.coordinator.coordinator import Coordinator


def status(coordinator: Coordinator, access: Access) -> dict[str, Any]:
    """For `fedqueue status` and whoever else asks."""
    run, strategy = coordinator.state, coordinator.strategy
    if run.stopped is not None:
        state = f"over: {run.stopped}"
    elif not run.started:
        state = "waiting for facilities"
    else:
        state = "paused" if run.held else "running"
        if run.hindrance:
            state += f": {run.hindrance}" + ("; an operator paused it too" if run.paused else "")
    enrolled = access.enrolled()
    return {
        "run": coordinator.config.run.name,
        "strategy": coordinator.config.run.strategy,
        "state": state,
        "run_seconds": round(coordinator.now, 1),
        "model": run.newest,
        "score": coordinator.tally.score,
        "unscored": len(coordinator.outcomes.unscored()),
        "folder": str(coordinator.folder),
        "facilities": [
            {
                "name": name,
                "state": _state(coordinator, name, enrolled),
                "heard_seconds_ago": round(time.monotonic() - presence.heard, 1) if presence.ever else None,
                "host": presence.host,
                "jobs": len(run.facilities[name].jobs),
                "open_jobs": _open_jobs(coordinator, name),
                **_idleness(coordinator, name, enrolled),
                "troubles": [
                    {"reason": trouble.reason, "seconds": round(time.monotonic() - presence.spoke + trouble.seconds, 1)}
                    for trouble in presence.troubles
                ],
                "ordered": run.facilities[name].ordered,
                "steps_per_second": _rounded(strategy.facilities[name].steps_per_second),
                "expected_delay": _rounded(strategy.forecast(strategy.facilities[name]).mean),
                "overhead": _rounded(strategy.facilities[name].overhead),
            }
            for name, presence in coordinator.presence.items()
        ],
    }


def _state(coordinator: Coordinator, name: str, enrolled: set[str]) -> str:
    here = coordinator.state.facilities[name]
    if name not in enrolled:
        return "not enrolled"
    if not coordinator.presence[name].ever and not here.ordered:
        return "not seen yet"
    return "away" if here.away and here.status != "drained" else here.status


def _open_jobs(coordinator: Coordinator, name: str) -> list[dict[str, Any]]:
    """Of each: is it queued or running, and for how many seconds of the run clock."""
    jobs = coordinator.state.facilities[name].jobs.values()
    return [
        {
            "job": job.order.job_id,
            "attempt": job.attempt,
            "state": "handing in" if job.phase == "ended" else job.phase,
            "seconds": round(max(0.0, coordinator.now - job.since), 1),
        }
        for job in jobs
    ]


def _idleness(coordinator: Coordinator, name: str, enrolled: set[str]) -> dict[str, Any]:
    """Why a facility has no job; None: it has one. `until_seconds`: in how many seconds of the run clock that ends."""
    why, until = _why_idle(coordinator, name, enrolled)
    seconds = None if until is None else round(max(0.0, until - coordinator.now), 1)
    return {"idle_because": why, "until_seconds": seconds}


def _why_idle(coordinator: Coordinator, name: str, enrolled: set[str]) -> tuple[str | None, float | None]:
    run, presence = coordinator.state, coordinator.presence[name]
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
