"""Weights times tensors: makes the next model from the current one and the updates, and checks an update.

Every rule is a weighted sum of whole models. Their factors are worked out first; then each tensor is summed
in pieces that stay in the processor's cache, so that every input is read once and the result written once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedqueue.combining import SAME, Combiner, most_say, voices
from fedqueue.low_rank import Matrix, weighted_factors
from fedqueue.protocol.aggregation import (
    COUNTER,
    FACTOR,
    MOVING,
    PARAMETER,
    STATISTIC,
    find_roles,
    model_factors,
    statistic_factors,
)
from fedqueue.protocol.messages import Guard, ServerStep
from fedqueue.tensorbytes import Buffer
from fedqueue.tensorfile import Kind, misfit_of_kinds, not_finite
from fedqueue.tensorsum import finite_root

StateDict = dict[str, Tensor]
"""A model as PyTorch names its parts: parameters and buffers."""

Moments = tuple[StateDict, ...]
"""What a server's optimizer remembers of the parameters: the first and the second moment, and maybe the largest second
one so far. Those of complex numbers are of their real and imaginary parts."""

CHUNK_VALUES = 1 << 18
"""Values summed at a time on a processor: 1 MiB of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One update as it enters an aggregation."""

    weight: float
    """What the strategy gave it, discount and normalisation included (no unit)."""
    trained: StateDict
    """The model after the facility's steps."""
    base: StateDict
    """The model those steps started from (the same object for all updates of one version)."""
    clip: float = 1.0
    """Of the change from base to trained, the part that counts."""
    voice: Hashable = None
    """Whose it is: all of one facility have one voice. None: it has a voice of its own."""


def aggregate(
    current: StateDict,
    contributions: Sequence[Contribution],
    rule: str,
    roles: Mapping[str, str] | None = None,
    *,
    from_first: bool = False,
    guard: Guard | None = None,
) -> StateDict:
    """The next model; `contributions` are ordered oldest to newest and have passed `misfit`.

    Parameters, by rule "add_deltas": current + sum of weight * (trained - base); by rule "mix_models":
    current + sum of weight * (trained - current). Statistics: the weighted mean of what was handed in, never outside
    its range (`statistic_factors`; `from_first`: the current model is the first of its run). Counters: what most say
    (`most_say`). Factors: those of the weighted sum of their products. With a `guard`, its rule takes the place of sums
    and means. `roles` of the tensors are found by their names unless they are given. Real and complex tensors are
    summed in at least single precision and keep the current model's type. No input is modified.

    >>> one, three = {"w": torch.ones(1)}, {"w": torch.full((1,), 3.0)}
    >>> aggregate(one, [Contribution(weight=0.5, trained=three, base=one)], "add_deltas")
    {'w': tensor([2.])}
    """
    if roles is None:
        roles = roles_of(current)
    guarded = None if guard is None else _Guarded(current, contributions, rule, roles, guard, from_first=from_first)
    return _next(current, contributions, rule, roles, guarded, from_first=from_first)


def _next(
    current: StateDict,
    contributions: Sequence[Contribution],
    rule: str,
    roles: Mapping[str, str],
    guarded: _Guarded | None,
    *,
    from_first: bool,
) -> StateDict:
    deltas, means = _terms(current, contributions, rule, from_first=from_first)
    heard = voices(contributions) if COUNTER in roles.values() else []
    if not contributions:
        return dict(current)
    kept: dict[str, Matrix] = {}
    products = [(_matrices(model), factor) for model, factor in deltas]

    def next_of(name: str, like: Tensor) -> Tensor:
        if roles[name] == FACTOR:
            return torch.from_numpy(weighted_factors(name, products, kept)).to(like.device, like.dtype)
        if roles[name] == COUNTER:
            return _most_say(like, [(contributions[v.members[-1][0]].trained[name], v.weight) for v in heard])
        if guarded is not None:
            return guarded.statistic(name) if roles[name] == STATISTIC else guarded.parameter(name)
        is_mean = roles[name] == STATISTIC
        return _weighted_sum(like, [(model[name], f) for model, f in (means if is_mean else deltas)], within=is_mean)

    with torch.no_grad():
        return {name: next_of(name, like) for name, like in current.items()}


def _matrices(model: StateDict) -> Callable[[str], Matrix]:
    return lambda name: model[name].detach().to("cpu", torch.float64).numpy()


