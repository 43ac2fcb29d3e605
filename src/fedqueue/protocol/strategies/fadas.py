"""FADAS: FedBuff whose server takes a step of Adam, a shorter one when an update of the buffer is very stale.

after every K arrivals:  d = (1 / K) * sum Delta     m, v as in FedAdam     v-hat <- max(v-hat, v)
w += eta * m / (sqrt(v-hat) + epsilon),   eta = rate / tau_max where tau_max > threshold, else rate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedqueue.protocol.aggregation import Buffer, Update
from fedqueue.protocol.codec import at_least
from fedqueue.protocol.plan import Plan
from fedqueue.protocol.strategies.fedadam import ServerStepOptions
from fedqueue.protocol.strategies.fixed_steps import FixedSteps
from fedqueue.protocol.strategies.roster import Facility


@dataclass(frozen=True, kw_only=True)
class FadasOptions(ServerStepOptions):
    buffer: int = 3  # K
    threshold: int = 1  # tau_c: staleness, in models, up to which a step is whole

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "buffer", "threshold")


class Fadas(FixedSteps):
    name = "fadas"
    variation_of = "fedbuff"
    Options = FadasOptions
    options: FadasOptions

    def __init__(self, plan: Plan, options: FadasOptions) -> None:
        super().__init__(plan, options)
        self._buffer = Buffer()

    def withdrawn(self, facility: Facility, updates: Sequence[Update]) -> None:
        self._buffer.drop(updates)

    def arrived(self, facility: Facility, update: Update) -> None:
        self._buffer.add(update)
        if len(self._buffer) >= self.options.buffer:
            updates, _ = self._buffer.take(self.made)
            stalest = max(update.staleness(self.made) for update in updates)
            rate = self.options.rate / (stalest if stalest > self.options.threshold else 1)
            step = self.options.step(rate, largest=True)
            self.aggregate([(u, 1 / len(updates)) for u in updates], step=step, full=1 / len(updates))
