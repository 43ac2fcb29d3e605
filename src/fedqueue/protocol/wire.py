"""Messages to and from JSON: how the ledger keeps them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final, get_args

from fedqueue.errors import ProtocolError
from fedqueue.protocol.messages import Assignment, Command, Event, Order, Receipt, Share, Standing

_KINDS: Final[dict[str, type]] = {cls.__name__: cls for cls in (*get_args(Event), *get_args(Command))}
_FIELDS: Final[dict[type, tuple[str, ...]]] = {
    cls: tuple(f.name for f in dataclasses.fields(cls))
    for cls in (*_KINDS.values(), Order, Assignment, Standing, Receipt, Share)
}
_PARTS: Final[dict[str, type]] = {
    "order": Order,
    "assignment": Assignment,
    "bound": Assignment,
    "standing": Standing,
    "receipt": Receipt,
}


def body(part: object) -> dict[str, Any]:
    """The fields of a message or of a part of one: what JSON calls when it meets our types."""
    return {name: getattr(part, name) for name in _FIELDS[type(part)]}


def parse(kind: str, fields: Mapping[str, Any]) -> Event | Command:
    """The message of this kind with these JSON fields.

    >>> parse("TimerFired", {"at": 10.0, "key": "cutoff/0"})
    TimerFired(at=10.0, key='cutoff/0')
    """
    if kind not in _KINDS:
        raise ProtocolError(f"unknown message kind {kind!r}")
    values = dict(fields)
    for name, part in _PARTS.items():
        if values.get(name) is not None:
            values[name] = part(**values[name])
    if "weights" in values:
        values["weights"] = tuple(Share(**share) for share in values["weights"])
    if "quantiles" in values:
        values["quantiles"] = tuple((float(p), float(q)) for p, q in values["quantiles"])
    made: Event | Command = _KINDS[kind](**values)
    return made


def encode_value(value: Any) -> str:
    """Compact JSON of messages, their parts and plain values; no NaN."""
    return _ENCODER.encode(value)


def encode(message: Event | Command) -> str:
    """A message as the ledger holds it, without its kind.

    >>> from fedqueue.protocol.messages import TimerFired
    >>> encode(TimerFired(at=10.0, key="cutoff/0"))
    '{"at":10.0,"key":"cutoff/0"}'
    """
    return _ENCODER.encode(body(message))


_ENCODER: Final = json.JSONEncoder(default=body, separators=(",", ":"), allow_nan=False)
