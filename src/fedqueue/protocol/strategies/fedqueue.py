"""FedQueue, the published algorithm: predict the wait, budget the work, admit by cutoff, weigh by staleness.

    at the start of round r, for every facility k with no job outstanding:
        J = T - U, U = q-hat + delta     E = floor(c * J)          eta = eta_base * E_min / E
        submit a job for J seconds, bound to version r
    on every arrival: buffer the update;  q-hat <- (1 - alpha) * q-hat + alpha * q
    at the cutoff (r + 1) * T:  w += (1 / S) * sum p * phi(tau) * Delta over what has arrived

Open questions of the paper are settled as docs/protocol.md says. Other rules for U, the seconds set aside for the wait,
are options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedqueue.protocol.aggregation import Update
from fedqueue.protocol.budget import scaled_rate, steps_within, train_budget
from fedqueue.protocol.codec import at_least, one_of, share
from fedqueue.protocol.contract import Assignment, Scaling
from fedqueue.protocol.predict import Forecast
from fedqueue.protocol.predict.base import RESERVE_RULES, ReserveRule, reserve
from fedqueue.protocol.strategies.base import NO_WAIT, Why
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.strategies.rounds import RoundOptions, RoundStrategy


@dataclass(frozen=True, kw_only=True)
class FedQueueOptions(RoundOptions):
    rule: ReserveRule = "paper"  # how much of a round is set aside for the wait
    margin: float = 2.0  # delta, seconds; of the rule "paper"
    late_rate: float = 0.05  # of the rule "late-rate"
    lr_scaling: Scaling = "inverse"
    close: Literal["timer", "early"] = "timer"  # early: as soon as nobody is out
    overlap: bool = False  # a facility whose job is still out gets another one when a round starts
    min_train_budget: float = 0.5  # seconds

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "margin", "min_train_budget")
        one_of(self, "rule", RESERVE_RULES)
        share(self, "late_rate")
        one_of(self, "close", ("timer", "early"))


class FedQueue(RoundStrategy):
    name = "fedqueue"
    Options = FedQueueOptions
    options: FedQueueOptions

    def start_round(self) -> None:
        self.tell_waits()
        self._dispatch(self._overlapping() if self.options.overlap else self.free())

    def idle(self, facility: Facility, why: Why) -> None:
        # After an arrival it waits for the next round. After a failure it gets a fresh budget now, if one is left.
        if why in ("failure", "rejoin"):
            budget = self._budget(self.next_wait(facility), facility.overhead, self.next_cutoff)
            if budget > self.options.min_train_budget:
                self._dispatch([facility])

    def arrived(self, facility: Facility, update: Update) -> None:
        super().arrived(facility, update)
        if self.options.close == "early" and all(self.available(f) for f in self.facilities.values()):
            self.close_early()

    def _dispatch(self, facilities: Sequence[Facility]) -> None:
        forecasts = {f.name: self.next_wait(f) for f in facilities}
        cutoffs = {f.name: self._aim(forecasts[f.name], f.overhead) for f in facilities}
        budgets = {f.name: self._budget(forecasts[f.name], f.overhead, cutoffs[f.name]) for f in facilities}  # J
        steps = {f.name: self._steps(f, budgets[f.name]) for f in facilities}  # E
        in_flight = (f.newest_steps for f in self.facilities.values() if f.newest_steps and f.name not in steps)
        least_steps = min([*steps.values(), *in_flight], default=1)  # E_min
        for facility in facilities:
            work = Assignment(
                base_version=self.ready,
                steps=steps[facility.name],
                learning_rate=scaled_rate(
                    self.plan.learning_rate, steps[facility.name], least_steps, self.options.lr_scaling
                ),
                train_budget=self._seconds(facility, steps[facility.name], budgets[facility.name]),
                cutoff=cutoffs[facility.name],
            )
            self.submit(
                facility,
                work,
                round=self.round,
                at_most=work.train_budget,
                expected_delay=forecasts[facility.name].mean,  # q-hat
            )

    def _aim(self, forecast: Forecast, overhead: float) -> float:
        """The next cutoff; the one after it, if the model came so late that nothing would be done by the next."""
        late = self.now > self.last_cutoff  # the round began a while ago
        if late and self._budget(forecast, overhead, self.next_cutoff) <= self.options.min_train_budget:
            return self.next_cutoff + self.round_length
        return self.next_cutoff

    def _budget(self, forecast: Forecast, overhead: float, cutoff: float) -> float:
        """Start-up and hand-in (`overhead`) take their time too; the paper's setting has none."""
        until, chosen = cutoff - self.now, self.options
        reserved = 0.0  # U: nothing is set aside where a job is there already
        if forecast is not NO_WAIT:
            reserved = reserve(
                chosen.rule, forecast, until - overhead, margin=chosen.margin, late_rate=chosen.late_rate
            )
        return train_budget(until, reserved, overhead, chosen.min_train_budget)

    def _steps(self, facility: Facility, budget: float) -> int:
        if facility.steps_per_second is None:  # its first job is a short one, to measure it
            return self.options.min_steps
        return steps_within(budget, facility.steps_per_second, self.options.min_steps)

    def _seconds(self, facility: Facility, steps: int, budget: float) -> float | None:
        """Training may last its budget, or as long as the least steps take."""
        if facility.steps_per_second is None:
            return None
        return max(budget, steps / facility.steps_per_second)

    def _overlapping(self) -> list[Facility]:
        out = [f for f in self.facilities.values() if f.status == "active" and len(f.jobs) < f.profile.max_jobs]
        return [] if self.holding else out
