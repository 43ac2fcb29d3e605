"""The coordinator's interface as an OpenAPI document, made from the same dataclasses that check its requests."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from fedqueue import __version__
from fedqueue.protocol.codec import Json

if TYPE_CHECKING:
    from fedqueue.coordinator.endpoints import Endpoint

Schema = Json
"""A document of JSON schema, which is plain JSON by its definition."""

BIGGEST: Final = 2**53
"""Numbers beyond this are nobody's steps or bytes."""
LONGEST: Final = 1e12
"""The same for numbers with a decimal point: seconds, scores."""
LONGEST_IN_PATH: Final = 10**15 - 1

_PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0, "maximum": BIGGEST},
    float: {"type": "number", "minimum": -LONGEST, "maximum": LONGEST},
    str: {"type": "string"},
    type(None): {"type": "null"},
    Any: {},  # values of a config: they are checked when it is read
}
_PATTERNS = {"sha256": "^[0-9a-f]{64}$", "file": "^[a-z]+[.][a-z]+$"}
_NUMBERS = ("version", "sequence", "attempt", "part", "offset", "bytes")


def openapi(endpoints: Iterable[Endpoint]) -> Schema:
    paths: dict[str, Schema] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "FedQueue coordinator", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"credential": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint) -> Schema:
    in_path = re.findall(r"{(\w+)}", endpoint.path)
    made: Schema = {
        "summary": endpoint.about,
        "parameters": [
            {"name": name, "in": where, "required": True, "schema": _parameter(name)}
            for where, names in (("path", in_path), ("query", endpoint.query))
            for name in names
        ],
        "responses": {"default": {"description": "JSON; a refusal has a reason"}},
    }
    if endpoint.right is not None:
        made["security"] = [{"credential": []}]
    if endpoint.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": of_type(endpoint.body)}}}
    elif endpoint.method == "PUT":
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _parameter(name: str) -> Schema:
    if name in _NUMBERS:
        return {"type": "integer", "minimum": 0, "maximum": LONGEST_IN_PATH}
    return {"type": "string", **({"pattern": _PATTERNS[name]} if name in _PATTERNS else {})}


def of_type(hint: Any) -> Schema:
    """The JSON schema of a type that our settings reader takes.

    >>> of_type(list[int])
    {'type': 'array', 'items': {'type': 'integer', 'minimum': 0, 'maximum': 9007199254740992}}
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(kind) for kind in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": of_type(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": of_type(inner[1])}
    if dataclasses.is_dataclass(hint):
        made: Schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
        hints, missing = get_type_hints(hint), dataclasses.MISSING
        for field in dataclasses.fields(hint):
            if field.metadata.get("inline"):
                part = of_type(hints[field.name])
                made["properties"] |= part["properties"]
                made["required"] += part["required"]
                continue
            made["properties"][field.name] = of_type(hints[field.name])
            if field.name == "kind" or (field.default is missing and field.default_factory is missing):
                made["required"].append(field.name)
        return made
    return dict(_PLAIN[hint])
