"""FedAsync: every arrival is mixed in at once, the less the staler it is.

w += alpha * s(tau) * (w_k - w),   s(tau) = (1 + tau)^-a
"""

from __future__ import annotations

from dataclasses import dataclass

from fedqueue.protocol.aggregation import Update, polynomial_discount
from fedqueue.protocol.codec import at_least, share
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions, FixedSteps
from fedqueue.protocol.strategies.roster import Facility


@dataclass(frozen=True, kw_only=True)
class FedAsyncOptions(FixedStepOptions):
    alpha: float = 0.5
    exponent: float = 1.0  # a

    def __post_init__(self) -> None:
        super().__post_init__()
        share(self, "alpha")
        at_least(self, 0, "exponent")


class FedAsync(FixedSteps):
    name = "fedasync"
    Options = FedAsyncOptions
    options: FedAsyncOptions

    def arrived(self, facility: Facility, update: Update) -> None:
        worth = polynomial_discount(update.staleness(self.made), self.options.exponent)
        self.aggregate([(update, self.options.alpha * worth)], rule="mix_models", full=self.options.alpha)
