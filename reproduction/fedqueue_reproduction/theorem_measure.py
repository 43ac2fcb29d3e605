"""The constants of Theorem 1, measured: losses and gradients of every facility's whole data, their noise, and how fast
they change.

Everything is measured at models that a run visits. The theorem asks for constants that hold at every model there is, so
what is seen is at most what it needs: smoothness, noise and dissimilarity are estimated from below, and a bound that is
made of them is lower than it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from fedqueue.aggregate import StateDict
from fedqueue.training.job import TaskSettings
from fedqueue.training.tasks import (
    augmentation,
    batches,
    derive_seed,
    first_module,
    seeded,
    share_out,
    workload_of,
)

CHUNK: Final = 128
"""Samples in one pass; more leave the processor's cache."""
ITERATIONS: Final = 30  # of the search for the direction of most curvature, at most
SETTLED: Final = 1e-3  # relative change at which it ends
STEP: Final = 1e-2
"""How far it looks, in lengths of the model: about as far as a job goes. It matters where layers have kinks, at which
nearer models show more."""
_PROCESSOR: Final = torch.device("cpu")

_KINKED: Final = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.Hardtanh)
_DRAWING: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Objectives:
    """F_k of every facility k and their weighted sum F, as the paper's problem has them: the mean loss over a
    facility's training samples, without dropout. Gradients are one long vector in double precision."""

    def __init__(self, settings: TaskSettings, data_weights: Sequence[float], seed: int) -> None:
        torch.set_num_threads(settings.threads)
        self.data_weights = tuple(data_weights)
        self._settings, self._seed = settings, seed
        self._workload = workload_of(settings)
        self._parts = share_out(self._workload, settings, len(data_weights), seed)
        self._module = first_module(self._workload, settings, seed)
        self._parameters = [value for value in self._module.parameters() if value.requires_grad]
        self._names = [name for name, value in self._module.named_parameters() if value.requires_grad]

    @property
    def kinked(self) -> bool:
        """Whether a layer's slope jumps, so that no L holds everywhere."""
        return any(isinstance(layer, _KINKED) for layer in self._module.modules())

    @property
    def draws(self) -> bool:
        """Whether a step follows another function than F: dropout, or changed inputs."""
        dropping = any(isinstance(layer, _DRAWING) and layer.p > 0 for layer in self._module.modules())
        return dropping or self._workload.augment is not None

    @property
    def batch_share(self) -> float:
        """The largest share of a facility's samples that one step sees."""
        return max(min(self._settings.batch_size, len(part)) / len(part) for part in self._parts)

    def vector(self, model: StateDict) -> Tensor:
        """The parameters that train."""
        return torch.cat([model[name].reshape(-1).to("cpu", torch.float64) for name in self._names])

    def all_at(self, model: StateDict) -> list[tuple[float, Tensor]]:
        """Loss and gradient of every facility."""
        return [self.at(facility, model) for facility in range(len(self._parts))]

    def at(self, facility: int, model: StateDict) -> tuple[float, Tensor]:
        """Loss and gradient of one facility."""
        self._module.load_state_dict(model)
        self._module.eval()
        return self._pass(facility)

    def mean(self, each: Sequence[tuple[float, Tensor]]) -> tuple[float, Tensor]:
        """Loss and gradient of F, from those of all facilities."""
        weighted = list(zip(self.data_weights, each, strict=True))
        gradient = torch.stack([weight * gradient for weight, (_, gradient) in weighted]).sum(dim=0)
        return sum(weight * loss for weight, (loss, _) in weighted), gradient

    def noise(self, facility: int, model: StateDict, gradient: Tensor, draws: int, key: int) -> float:
        """sigma_k^2 at this model: the mean squared distance of so many steps' gradients from that of F_k. A step is
        what it is in training: a batch of the same size, dropout and all."""
        inputs, targets = self._workload.train
        luck = derive_seed("noise", self._seed, facility, key)
        augment = augmentation(self._workload, luck)
        self._module.load_state_dict(model)
        self._module.train()
        total = 0.0
        with seeded(luck, _PROCESSOR):
            generator = torch.Generator().manual_seed(luck)
            for step in range(draws):
                # A fresh shuffle each: batches of one epoch would lean on each other.
                (chosen,) = batches(self._parts[facility], self._settings.batch_size, 1, generator)
                given = inputs[chosen] if augment is None else augment(step, inputs[chosen])
                loss = self._workload.loss(self._module(given), targets[chosen])
                total += float((self._slope(loss) - gradient).square().sum())
        return total / draws

    def curvature(self, facility: int, model: StateDict, gradient: Tensor) -> float:
        """L of F_k near this model, from below: the greatest |grad F_k(w + d) - grad F_k(w)| / |d| that a search by
        repeated multiplication finds, for small d. No second derivative is asked for, so kinks count."""
        return self._search([facility], [1.0], model, gradient)

    def mean_curvature(self, model: StateDict, gradient: Tensor) -> float:
        """The same of F."""
        return self._search(range(len(self._parts)), self.data_weights, model, gradient)

    def _search(self, facilities: Sequence[int], weights: Sequence[float], model: StateDict, gradient: Tensor) -> float:
        """Each direction is the change of the gradient along the last one: it turns to the greatest curvature."""
        here = self.vector(model)
        length = STEP * max(1.0, float(here.norm()))
        generator = torch.Generator().manual_seed(derive_seed("direction", self._seed))
        direction = torch.randn(len(here), generator=generator, dtype=torch.float64)
        greatest = 0.0
        self._module.load_state_dict(model)
        self._module.eval()
        for _ in range(ITERATIONS):
            there = self._move_to(here + direction * (length / direction.norm()))
            change = -gradient
            for facility, weight in zip(facilities, weights, strict=True):
                change = change + weight * self._pass(facility)[1]
            found = float(change.norm() / (there - here).norm())
            if found == 0.0 or abs(found - greatest) <= SETTLED * found:
                return max(greatest, found)
            greatest, direction = max(greatest, found), change
        return greatest

    def _move_to(self, place: Tensor) -> Tensor:
        """Set the parameters; returns where they are after rounding."""
        with torch.no_grad():
            pieces = torch.split(place, [value.numel() for value in self._parameters])
            for value, piece in zip(self._parameters, pieces, strict=True):
                value.copy_(piece.view_as(value))
            return torch.cat([value.reshape(-1).to(torch.float64) for value in self._parameters])

    def _pass(self, facility: int) -> tuple[float, Tensor]:
        """Over all samples of a facility, with the parameters that the module has."""
        inputs, targets = self._workload.train
        part = self._parts[facility]
        loss, gradient = 0.0, torch.zeros(sum(value.numel() for value in self._parameters), dtype=torch.float64)
        for chosen in torch.split(part, CHUNK):
            share = len(chosen) / len(part)  # a loss is a mean over the samples
            one = self._workload.loss(self._module(inputs[chosen]), targets[chosen])
            loss += share * float(one.detach())
            gradient += share * self._slope(one)
        return loss, gradient

    def _slope(self, loss: Tensor) -> Tensor:
        pieces = torch.autograd.grad(loss, self._parameters)
        return torch.cat([piece.reshape(-1).to(torch.float64) for piece in pieces])
