"""Weights times tensors: makes the next model from the current one and the updates, and checks an update.

Every rule is a weighted sum of whole models. Their factors are worked out first; then each tensor is summed
in pieces that stay in the processor's cache, so that every input is read once and the result written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

StateDict = dict[str, Tensor]
"""A model as PyTorch names its parts: parameters and buffers."""

CHUNK_VALUES = 1 << 18
"""Values summed at a time: 1 MiB of float32."""

REAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One update as it enters an aggregation."""

    weight: float
    """What the strategy gave it, discount and normalisation included (no unit)."""
    trained: StateDict
    """The model after the facility's steps."""
    base: StateDict
    """The model those steps started from (the same object for all updates of one version)."""


def aggregate(current: StateDict, contributions: Sequence[Contribution], rule: str) -> StateDict:
    """The next model; `contributions` are ordered oldest to newest and have passed `misfit`.

    Rule "add_deltas": current + sum of weight * (trained - base).
    Rule "mix_models": current + sum of weight * (trained - current).
    Real and complex tensors are summed in at least single precision and keep the current model's type.
    Integer and bool tensors, such as step counters, are taken from the newest contribution. No input is
    modified.

    >>> one, three = {"w": torch.ones(1)}, {"w": torch.full((1,), 3.0)}
    >>> aggregate(one, [Contribution(weight=0.5, trained=three, base=one)], "add_deltas")
    {'w': tensor([2.])}
    """
    terms = _terms(current, contributions, rule)
    if not contributions:
        return dict(current)
    newest = contributions[-1].trained
    with torch.no_grad():
        return {
            name: _weighted_sum(like, [(model[name], factor) for model, factor in terms])
            if like.is_floating_point() or like.is_complex()
            else newest[name].to(like.dtype, copy=True)
            for name, like in current.items()
        }


def misfit(update: StateDict, like: StateDict) -> str | None:
    """Why `update` cannot stand beside the model `like`, in one line; None when it can.

    Names, shapes and kinds of number must agree and every value must be finite. Real numbers may come in
    another precision (bfloat16 for a float32 model), since the sum is made in at least single precision.
    """
    if missing := [name for name in like if name not in update]:
        return f"tensor {_first(missing)} is missing"
    if unexpected := [name for name in update if name not in like]:
        return f"tensor {_first(unexpected)} is unexpected"
    for name, tensor in update.items():
        expected = like[name]
        if tensor.shape != expected.shape:
            return f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(expected.shape)}"
        both_real = tensor.dtype in REAL_DTYPES and expected.dtype in REAL_DTYPES
        if tensor.dtype != expected.dtype and not both_real:
            return f"tensor {name!r} has type {_dtype(tensor)}, expected {_dtype(expected)}"
        if count := _count_not_finite(tensor):
            return f"tensor {name!r} has {count:,} of {tensor.numel():,} values that are not finite"
    return None


def _terms(current: StateDict, contributions: Sequence[Contribution], rule: str) -> list[tuple[StateDict, float]]:
    """The models that enter the sum, each once, with their factors; the factors sum to one."""
    if rule not in ("add_deltas", "mix_models"):
        raise ValueError(f"rule must be 'add_deltas' or 'mix_models', found {rule!r}")
    # By identity, so that updates of one version share one pass over their base.
    models = {id(current): current}
    factors = {id(current): 1.0}
    for contribution in contributions:
        base = contribution.base if rule == "add_deltas" else current
        for model, share in ((base, -contribution.weight), (contribution.trained, contribution.weight)):
            models[id(model)] = model
            factors[id(model)] = factors.get(id(model), 0.0) + share
    return [(model, factors[key]) for key, model in models.items() if factors[key] != 0.0]


def _weighted_sum(like: Tensor, terms: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Sum of tensor * factor, in `like`'s shape and type."""
    result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    target = result.view(-1)
    flat = [(tensor.reshape(-1), factor) for tensor, factor in terms]
    precision = torch.promote_types(like.dtype, torch.float32)
    # A half-precision result is summed aside and rounded once; otherwise the sum is made in place.
    aside = None
    if precision != like.dtype:
        aside = torch.empty(min(CHUNK_VALUES, like.numel()), dtype=precision, device=like.device)
    for start in range(0, target.numel(), CHUNK_VALUES):
        piece = target[start : start + CHUNK_VALUES]
        total = piece if aside is None else aside[: piece.numel()]
        (first, factor), *others = flat
        chunk = first[start : start + CHUNK_VALUES].to(precision)
        torch.mul(chunk, factor, out=total)
        for source, factor in others:
            total.add_(source[start : start + CHUNK_VALUES].to(precision), alpha=factor)
        if aside is not None:
            piece.copy_(total)
    return result


def _count_not_finite(tensor: Tensor) -> int:
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # The extremes show any NaN or infinity in one pass without memory; counting is for the rare bad tensor.
    if all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values)):
        return 0
    return int((~torch.isfinite(tensor)).sum())


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
