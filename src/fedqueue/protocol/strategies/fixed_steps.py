"""What the strategies with a given number of local steps share. As it stands it keeps every facility busy:
who is free gets the newest model at once."""

from __future__ import annotations

from dataclasses import dataclass

from fedqueue.protocol.contract import Assignment
from fedqueue.protocol.strategies.base import Strategy, Why
from fedqueue.protocol.strategies.roster import Facility


@dataclass(frozen=True, kw_only=True)
class FixedStepOptions:
    steps: int | dict[str, int] = 100  # local steps a job: for all, or by facility

    def __post_init__(self) -> None:
        for count in self.steps.values() if isinstance(self.steps, dict) else [self.steps]:
            if count < 1:
                raise ValueError(f"steps must be 1 or more, found {count}")


class FixedSteps(Strategy):
    options: FixedStepOptions

    def model_ready(self) -> None:
        for facility in self.free():
            self.dispatch(facility)

    def idle(self, facility: Facility, why: Why) -> None:
        if self.made == self.ready:  # otherwise the model that is being made comes first
            self.dispatch(facility)

    def dispatch(self, facility: Facility) -> None:
        steps = self.options.steps
        work = Assignment(
            base_version=self.ready,
            steps=steps if isinstance(steps, int) else steps[facility.name],
            learning_rate=self.plan.learning_rate,
        )
        self.submit(facility, work, round=self.ready)
