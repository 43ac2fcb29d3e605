"""What a facility says of itself, bounded by what the coordinator saw: when it ordered, what it ordered, when it heard.

A number that cannot be true counts as the largest that can. Nothing honest is larger, but for jobs that were out while
the run clock stood still: of those no age is known, and only the limits of the contract hold.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, Final, TypeVar

from fedqueue.protocol.contract import Assignment, Standing
from fedqueue.protocol.messages import (
    Event,
    ForecastIssued,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    UpdateArrived,
    WorkTaken,
)
from fedqueue.protocol.state import FacilityState, JobState

T = TypeVar("T")

MOST_NODES: Final = 100_000
MOST_SAMPLES: Final = 1 << 20
"""In one step."""
AHEAD: Final = 4
"""A job that stays does so many times its work ahead, at the most that counts."""
BEYOND: Final = 10.0
"""A wait may be forecast so many times as long as any that was seen, or as a round."""


def plausible(event: Event, job: JobState | None, standing: Standing | None = None) -> Event:
    """The event with nothing in it that cannot be. `job`: that it is about; `standing`: what it says it took."""
    if job is None:
        return event
    age = inf if job.clock_stood else max(0.0, event.at - job.ordered_at)
    match event:
        case JobStarted():
            ago = min(event.ago, age)
            lingered = min(event.lingered, age - ago if age < inf else inf)
            delay = min(event.admission_delay, age - ago - lingered if age < inf else inf)
            bound = _bound(event.bound, job, standing)
            return replace(event, ago=ago, lingered=lingered, admission_delay=max(0.0, delay), bound=bound)
        case WorkTaken():
            most = _most_ahead(job.assignment)
            return replace(
                _within(event, age, "ago", "waited", "ahead_seconds"),
                bound=_bound(event.bound, job, standing),
                ahead=min(event.ahead, most),
            )
        case JobEnded():
            steps = _most_steps(job.assignment, event.steps_done)
            ended = _within(event, age, "train_seconds", "held_seconds", "idle_seconds")
            taken = job.part + 1 if event.attempt == job.attempt else event.parts
            return replace(ended, steps_done=min(event.steps_done, steps), parts=min(event.parts, taken))
        case JobFailed() | JobRequeued():
            return _within(event, age, "held_seconds")
        case UpdateArrived(receipt=receipt):
            work, _ = job.work_of((receipt.attempt, receipt.part))
            steps = min(receipt.steps_done, _most_steps(work, receipt.steps_done))
            told = replace(
                _within(receipt, age, "train_seconds", "admission_delay", "turn_seconds"),
                steps_done=steps,
                ahead=min(receipt.ahead, steps),
                samples=min(receipt.samples, MOST_SAMPLES * steps),
                nodes=min(receipt.nodes, MOST_NODES),
            )
            return replace(event, receipt=told)
    return event


def plausible_forecast(event: ForecastIssued, facility: FacilityState, round_length: float) -> ForecastIssued:
    """A wait that is beyond all that was seen is not believed."""
    waiting = [event.at - job.ordered_at for job in facility.jobs.values() if job.started_at is None]
    most = BEYOND * max([facility.longest_wait, round_length, *waiting])
    quantiles = tuple((level, min(seconds, most)) for level, seconds in event.quantiles)
    return replace(event, mean=min(event.mean, most), quantiles=quantiles)


def _within(told: T, most: float, *names: str) -> T:
    bounded: Any = {name: min(getattr(told, name), most) for name in names}
    made: T = replace(told, **bounded)  # type: ignore[type-var]
    return made


def _most_ahead(work: Assignment | None) -> int:
    return AHEAD * (100 if work is None else max(100, work.steps))


def _most_steps(work: Assignment | None, said: int) -> int:
    """Of an update; those that were done ahead are among them."""
    return said if work is None else work.steps + _most_ahead(work)


def _bound(work: Assignment | None, job: JobState, standing: Standing | None) -> Assignment | None:
    """No more steps than what was posted gives in the whole wall time that was ordered."""
    if work is None or standing is None:
        return work
    most = max(standing.min_steps, int(standing.steps_per_second * job.order.wall_seconds))
    return replace(work, steps=min(work.steps, most))
