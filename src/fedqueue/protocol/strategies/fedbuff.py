"""FedBuff: asynchronous work, buffered aggregation: every K arrivals change the model together.

after every K arrivals:  w += (alpha / K) * sum s(tau) * Delta,   s(tau) = (1 + tau)^-a
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedqueue.protocol.aggregation import Buffer, Update, polynomial_discount
from fedqueue.protocol.codec import at_least, more_than
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions, FixedSteps
from fedqueue.protocol.strategies.roster import Facility


@dataclass(frozen=True, kw_only=True)
class FedBuffOptions(FixedStepOptions):
    buffer: int = 3  # K
    alpha: float = 0.5
    exponent: float = 1.0  # a

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "buffer")
        more_than(self, 0, "alpha")
        at_least(self, 0, "exponent")


class FedBuff(FixedSteps):
    name = "fedbuff"
    Options = FedBuffOptions
    sums_several = True
    options: FedBuffOptions

    def __init__(self, plan: Plan, options: FedBuffOptions) -> None:
        super().__init__(plan, options)
        self._buffer = Buffer()

    def withdrawn(self, facility: Facility, updates: Sequence[Update]) -> None:
        self._buffer.drop(updates)

    def arrived(self, facility: Facility, update: Update) -> None:
        self._buffer.add(update)
        if len(self._buffer) >= self.options.buffer and not self.too_few(self._buffer.facilities()):
            updates, _ = self._buffer.take(self.made)
            scale = self.options.alpha / self.options.buffer
            worth = [polynomial_discount(u.staleness(self.made), self.options.exponent) for u in updates]
            self.aggregate([(u, scale * s) for u, s in zip(updates, worth, strict=True)], full=scale)
