"""Parts of an agent by themselves, with a coordinator that a test speaks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from fedqueue.agent.evaluation import Evaluation
from fedqueue.agent.jobs import Jobs
from fedqueue.agent.journal import Closed, Notes, Received, SiteJob
from fedqueue.agent.masking import Masking
from fedqueue.agent.schedulers import LocalSettings, SubmitRefusedError, make_scheduler
from fedqueue.agent.settings import AgentConfig, AgentSettings
from fedqueue.agent.transfers import Delivery, ModelCache
from fedqueue.agent.transport import CoordinatorRefusedError, CoordinatorUnreachableError
from fedqueue.files import write_json
from fedqueue.protocol.cap import CapLeft
from fedqueue.protocol.contract import Assignment, EvaluationRequest, JobOrder, ModelFile, Order, Verdict
from fedqueue.protocol.reports import Ended, Started
from tests.waiting import wait_for


class Coordinator:
    """What a client asks, and what it is answered."""

    def __init__(self) -> None:
        self.upload: Callable[..., None] = lambda *_: None
        self.commit: Callable[..., Verdict] = lambda *_: Verdict(status="accepted")


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    settings = AgentSettings(
        home=str(tmp_path), command="true", evaluate_command="sleep 600", poll_seconds=0.01, node_hours=1.2
    )
    config, notes = AgentConfig(agent=settings, scheduler=LocalSettings()), Notes(tmp_path)
    yield Jobs(config, tmp_path, "north", make_scheduler(config.scheduler, tmp_path), notes)
    notes.close()


def ended_job(jobs: Jobs) -> None:
    """Job 0 has run, and its update waits to be handed in."""
    notes = jobs.notes
    order = Order(job_id="north/0", facility="north", round=0, wall_seconds=3600.0)
    work = Assignment(base_version=0, steps=1, learning_rate=0.1)
    job = JobOrder(order=order, assignment=work, model=ModelFile(version=0, sha256="b" * 64))
    notes.note(SiteJob(name="fq-0", ordered_at=time.time(), job=job, scheduler_id="1", submitted_at=time.time()))
    notes.note(notes.report(Started, sequence=0, attempt=0, admission_delay=0.5, ago=0.0))
    notes.note(notes.report(Ended, sequence=0, attempt=0, steps_done=1, train_seconds=1.0, held_seconds=1.0))
    notes.note(Received(n=2))
    folder = jobs.folder(jobs.memory.works[0])
    folder.attempt(0).mkdir(parents=True)
    folder.update(0).write_bytes(b"bytes")
    result = {"base_version": 0, "steps_done": 1, "train_seconds": 1.0, "metrics": {}, "bytes": 5, "sha256": "a" * 64}
    times = {"began_at": 1.0, "finished_at": 2.0, "stopped_by": "steps"}
    write_json(folder.attempt(0) / "result.json", {**result, **times})


def turn_until(delivery: Delivery, true: Callable[[], bool]) -> None:
    def turned() -> bool:
        delivery.turn()
        return true()

    wait_for(turned, "what comes of a hand-in", every=0.01)


def test_a_verdict_that_was_lost_on_its_way_is_asked_for_again(jobs: Jobs, said: list[str]) -> None:
    """The coordinator was killed when it had settled the update: the job is closed, and the bytes are not wanted."""
    coordinator = Coordinator()
    delivery = Delivery(jobs, coordinator, Masking(jobs, coordinator, cast(Any, None)))  # type: ignore[arg-type]
    ended_job(jobs)
    work = jobs.memory.works[0]

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


def test_scoring_keeps_to_the_cap_of_node_hours(jobs: Jobs, said: list[str]) -> None:
    """A job that scores asks for half an hour, the job under way for one, and the cap is 1.2."""
    model_cache = ModelCache(jobs, Coordinator())  # type: ignore[arg-type]
    evaluation = Evaluation(jobs, model_cache)
    model = ModelFile(version=3, sha256="a" * 64)
    model_cache.path(model).write_bytes(b"bytes")
    ended_job(jobs)
    evaluation.wanted = EvaluationRequest(version=3, model=model)
    for _ in range(2):
        evaluation.turn()
    assert said == ["models cannot be scored now: 0.00 of 1.2 node-hours are used, and jobs under way may use the rest"]
    assert jobs.scheduler.find(f"fq-{jobs.memory.journal_id[:8]}-eval-3") is None
    jobs.notes.note(jobs.closing(jobs.memory.works[0], 60.0))
    evaluation.turn()
    assert jobs.scheduler.find(f"fq-{jobs.memory.journal_id[:8]}-eval-3") is not None
    with pytest.raises(SubmitRefusedError, match="jobs under way may use the rest"):
        jobs.check_cap(3600.0)  # of a job that trains, while the other scores
    evaluation.stop()
    model_cache.close()


def test_a_job_that_is_too_long_for_the_cap_may_come_again_as_a_shorter_one(jobs: Jobs) -> None:
    """1.2 node-hours are 4320 s, and one job is under way, which asked for 3600."""
    ended_job(jobs)
    assert jobs.cap_left() == CapLeft(seconds=720.0, when_idle=4320.0)
    with pytest.raises(SubmitRefusedError, match="jobs under way may use the rest") as refused:
        jobs.check_cap(1000.0, 60.0)
    jobs.notes.note(jobs.closing(jobs.memory.works[0], 4000.0))
    assert jobs.cap_left() == CapLeft(seconds=320.0, when_idle=320.0)
    jobs.check_cap(320.0, 60.0)
    with pytest.raises(SubmitRefusedError, match="too little for a job of 1000 s") as refused:
        jobs.check_cap(1000.0, 60.0)
    assert refused.value.transient
    with pytest.raises(SubmitRefusedError, match="the facility's cap") as refused:
        jobs.check_cap(1000.0, 600.0)
    assert not refused.value.transient


def test_scoring_ends_where_the_node_hours_are_used_up(jobs: Jobs, said: list[str]) -> None:
    model_cache = ModelCache(jobs, Coordinator())  # type: ignore[arg-type]
    evaluation = Evaluation(jobs, model_cache)
    model = ModelFile(version=3, sha256="a" * 64)
    model_cache.path(model).write_bytes(b"bytes")
    jobs.notes.note(Closed(node_seconds=4000.0))
    evaluation.wanted = EvaluationRequest(version=3, model=model)
    for _ in range(2):
        evaluation.turn()
    model_cache.close()
    assert len(said) == 1
    assert "model 3 cannot be scored: 1.11 of 1.2 node-hours are used: the facility's cap" in said[0]
