"""The cadence that timer strategies share: a round, its cutoff, what the cutoff takes, the next round.

Round r runs from r*T to its cutoff (r+1)*T. Version r is the model at the start of round r. A cutoff takes
every update that has arrived, each weighed p * phi(tau) / S; with none, the model stays and the round advances.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedqueue.protocol.admit import Buffer, Update
from fedqueue.protocol.checks import at_least, more_than, one_of, share
from fedqueue.protocol.contract import Scaling
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.predict import check_name
from fedqueue.protocol.state import JobState
from fedqueue.protocol.strategies.base import Strategy
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.weigh import Decay, discount, normalised


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """Options of every timer strategy."""

    round_length: float | None = None  # T, seconds; None: the run's
    predictor: str = "ewma"
    smoothing: float = 0.5  # alpha
    decay: Decay = "harmonic"  # phi
    beta: float = 0.5
    max_staleness: int | None = None  # drop what is staler, on record; None: use everything
    lr_scaling: Scaling = "none"
    min_steps: int = 10

    def __post_init__(self) -> None:
        more_than(self, 0, "round_length")
        check_name(self.predictor)
        share(self, "smoothing")
        one_of(self, "decay", ("harmonic", "exponential", "none"))
        at_least(self, 0, "beta", "max_staleness")
        one_of(self, "lr_scaling", ("inverse", "none"))
        at_least(self, 1, "min_steps")


class RoundStrategy(Strategy):
    """Closes a round at every cutoff. Subclasses say how facilities get work."""

    options: RoundOptions
    has_cutoffs = True

    def __init__(self, plan: Plan, options: RoundOptions) -> None:
        super().__init__(plan, options)
        self.round_length = options.round_length or plan.round_length
        self.round = 0
        self.buffer = Buffer()
        self.last_cutoff = 0.0  # the newest one that fired
        self._origin = 0.0  # cutoffs fall at origin + n * T: no rounding error piles up
        self._since_origin = 0

    def start_round(self) -> None:
        """The model of a new round is ready."""
        raise NotImplementedError

    def begin(self) -> None:
        self._schedule_from(self.now)
        self.start_round()

    def model_ready(self) -> None:
        self.start_round()

    def arrived(self, facility: Facility, update: Update) -> None:
        self.buffer.add(update)

    def timer(self, key: str) -> None:
        if key == f"cutoff/{self.round}":
            cutoff = self.next_cutoff
            self.close_round()
            length = self.next_round_length()
            if length == self.round_length:
                self._since_origin += 1
                self._set_cutoff()
            else:
                self.round_length = length
                self._schedule_from(cutoff)

    def tell_waits(self) -> None:
        """Forecasts count the waits that are under way; of several at a facility, the longest."""
        for facility in self.facilities.values():
            waiting = [j for j in facility.jobs.values() if j.started_at is None and j.order.after is None]
            if waiting:
                # Not less than nothing, should an event come out of order.
                waited = max(0.0, self.now - min(j.ordered_at for j in waiting))
                facility.predictor.still_waiting(self.now, waited)

    def next_round_length(self) -> float:
        """Asked at each cutoff; cutoffs of the new length count from there."""
        return self.round_length

    def close_early(self) -> None:
        """Everybody is back: the cutoff is now, and the next one a round length from now."""
        self.close_round()
        self._schedule_from(self.now)

    def close_round(self) -> None:
        admitted, expired = self.buffer.take(self.round, self.options.max_staleness)
        for update in expired:
            self.settle(update, "expired", reason="staler than max_staleness", staleness=update.staleness(self.round))
        raw = [
            self.facilities[u.facility].profile.data_weight
            * discount(u.staleness(self.round), self.options.decay, self.options.beta)
            for u in admitted
        ]
        self.aggregate(zip(admitted, normalised(raw), strict=True))
        self.last_cutoff = self.now
        self.round += 1

    def missed(self, job: JobState) -> bool:
        # By the order of events, not by clock readings: the cutoff fired before the update came.
        return job.cutoff is not None and job.cutoff <= self.last_cutoff

    @property
    def next_cutoff(self) -> float:
        return self._origin + (self._since_origin + 1) * self.round_length

    def _schedule_from(self, origin: float) -> None:
        self._origin, self._since_origin = origin, 0
        self._set_cutoff()

    def _set_cutoff(self) -> None:
        self.set_timer(f"cutoff/{self.round}", self.next_cutoff)
