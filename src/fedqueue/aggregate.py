"""Weights times tensors: makes the next model from the current one and the updates, and checks an update.

Every rule is a weighted sum of whole models. Their factors are worked out first; then each tensor is summed
in pieces that stay in the processor's cache, so that every input is read once and the result written once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedqueue.protocol.roles import COUNTER, STATISTIC, find_roles
from fedqueue.protocol.weigh import model_factors, statistic_factors
from fedqueue.tensorfile import Kind, misfit_of_kinds, not_finite

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


def aggregate(
    current: StateDict,
    contributions: Sequence[Contribution],
    rule: str,
    roles: Mapping[str, str] | None = None,
    *,
    from_first: bool = False,
) -> StateDict:
    """The next model; `contributions` are ordered oldest to newest and have passed `misfit`.

    Parameters, by rule "add_deltas": current + sum of weight * (trained - base); by rule "mix_models":
    current + sum of weight * (trained - current). Statistics: the weighted mean of what was handed in, never outside
    its range (`statistic_factors`; `from_first`: the current model is the first of its run). Counters: those of the
    newest contribution. `roles` of the tensors are found by their names unless they are given.
    Real and complex tensors are summed in at least single precision and keep the current model's type. No input is
    modified.

    >>> one, three = {"w": torch.ones(1)}, {"w": torch.full((1,), 3.0)}
    >>> aggregate(one, [Contribution(weight=0.5, trained=three, base=one)], "add_deltas")
    {'w': tensor([2.])}
    """
    deltas, means = _terms(current, contributions, rule, from_first=from_first)
    if not contributions:
        return dict(current)
    if roles is None:
        roles = roles_of(current)
    newest = contributions[-1].trained

    def next_of(name: str, like: Tensor) -> Tensor:
        if roles[name] == COUNTER:
            return newest[name].to(like.dtype, copy=True)
        is_mean = roles[name] == STATISTIC
        return _weighted_sum(like, [(model[name], f) for model, f in (means if is_mean else deltas)], within=is_mean)

    with torch.no_grad():
        return {name: next_of(name, like) for name, like in current.items()}


def roles_of(
    model: StateDict, declared: Mapping[str, str] | None = None, chosen: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What each tensor is: see `find_roles`."""
    return find_roles({name: kind.type for name, kind in _kinds(model).items()}, declared, chosen)


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


def _terms(
    current: StateDict, contributions: Sequence[Contribution], rule: str, *, from_first: bool
) -> tuple[list[tuple[StateDict, float]], list[tuple[StateDict, float]]]:
    """The models that enter the sum of parameters, and those that enter the mean of statistics, with their factors."""
    # By identity, so that updates of one version share one pass over their base.
    models = {id(current): current}
    for contribution in contributions:
        models |= {id(contribution.base): contribution.base, id(contribution.trained): contribution.trained}
    deltas = model_factors(id(current), [(c.weight, id(c.trained), id(c.base)) for c in contributions], rule)
    trained = [(c.weight, id(c.trained)) for c in contributions]
    means = statistic_factors(id(current), trained, rule, from_first=from_first)
    return [(models[key], factor) for key, factor in deltas.items()], [(models[key], f) for key, f in means.items()]


def _weighted_sum(like: Tensor, terms: Sequence[tuple[Tensor, float]], *, within: bool = False) -> Tensor:
    """Sum of tensor * factor, in `like`'s shape and type; `within` the range of the tensors, which a rounded mean may
    leave by a hair."""
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
        least = most = chunk = first[start : start + CHUNK_VALUES].to(precision)
        torch.mul(chunk, factor, out=total)
        for source, factor in others:
            chunk = source[start : start + CHUNK_VALUES].to(precision)
            # Product and sum are rounded one by one (no fused step), so that `fedqueue.tensorfile` gets the same bits.
            total.add_(torch.mul(chunk, factor, out=scratch[: piece.numel()]))
            if within:
                least, most = torch.where(chunk < least, chunk, least), torch.where(chunk > most, chunk, most)
        if within:
            total.copy_(torch.where(total < least, least, torch.where(total > most, most, total)))
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
