"""A facility as a strategy knows it: what is open there, and what was learned of its waits, speed and failures."""

from __future__ import annotations

from fedqueue.protocol.contract import JobId, Standing
from fedqueue.protocol.plan import FacilityProfile
from fedqueue.protocol.predict import Forecast, Predictor, make_predictor
from fedqueue.protocol.state import FacilityState, Status

MOST_STEPS = 1e9  # a second: more is not a measurement
NEWEST = 0.5  # weight of the newest job in the measured throughput
FADE = 0.9  # how slowly a learned overhead shrinks; it grows at once


class Facility:
    """A thin layer on what the run's state says of it."""

    __slots__ = (
        "_overhead_seen",
        "failures",
        "issued",
        "jobs",
        "name",
        "newest_steps",
        "outlasted",
        "overhead",
        "posted",
        "predictor",
        "profile",
        "refusals",
        "replaces",
        "startup_allowance",
        "state",
        "steps_per_second",
        "stretch",
        "suspensions",
    )

    def __init__(self, profile: FacilityProfile, state: FacilityState, predictor: str, smoothing: float) -> None:
        self.profile = profile
        self.state = state
        self.jobs = state.jobs
        self.name = profile.name
        first = profile.first_delay
        if predictor == "static" and profile.true_mean_delay is not None:
            first = profile.true_mean_delay
        self.predictor: Predictor = make_predictor(predictor, first, smoothing)
        self.issued: Forecast | None = None
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

    @property
    def status(self) -> Status:
        return self.state.status

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
