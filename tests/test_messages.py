"""Messages are checked when made, and survive a trip through JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any, get_args

import pytest

from fedqueue.errors import ProtocolError
from fedqueue.protocol.codec import encode
from fedqueue.protocol.contract import Assignment, Order, Receipt, facility_of, job_id, sequence_of
from fedqueue.protocol.messages import Command, Event, ForecastIssued, JobStarted, Share, TimerFired, parse
from tests.conftest import STRATEGY_NAMES, config_of, trace_of


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_every_message_of_a_run_survives_json(strategy: str) -> None:
    faults = [{"kind": "preempt", "probability": 0.2}, {"kind": "corrupt", "probability": 0.1}]
    messages: list[Event | Command] = []
    for event, commands in trace_of(config_of(strategy, faults=faults)):
        messages += [event, *commands]
    for message in messages:
        assert parse(type(message).__name__, json.loads(encode(message))) == message


def test_forecast_with_its_quantiles_survives_json() -> None:
    issued = ForecastIssued(at=1.0, facility="east", mean=2.0, quantiles=((0.5, 1.0), (0.9, 4.0)), source="boosting")
    assert parse("ForecastIssued", json.loads(encode(issued))) == issued


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TimerFired(at=float("nan"), key="x"), "at"),
        (lambda: TimerFired(at=-1.0, key="x"), "at"),
        (lambda: JobStarted(at=1.0, job_id="a/0", attempt=-1, admission_delay=0.0), "attempt"),
        (lambda: JobStarted(at=1.0, job_id="a/0", attempt=0, admission_delay=float("inf")), "admission_delay"),
        (lambda: Order(job_id="a/0", facility="a", round=0, wall_seconds=0.0), "wall_seconds"),
        (lambda: Assignment(base_version=0, steps=0, learning_rate=0.1), "steps"),
        (lambda: Assignment(base_version=0, steps=1, learning_rate=float("nan")), "learning_rate"),
        (lambda: Share(job_id="a/0", attempt=0, weight=-0.1), "weight"),
        (
            lambda: Receipt(
                job_id="a/0", attempt=0, base_version=-1, steps_done=0, train_seconds=0.0, admission_delay=0.0
            ),
            "base_version",
        ),
    ],
)
def test_message_that_makes_no_sense_cannot_be_made(make: object, field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"\.{field} must be"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("kind", [*get_args(Event), *get_args(Command), Order, Assignment, Receipt, Share])
def test_messages_are_frozen_and_keyword_only_and_have_their_defaults(kind: Any) -> None:
    fields = dataclasses.fields(kind)
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == [field.name for field in fields]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    for field in fields:
        if field.default_factory is dataclasses.MISSING:
            known = field.default if field.default is not dataclasses.MISSING else inspect.Parameter.empty
            assert parameters[field.name].default is known
    made = kind.__new__(kind)
    for name in ("at", *(field.name for field in fields)):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(made, name, 1)


def test_job_id_is_facility_and_sequence_even_with_odd_names() -> None:
    assert facility_of(job_id("a.b-c", 12)) == "a.b-c"
    assert sequence_of(job_id("a.b-c", 12)) == 12


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown message kind"):
        parse("JobTeleported", {})