def take_step(
    current: StateDict,
    contributions: Sequence[Contribution],
    rule: str,
    step: ServerStep,
    moments: Moments,
    roles: Mapping[str, str] | None = None,
    *,
    from_first: bool = False,
    guard: Guard | None = None,
) -> tuple[StateDict, Moments]:
    """As `aggregate`, but parameters take a step of the server's optimizer; the moments from then on, too. `moments`
    are those of the current model, empty if there are none yet.

    >>> zero, one = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> step = ServerStep(rate=2.0, beta1=0.5, beta2=0.75, epsilon=0.5)     # m = 0.5, v = 0.75 * 0.5^2 + 0.25
    >>> take_step(zero, [Contribution(weight=1.0, trained=one, base=zero)], "add_deltas", step, ())
    ({'w': tensor([0.8610])}, ({'w': tensor([0.5000])}, {'w': tensor([0.4375])}))
    """
    if not contributions:
        return dict(current), moments
    if roles is None:
        roles = roles_of(current)
    changes = _terms(current, contributions, rule, from_first=from_first, of_change=True)[0]
    rest = {name: like for name, like in current.items() if roles[name] != PARAMETER}
    guarded = None if guard is None else _Guarded(current, contributions, rule, roles, guard, from_first=from_first)
    made = _next(rest, contributions, rule, roles, guarded, from_first=from_first)
    after: Moments = tuple({} for _ in range(step.moments))
    with torch.no_grad():
        for name in (name for name in current if name not in rest):
            if guarded is not None:
                change = guarded.change(name)
            else:
                change = _weighted_sum(_precise(current[name]), [(model[name], factor) for model, factor in changes])
            before = [moment[name] for moment in moments]
            made[name], found = _stepped(current[name], change, step, before)
            for kept, moment in zip(after, found, strict=True):
                kept[name] = moment
    return {name: made[name] for name in current}, after


def _stepped(now: Tensor, change: Tensor, step: ServerStep, moments: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Each operation is rounded by itself, in the order of `fedqueue.tensorsum`, so that both get the same bits."""
    if now.is_complex():
        stepped, moments = _stepped(torch.view_as_real(now), torch.view_as_real(change), step, moments)
        return torch.view_as_complex(stepped), moments
    if moments:
        first, second, *largest = moments
    else:
        first, second = torch.zeros_like(change), torch.full_like(change, step.epsilon * step.epsilon)
        largest = [second] if step.largest else []
    first = first * step.beta1 + change * (1 - step.beta1)
    second = second * step.beta2 + change * change * (1 - step.beta2)
    largest = [torch.where(second > most, second, most) for most in largest]
    way = first * step.rate / (_square_root(largest[0] if largest else second) + step.epsilon)
    return (_precise(now) + way).to(now.dtype), [first, second, *largest]


class _Guarded:
    """Tensors combined by a guard's rule: on the processor, in the pieces in which `fedqueue.tensorsum` reads them."""

    def __init__(
        self,
        current: StateDict,
        contributions: Sequence[Contribution],
        rule: str,
        roles: Mapping[str, str],
        guard: Guard,
        *,
        from_first: bool,
    ) -> None:
        self._current, self._contributions = current, contributions
        self._combiner = Combiner(contributions, rule, guard, self._read, from_first=from_first)
        self._combiner.look_at(
            ((name, start), _number_type(like))
            for name, like in current.items()
            if roles[name] == PARAMETER
            for start in self._starts(like)
        )

    @staticmethod
    def _starts(like: Tensor) -> range:
        return range(0, like.numel() * (2 if like.is_complex() else 1), CHUNK_VALUES)

    def _read(self, place: int, which: str, piece: tuple[str, int], precision: np.dtype[Any]) -> Buffer:
        model = self._current if which == "current" else getattr(self._contributions[place], which)
        return _piece_of(model[piece[0]], piece[1], precision)

    def change(self, name: str) -> Tensor:
        like = self._current[name]
        pieces = [self._combiner.change((name, start), _number_type(like)) for start in self._starts(like)]
        if not pieces or any(piece is None for piece in pieces):
            return torch.zeros_like(_precise(like))
        return self._whole(pieces, like)

    def parameter(self, name: str) -> Tensor:
        like = self._current[name]
        return (_precise(like) + self.change(name)).to(like.dtype)

    def statistic(self, name: str) -> Tensor:
        like, number = self._current[name], _number_type(self._current[name])
        if not like.numel():
            return like.clone()
        pieces = [
            self._combiner.statistic((name, start), number, _piece_of(like, start, number))
            for start in self._starts(like)
        ]
        return self._whole(pieces, like).to(like.dtype)

    @staticmethod
    def _whole(pieces: Sequence[Buffer | None], like: Tensor) -> Tensor:
        found = torch.from_numpy(np.concatenate([piece for piece in pieces if piece is not None])).to(like.device)
        return torch.view_as_complex(found.reshape(*like.shape, 2)) if like.is_complex() else found.reshape(like.shape)


def _number_type(like: Tensor) -> np.dtype[Any]:
    return np.dtype("<f8" if like.dtype == torch.float64 else "<f4")


def _piece_of(tensor: Tensor, start: int, precision: np.dtype[Any]) -> Buffer:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)[start : start + CHUNK_VALUES]
    return np.asarray(flat.to(torch.float64 if precision.itemsize == 8 else torch.float32).cpu().numpy())


