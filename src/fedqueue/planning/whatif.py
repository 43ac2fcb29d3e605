"""What if: `south.wait=2x`, `south.nodes=16`, `south.speed=1.5x`, `without south`, `max_jobs=1`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fedqueue.config import FixedQueue
from fedqueue.errors import ConfigError
from fedqueue.planning.places import Place, check_shape

EXAMPLES: Final = "south.wait=2x, south.nodes=16, south.speed=1.5x, south.startup=60, max_jobs=1 or 'without south'"


def apply(text: str, places: Sequence[Place], scaling: float) -> tuple[Place, ...]:
    """The facilities as they would be; ConfigError if the text cannot be understood."""
    words = text.split()
    names = [place.name for place in places]
    if len(words) == 2 and words[0] == "without":
        _known(words[1], names, text)
        if len(places) == 1:
            raise ConfigError(f"--what-if {text!r}: it is the only facility")
        return tuple(place for place in places if place.name != words[1])
    key, equals, value = (part.strip() for part in text.partition("="))
    name, dot, what = key.rpartition(".")
    if not equals or what not in _CHANGES:
        raise ConfigError(f"--what-if {text!r}: must be such as {EXAMPLES}; keys are {', '.join(_CHANGES)}")
    if dot:
        _known(name, names, text)
    try:
        return tuple(_CHANGES[what](p, value, scaling) if name in ("", p.name) else p for p in places)
    except ValueError as error:
        raise ConfigError(f"--what-if {text!r}: {str(error) or f'{value!r} cannot be understood'}") from None


def _known(name: str, names: Sequence[str], text: str) -> None:
    if name not in names:
        raise ConfigError(f"--what-if {text!r}: there is no facility {name!r}; there are {', '.join(names)}")


def _wait(place: Place, value: str, scaling: float) -> Place:
    if value.endswith("x"):
        return replace(place, factor=place.factor * _number(value[:-1]))
    queue = FixedQueue(delay=_number(value, zero=True))
    return replace(place, settings=replace(place.settings, queue=queue), log=None, factor=1.0)


def _nodes(place: Place, value: str, scaling: float) -> Place:
    made = place.with_nodes(_whole(value), scaling)
    if made.log is not None:
        check_shape(made)
    return made


def _speed(place: Place, value: str, scaling: float) -> Place:
    known = place.settings.steps_per_second or 1.0
    speed = known * _number(value[:-1]) if value.endswith("x") else _number(value)
    return replace(place, settings=replace(place.settings, steps_per_second=speed))


def _startup(place: Place, value: str, scaling: float) -> Place:
    return replace(place, settings=replace(place.settings, startup_seconds=_number(value, zero=True)))


def _max_jobs(place: Place, value: str, scaling: float) -> Place:
    return replace(place, settings=replace(place.settings, max_jobs=_whole(value)))


_CHANGES: Final[dict[str, Callable[[Place, str, float], Place]]] = {
    "wait": _wait,
    "nodes": _nodes,
    "speed": _speed,
    "startup": _startup,
    "max_jobs": _max_jobs,
}


def _number(text: str, *, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number; write 2x for twice as much, or the new value") from None
    if not (0 < value < float("inf") or (zero and value == 0)):
        raise ValueError(f"must be {'0 or more' if zero else 'more than 0'}, found {text}")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"must be a whole number, 1 or more, found {text!r}")
    return int(text)
