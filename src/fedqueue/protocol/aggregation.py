"""What the next model is made of, without its tensors: which updates, with which weights, and each tensor by its role.

Jobs import this file: Python 3.9 and the standard library alone.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import exp, prod
from statistics import median
from typing import Any, Final, Literal, NamedTuple, TypeVar

from fedqueue.errors import ConfigError
from fedqueue.protocol.contract import Receipt

K = TypeVar("K", bound=Hashable)


# Which updates: those that arrived before the cutoff, less those too stale to use -------------------------


class Update(NamedTuple):
    """An update that arrived and waits for its cutoff."""

    receipt: Receipt
    facility: str
    arrived_at: float
    aimed: bool  # it aimed at a cutoff
    deferred: bool  # it missed that cutoff
    length: float = 0.0  # of the training, in steps times learning rate; 0: not known

    def staleness(self, version: int) -> int:
        """tau: how many versions the model has moved on, if it is used to change this version."""
        return version - self.receipt.base_version


class Buffer:
    """B: updates in order of arrival. Each leaves it once."""

    def __init__(self) -> None:
        self._waiting: list[Update] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, update: Update) -> None:
        self._waiting.append(update)

    def facilities(self) -> set[str]:
        return {update.facility for update in self._waiting}

    def drop(self, updates: Sequence[Update]) -> None:
        """They were withdrawn."""
        self._waiting = [update for update in self._waiting if update not in updates]

    def take(self, version: int, max_staleness: int | None = None) -> tuple[list[Update], list[Update]]:
        """Empties the buffer into (admitted, expired): a cutoff that changes `version` takes what has arrived."""
        waiting, self._waiting = self._waiting, []
        if max_staleness is None:
            return waiting, []
        admitted = [u for u in waiting if u.staleness(version) <= max_staleness]
        return admitted, [u for u in waiting if u.staleness(version) > max_staleness]


# With which weights: discounts (phi, s), and the sum that they make ---------------------------------------

Decay = Literal["harmonic", "exponential", "none"]


def discount(staleness: int, decay: Decay, beta: float) -> float:
    """phi(tau): 1 when fresh.

    >>> discount(2, "harmonic", beta=0.5)
    0.5
    """
    if decay == "harmonic":
        return 1.0 / (1.0 + beta * staleness)
    if decay == "exponential":
        return exp(-beta * staleness)
    return 1.0


def polynomial_discount(staleness: int, exponent: float) -> float:
    """s(tau) = (1 + tau)^-a, as the asynchronous baselines use it.

    >>> polynomial_discount(3, exponent=1.0)
    0.25
    """
    return float((1 + staleness) ** -exponent)


def normalised(raw: Sequence[float]) -> list[float]:
    """Weights that sum to one: raw / S. Empty or all-zero input has no such weights and gives zeros.

    >>> normalised([1.0, 3.0])
    [0.25, 0.75]
    """
    total = sum(raw)
    return [value / total for value in raw] if total > 0 else [0.0 for _ in raw]


def model_factors(
    current: K, shares: Sequence[tuple[float, K, K, float]], rule: str, *, of_change: bool = False
) -> dict[K, float]:
    """The whole models that enter the sum for the next model, each once, with their factors (which sum to one).
    `of_change`: those of the sum that is added to the current model (factors sum to zero).

    Models are known by keys of the caller's choosing. `shares` are (weight, trained, base, part), oldest first; `part`
    is that of the change trained - base which counts, so that base + part * (trained - base) stands for trained.
    Rule "add_deltas": current + sum of weight * (trained - base).
    Rule "mix_models": current + sum of weight * (trained - current).
    The order is that of the sum: it decides the last bits. A model whose factor is zero is left out.

    >>> model_factors("v3", [(0.25, "a", "v3", 1.0), (0.5, "b", "v2", 1.0)], "add_deltas")
    {'v3': 0.75, 'a': 0.25, 'v2': -0.5, 'b': 0.5}
    >>> model_factors("v3", [(0.5, "b", "v2", 0.25)], "mix_models")
    {'v3': 0.5, 'v2': 0.375, 'b': 0.125}
    """
    if rule not in ("add_deltas", "mix_models"):
        raise ValueError(f"rule must be 'add_deltas' or 'mix_models', found {rule!r}")
    factors = {current: 0.0 if of_change else 1.0}
    for weight, trained, base, part in shares:
        if rule == "add_deltas":
            terms = [(base, -weight * part), (trained, weight * part)]
        else:
            terms = [(current, -weight), (base, weight * (1 - part)), (trained, weight * part)]
        for model, share in terms:
            factors[model] = factors.get(model, 0.0) + share
    return {model: factor for model, factor in factors.items() if factor != 0.0}


def statistic_factors(current: K, shares: Sequence[tuple[float, K]], rule: str, *, from_first: bool) -> dict[K, float]:
    """The models whose running statistics are averaged for the next one, with factors of 0 to 1 that sum to one.

    `shares` are (weight, trained), oldest first. What layers measured is averaged over what was handed in, by weight.
    Rule "mix_models" mixes the current model's in, as it does with parameters, unless that is the first model of the
    run (`from_first`), whose statistics nobody measured.

    >>> statistic_factors("v3", [(0.25, "a"), (0.25, "b")], "add_deltas", from_first=False)
    {'a': 0.5, 'b': 0.5}
    >>> statistic_factors("v3", [(0.25, "a")], "mix_models", from_first=False)
    {'v3': 0.75, 'a': 0.25}
    """
    total = sum(weight for weight, _ in shares)
    if total <= 0:
        return {current: 1.0}
    rest = max(0.0, 1.0 - total) if rule == "mix_models" and not from_first else 0.0
    factors = {current: rest} if rest > 0 else {}
    for weight, trained in shares:
        if weight > 0:
            factors[trained] = factors.get(trained, 0.0) + weight / (total + rest)
    return factors


# How far a facility is trusted with the model, however much it sends --------------------------------------
# Its say: of what counts, no more than its data weight. Clipping: no update moves the model much further than updates
# usually do. Rules by which updates are combined when some may lie work on tensors: `fedqueue.combining`.

KEPT_NORMS: Final = 5
"""Of each facility; who sends many has no more than that."""


def at_most_one(worth: Sequence[tuple[str, float]]) -> list[float]:
    """What updates of these facilities are worth that meet at a cutoff: those of one together no more than a fresh one.

    >>> at_most_one([("a", 1.0), ("b", 1.0), ("a", 0.5), ("a", 0.5)])
    [0.5, 1.0, 0.25, 0.25]
    """
    total: dict[str, float] = {}
    for facility, value in worth:
        total[facility] = total.get(facility, 0.0) + value
    return [value / max(1.0, total[facility]) for facility, value in worth]


class Say:
    """Where updates count as they come: of what counted within a round length, a facility has its data weight at the
    most, and one update more. (Without that one nobody could begin.)

    >>> say = Say({"a": 0.5, "b": 0.5}, 10.0)
    >>> [say.allow(1.0, "a", 0.5, full=0.5), say.allow(2.0, "a", 0.5, full=0.5)]
    [0.5, 0.0]
    >>> say.allow(3.0, "b", 0.25, full=0.5), say.allow(4.0, "a", 0.5, full=0.5), say.allow(12.0, "a", 0.5, full=0.5)
    (0.25, 0.25, 0.5)
    """

    def __init__(self, data_weights: Mapping[str, float], seconds: float) -> None:
        total = sum(data_weights.values())
        self._share = {name: weight / total if total > 0 else 0.0 for name, weight in data_weights.items()}
        self._seconds = seconds
        self._counted: deque[tuple[float, str, float]] = deque()  # when, whose, how much

    def allow(self, at: float, facility: str, weight: float, *, full: float) -> float:
        """How much of its weight an update has that arrived then. `full`: that of one that is fresh."""
        while self._counted and self._counted[0][0] <= at - self._seconds:
            self._counted.popleft()
        own = sum(counted for _, name, counted in self._counted if name == facility)
        others = sum(counted for _, name, counted in self._counted if name != facility)
        mine = self._share[facility]
        if mine < 1:
            weight = max(0.0, min(weight, full + others * mine / (1 - mine) - own))
        if weight > 0:
            self._counted.append((at, facility, weight))
        return weight


class Norms:
    """How far updates usually move the model: medians, in which each facility has one voice.

    Longer training moves it further, though not in proportion. So a norm is compared with the usual norm, and with the
    usual norm for its length (steps times learning rate); what is clipped is too large for both.

    >>> norms = Norms(10.0)
    >>> for name, norm in (("a", 1.0), ("b", 1.5), ("c", 2.0), ("d", 500.0)): norms.seen(name, norm, length=1.0)
    >>> norms.part(500.0, length=1.0), norms.part(17.0, length=1.0), norms.part(175.0, length=10.0)
    (0.035, 1.0, 1.0)
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor  # 0: nothing is clipped
        self._norms: dict[str, deque[float]] = {}
        self._by_length: dict[str, deque[float]] = {}

    def seen(self, facility: str, norm: float, length: float) -> None:
        self._norms.setdefault(facility, deque(maxlen=KEPT_NORMS)).append(norm)
        if length > 0:
            self._by_length.setdefault(facility, deque(maxlen=KEPT_NORMS)).append(norm / length)

    def part(self, norm: float | None, length: float) -> float:
        """Of the change that an update makes, the part that counts. None: its norm is not known."""
        if norm is None or not self._factor or not self._norms:
            return 1.0
        usual = max(_typical(self._norms), length * _typical(self._by_length))
        limit = self._factor * usual
        return 1.0 if norm <= limit or usual == 0 else limit / norm


