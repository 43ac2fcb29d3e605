"""FedAdam: FedAvg whose server takes a step of Adam instead of the mean.

d = sum over all k of p * (w_k - w)     m <- beta1 * m + (1 - beta1) * d     v <- beta2 * v + (1 - beta2) * d^2
w += rate * m / (sqrt(v) + epsilon)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedqueue.protocol.aggregation import Update
from fedqueue.protocol.codec import more_than, share
from fedqueue.protocol.messages import ServerStep
from fedqueue.protocol.strategies.fedavg import FedAvg
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions


@dataclass(frozen=True, kw_only=True)
class ServerStepOptions(FixedStepOptions):
    """Options of every strategy whose server has an optimizer."""

    rate: float = 0.03  # eta of the server
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 0.001  # what a change must exceed to count in full

    def __post_init__(self) -> None:
        super().__post_init__()
        more_than(self, 0, "rate", "epsilon")
        share(self, "beta1", "beta2")

    def step(self, rate: float, *, largest: bool = False) -> ServerStep:
        return ServerStep(rate=rate, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, largest=largest)


class FedAdam(FedAvg):
    name = "fedadam"
    variation_of = "fedavg"
    Options = ServerStepOptions
    options: ServerStepOptions

    def combine(self, weighed: Sequence[tuple[Update, float]]) -> None:
        self.aggregate(weighed, step=self.options.step(self.options.rate))
