"""Parts of an agent by themselves, with a coordinator that a test speaks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.agent_state import AtScheduler, Closed, Notes, Ordered, Received
from fedqueue.agent.delivery import Delivery
from fedqueue.agent.evaluation import Evaluation
from fedqueue.agent.model_cache import ModelCache
from fedqueue.agent.schedulers import LocalSettings, SubmitRefusedError, make_scheduler
from fedqueue.agent.settings import AgentConfig, AgentSettings
from fedqueue.agent.station import Station
from fedqueue.agent.transport import CoordinatorRefusedError, CoordinatorUnreachableError
from fedqueue.files import write_json
from fedqueue.protocol.contract import Assignment, EvaluationRequest, JobOrder, ModelFile, Order, Verdict
from fedqueue.protocol.reports import Ended, Started
from tests.slurm import wait_for


class Coordinator:
    """What a client asks, and what it is answered."""

    def __init__(self) -> None:
        self.upload: Callable[..., None] = lambda *_: None
        self.commit: Callable[..., Verdict] = lambda *_: Verdict(status="accepted")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def station(tmp_path: Path, said: list[str]) -> Iterator[Station]:
    settings = AgentSettings(
        home=str(tmp_path), command="true", evaluate_command="sleep 600", poll_seconds=0.01, node_hours=1.2
    )
    config, notes = AgentConfig(agent=settings, scheduler=LocalSettings()), Notes(tmp_path)
    yield Station(config, tmp_path, "north", make_scheduler(config.scheduler, tmp_path), notes, said.append)
    notes.close()


def ended_job(station: Station) -> None:
    """Job 0 has run, and its update waits to be handed in."""
    notes = station.notes
    order = Order(job_id="north/0", facility="north", round=0, wall_seconds=3600.0)
    work = Assignment(base_version=0, steps=1, learning_rate=0.1)
    job = JobOrder(order=order, assignment=work, model=ModelFile(version=0, sha256="b" * 64))
    notes.note(Ordered(name="fq-0", at=time.time(), job=job), AtScheduler(sequence=0, id="1", at=time.time()))
    notes.note(notes.report(Started, sequence=0, attempt=0, admission_delay=0.5, ago=0.0))
    notes.note(notes.report(Ended, sequence=0, attempt=0, steps_done=1, train_seconds=1.0, held_seconds=1.0))
    notes.note(Received(n=2))
    folder = station.folder(station.memory.works[0])
    folder.attempt(0).mkdir(parents=True)
    folder.update(0).write_bytes(b"bytes")
    result = {"base_version": 0, "steps_done": 1, "train_seconds": 1.0, "metrics": {}, "bytes": 5, "sha256": "a" * 64}
    times = {"began_at": 1.0, "finished_at": 2.0, "stopped_by": "steps"}
    write_json(folder.attempt(0) / "result.json", {**result, **times})


def turn_until(delivery: Delivery, true: Callable[[], bool]) -> None:
    def turned() -> bool:
        delivery.turn()
        return true()

    wait_for(turned, 10.0, "what comes of a hand-in", every=0.01)


def test_a_verdict_that_was_lost_on_its_way_is_asked_for_again(station: Station, said: list[str]) -> None:
    """The coordinator was killed when it had settled the update: the job is closed, and the bytes are not wanted."""
    coordinator = Coordinator()
    delivery = Delivery(station, coordinator)  # type: ignore[arg-type]
    ended_job(station)
    work = station.memory.works[0]

    def lost(*_: Any) -> Verdict:
        raise CoordinatorUnreachableError("cut")

    coordinator.commit = lost
    turn_until(delivery, lambda: bool(said))
    assert delivery.unanswered(work), "told to cancel the job, the agent waits for the verdict"

    def closed(*_: Any) -> None:
        raise CoordinatorRefusedError("url: job 0 is not open", "job 0 is not open", "superseded")

    coordinator.upload = closed
    coordinator.commit = lambda *_: Verdict(status="rejected", reason="not finite")
    turn_until(delivery, lambda: work.settled)
    delivery.close()
    assert said[-1] == "the update of job 0 (1) was rejected: not finite"


def test_scoring_keeps_to_the_cap_of_node_hours(station: Station, said: list[str], tmp_path: Path) -> None:
    """A job that scores asks for half an hour, the job under way for one, and the cap is 1.2."""
    model_cache = ModelCache(tmp_path, Coordinator(), station.clock, lambda *_: None)  # type: ignore[arg-type]
    evaluation = Evaluation(station, model_cache, None)
    model = ModelFile(version=3, sha256="a" * 64)
    model_cache.path(model).write_bytes(b"bytes")
    ended_job(station)
    evaluation.want(EvaluationRequest(version=3, model=model))
    for _ in range(2):
        evaluation.turn()
    assert said == ["models cannot be scored now: 0.00 of 1.2 node-hours are used, and jobs under way may use the rest"]
    assert station.scheduler.find(f"fq-{station.memory.journal_id[:8]}-eval-3") is None
    station.notes.note(station.closing(station.memory.works[0], 60.0))
    evaluation.turn()
    assert station.scheduler.find(f"fq-{station.memory.journal_id[:8]}-eval-3") is not None
    with pytest.raises(SubmitRefusedError, match="jobs under way may use the rest"):
        station.check_cap(3600.0)  # of a job that trains, while the other scores
    evaluation.stop()
    model_cache.close()


def test_scoring_ends_where_the_node_hours_are_used_up(station: Station, said: list[str], tmp_path: Path) -> None:
    model_cache = ModelCache(tmp_path, Coordinator(), station.clock, lambda *_: None)  # type: ignore[arg-type]
    evaluation = Evaluation(station, model_cache, None)
    model = ModelFile(version=3, sha256="a" * 64)
    model_cache.path(model).write_bytes(b"bytes")
    station.notes.note(Closed(node_seconds=4000.0))
    evaluation.want(EvaluationRequest(version=3, model=model))
    for _ in range(2):
        evaluation.turn()
    model_cache.close()
    assert len(said) == 1
    assert "model 3 cannot be scored: 1.11 of 1.2 node-hours are used: the facility's cap" in said[0]
