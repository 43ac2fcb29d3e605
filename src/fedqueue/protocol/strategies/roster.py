"""The books of a strategy: facilities and the jobs they have out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedqueue.protocol.contract import Assignment, JobId, Order, Standing
from fedqueue.protocol.plan import FacilityProfile
from fedqueue.protocol.predict import Forecast, Predictor, make_predictor

Status = Literal["active", "left", "drained", "suspended", "out"]
"""active: may have work. left: out of reach, may come back. drained: asked to stop. suspended: comes back by
itself. out: failed for good; comes back when someone makes it join."""

MOST_STEPS = 1e9  # a second: more is not a measurement
NEWEST = 0.5  # weight of the newest job in the measured throughput
FADE = 0.9  # how slowly a learned overhead shrinks; it grows at once


@dataclass(slots=True)
class Job:
    """One order that is out."""

    order: Order
    assignment: Assignment | None
    submitted_at: float
    attempt: int = 0
    started_at: float | None = None
    ended: bool = False
    out_of_reach: bool = False  # its facility was, for a while: when we heard of it says little about when it was


class Facility:
    """A facility as the strategy knows it."""

    __slots__ = (
        "_overhead_seen",
        "away",
        "failures",
        "issued",
        "jobs",
        "name",
        "newest_steps",
        "next_sequence",
        "outlasted",
        "overhead",
        "posted",
        "predictor",
        "profile",
        "refusals",
        "replaces",
        "startup_allowance",
        "status",
        "steps_per_second",
        "stretch",
        "suspensions",
    )

    def __init__(self, profile: FacilityProfile, predictor: str, smoothing: float) -> None:
        self.profile = profile
        self.name = profile.name
        first = profile.first_delay
        if predictor == "static" and profile.true_mean_delay is not None:
            first = profile.true_mean_delay
        self.predictor: Predictor = make_predictor(predictor, first, smoothing)
        self.issued: Forecast | None = None
        self.status: Status = "active"
        self.away = False  # out of reach
        self.jobs: dict[JobId, Job] = {}
        self.next_sequence = 0
        self.steps_per_second = profile.steps_per_second
        self.overhead = profile.overhead
        self.startup_allowance = profile.startup_allowance  # to ask for beside the overhead, until that is learned
        self._overhead_seen = False
        self.newest_steps: int | None = None
        self.posted: Standing | None = None
        self.failures = 0  # in a row
        self.refusals = 0  # in a row
        self.suspensions = 0  # in a row
        self.stretch = 1.0  # how much more wall time to ask for, after jobs that ran into their limit
        self.outlasted = 0.0  # seconds that the last of them held, which was not enough
        self.replaces: JobId | None = None  # the failed job that its next one stands in for

    def measure(self, steps: int, seconds: float) -> None:
        """Throughput c from a job's own steps and seconds; noise below one in a thousand million is rounding."""
        if steps < 1 or seconds <= 0 or steps > MOST_STEPS * seconds:
            return
        seen = steps / seconds
        known = self.steps_per_second
        if known is None:
            self.steps_per_second = seen
        elif abs(seen - known) > 1e-9 * known:
            self.steps_per_second = (1 - NEWEST) * known + NEWEST * seen

    def learn_overhead(self, seconds: float) -> None:
        """Seconds of a job, start to arrival, that were not training. The first that are seen end all guessing."""
        if self.startup_allowance is not None and not self._overhead_seen:
            self.startup_allowance = self.overhead = 0.0
        self._overhead_seen = True
        self.overhead = max(seconds, FADE * self.overhead + (1 - FADE) * seconds, 0.0)