def _most_say(like: Tensor, said: Sequence[tuple[Tensor, float]]) -> Tensor:
    """As `fedqueue.combining.most_say`, where the tensors are."""
    if not said:
        return like.clone()
    values = torch.stack([tensor.to(like.dtype) for tensor, _ in said])
    weights = [weight for _, weight in said]
    if values.is_complex():
        return torch.view_as_complex(_most(torch.view_as_real(values), weights))
    return _most(values, weights)


def _most(values: Tensor, weights: Sequence[float]) -> Tensor:
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:  # which numpy does not know
        return torch.from_numpy(np.array(most_say(values.numpy(), weights)))
    ranked, order = torch.sort(values, dim=0, stable=True)
    reached = torch.tensor(weights, dtype=torch.float64, device=values.device)[order].cumsum(dim=0)
    place = (reached >= (1 - SAME) * reached[-1:] / 2).to(torch.uint8).argmax(dim=0, keepdim=True)
    return ranked.gather(0, place)[0]


def _square_root(tensor: Tensor) -> Tensor:
    """To the nearest number; torch's own on a processor may be the one beside it."""
    if tensor.device.type != "cpu":
        return torch.sqrt(tensor)
    return torch.from_numpy(np.sqrt(tensor.numpy(), out=np.empty(tensor.shape, tensor.numpy().dtype)))


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Variates:
    """The control variates of SCAFFOLD: of the server, c, and of each facility, c_k; all zero at first. They are mean
    steps over the learning rate, whatever the optimizer; with plain gradient descent they are mean gradients."""

    def __init__(self, like: StateDict, roles: Mapping[str, str]) -> None:
        self.server = {name: torch.zeros_like(t) for name, t in like.items() if roles[name] == PARAMETER}
        self.facilities: dict[int, StateDict] = {}
        self._changes: dict[Hashable, tuple[int, StateDict]] = {}  # by update: whose variate changes, and by what

    def drift(self, facility: int) -> StateDict:
        """c_k - c: what is added to each of its steps, times the learning rate."""
        own = self.facilities.get(facility, {})
        return {name: own[name] - c if name in own else -c for name, c in self.server.items()}

    def trained(self, key: Hashable, facility: int, base: StateDict, trained: StateDict, length: float) -> None:
        """A job took so many steps times its learning rate (`length`). Its facility's variate changes by
        (base - trained) / length - c when its update is in a model."""
        change = {name: (base[name] - trained[name]) / length - c for name, c in self.server.items()}
        self._changes[key] = (facility, change)

    def move(self, shares: Iterable[tuple[Hashable, float]]) -> None:
        """These updates are in a model: c_k of each changes, and c by so much of that."""
        for key, share in shares:
            facility, change = self._changes.pop(key)
            own = self.facilities.get(facility, {})
            self.facilities[facility] = {name: own[name] + d if name in own else d for name, d in change.items()}
            self.server = {name: c + share * change[name] for name, c in self.server.items()}

    def forget(self, key: Hashable) -> None:
        self._changes.pop(key, None)


