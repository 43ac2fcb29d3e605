"""Many copies of one network, trained side by side: every parameter has a further first dimension, its slot.

A network of a few small layers keeps no accelerator busy, and most of its time goes into starting kernels. Stacked, one
kernel works for all slots: a convolution becomes a product of matrices, batched over the slots, as a linear layer is.
Images lie channels last. `Stack` knows the plain layers below; for anything else `why_not` says so, in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedqueue.training.tasks import draws
from fedqueue_reproduction.recorded import quick
from fedqueue_reproduction.rows import Rows

Drop = Callable[[Tensor, float, int], Tensor]
"""(activations, probability, number of the layer) -> what is left of them."""


def why_not(module: nn.Module) -> str | None:
    """Why this network cannot be stacked; None if it can."""
    if not isinstance(module, nn.Sequential):
        return f"its model is a {type(module).__name__}, not a Sequential"
    if any(True for _ in module.buffers()):
        return "its model has buffers"
    for layer in module:
        reason = _why_not_layer(layer)
        if reason is not None:
            return reason
    return None


def _why_not_layer(layer: nn.Module) -> str | None:
    if isinstance(layer, nn.Conv2d):
        side = layer.kernel_size[0]
        plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
        same = layer.kernel_size == (side, side) and side % 2 == 1 and layer.padding == (side // 2, side // 2)
        ok = plain and same and layer.padding_mode == "zeros" and layer.bias is not None
    elif isinstance(layer, nn.Linear):
        ok = layer.bias is not None
    elif isinstance(layer, nn.MaxPool2d):
        plain = layer.padding == 0 and layer.dilation == 1 and not layer.ceil_mode
        ok = plain and isinstance(layer.kernel_size, int) and layer.stride == layer.kernel_size
    else:
        ok = isinstance(layer, nn.ReLU | nn.Dropout) or (isinstance(layer, nn.Flatten) and layer.start_dim == 1)
    return None if ok else f"its layer {layer} is not one that can be stacked"


class Stack(Rows):
    """The network as a function of stacked parameters; example: `Stack(module).outputs(leaves, images, drop)`."""

    def __init__(self, module: nn.Module, roles: Mapping[str, str] | None = None) -> None:
        reason = why_not(module)
        if reason is not None or not isinstance(module, nn.Sequential):
            raise ValueError(reason)
        super().__init__(module.named_parameters(), roles=roles)
        self._layers: list[tuple[str, nn.Module]] = list(module.named_children())

    def outputs(self, parameters: dict[str, Tensor], inputs: Tensor, drop: Drop | None) -> Tensor:
        """Inputs (slots, samples, ...) -> outputs (slots, samples, ...). `drop` None: nothing is dropped out."""
        x = inputs.movedim(2, -1).contiguous() if inputs.ndim == 5 else inputs  # images: channels last
        layers = list(self._layers)
        while layers:
            name, layer = layers.pop(0)
            if isinstance(layer, nn.Conv2d):
                x = _Convolution.apply(x, parameters[f"{name}.weight"])  # type: ignore[no-untyped-call]
                # A bias is the same for all of a window, and so is the order of its values after a ReLU: pooled first,
                # both have a quarter of the work.
                pool = None
                if len(layers) >= 2 and isinstance(layers[0][1], nn.ReLU) and isinstance(layers[1][1], nn.MaxPool2d):
                    pool = layers.pop(1)[1]
                if isinstance(pool, nn.MaxPool2d):
                    x = _pooled(x, pool)
                x = x + parameters[f"{name}.bias"][:, None, None, None, :]
            elif isinstance(layer, nn.Linear):
                weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
                x = torch.baddbmm(bias[:, None, :], x, weight.transpose(1, 2))
            elif isinstance(layer, nn.ReLU):
                x = functional.relu(x)
            elif isinstance(layer, nn.MaxPool2d):
                x = _pooled(x, layer)
            elif isinstance(layer, nn.Dropout):
                x = x if drop is None else drop(x, layer.p, len(layers))
            elif x.ndim == 5:  # Flatten, in the order in which the linear layer's weights count
                x = x.movedim(-1, 2).reshape(*x.shape[:2], -1)
            else:
                x = x.reshape(*x.shape[:2], -1)
        return x


def _pooled(x: Tensor, layer: nn.MaxPool2d) -> Tensor:
    return quick(_pool, x)(x, layer.kernel_size)


def _windows(x: Tensor, side: int) -> Tensor:
    return quick(_gather, x)(x, side)


def _pool(x: Tensor, side: int) -> Tensor:
    slots, samples = x.shape[:2]
    images = x.reshape(slots * samples, *x.shape[2:]).movedim(-1, 1)  # channels last in memory, first by name
    pooled = functional.max_pool2d(images, side).movedim(1, -1)
    return pooled.reshape(slots, samples, *pooled.shape[1:])


def _gather(x: Tensor, side: int) -> Tensor:
    """Images (slots, samples, height, width, channels) -> the window around each pixel: (slots, pixels, values)."""
    around = side // 2
    padded = functional.pad(x, (0, 0, around, around, around, around))
    # ... height, width, channels, row of the window, column of the window
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)
    return windows.permute(0, 1, 2, 3, 5, 6, 4).reshape(x.shape[0], -1, side * side * x.shape[-1])


class _Convolution(torch.autograd.Function):
    """Without bias, stride 1, zeros around: the image keeps its size."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        slots, channels, _, side, _ = weight.shape
        windows = _windows(x, side)
        matrix = weight.permute(0, 3, 4, 2, 1).reshape(slots, -1, channels)
        ctx.save_for_backward(windows, weight)
        return torch.bmm(windows, matrix).view(*x.shape[:-1], channels)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor]:  # type: ignore[no-untyped-def]
        windows, weight = ctx.saved_tensors
        slots, channels, before, side, _ = weight.shape
        gradient = gradient.contiguous()
        flat = gradient.view(slots, -1, channels)
        of_weight = torch.bmm(windows.transpose(1, 2), flat)
        of_weight = of_weight.view(slots, side, side, before, channels).permute(0, 4, 3, 1, 2)
        of_x = None
        if ctx.needs_input_grad[0]:
            # A convolution of the gradient with the windows turned round.
            turned = weight.flip(3, 4).permute(0, 3, 4, 1, 2).reshape(slots, -1, before)
            of_x = torch.bmm(_windows(gradient, side), turned).view(*gradient.shape[:-1], before)
        return of_x, of_weight


def cross_entropy(outputs: Tensor, targets: Tensor, used: Tensor) -> Tensor:
    """Mean over each slot's samples that are `used` (slots, samples); one value a slot."""
    each = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    weights = used.to(each.dtype)
    return (each * weights).sum(1) / weights.sum(1).clamp(min=1)


def keyed_drop(keys: Tensor, steps: Tensor) -> Drop:
    """Dropout whose draws depend on each slot's key and step alone, never on who trains beside it.

    `keys` and `steps` are whole numbers, one a slot. The draws are a hash of key, step, layer and place.
    """

    def drop(x: Tensor, probability: float, layer: int) -> Tensor:
        drawn = (draws(keys, steps, layer, x[0].numel()) >> 20) & 0xFFFFFF
        kept = drawn >= int(probability * (1 << 24))
        return x * kept.view_as(x) / (1 - probability)

    return drop