def _typical(seen: Mapping[str, Sequence[float]]) -> float:
    return median([median(values) for values in seen.values()]) if seen else 0.0


# Each tensor by its role ----------------------------------------------------------------------------------
# Parameters are what training changes: they move by weighted deltas. Statistics are what layers measured (the running
# mean and variance of batch normalisation): a difference of two of them means nothing, so they are averaged and stay
# within the range of what was handed in. Counters are what most facilities say. Factors are pairs of small matrices
# whose product is what counts: it is the products that are summed, not the matrices (`fedqueue.low_rank`).
#
# Roles of the usual layers are known by their names. A model's file may declare others (`declare_roles`), and a
# config's [model.roles] has the last word.

PARAMETER, STATISTIC, COUNTER, FACTOR = "parameter", "statistic", "counter", "factor"
ROLES = (PARAMETER, STATISTIC, COUNTER, FACTOR)
MOVING = (PARAMETER, FACTOR)
"""What training changes."""

DECLARATION = "fedqueue.roles"
"""The key under which a safetensors file says what its tensors are: a JSON object of names and roles."""
DECLARATIONS = (DECLARATION, "fedqueue.protocol.roles")
"""The same, with the key of files that were written for a while before 0.2."""

MOMENT, ROWS, COLUMNS = "second_moment", "second_moment_rows", "second_moment_columns"
"""Ends of the names of tensors that hold what Adam learned of a parameter: see `fedqueue.moments`."""

