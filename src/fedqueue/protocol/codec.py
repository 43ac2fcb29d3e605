"""Dataclasses to and from JSON, and from TOML: how a message is shaped, written, and read again.

There is one strict reader, `read`, for whatever comes from outside: config files, requests and answers, files of jobs,
an agent's journal. No unknown key, no missing key, no wrong type; a `ConfigError` names the place, what was found and
what is allowed, in one line. Ranges are checked by each dataclass in `__post_init__`. What we wrote ourselves and
keep under lock, the ledger, is read by `build`, which is fast because it trusts.

Jobs import this file: Python 3.9 and the standard library alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import types
from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Callable,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from fedqueue.errors import ConfigError

if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_):  # Python 3.9 has none
        return lambda made: made


T = TypeVar("T")

Json = dict[str, Any]
"""A JSON object on its way in or out; inside there are types."""

_UNIONS = (Union, getattr(types, "UnionType", Union))
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


# The shape of a message ---------------------------------------------------------------------------------


def later(*, default: Any) -> Any:
    """A field that was added later: it is not in the JSON while it has its default, as it was before there was one."""
    return dataclasses.field(default=default, metadata={"later": True})


def inline() -> Any:
    """A part whose fields stand among those of the whole in JSON."""
    return dataclasses.field(metadata={"inline": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, later, inline))
def message(cls: type[T]) -> type[T]:
    """The shape of every message, and of what messages carry. (In Python 3.9, fields without default come first.)"""
    shape: Any = {"slots": True, "kw_only": True} if sys.version_info >= (3, 10) else {}
    return dataclasses.dataclass(frozen=True, **shape)(cls)


# Ranges, one line a check ---------------------------------------------------------------------------------
# For `__post_init__`; the error begins with the key.


def at_least(owner: object, least: float, *names: str) -> None:
    """Each named number is finite and `least` or more; None means not set."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (isfinite(value) and value >= least):
            raise ValueError(f"{name} must be {least:g} or more, found {value}")