def norm_of_change(trained: StateDict, base: StateDict, roles: Mapping[str, str]) -> float:
    """How far the parameters are from those of the base (L2), finite in any case.

    >>> zero, ones = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    >>> norm_of_change(ones, zero, {"w": "parameter"})
    2.0
    """
    total = 0.0
    for name in (name for name, role in roles.items() if role in MOVING):
        values = [torch.view_as_real(t) if t.is_complex() else t for t in (trained[name], base[name])]
        flat = [value.reshape(-1).double() for value in values]
        total += float((flat[0] - flat[1]).square().sum())
    return finite_root(total)


def agreement(contributions: Sequence[Contribution], roles: Mapping[str, str]) -> float | None:
    """How far the deltas of the parameters agree: |sum of w*Delta|^2 over the sum of w*|Delta|^2, for weights that sum
    to one. None: there are fewer than two, or none is a change.

    >>> zero, ones = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    >>> same = [Contribution(weight=0.5, trained=ones, base=zero)] * 2
    >>> agreement(same, {"w": "parameter"})
    1.0
    """
    sums = sums_of_changes(contributions, roles)
    return None if sums is None else agreement_of(*sums.tolist())


def agreement_of(together: float, apart: float) -> float | None:
    return together / apart if apart > 0 else None


def sums_of_changes(contributions: Sequence[Contribution], roles: Mapping[str, str]) -> Tensor | None:
    """|sum of w*Delta|^2 and the sum of w*|Delta|^2, where the models are: an accelerator is not waited for."""
    total = sum(c.weight for c in contributions)
    if len(contributions) < 2 or total <= 0:
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=next(iter(contributions[0].base.values())).device)
    with torch.no_grad():
        for name in (name for name, role in roles.items() if role in MOVING):
            mean = torch.zeros_like(contributions[0].base[name], dtype=torch.float64)
            for contribution in contributions:
                delta = contribution.trained[name].double() - contribution.base[name].double()
                delta *= contribution.clip
                mean.add_(delta, alpha=contribution.weight / total)
                sums[1] += contribution.weight / total * delta.square().sum()
            sums[0] += mean.square().sum()
    return sums


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
    current: StateDict,
    contributions: Sequence[Contribution],
    rule: str,
    *,
    from_first: bool,
    of_change: bool = False,
) -> tuple[list[tuple[StateDict, float]], list[tuple[StateDict, float]]]:
    """The models that enter the sum of parameters, and those that enter the mean of statistics, with their factors."""
    # By identity, so that updates of one version share one pass over their base.
    models = {id(current): current}
    for contribution in contributions:
        models |= {id(contribution.base): contribution.base, id(contribution.trained): contribution.trained}
    shares = [(c.weight, id(c.trained), id(c.base), c.clip) for c in contributions]
    deltas = model_factors(id(current), shares, rule, of_change=of_change)
    trained = [(c.weight * c.clip, id(c.trained)) for c in contributions]
    means = statistic_factors(id(current), trained, rule, from_first=from_first)
    return [(models[key], factor) for key, factor in deltas.items()], [(models[key], f) for key, f in means.items()]


def _weighted_sum(like: Tensor, terms: Sequence[tuple[Tensor, float]], *, within: bool = False) -> Tensor:
    """Sum of tensor * factor, in `like`'s shape and type; `within` the range of the tensors, which a rounded mean may
    leave by a hair."""
    if not terms:
        return torch.zeros_like(like)
    result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    target = result.view(-1)
    chunk_values = CHUNK_VALUES if like.device.type == "cpu" else max(1, like.numel())
    flat = [(tensor.reshape(-1), factor) for tensor, factor in terms]
    precision = torch.promote_types(like.dtype, torch.float32)
    # A half-precision result is summed aside and rounded once; otherwise the sum is made in place.
    aside = None
    if precision != like.dtype:
        aside = torch.empty(min(chunk_values, like.numel()), dtype=precision, device=like.device)
    scratch = torch.empty(min(chunk_values, like.numel()), dtype=precision, device=like.device)
    for start in range(0, target.numel(), chunk_values):
        piece = target[start : start + chunk_values]
        total = piece if aside is None else aside[: piece.numel()]
        (first, factor), *others = flat
        least = most = chunk = first[start : start + chunk_values].to(precision)
        torch.mul(chunk, factor, out=total)
        for source, factor in others:
            chunk = source[start : start + chunk_values].to(precision)
            # Product and sum are rounded one by one (no fused step), so that `fedqueue.tensorsum` gets the same bits.
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
