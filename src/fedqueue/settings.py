"""Plain values (from TOML, JSON or the command line) -> a dataclass, with its keys and types enforced.

Settings are dataclasses that check their own ranges in `__post_init__` (see checks.py); this reader brings what
every one of them needs: no unknown key, no missing key, no wrong type. A `ConfigError` names the place, what was
found and what is allowed, in one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedqueue.errors import ConfigError

T = TypeVar("T")

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def read(kind: type[T], given: Any, where: str) -> T:
    """An instance of this dataclass from a table of plain values; `where` is the key of the table.

    >>> from fedqueue.protocol.plan import FailurePolicy
    >>> read(FailurePolicy, {"max_attempts": 5}, "failures").max_attempts
    5
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: must be a table, found {given!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in fields:
            raise ConfigError(f"{where}.{key}: unknown key; {_hint(str(key), list(fields))}")
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for name, field in fields.items():
        if name in given:
            values[name] = _value(hints[name], given[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}.{name}: is missing")
    try:
        return kind(**values)
    except ValueError as error:  # the dataclass's own checks; they begin with the key
        raise ConfigError(f"{where}.{error}") from None


def _value(hint: Any, given: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of_several(inner, given, where)
    if origin is Annotated:  # a union, and a function that gives further members of it
        return _one_of_several((*get_args(inner[0]), *inner[1]()), given, where)
    if origin is Literal:
        if given in inner:
            return given
        raise ConfigError(f"{where}: must be one of {', '.join(map(str, inner))}, found {given!r}")
    if origin is list:
        if isinstance(given, list | tuple):
            return [_value(inner[0], item, f"{where}.{_label(item, i)}") for i, item in enumerate(given)]
        raise ConfigError(f"{where}: must be a list, found {given!r}")
    if origin is tuple:
        if isinstance(given, list | tuple) and len(given) == len(inner):
            return tuple(_value(kind, item, where) for kind, item in zip(inner, given, strict=True))
        raise ConfigError(f"{where}: must be a list of {len(inner)}, found {given!r}")
    if origin is dict or origin is Mapping:
        if isinstance(given, Mapping):
            return {str(key): _value(inner[1], item, f"{where}.{key}") for key, item in given.items()}
        raise ConfigError(f"{where}: must be a table, found {given!r}")
    if dataclasses.is_dataclass(hint):
        return given if type(given) is hint else read(hint, given, where)  # type: ignore[arg-type]
    if hint is object or hint is Any:
        return given
    return _plain(hint, given, where)


def _plain(kind: Any, given: Any, where: str) -> Any:
    if kind is float and type(given) is int:
        given = float(given)
    if kind is float and type(given) is float and not isfinite(given):
        raise ConfigError(f"{where}: must be a finite number, found {given}")
    if type(given) is kind:
        return given
    raise ConfigError(f"{where}: must be {_NAMES[kind]}, found {given!r}")


def _one_of_several(kinds: tuple[Any, ...], given: Any, where: str) -> Any:
    if given is None and type(None) in kinds:
        return None
    choices = [kind for kind in kinds if kind is not type(None)]
    if len(choices) == 1:
        return _value(choices[0], given, where)
    tagged = {get_args(get_type_hints(k)["kind"])[0]: k for k in choices if dataclasses.is_dataclass(k)}
    if tagged:  # tables that say by `kind` which of them they are
        if not isinstance(given, Mapping) or given.get("kind") not in tagged:
            found = given.get("kind") if isinstance(given, Mapping) else given
            raise ConfigError(f"{where}.kind: must be one of {', '.join(tagged)}, found {found!r}")
        return _value(tagged[given["kind"]], given, where)
    errors = []
    for kind in choices:
        try:
            return _value(kind, given, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _label(item: Any, index: int) -> str:
    """A table in a list is called by its name, if it has one."""
    return str(item.get("name", index)) if isinstance(item, Mapping) else str(index)


def _hint(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1)
    return f"did you mean {close[0]}?" if close else f"allowed are {', '.join(allowed)}"
