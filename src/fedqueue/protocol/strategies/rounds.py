"""The cadence that timer strategies share: a round, its cutoff, what the cutoff takes, the next round.

Round r runs from r*T to its cutoff (r+1)*T. Version r is the model at the start of round r. A cutoff takes
every update that has arrived, each weighed p * phi(tau) / S; with none, the model stays and the round advances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedqueue.protocol.aggregation import Buffer, Decay, Update, at_most_one, discount, normalised
from fedqueue.protocol.budget import IDLE_ROUNDS
from fedqueue.protocol.codec import at_least, more_than, one_of, share
from fedqueue.protocol.contract import Scaling
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.predict import check_name
from fedqueue.protocol.strategies.base import Strategy
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.strategies.staying import StayOptions

LEAST_TRUST = 0.05  # in an update of an absent facility; with less it is forgotten


@dataclass(frozen=True, kw_only=True)
class RoundOptions(StayOptions):
    """Options of every timer strategy."""

    round_length: float | None = None  # T, seconds; None: the run's
    predictor: str = "ewma"
    smoothing: float = 0.5  # alpha
    decay: Decay = "harmonic"  # phi
    beta: float = 0.5
    max_staleness: int | None = None  # drop what is staler, on record; None: use everything
    lr_scaling: Scaling = "none"
    min_steps: int = 10
    absent: float = 0.0
    """Trust in the last update of a facility that is absent at a cutoff: what it counts after one round, its square
    after two, and so on; 0: it does not count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        more_than(self, 0, "round_length")
        check_name(self.predictor)
        share(self, "smoothing", "absent")
        one_of(self, "decay", ("harmonic", "exponential", "none"))
        at_least(self, 0, "beta", "max_staleness")
        one_of(self, "lr_scaling", ("inverse", "none"))
        at_least(self, 1, "min_steps")


class RoundStrategy(Strategy):
    """Closes a round at every cutoff. Subclasses say how facilities get work."""

    options: RoundOptions
    has_cutoffs = True
    sums_several = True

    def __init__(self, plan: Plan, options: RoundOptions) -> None:
        super().__init__(plan, options)
        self.round_length = options.round_length or plan.round_length
        self.round = 0
        self.buffer = Buffer()
        self.last_cutoff = 0.0  # the newest one that fired
        self._last: dict[str, tuple[Update, int]] = {}  # by facility: its newest update in a model, since which round
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

    def withdrawn(self, facility: Facility, updates: Sequence[Update]) -> None:
        self.buffer.drop(updates)
        self._last.pop(facility.name, None)

    def rolled_back(self) -> None:
        self._last.clear()  # nothing of models that are taken back stands in for anybody
        self.round += 1  # the version that is asked for is that of the next round, which has begun; its cutoff stays
        self._set_cutoff()

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
        admitted, expired = list[Update](), list[Update]()
        if not self.too_few(self.buffer.facilities()):  # else they wait for the next cutoff
            admitted, expired = self.buffer.take(self.round, self.options.max_staleness)
        for update in expired:
            self.settle(update, "expired", reason="staler than max_staleness", staleness=update.staleness(self.round))
        worth = [discount(u.staleness(self.round), self.options.decay, self.options.beta) for u in admitted]
        raw = [self.facilities[u.facility].profile.data_weight * w for u, w in zip(admitted, worth, strict=True)]
        if self.options.stay != "off":
            raw = [r * s for r, s in zip(raw, self._shares_at_facility(admitted, worth), strict=True)]
        elif self.bounds_say:
            bounded = at_most_one([(u.facility, w) for u, w in zip(admitted, worth, strict=True)])
            raw = [self.facilities[u.facility].profile.data_weight * w for u, w in zip(admitted, bounded, strict=True)]
        stand_ins = self._stand_ins(admitted)
        trusted = [self.facilities[u.facility].profile.data_weight * trust for u, trust in stand_ins]
        weights = normalised([*raw, *trusted])
        self.aggregate(
            zip(admitted, weights, strict=False),
            again=[(u, weight) for (u, _), weight in zip(stand_ins, weights[len(admitted) :], strict=True)],
            keep=(update for update, _ in self._last.values()),
            agreement=self.asks_for_agreement,
        )
        self.last_cutoff = self.now
        self.round += 1

    def _stand_ins(self, admitted: Sequence[Update]) -> list[tuple[Update, float]]:
        """The last updates of the facilities that have none now, with the trust in each. Nothing is made of them
        alone."""
        if not self.options.absent or not admitted:
            return []
        self._last |= {update.facility: (update, self.round) for update in admitted}
        trust = {name: self.options.absent ** (self.round - since) for name, (_, since) in self._last.items()}
        self._last = {name: last for name, last in self._last.items() if trust[name] >= LEAST_TRUST}
        return [(update, trust[name]) for name, (update, since) in self._last.items() if since < self.round]

    @property
    def asks_for_agreement(self) -> bool:
        """Whether a model comes with how far its updates agree."""
        return False

    @staticmethod
    def _shares_at_facility(admitted: Sequence[Update], worth: Sequence[float]) -> list[float]:
        """Two jobs of a facility that meet at a cutoff share its weight, by what their steps are worth."""
        total: dict[str, float] = {}
        work = [w * max(1, u.receipt.steps_done) for u, w in zip(admitted, worth, strict=True)]
        for update, done in zip(admitted, work, strict=True):
            total[update.facility] = total.get(update.facility, 0.0) + done
        return [
            done / total[u.facility] if total[u.facility] > 0 else 0.0 for u, done in zip(admitted, work, strict=True)
        ]

    def missed(self, facility: Facility, cutoff: float) -> bool:
        # By the order of events, not by clock readings: the cutoff fired before the update came.
        return cutoff <= self.last_cutoff

    @property
    def idle_seconds(self) -> float:
        return IDLE_ROUNDS * self.round_length

    @property
    def next_cutoff(self) -> float:
        return self._origin + (self._since_origin + 1) * self.round_length

    def _schedule_from(self, origin: float) -> None:
        self._origin, self._since_origin = origin, 0
        self._set_cutoff()

    def _set_cutoff(self) -> None:
        self.set_timer(f"cutoff/{self.round}", self.next_cutoff)