Shape = tuple[int, ...]

_USUAL = {
    "running_mean": STATISTIC,
    "running_var": STATISTIC,
    "num_batches_tracked": COUNTER,
    **dict.fromkeys((MOMENT, ROWS, COLUMNS), STATISTIC),
}


def find_roles(
    types: Mapping[str, str], declared: Mapping[str, str] | None = None, chosen: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The role of each tensor, from its name and type ("float32", "int64", ...).

    `chosen` are shell patterns, the first that matches counts; then what the file `declared` by name; then the names
    of the usual layers. Tensors that are not made of real or complex numbers are counters, whatever is said of them.

    >>> find_roles({"conv.weight": "float32", "norm.running_var": "float32", "norm.num_batches_tracked": "int64"})
    {'conv.weight': 'parameter', 'norm.running_var': 'statistic', 'norm.num_batches_tracked': 'counter'}
    """
    found = {}
    for name, type_name in types.items():
        role = _USUAL.get(name.rpartition(".")[2], PARAMETER)
        role = (declared or {}).get(name, role)
        role = next((r for pattern, r in (chosen or {}).items() if fnmatchcase(name, pattern)), role)
        if not type_name.startswith(("float", "bfloat", "complex")):
            role = COUNTER
        elif role == STATISTIC and type_name.startswith("complex"):
            raise ValueError(f"tensor {name!r} is of complex numbers and cannot be a statistic")
        found[name] = role
    for name in (name for name, role in found.items() if role == FACTOR):
        if not all(found.get(other) == FACTOR for other in factor_names(name)):
            raise ValueError(f"tensor {name!r} is a factor, but the other factor of its product is not there as one")
        if not types[name].startswith(("float", "bfloat")):
            raise ValueError(f"tensor {name!r} is not of real numbers and cannot be a factor")
    return found


def factor_names(name: str) -> tuple[str, str]:
    """B and A, the two factors of the product that this one belongs to, as peft names them.

    >>> factor_names("layer.lora_A.weight")
    ('layer.lora_B.weight', 'layer.lora_A.weight')
    """
    for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        if a in name or b in name:
            return name.replace(a, b), name.replace(b, a)
    raise ValueError(f"tensor {name!r} cannot be a factor: its name has neither lora_A nor lora_B")


def must_match(chosen: Mapping[str, str], names: Iterable[str]) -> None:
    """A pattern of the config that no tensor's name matches is a mistake."""
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"model.roles: no tensor's name matches {pattern!r}")