def more_than(owner: object, bound: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (isfinite(value) and value > bound):
            raise ValueError(f"{name} must be more than {bound:g}, found {value}")


def share(owner: object, *names: str) -> None:
    """Each named number is from 0 to 1."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, found {value}")


def one_of(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, found {value!r}")


# Writing ------------------------------------------------------------------------------------------------

_LAYOUTS: dict[type, tuple[tuple[str, ...], tuple[tuple[str, Any], ...], tuple[str, ...]]] = {}


def body(part: object) -> Json:
    """The fields of a message or of a part of one: what JSON calls when it meets our types."""
    kind = type(part)
    always, optional, inlined = _LAYOUTS.get(kind) or _layout(kind)
    made = {name: getattr(part, name) for name in always}
    for name, default in optional:
        value = getattr(part, name)
        if value != default:
            made[name] = value
    for name in inlined:
        made.update(body(getattr(part, name)))
    return made


def _layout(kind: Any) -> Any:
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind} cannot be written as JSON")
    fields = dataclasses.fields(kind)
    optional = tuple((f.name, f.default) for f in fields if f.metadata.get("later"))
    inlined = tuple(f.name for f in fields if f.metadata.get("inline"))
    always = tuple(f.name for f in fields if f.name not in inlined and not f.metadata.get("later"))
    return _LAYOUTS.setdefault(kind, (always, optional, inlined))  # type: ignore[arg-type]


_ENCODER = json.JSONEncoder(default=body, separators=(",", ":"), allow_nan=False)


def encode(value: Any) -> str:
    """Compact JSON of messages, their parts and plain values; no NaN.

    >>> from fedqueue.protocol.messages import TimerFired
    >>> encode(TimerFired(at=10.0, key="cutoff/0"))
    '{"at":10.0,"key":"cutoff/0"}'
    """
    return _ENCODER.encode(value)


# Reading what we wrote ----------------------------------------------------------------------------------


def build(kind: type[T], fields: Mapping[str, Any]) -> T:
    """The message of this type with these JSON fields, which `encode` wrote."""
    values = dict(fields)
    for name, make in _makers(kind):
        if values.get(name) is not None:
            values[name] = make(values[name])
    return kind(**values)


def _find_makers(kind: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Of the fields that are not in JSON as they are in the message."""
    found = ((name, _maker(hint)) for name, hint in _hints(kind).items())
    return tuple((name, make) for name, make in found if make is not None)


_makers: Callable[[Any], tuple[tuple[str, Callable[[Any], Any]], ...]] = lru_cache(maxsize=None)(_find_makers)


def _maker(hint: Any) -> Callable[[Any], Any] | None:
    if get_origin(hint) in _UNIONS:
        return next(filter(None, map(_maker, get_args(hint))), None)
    if get_origin(hint) is tuple:
        make = _maker(get_args(hint)[0])
        return tuple if make is None else lambda items: tuple(map(make, items))
    return (lambda fields: build(hint, fields)) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


# Reading what others wrote ------------------------------------------------------------------------------


_hints: Callable[[Any], Json] = lru_cache(maxsize=None)(lambda kind: get_type_hints(kind, include_extras=True))


def read(kind: type[T], given: Any, where: str) -> T:
    """An instance of this dataclass from a table of plain values; `where` is the key of the table, if it has one.

    >>> from fedqueue.protocol.plan import FailurePolicy
    >>> read(FailurePolicy, {"max_attempts": 5}, "failures").max_attempts
    5
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where or 'it'}: must be a table, found {given!r}")
    hints = _hints(kind)
    fields: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    allowed = _keys(kind)
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{_place(where, key)}: unknown key; {_hint(str(key), allowed)}")
    values = {}
    for name, field in fields.items():
        if field.metadata.get("inline"):
            values[name] = read(hints[name], {key: given[key] for key in _keys(hints[name]) if key in given}, where)
        elif name in given:
            values[name] = _value(hints[name], given[name], _place(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_place(where, name)}: is missing")
    try:
        return kind(**values)
    except ValueError as error:  # the dataclass's own checks; they begin with the key
        raise ConfigError(_place(where, str(error).removeprefix(f"{kind.__name__}."))) from None


def _keys(kind: Any) -> list[str]:
    """Of its table."""
    fields, hints = dataclasses.fields(kind), _hints(kind)
    return [key for f in fields for key in (_keys(hints[f.name]) if f.metadata.get("inline") else [f.name])]


def _place(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _value(hint: Any, given: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return _one_of_several(inner, given, where)
    if origin is Annotated:  # a union, and a function that gives further members of it
        return _one_of_several((*get_args(inner[0]), *inner[1]()), given, where)
    if origin is Literal:
        if given in inner:
            return given
        raise ConfigError(f"{where}: must be one of {', '.join(map(str, inner))}, found {given!r}")
    if origin is list:
        if isinstance(given, (list, tuple)):
            return [_value(inner[0], item, f"{where}.{_label(item, i)}") for i, item in enumerate(given)]
        raise ConfigError(f"{where}: must be a list, found {given!r}")
    if origin is tuple:
        if isinstance(given, (list, tuple)) and len(given) == len(inner):
            return tuple(_value(kind, given[i], where) for i, kind in enumerate(inner))
        raise ConfigError(f"{where}: must be a list of {len(inner)}, found {given!r}")
    if origin in (dict, Mapping):
        if isinstance(given, Mapping):
            return {_key(inner[0], key, where): _value(inner[1], item, f"{where}.{key}") for key, item in given.items()}
        raise ConfigError(f"{where}: must be a table, found {given!r}")
    if dataclasses.is_dataclass(hint):
        return given if type(given) is hint else read(hint, given, where)  # type: ignore[arg-type]
    if hint is object or hint is Any:
        return given
    return _plain(hint, given, where)


def _key(kind: Any, given: Any, where: str) -> Any:
    """JSON has texts alone for keys."""
    if kind is not int:
        return str(given)
    if not str(given).isdigit():
        raise ConfigError(f"{where}: its keys must be whole numbers, found {given!r}")
    return int(given)


def _plain(kind: Any, given: Any, where: str) -> Any:
    if kind is float and type(given) is int and abs(given) < sys.float_info.max:
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
    tagged = {word: k for k in choices if dataclasses.is_dataclass(k) for word in get_args(_hints(k)["kind"])}
    if tagged:  # tables that say by `kind` which of them they are
        found = given.get("kind") if isinstance(given, Mapping) else given
        if not isinstance(found, str) or found not in tagged:
            raise ConfigError(f"{where}.kind: must be one of {', '.join(tagged)}, found {found!r}")
        return _value(tagged[found], given, where)
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
