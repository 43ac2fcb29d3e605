"""How settings say what they take: one line a check, and an error that begins with the key."""

from __future__ import annotations

from math import isfinite


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
