"""A facility as a strategy knows it: what is open there, and what was learned of its waits, speed and failures."""

from __future__ import annotations

from math import inf

from fedqueue.protocol.contract import JobId, Standing
from fedqueue.protocol.plan import FacilityProfile
from fedqueue.protocol.predict import Forecast, Predictor, WaitByWall, make_predictor
from fedqueue.protocol.state import FacilityState, Status

MOST_STEPS = 1e9  # a second: more is not a measurement
NEWEST = 0.5  # weight of the newest job in the measured throughput
FADE = 0.9  # how slowly a learned overhead shrinks; it grows at once


class Facility:
    """A thin layer on what the run's state says of it."""

    __slots__ = (
        "_overhead_seen",
        "delivery",
        "failures",
        "first_hand_in",
        "issued",
        "jobs",
        "lacks",
        "name",
        "newest_steps",
        "outlasted",
        "overhead",
        "patience",
        "posted",
        "predictor",
        "profile",
        "refusals",
        "replaces",
        "site_limit",
        "startup_allowance",
        "state",
        "stay_overhead",
        "steps_per_second",
        "stretch",
        "suspensions",
        "waits",
    )

    def __init__(
        self, profile: FacilityProfile, state: FacilityState, predictor: str, smoothing: float, usual_wall: float
    ) -> None:
        self.profile = profile
        self.state = state
        self.jobs = state.jobs
        self.name = profile.name
        first = profile.first_delay
        if predictor == "static" and profile.true_mean_delay is not None:
            first = profile.true_mean_delay
        self.predictor: Predictor = make_predictor(predictor, first, smoothing)
        self.waits = WaitByWall(usual_wall, profile.first_delay, profile.known_waits)
        self.site_limit = profile.most_wall_seconds or inf  # seconds that a job may ask for, as far as anybody said
        self.lacks: float | None = None  # seconds that the cap on node-hours did not leave for the job wanted last
        self.issued: Forecast | None = None
        self.steps_per_second = profile.steps_per_second
        self.overhead = profile.overhead
        self.startup_allowance = profile.startup_allowance  # to ask for beside the overhead, until that is learned
        self._overhead_seen = False
        self.stay_overhead: float | None = None  # the same, of the parts of a job that stays after its first
        self.first_hand_in: float | None = None  # the same, of the first without its start-up: a guess at those
        self.delivery: float | None = None  # seconds from a model's being ready to a waiting job's taking it
        self.newest_steps: int | None = None
        self.posted: Standing | None = None
        self.failures = 0  # in a row
        self.refusals = 0  # in a row
        self.suspensions = 0  # in a row
        self.patience = 1.0  # how much longer a job that stays waits for work, after jobs that gave up too soon
        self.stretch = 1.0  # how much more wall time to ask for, after jobs that ran into their limit
        self.outlasted = 0.0  # seconds that the last of them held, which was not enough
        self.replaces: JobId | None = None  # the failed job that its next one stands in for

    @property
    def status(self) -> Status:
        return self.state.status

    @property
    def cap_left(self) -> float:
        """Seconds that one more job may ask for by the cap on node-hours."""
        left = self.state.cap_left
        if left is None:
            return inf
        return left.seconds - sum(job.wall_seconds for job in self.jobs.values() if job.phase == "ordered")

    @property
    def most_wall(self) -> float:
        """Seconds that a job may ask for now; more than 0, also where so little is left that none is ordered."""
        return self.site_limit if self.state.cap_left is None else min(self.site_limit, max(1.0, self.cap_left))

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

    def learn_stay_overhead(self, seconds: float) -> None:
        """Seconds from taking the work of a further part to its arrival that were not training."""
        known = self.stay_overhead
        self.stay_overhead = max(seconds, 0.0 if known is None else FADE * known + (1 - FADE) * seconds, 0.0)

    def handed_in_first(self, seconds: float) -> None:
        """From the end of training in the first part of a job that stays to its arrival."""
        self.first_hand_in = max(0.0, seconds)

    def learn_delivery(self, seconds: float) -> None:
        self.delivery = seconds if self.delivery is None else (1 - NEWEST) * self.delivery + NEWEST * seconds

    @property
    def knows_turns(self) -> bool:
        """Whether it is known what a further part takes beside training. A real job's first one also starts up."""
        return self.stay_overhead is not None or self.startup_allowance is None

    @property
    def up(self) -> float:
        """Seconds from the end of training to the arrival of an update, as far as anybody knows."""
        if self.stay_overhead is not None:
            return self.stay_overhead
        return self.overhead if self.startup_allowance is None else self.first_hand_in or 0.0

    @property
    def down(self) -> float:
        """Seconds from a model's being ready to a job's taking it, likewise."""
        return self.up if self.delivery is None else self.delivery

    def learn_overhead(self, seconds: float) -> None:
        """Seconds of a job, start to arrival, that were not training. The first that are seen end all guessing."""
        if self.startup_allowance is not None and not self._overhead_seen:
            self.startup_allowance = self.overhead = 0.0
        self._overhead_seen = True
        self.overhead = max(seconds, FADE * self.overhead + (1 - FADE) * seconds, 0.0)
