"""What an agent takes from a coordinator: checked in full before anything of it is noted, written or named.

A coordinator may ask for work and offer models. It has no say in what runs at a facility, or where files go; so what
it sends are numbers, digests and words from short lists, and whatever else comes is no answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fedqueue.agent.transport import CoordinatorUnreachableError
from fedqueue.errors import ConfigError
from fedqueue.protocol.checks import at_least, more_than
from fedqueue.protocol.messages import Purpose, Scaling
from fedqueue.protocol.reports import MOST_REPORTS, REASON_LENGTH, one_line
from fedqueue.settings import read

MOST_ORDERS: Final = 100
"""In one answer, and open at a facility: a scheduler is not flooded, whoever asks."""
BIGGEST: Final = 2**53

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def _numbers(owner: object, *names: str) -> None:
    """Each named number is whole, 0 or more, and no larger than a computer counts."""
    at_least(owner, 0, *names)
    for name in names:
        value = getattr(owner, name)
        if value is not None and value > BIGGEST:
            raise ValueError(f"{name} is too large")


@dataclass(frozen=True, kw_only=True)
class _Model:
    version: int
    sha256: str

    def __post_init__(self) -> None:
        _numbers(self, "version")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError("sha256 must be 64 hexadecimal digits")


@dataclass(frozen=True, kw_only=True)
class _Assignment:
    base_version: int
    steps: int
    learning_rate: float
    train_budget: float | None = None

    def __post_init__(self) -> None:
        _numbers(self, "base_version", "steps")
        more_than(self, 0, "steps", "learning_rate")
        at_least(self, 0, "train_budget")


@dataclass(frozen=True, kw_only=True)
class _Order:
    sequence: int
    round: int
    wall_seconds: float
    purpose: Purpose
    after: int | None = None
    assignment: _Assignment | None = None
    model: _Model | None = None

    def __post_init__(self) -> None:
        _numbers(self, "sequence", "round", "after")
        more_than(self, 0, "wall_seconds")
        if (self.assignment is None) != (self.model is None):
            raise ValueError("model must come with an assignment, and with nothing else")


@dataclass(frozen=True, kw_only=True)
class _Standing:
    number: int
    next_cutoff_in: float
    version: int
    round_length: float
    steps_per_second: float
    overhead: float
    min_steps: int
    learning_rate: float
    lr_scaling: Scaling = "none"
    least_steps: int | None = None
    patience: float = 0.0
    model: _Model

    def __post_init__(self) -> None:
        _numbers(self, "number", "version", "min_steps", "least_steps")
        more_than(self, 0, "round_length", "steps_per_second", "min_steps", "learning_rate", "least_steps")
        at_least(self, 0, "overhead", "patience")


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    version: int
    model: _Model

    def __post_init__(self) -> None:
        _numbers(self, "version")


@dataclass(frozen=True, kw_only=True)
class _Answer:
    received: int
    orders: list[_Order] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    standing: _Standing | None = None
    evaluate: _Evaluation | None = None
    over: str | None = None

    def __post_init__(self) -> None:
        _numbers(self, "received")
        if len(self.orders) > MOST_ORDERS or len(self.cancel) > MOST_REPORTS:
            raise ValueError(f"orders must be {MOST_ORDERS} at most, and cancel {MOST_REPORTS}")


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    status: Literal["accepted", "rejected", "checking"]
    reason: str | None = None


def checked_answer(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a poll was answered, as plain values."""
    answer = _checked(_Answer, given)
    answer["over"] = _text(answer["over"])
    return answer


def checked_verdict(given: Mapping[str, Any]) -> dict[str, Any]:
    """What became of an update, as plain values."""
    verdict = _checked(_Verdict, given)
    verdict["reason"] = _text(verdict["reason"])
    return verdict


def _checked(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dataclasses.asdict(read(kind, given, "answer"))
    except (ConfigError, TypeError, OverflowError, RecursionError) as error:
        what = one_line(str(error))[:REASON_LENGTH]
        raise CoordinatorUnreachableError(f"the coordinator's answer is none that this agent knows: {what}") from None


def _text(said: str | None) -> str | None:
    return None if said is None else one_line(said)[:REASON_LENGTH]
