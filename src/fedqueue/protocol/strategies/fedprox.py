"""FedProx: FedAvg whose jobs stay near the model they began with, however much their data differs.

each step of facility k goes down the gradient of  loss_k(w) + mu/2 * |w - w_base|^2

The term is the trainer's: `proximal` takes the place of the task's own, which every other strategy may use as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedqueue.protocol.codec import at_least
from fedqueue.protocol.strategies.fedavg import FedAvg
from fedqueue.protocol.strategies.fixed_steps import FixedStepOptions


@dataclass(frozen=True, kw_only=True)
class FedProxOptions(FixedStepOptions):
    proximal: float = 0.01  # mu

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "proximal")


class FedProx(FedAvg):
    name = "fedprox"
    variation_of = "fedavg"
    Options = FedProxOptions
