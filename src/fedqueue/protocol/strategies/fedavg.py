"""FedAvg: everybody trains from the same model; when the last is back, the models are averaged. It blocks.

w += sum over all k of p * (w_k - w)
"""

from __future__ import annotations

from collections.abc import Sequence

from fedqueue.protocol.aggregation import Update, normalised
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.strategies.base import Why
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions, FixedSteps
from fedqueue.protocol.strategies.roster import Facility


class FedAvg(FixedSteps):
    name = "fedavg"
    Options = FixedStepOptions

    def __init__(self, plan: Plan, options: FixedStepOptions) -> None:
        super().__init__(plan, options)
        self._awaited: set[str] = set()
        self._back: list[Update] = []

    def begin(self) -> None:
        self._start_round()

    def model_ready(self) -> None:
        self._start_round()

    def arrived(self, facility: Facility, update: Update) -> None:
        if facility.name not in self._awaited or update.staleness(self.made):
            # The others went on while it was out of reach.
            self.settle(update, "expired", reason="its round closed without it", staleness=update.staleness(self.made))
            return
        self._awaited.remove(facility.name)
        self._back.append(update)
        self._close_if_complete()

    def idle(self, facility: Facility, why: Why) -> None:
        if facility.name in self._awaited:
            self.dispatch(facility)
        else:
            self._start_if_nobody_works()

    def lost(self, facility: Facility) -> None:
        if facility.name in self._awaited:
            self._awaited.remove(facility.name)
            self._close_if_complete()
            self._start_if_nobody_works()

    def withdrawn(self, facility: Facility, updates: Sequence[Update]) -> None:
        self._back = [update for update in self._back if update not in updates]
        if updates:
            self._start_if_nobody_works()

    def _start_if_nobody_works(self) -> None:
        """Nobody was there when the round should have begun, or who was is lost: with those who are there."""
        if not self._awaited and not self._back and self.made == self.ready:
            self._start_round()

    def _start_round(self) -> None:
        for facility in self.free():
            self._awaited.add(facility.name)
            self.dispatch(facility)

    def _close_if_complete(self) -> None:
        if self._awaited or not self._back:
            return
        weights = normalised([self.facilities[u.facility].profile.data_weight for u in self._back])
        self.combine(list(zip(self._back, weights, strict=True)))
        self._back = []

    def combine(self, weighed: Sequence[tuple[Update, float]]) -> None:
        """Ask for the next model from what is back; its variations differ here."""
        self.aggregate(weighed)
