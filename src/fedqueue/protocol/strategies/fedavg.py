"""FedAvg: everybody trains from the same model; when the last is back, the models are averaged. It blocks.

w += sum over all k of p * (w_k - w)
"""

from __future__ import annotations

from fedqueue.protocol.admit import Update
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.strategies.base import Why
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions, FixedSteps
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.weigh import normalised


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
        elif not self._awaited and not self._back and self.made == self.ready:
            self._start_round()  # nobody was there when the round should have begun

    def lost(self, facility: Facility) -> None:
        if facility.name in self._awaited:
            self._awaited.remove(facility.name)
            self._close_if_complete()

    def _start_round(self) -> None:
        for facility in self.free():
            self._awaited.add(facility.name)
            self.dispatch(facility)

    def _close_if_complete(self) -> None:
        if self._awaited or not self._back:
            return
        weights = normalised([self.facilities[u.facility].profile.data_weight for u in self._back])
        self.aggregate(zip(self._back, weights, strict=True))
        self._back = []
