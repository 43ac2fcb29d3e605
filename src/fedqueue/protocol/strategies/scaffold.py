"""SCAFFOLD: FedAvg whose steps are corrected by how a facility's usual step differs from everybody's.

each local step of k:   y -= eta * (g_k(y) + c - c_k)
when it is done:        c_k <- c_k - c + (w - y) / (E * eta)            (the paper's option II)
when all are back:      w += sum p * (y - w)                c += sum p * (change of c_k)

The control variates c and c_k are tensors, kept by the simulator. Real jobs would need c with each model, so real runs
refuse this strategy.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedqueue.protocol.aggregation import Update
from fedqueue.protocol.strategies.fedavg import FedAvg


class Scaffold(FedAvg):
    name = "scaffold"
    variation_of = "fedavg"
    keeps_variates = True

    def combine(self, weighed: Sequence[tuple[Update, float]]) -> None:
        weights = {name: facility.profile.data_weight for name, facility in self.facilities.items()}
        present = sum(weights[update.facility] for update, _ in weighed)
        self.aggregate(weighed, variates=present / sum(weights.values()))