def declared_roles(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a file's metadata say of its tensors; raises ValueError where that is no such thing."""
    key = next((key for key in DECLARATIONS if key in metadata), None)
    if key is None:
        return {}
    try:
        roles = json.loads(metadata[key])
    except ValueError:
        roles = None
    if not isinstance(roles, dict) or not all(role in ROLES for role in roles.values()):
        raise ValueError(f"its metadata {key!r} must be a JSON object of tensor names and roles")
    return roles


def special(roles: Mapping[str, str]) -> dict[str, str]:
    """Of these roles those that are on record: of tensors that are not parameters."""
    return {name: role for name, role in roles.items() if role != PARAMETER}


def declaration(roles: Mapping[str, str]) -> dict[str, str]:
    """These roles as metadata of a safetensors file; empty where all are parameters."""
    found = special(roles)
    return {DECLARATION: json.dumps(found, separators=(",", ":"))} if found else {}


def buffer_roles(module: Any) -> dict[str, str]:
    """What a torch module says of its tensors: its buffers are statistics, or counters where they are whole numbers."""
    kept = module.state_dict()
    return {
        name: STATISTIC if buffer.is_floating_point() else COUNTER
        for name, buffer in module.named_buffers()
        if name in kept
    }


def declare_roles(module: Any) -> dict[str, str]:
    """Metadata for `safetensors.torch.save_file`, by which a first model says what its buffers are.

    Example: `save_file(model.state_dict(), "first.safetensors", metadata=fedqueue.declare_roles(model))`.
    """
    return declaration(buffer_roles(module))


# What Adam learned of a parameter (`fedqueue.moments`): tensors beside it, which are statistics


def moment_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """The tensors that travel for a parameter.

    >>> moment_shapes("conv.weight", (64, 32, 3, 3))
    {'conv.weight.second_moment_rows': (64,), 'conv.weight.second_moment_columns': (288,)}
    """
    if len(shape) < 2:
        return {f"{name}.{MOMENT}": shape}
    return {f"{name}.{ROWS}": shape[:1], f"{name}.{COLUMNS}": (prod(shape[1:]),)}


def first_moments(shapes: Mapping[str, Shape], types: Mapping[str, str], roles: Mapping[str, str]) -> dict[str, Shape]:
    """All that travels with a model of these tensors; at first they are zero, which says that nobody knows any."""
    moving = [name for name, role in roles.items() if role in MOVING and types[name].startswith(("float", "bfloat"))]
    return {key: found for name in moving for key, found in moment_shapes(name, shapes[name]).items()}


def is_moment(name: str) -> bool:
    return name.rpartition(".")[2] in (MOMENT, ROWS, COLUMNS)


def split_moments(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model itself, and the moments beside it.

    >>> split_moments({"w": 1, "w.second_moment": 2})
    ({'w': 1}, {'w.second_moment': 2})
    """
    model = {name: tensor for name, tensor in tensors.items() if not is_moment(name)}
    return model, {name: tensor for name, tensor in tensors.items() if is_moment(name)}
