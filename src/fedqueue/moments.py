"""What the optimizers of all facilities learned, shared: an Adam need not begin anew with every job.

Adam divides each step by the root of a second moment, the mean of squared gradients. A job that begins with none makes
large steps in every direction until it has seen some, and each facility learns another scale. So the second moments
travel with a model, as statistics: every update brings those with which its job ended, and their weighted mean comes
with the next model. Of a matrix only the means of rows and columns travel, a hundredth of it or less, and their product
stands for it.

The first moment does not travel. A job that stays has the model before, and goes on where the mean of everybody was
going.

Part of the worker: Python 3.9; torch is loaded where tensors are touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedqueue.protocol.aggregation import COLUMNS, MOMENT, MOVING, ROWS, Shape, first_moments, moment_shapes

TRUST = 30
"""Steps that the shared moments count for: after so many of its own, half of what a job divides by is its own."""
ONWARD = 0.5
"""Of the last change of the model, the share that a job would do again if its own gradients were zero."""


def no_moments(model: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """Those of a first model."""
    import torch

    types = {name: str(tensor.dtype).rpartition(".")[2] for name, tensor in model.items()}
    found = first_moments({name: tuple(tensor.shape) for name, tensor in model.items()}, types, roles)
    return {name: torch.zeros(shape) for name, shape in found.items()}


def taken_apart(name: str, second: Any) -> dict[str, Any]:
    """A second moment as it travels."""
    if second.ndim < 2:
        return {f"{name}.{MOMENT}": second.detach().clone()}
    flat = second.detach().flatten(1)
    return {f"{name}.{ROWS}": flat.mean(1), f"{name}.{COLUMNS}": flat.mean(0)}


def put_together(name: str, shape: Shape, moments: Mapping[str, Any]) -> Any:
    """The second moment of a parameter; None: it does not travel.

    >>> import torch
    >>> put_together("w", (2, 2), taken_apart("w", torch.tensor([[1.0, 2.0], [3.0, 6.0]])))
    tensor([[1., 2.],
            [3., 6.]])
    """
    wanted = moment_shapes(name, shape)
    parts: list[Any] = [moments.get(key) for key in wanted]
    if any(part is None or tuple(part.shape) != size for part, size in zip(parts, wanted.values())):  # noqa: B905
        return None
    # What a facility hands in may be anything finite.
    parts = [part.float().clamp(min=0) for part in parts]
    if len(shape) < 2:
        return parts[0]
    rows, columns = parts
    mean = rows.mean()
    return (rows[:, None] * (columns / mean if mean > 0 else columns)[None, :]).reshape(shape)


def first_moment(second: Any, change: Any, beta1: float, learning_rate: float) -> Any:
    """With which Adam goes on the way that the model went: by `ONWARD` of the change, if it meets no gradient."""
    return second.sqrt() * change * (-ONWARD * (1 - beta1) / learning_rate)


def change_of(
    now: Mapping[str, Any], before: Mapping[str, Any], versions: int, roles: Mapping[str, str]
) -> dict[str, Any] | None:
    """How a model moved in one version, by two that are so many versions apart. None: they are not."""
    if versions < 1:
        return None
    return {name: (now[name] - before[name]) / versions for name, role in roles.items() if role in MOVING}


class Moments:
    """An Adam that goes on from shared moments. What it is not meant for stays as it is: parameters whose moments do
    not travel, and optimizers of another kind."""

    def __init__(
        self,
        optimizer: Any,
        named: Iterable[tuple[str, Any]],
        moments: Mapping[str, Any],
        change: Mapping[str, Any] | None,
        learning_rate: float,
        *,
        recorded: bool = False,
    ) -> None:
        """`change`: how the model moved to where this begins, in one version; None: nobody knows. `recorded`: steps are
        replayed, and call no hooks; who replays them sets each one's rate by `warmth`."""
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in named}
        self._given = moments
        self._warming: list[Any] = []  # groups of parameters that all began without a first moment
        self._steps = 0
        self._rates: list[Any] = []
        self._hooks: list[Any] = []
        if not any(bool((tensor > 0).any()) for tensor in moments.values()):
            return  # this is the first model
        for group in optimizer.param_groups:
            begun = [self._begin(group, parameter, change, learning_rate) for parameter in group["params"]]
            if change is None and all(begun):
                self._warming.append(group)
        if self._warming and not recorded:
            # Torch has one count of steps for both moments, and has counted steps that the first has not seen.
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def _begin(self, group: Any, parameter: Any, change: Mapping[str, Any] | None, learning_rate: float) -> bool:
        import torch

        name = self._name(group, parameter)
        second = None if name is None else put_together(name, tuple(parameter.shape), self._given)
        if second is None:
            return False
        second = second.to(parameter.device)
        beta1, beta2 = group["betas"]
        first = torch.zeros_like(second)
        if change is not None:
            assert name is not None
            moved = change[name].to(second.device, second.dtype)
            first = first_moment(second, moved, beta1, learning_rate)
        on_device = group.get("capturable") or group.get("fused")
        state = self._optimizer.state[parameter]
        counted = torch.tensor(float(TRUST), device=parameter.device if on_device else "cpu")
        seen = second * (1 - beta2**TRUST)
        begun = {"step": counted, "exp_avg": first, "exp_avg_sq": seen}
        if group.get("amsgrad"):
            begun["max_exp_avg_sq"] = seen
        for key, tensor in begun.items():
            if key in state:  # in its place, which recorded steps know
                state[key].copy_(tensor)
            else:
                state[key] = tensor if key == "step" else tensor.to(parameter.dtype, copy=True)
        return True

    def _name(self, group: Any, parameter: Any) -> str | None:
        adapts = "betas" in group and parameter.requires_grad and parameter.is_floating_point()
        return self._names.get(id(parameter)) if adapts else None

    def _before_step(self, *_: Any) -> None:
        self._steps += 1
        self._rates = [group["lr"] for group in self._warming]
        for group in self._warming:
            group["lr"] = group["lr"] * self.warmth(self._steps)

    def warmth(self, step: int) -> float:
        """What the rate of this step is multiplied by, counted from 1: where first moments began from nothing, it makes
        up for the steps that torch has counted and they have not seen."""
        beta1 = self._warming[0]["betas"][0] if self._warming else 0.0
        return float((1 - beta1 ** (step + TRUST)) / (1 - beta1**step))

    def _after_step(self, *_: Any) -> None:
        for group, rate in zip(self._warming, self._rates):  # noqa: B905
            group["lr"] = rate

    def end(self) -> dict[str, Any]:
        """As they are now, to hand in; of parameters that did not train as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        found = dict(self._given)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name, state = self._name(group, parameter), self._optimizer.state.get(parameter, {})
                if name is not None and "exp_avg_sq" in state:
                    seen = 1 - group["betas"][1] ** float(state["step"])
                    parts = taken_apart(name, state["exp_avg_sq"].float() / seen)
                    found.update({key: part for key, part in parts.items() if key in found})
        return found
