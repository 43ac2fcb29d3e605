"""What a facility says of its own queue: from its scheduler's estimates, from the queue itself, to the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent import live_forecast as foreseeing
from fedqueue.agent.jobs import Jobs
from fedqueue.agent.journal import Closed, Notes, SiteJob
from fedqueue.agent.live_forecast import LiveForecast
from fedqueue.agent.schedulers import SchedulerUnreachableError
from fedqueue.agent.settings import AgentConfig, AgentSettings
from fedqueue.files import FileClock
from fedqueue.forecasting.state import Listed
from fedqueue.history.trace import write_log
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.contract import JobOrder, Order
from fedqueue.protocol.messages import ForecastIssued
from fedqueue.protocol.reports import ForecastMade, Started, event_of
from tests.coordinators import Served, refusal, serving
from tests.test_forecasting import one_server

WALL = 600.0


class Oracle:
    """A scheduler that says what a test wants it to say."""

    kind = "oracle"

    def __init__(self) -> None:
        self.says: float | None = 100.0
        self.queue: Mapping[str, Listed] | None = None
        self.reachable = True
        self.asked = 0

    def estimate(self, wall_seconds: float) -> float | None:
        self.asked += 1
        if not self.reachable:
            raise SchedulerUnreachableError("it sleeps")
        return self.says

    def planned(self, job_id: str) -> float | None:
        return self.estimate(0.0)

    def listing(self) -> Mapping[str, Listed] | None:
        return self.queue


class Clock(FileClock):
    """The file system's clock as a test sets it."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def now(self) -> float:
        return self._home.now


class Home:
    """An agent's home, and what its journal says of jobs."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.scheduler = Oracle()
        self.now = 1000.0
        self._settings = AgentSettings(home="home", command="true", forecast_seconds=1e-9, **settings)
        self._clock = Clock(self)
        self.visit()

    def visit(self) -> None:
        """A new process of the agent."""
        scheduler: Any = self.scheduler
        self.close()
        self.notes = Notes(self.path, self._clock)
        jobs = Jobs(AgentConfig(agent=self._settings), self.path, "north", scheduler, self.notes)
        self.foreseeing = LiveForecast.of(jobs)

    def close(self) -> None:
        if hasattr(self, "notes"):
            self.notes.close()

    def turn(self) -> None:
        assert self.foreseeing is not None
        self.foreseeing.turn()

    def order(self, sequence: int) -> None:
        order = Order(job_id=f"north/{sequence}", facility="north", round=0, wall_seconds=WALL)
        work = SiteJob(name=f"fq-{sequence}", ordered_at=self.now, job=JobOrder(order=order))
        self.notes.note(work)
        self.turn()  # it looks at the queue before the job is there
        self.notes.note(replace(work, scheduler_id=str(sequence), submitted_at=self.now))
        self.turn()

    def start(self, sequence: int, wait: float) -> None:
        self.now += wait
        self.notes.note(self.notes.report(Started, sequence=sequence, attempt=0, admission_delay=wait, ago=0.0))
        self.turn()
        self.notes.note(Closed(sequence=sequence))
        self.turn()

    def foreseen(self) -> list[ForecastMade]:
        reports = (found.report for found in self.notes.memory.reports.values())
        return [report for report in reports if isinstance(report, ForecastMade)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Callable[..., Home]]:
    homes: list[Home] = []

    def make(**settings: Any) -> Home:
        path = tmp_path / f"home-{len(homes)}"
        path.mkdir()
        homes.append(Home(path, **settings))
        return homes[-1]

    yield make
    for one in homes:
        one.close()


def test_scheduler_that_is_wrong_by_a_factor_is_corrected_and_remembered(home: Callable[..., Home]) -> None:
    north = home(forecast="scheduler")
    for sequence in range(40):
        north.order(sequence)
        north.start(sequence, wait=10.0)  # it says 100 s
        if sequence == 30:
            north.visit()
    north.scheduler.says = 1000.0
    north.order(40)
    newest = north.foreseen()[-1]
    assert newest.source == "scheduler"
    assert 90.0 < dict(zip(newest.levels, newest.seconds, strict=True))[0.5] < 130.0
    assert newest.seconds == sorted(newest.seconds)
    event = event_of(newest, "north", 5.0, {})
    assert isinstance(event, ForecastIssued)
    assert event.mean == newest.mean


def test_without_an_estimate_own_waits_count_and_little_changes_are_not_sent(home: Callable[..., Home]) -> None:
    north = home(forecast="scheduler")
    north.scheduler.says = None
    for sequence in range(30):
        north.order(sequence)
        north.start(sequence, wait=50.0)
    assert 45.0 < north.foreseen()[-1].mean < 55.0
    assert len(north.foreseen()) < 10


def test_no_forecast_when_off_and_trouble_costs_nothing_else(home: Callable[..., Home], said: list[str]) -> None:
    assert home().foreseeing is None
    north = home(forecast="scheduler")
    (north.path / foreseeing.FILE).write_text("{torn")
    north.scheduler.reachable = False
    north.order(1)
    north.start(1, wait=10.0)
    assert north.foreseen() == []
    assert said == ["forecasts.json in the agent's home cannot be read: forecasts begin anew"]
    boosted = home(forecast="boosting")
    boosted.order(2)
    assert said[-1] == "no forecast: oracle does not list its queue; set agent.forecast to off"


def test_boosting_learns_from_a_log_and_goes_on_with_listings(
    tmp_path: Path, home: Callable[..., Home], said: list[str]
) -> None:
    log = one_server(600)
    procs = int(log.procs[-1])
    write_log(log, tmp_path / "past.csv")
    north = home(forecast="boosting", forecast_history=str(tmp_path / "past.csv"))
    north.now = float(log.submit[-1]) + (log.epoch or 0.0) + 10.0
    waiting = {f"x{n}": Listed(submitted=north.now - n, procs=procs, requested=WALL) for n in range(5)}
    north.scheduler.queue = waiting
    north.order(0)
    north.scheduler.queue = {**waiting, "0": Listed(submitted=north.now, procs=1, requested=WALL)}
    north.start(0, wait=30.0)
    assert north.foreseen(), said
    newest = north.foreseen()[-1]
    assert newest.source == "boosting"
    assert newest.seconds == sorted(newest.seconds)
    assert newest.mean > 0.0


# At the coordinator -------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, strategy="fedqueue") as found:
        yield found


def test_forecast_of_a_facility_is_what_its_next_order_expects(served: Served) -> None:
    north = served.facility("north")
    foreseen = {
        "kind": "foreseen",
        "mean": 123.0,
        "levels": [0.5, 0.9],
        "seconds": [100.0, 300.0],
        "source": "scheduler",
    }
    for bad in ({"levels": [0.9, 0.5]}, {"seconds": [300.0, 100.0]}, {"levels": [0.5]}, {"mean": -1.0}):
        assert refusal(north.poll, {**foreseen, **bad}).status == 422
    north.poll(foreseen)
    north.order()
    north.order()  # the one before has failed
    with LedgerReader(served.folder / FILE) as ledger:
        (issued,) = ledger.rows("SELECT body FROM events WHERE kind = 'ForecastIssued'")
        assert '"scheduler"' in issued["body"]
        query = "SELECT json_extract(body, '$.order.expected_delay') AS expected FROM commands WHERE kind = 'SubmitJob'"
        assert 123.0 in [row["expected"] for row in ledger.rows(query)]
