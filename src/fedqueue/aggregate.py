"""Weights times tensors: makes the next model from the current one and the updates, and checks an update.

Every rule is a weighted sum of whole models. Their factors are worked out first; then each tensor is summed
in pieces that stay in the processor's cache, so that every input is read once and the result written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedqueue.tensorfile import Kind, misfit_of_kinds, not_finite
from fedqueue.weigh import model_factors

StateDict = dict[str, Tensor]
"""A model as PyTorch names its parts: parameters and buffers."""

CHUNK_VALUES = 1 << 18
"""Values summed at a time: 1 MiB of float32."""


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
    if reason := misfit_of_kinds(_kinds(update), _kinds(like)):
        return reason
    for name, tensor in update.items():
        if count := _count_not_finite(tensor):
            return not_finite(name, count, tensor.numel())
    return None


def _kinds(model: StateDict) -> dict[str, Kind]:
    return {name: Kind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in model.items()}


def _terms(current: StateDict, contributions: Sequence[Contribution], rule: str) -> list[tuple[StateDict, float]]:
    """The models that enter the sum, each once, with their factors."""
    # By identity, so that updates of one version share one pass over their base.
    models = {id(current): current}
    for contribution in contributions:
        models |= {id(contribution.base): contribution.base, id(contribution.trained): contribution.trained}
    shares = [(c.weight, id(c.trained), id(c.base)) for c in contributions]
    return [(models[key], factor) for key, factor in model_factors(id(current), shares, rule).items()]


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
    scratch = torch.empty(min(CHUNK_VALUES, like.numel()), dtype=precision, device=like.device)
    for start in range(0, target.numel(), CHUNK_VALUES):
        piece = target[start : start + CHUNK_VALUES]
        total = piece if aside is None else aside[: piece.numel()]
        (first, factor), *others = flat
        chunk = first[start : start + CHUNK_VALUES].to(precision)
        torch.mul(chunk, factor, out=total)
        for source, factor in others:
            # Product and sum are rounded one by one (no fused step), so that `fedqueue.tensorfile` gets the same bits.
            share = torch.mul(source[start : start + CHUNK_VALUES].to(precision), factor, out=scratch[: piece.numel()])
            total.add_(share)
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
