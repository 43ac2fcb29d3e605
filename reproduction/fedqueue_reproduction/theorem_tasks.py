"""Two tasks on which every assumption of Theorem 1 is true: one is convex, the other can be worked out by hand.

[task]
name = "fedqueue_reproduction.theorem_tasks:linear_digits"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedqueue.training.workload import Workload, digits


def linear_digits() -> Workload:
    """Multinomial regression on the digits: one layer, from zero. Its loss is convex, and smooth with
    L <= half the greatest eigenvalue of the mean of x x^T, where x are the pixels and a one."""
    task = digits()
    return Workload(make_model=_regression, train=task.train, test=task.test)


def _regression() -> nn.Module:
    layer = nn.Linear(64, 10)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer)


class _OneNumber(nn.Module):
    """The same number, whatever it is given."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor([start]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.number.expand(len(inputs))


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean() / 2


def two_targets(start: float = 0.0) -> Workload:
    """One number and two facilities, of which one wants it to be 1 and the other -1: F_k(w) = (w - b_k)^2 / 2. So L is
    1, G is 1, sigma is 0, F(w) is (w^2 + 1)/2, and its gradient is w."""
    samples = (torch.zeros(2, 1), torch.tensor([1.0, -1.0]))
    return Workload(make_model=lambda: _OneNumber(start), train=samples, test=samples, loss=_half_square)
