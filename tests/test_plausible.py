"""What a facility says of itself is bounded by what the coordinator saw: a server at work, and lies of every size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedqueue.ledger import LedgerReader
from fedqueue.protocol.contract import Assignment, Order, Receipt
from fedqueue.protocol.messages import JobEnded, JobStarted, UpdateArrived
from fedqueue.protocol.pace import APART, STEPS, TURNAROUNDS, shortest_round
from fedqueue.protocol.reports import AHEAD, plausible
from fedqueue.protocol.state import JobState
from tests.coordinators import serving, started, update

HUGE = st.floats(0, 3e7)


def job_at(ordered_at: float) -> JobState:
    order = Order(job_id="a/0", facility="a", round=0, wall_seconds=60.0)
    return JobState(order, ordered_at, assignment=Assignment(base_version=0, steps=50, learning_rate=0.1))


@given(age=st.floats(0, 1e5), delay=HUGE, ago=HUGE, lingered=HUGE, train=HUGE, steps=st.integers(0, 2**53))
def test_no_duration_is_longer_than_the_order_is_old_and_no_job_does_more_than_it_was_given(
    age: float, delay: float, ago: float, lingered: float, train: float, steps: int
) -> None:
    job, at = job_at(10.0), 10.0 + age
    told = plausible(JobStarted(at=at, job_id="a/0", attempt=0, admission_delay=delay, ago=ago, lingered=lingered), job)
    assert isinstance(told, JobStarted)
    assert told.admission_delay + told.ago + told.lingered <= (at - 10.0) * (1 + 1e-9)
    ended = plausible(
        JobEnded(at=at, job_id="a/0", attempt=0, steps_done=steps, train_seconds=train, held_seconds=train, parts=9),
        job,
    )
    assert isinstance(ended, JobEnded)
    assert max(ended.train_seconds, ended.held_seconds) <= at - 10.0
    assert ended.steps_done <= 50 + AHEAD * 100
    assert ended.parts == 1
    receipt = Receipt(
        job_id="a/0", attempt=0, base_version=0, steps_done=steps, train_seconds=train, admission_delay=delay,
        samples=steps, nodes=2**40,
    )  # fmt: skip
    arrived = plausible(UpdateArrived(at=at, receipt=receipt), job)
    assert isinstance(arrived, UpdateArrived)
    assert arrived.receipt.train_seconds <= at - 10.0
    assert arrived.receipt.samples <= arrived.receipt.steps_done << 20
    assert arrived.receipt.nodes <= 100_000


def test_what_happened_while_the_run_clock_stood_still_is_believed() -> None:
    job = job_at(10.0)
    job.clock_stood = True
    event = JobStarted(at=11.0, job_id="a/0", attempt=0, admission_delay=3600.0, ago=5.0)
    assert plausible(event, job) == event


@given(st.floats(0.01, 1e3), st.floats(0.01, 1e9))
def test_of_two_facilities_neither_can_make_rounds_as_long_as_it_likes(honest: float, lie: float) -> None:
    assert shortest_round([honest, lie], [honest, lie]) <= APART * max(STEPS, TURNAROUNDS) * honest * (1 + 1e-9)


def test_absurd_numbers_of_a_facility_are_bounded_on_a_server_at_work(tmp_path: Path) -> None:
    with serving(tmp_path, facilities=("north",), plain=True, round_length=2.0, options={"rounds": "auto"}) as served:
        north = served.facility("north")
        north.poll(poll_seconds=3600.0)
        year = 366 * 86400.0
        order = north.order()
        north.poll(started(order.sequence, admission_delay=year, lingered=year))
        path = north.put(order, update(tmp_path))
        lies = {"train_seconds": year, "admission_delay": year, "steps_done": 2**40, "samples": 2**50, "nodes": 2**40}
        assert north.commit(path, 0, **lies)["status"] == "accepted"
        north.poll({
            "kind": "foreseen", "mean": year, "levels": [0.5, 0.9], "seconds": [year, year], "source": "made up",
        })  # fmt: skip
        with LedgerReader(served.folder / "ledger.sqlite") as ledger:
            events: dict[str, dict[str, Any]] = {
                row["kind"]: json.loads(row["body"])
                for row in ledger.rows("SELECT kind, body FROM events ORDER BY seq")
            }
        seen = events["ForecastIssued"]["at"]
        assert events["JobStarted"]["admission_delay"] + events["JobStarted"]["lingered"] <= seen
        receipt = events["UpdateArrived"]["receipt"]
        assert max(receipt["train_seconds"], receipt["admission_delay"]) <= seen
        assert receipt["steps_done"] <= 10 + AHEAD * 100
        assert receipt["samples"] <= receipt["steps_done"] << 20
        assert events["ForecastIssued"]["mean"] <= 10 * max(seen, 2.0) * 2
        assert served.replays() > 0
