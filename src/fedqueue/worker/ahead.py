"""What a job that stays does while its next model is made and travels: it trains on from its own weights.

What it handed in is on its way into that model. So what it changed since then is all that is carried over, as one
update of weight 1 would be: parameters by their difference, low-rank factors by that of their products, statistics and
counters as they are. Part of the worker: Python 3.9; torch is loaded where tensors are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedqueue.protocol.aggregation import FACTOR, PARAMETER, is_moment
from fedqueue.worker.job_folder import Header, Tensors, is_torch, torch_type


class Ahead:
    """Since the part that was handed in last."""

    def __init__(self, handed_in: Mapping[str, Any] | None) -> None:
        """None: this is not the first process, which alone has the tensors."""
        self.steps = 0
        self.seconds = 0.0
        self.samples = 0
        self._handed_in = None if handed_in is None else _copied(handed_in)
        self._now: Tensors | None = None

    def went_on(self, tensors: Mapping[str, Any] | None, steps: int, seconds: float, samples: int) -> None:
        self.steps += steps
        self.seconds += seconds
        self.samples += samples
        if tensors is not None:
            self._now = _copied(tensors)

    def weights(self, header: Header) -> Tensors:
        """To train on from."""
        found = self._now or self._handed_in
        assert found is not None
        return {name: found[name].to(torch_type(kind), copy=True) for name, (kind, _) in header.items()}

    def carry(self, model: Tensors, roles: Mapping[str, str]) -> Tensors:
        """The next model, with what was done meanwhile."""
        import torch

        if self._now is None or self._handed_in is None:
            return model
        carried = {}
        sides = [(_matrices(model), 1.0), (_matrices(self._handed_in), -1.0), (_matrices(self._now), 1.0)]
        kept: dict[str, Any] = {}
        for name, value in model.items():
            if is_moment(name):  # everybody's
                carried[name] = value
                continue
            now, before = self._now[name], self._handed_in[name]
            if roles[name] == PARAMETER:
                precise = torch.promote_types(value.dtype, torch.float32)
                now = torch.sub(now.to(precise), before.to(precise)).add_(value)  # large models: few copies
            elif roles[name] == FACTOR:
                from fedqueue.low_rank import weighted_factors  # loads numpy

                now = torch.from_numpy(weighted_factors(name, sides, kept))
            carried[name] = now.to(value.dtype)
        return carried


def _matrices(tensors: Tensors) -> Callable[[str], Any]:
    return lambda name: tensors[name].double().numpy()


def _copied(tensors: Mapping[str, Any]) -> Tensors:
    import torch

    return {
        name: (value if is_torch(value) else torch.as_tensor(value)).detach().to("cpu", copy=True)
        for name, value in tensors.items()
    }
