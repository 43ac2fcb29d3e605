"""What the strategies with a given number of local steps share. As it stands it keeps every facility busy:
who is free gets the newest model at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from fedqueue.protocol.codec import more_than
from fedqueue.protocol.contract import Assignment
from fedqueue.protocol.strategies.base import Strategy, Why
from fedqueue.protocol.strategies.roster import Facility
from fedqueue.protocol.strategies.staying import StayOptions


@dataclass(frozen=True, kw_only=True)
class FixedStepOptions(StayOptions):
    steps: int | dict[str, int] = 100  # local steps a job: for all, or by facility
    train_seconds: float | None = None
    """As many steps as a facility does in so many seconds, so that fast and slow ones take equally long; `steps` count
    until its speed is known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        more_than(self, 0, "train_seconds")
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
        work = Assignment(
            base_version=self.ready, steps=self._steps_of(facility), learning_rate=self.plan.learning_rate
        )
        self.submit(facility, work, round=self.ready)

    def _steps_of(self, facility: Facility) -> int:
        seconds, steps = self.options.train_seconds, self.options.steps
        if seconds is not None and facility.steps_per_second is not None:
            return max(1, floor(seconds * facility.steps_per_second))
        return steps if isinstance(steps, int) else steps[facility.name]
