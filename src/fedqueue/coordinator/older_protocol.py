"""An answer in the words of protocols 1 and 2 (FedQueue 0.1): their agents know jobs by number, and take no key that
they do not know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from fedqueue.protocol.codec import inline, later, message
from fedqueue.protocol.contract import (
    Answer,
    EvaluationRequest,
    JobOrder,
    ModelFile,
    PostedWork,
    Purpose,
    Scaling,
    sequence_of,
)

T = TypeVar("T")


@message
class OldAssignment:
    base_version: int
    steps: int
    learning_rate: float
    train_budget: float | None


@message
class OldOrder:
    sequence: int
    round: int
    wall_seconds: float
    purpose: Purpose
    after: int | None
    assignment: OldAssignment | None
    model: ModelFile | None


@message
class OldStanding:
    version: int
    next_cutoff_in: float
    round_length: float
    steps_per_second: float
    overhead: float
    min_steps: int
    learning_rate: float
    lr_scaling: Scaling
    least_steps: int | None
    patience: float


@message
class OldPostedWork:
    number: int
    model: ModelFile
    standing: OldStanding = inline()


@message
class OldAnswer:
    received: int
    orders: list[OldOrder]
    cancel: list[int]
    standing: OldPostedWork | None
    evaluate: EvaluationRequest | None
    over: str | None
    run: str = later(default="")


def in_older_words(answer: Answer) -> OldAnswer:
    standing = None if answer.standing is None else _posted(answer.standing)
    orders = [_order(order) for order in answer.orders]
    return _from(OldAnswer, [answer], orders=orders, standing=standing)


def _order(order: JobOrder) -> OldOrder:
    work, after = order.assignment, order.order.after
    return _from(
        OldOrder,
        [order, order.order],
        after=None if after is None else sequence_of(after),
        assignment=None if work is None else _from(OldAssignment, [work]),
    )


def _posted(posted: PostedWork) -> OldPostedWork:
    standing = _from(OldStanding, [posted.standing], next_cutoff_in=posted.standing.next_cutoff)
    return OldPostedWork(number=posted.number, model=posted.model, standing=standing)


def _from(kind: type[T], parts: Iterable[object], **changed: Any) -> T:
    """Its fields have the names of those of the parts, but for those that are changed."""
    names = [field.name for field in fields(kind) if field.name not in changed]  # type: ignore[arg-type]
    found = {name: getattr(part, name) for name in names for part in parts if hasattr(part, name)}
    return kind(**found, **changed)
