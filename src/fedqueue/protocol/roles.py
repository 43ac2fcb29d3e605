"""What each tensor of a model is, and so how it is aggregated: parameter, statistic or counter.

Parameters are what training changes: they move by weighted deltas. Statistics are what layers measured (the running
mean and variance of batch normalisation): a difference of two of them means nothing, so they are averaged and stay
within the range of what was handed in. Counters are taken from the newest update.

Roles of the usual layers are known by their names. A model's file may declare others (`declare`), and a config's
[model.roles] has the last word. Works with Python 3.9.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from fedqueue.errors import ConfigError

PARAMETER, STATISTIC, COUNTER = "parameter", "statistic", "counter"
ROLES = (PARAMETER, STATISTIC, COUNTER)

DECLARATION = "fedqueue.protocol.roles"
"""The key under which a safetensors file says what its tensors are: a JSON object of names and roles."""

_USUAL = {"running_mean": STATISTIC, "running_var": STATISTIC, "num_batches_tracked": COUNTER}


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
    return found


def must_match(chosen: Mapping[str, str], names: Iterable[str]) -> None:
    """A pattern of the config that no tensor's name matches is a mistake."""
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"model.roles: no tensor's name matches {pattern!r}")


def declared_roles(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a file's metadata say of its tensors; raises ValueError where that is no such thing."""
    text = metadata.get(DECLARATION)
    if text is None:
        return {}
    try:
        roles = json.loads(text)
    except ValueError:
        roles = None
    if not isinstance(roles, dict) or not all(role in ROLES for role in roles.values()):
        raise ValueError(f"its metadata {DECLARATION!r} must be a JSON object of tensor names and roles")
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
