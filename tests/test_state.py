"""What is open in a run: the table of a job's phases, and every view of it under repeated and superseded events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedqueue.cli.live import Screen
from fedqueue.config import Config
from fedqueue.metrics import Tally
from fedqueue.page.history import History
from fedqueue.planning.measure import Meter, Worth
from fedqueue.protocol.contract import Order, Receipt
from fedqueue.protocol.messages import (
    CancelJob,
    Command,
    Event,
    JobEnded,
    JobFailed,
    JobRequeued,
    JobStarted,
    JobSubmitted,
    ModelScored,
    SubmitJob,
    SubmitRefused,
    UpdateArrived,
    UpdateRejected,
    WorkTaken,
)
from fedqueue.protocol.state import JOB, PHASES, STAYING, JobState, Outcomes, RunState
from fedqueue.report.jobs import Jobs
from fedqueue.sim.simulation import make_plan, make_strategy
from fedqueue.sim.site import Site
from tests.conftest import STRATEGY_NAMES
from tests.test_strategies import REPEATABLE, configs, run

JOB_EVENTS = (
    JobSubmitted,
    SubmitRefused,
    JobStarted,
    WorkTaken,
    JobRequeued,
    JobEnded,
    JobFailed,
    UpdateArrived,
    UpdateRejected,
)
ATTEMPT = 3  # the newest that is known in these tests


def said(kind: type, job: str, attempt: int, at: float) -> Event:
    """One such event."""
    match kind.__name__:
        case "JobSubmitted":
            return JobSubmitted(at=at, job_id=job, attempt=attempt)
        case "SubmitRefused":
            return SubmitRefused(at=at, job_id=job, reason="full", transient=True)
        case "JobStarted":
            return JobStarted(at=at, job_id=job, attempt=attempt, admission_delay=1.0, ago=0.5)
        case "JobRequeued":
            return JobRequeued(at=at, job_id=job, attempt=attempt, reason="preempted", held_seconds=2.0)
        case "WorkTaken":
            return WorkTaken(at=at, job_id=job, attempt=attempt, part=1, waited=0.5)
        case "JobEnded":
            return JobEnded(at=at, job_id=job, attempt=attempt, steps_done=7, train_seconds=3.0, held_seconds=4.0)
        case "JobFailed":
            return JobFailed(at=at, job_id=job, attempt=attempt, reason="fell", transient=True, held_seconds=4.0)
        case "UpdateRejected":
            return UpdateRejected(at=at, job_id=job, attempt=attempt, reason="not finite")
    receipt = Receipt(job_id=job, attempt=attempt, base_version=0, steps_done=7, train_seconds=3.0, admission_delay=1.0)
    return UpdateArrived(at=at, receipt=receipt)


def job_in(phase: Any, *, cancelled: bool, stays: bool) -> tuple[RunState, JobState]:
    state = RunState(["north"])
    stay = 20.0 if stays else None
    state.wanted(SubmitJob(order=Order(job_id="north/0", facility="north", round=0, wall_seconds=60.0, stay=stay)))
    job = state.facilities["north"].jobs["north/0"]
    job.phase, job.attempt, job.parts = phase, ATTEMPT, 3
    if cancelled:
        state.wanted(CancelJob(job_id="north/0"))
    return state, job


def open_in(state: RunState) -> dict[str, Any]:
    """All that the state says is open; when it heard of something last, and how often, is not."""
    passing = ("views", "at", "events", "job", "work")
    plain = {name: value for name, value in vars(state).items() if name not in passing}
    return {
        **{name: value for name, value in plain.items() if name != "facilities"},
        "facilities": {name: dataclasses.asdict(facility) for name, facility in state.facilities.items()},
    }


@pytest.mark.parametrize("table", [JOB, STAYING], ids=["hands in once", "stays"])
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize(("phase", "kind"), list(product(PHASES, JOB_EVENTS)))
def test_an_event_takes_a_job_where_the_table_says_and_else_changes_nothing(
    phase: str, kind: type, cancelled: bool, table: dict[Any, Any]
) -> None:
    for age, attempt in (("older", ATTEMPT - 1), ("same", ATTEMPT), ("newer", ATTEMPT + 1)):
        if kind is SubmitRefused and age != "same":
            continue  # it names no attempt: the job never was
        state, job = job_in(phase, cancelled=cancelled, stays=table is STAYING)
        told: list[Event | Command] = []
        state.views.append(lambda what, _, told=told: told.append(what))  # type: ignore[misc]
        before = open_in(state)
        event = said(kind, "north/0", attempt, at=5.0)
        effective = state.happened(event)
        assert effective == ((phase, kind, age) in table)
        assert told == ([event] if effective else [])
        if not effective:
            assert open_in(state) == before
            continue
        assert state.job is job
        there = {**state.facilities["north"].jobs, **state.facilities["north"].cancelled}
        after = table[phase, kind, age]
        assert (after is None) == ("north/0" not in there)
        assert job.phase == (after or phase)
        if attempt > ATTEMPT:
            assert job.attempt == attempt


def test_the_table_names_every_event_of_a_job_and_no_other() -> None:
    assert {kind for _, kind, _ in STAYING} == set(JOB_EVENTS) <= set(get_args(Event))
    assert {kind for _, kind, _ in JOB} == set(JOB_EVENTS) - {WorkTaken}


def test_a_job_that_stays_is_over_when_it_has_ended_and_all_its_parts_are_settled() -> None:
    state, job = job_in("running", cancelled=False, stays=True)
    arrived = said(UpdateArrived, "north/0", ATTEMPT, 5.0)
    assert state.happened(arrived)
    assert not state.happened(arrived)
    ended = JobEnded(at=7.0, job_id="north/0", attempt=ATTEMPT, steps_done=0, train_seconds=0.0, parts=2)
    assert state.happened(ended)
    assert list(state.facilities["north"].jobs) == ["north/0"]
    assert state.happened(UpdateRejected(at=8.0, job_id="north/0", attempt=ATTEMPT, part=1, reason="not finite"))
    assert job.is_over
    assert "north/0" not in state.facilities["north"].jobs


def test_an_update_of_a_job_that_stays_counts_though_its_scheduler_took_the_job_back() -> None:
    state, job = job_in("running", cancelled=False, stays=True)
    state.happened(said(JobRequeued, "north/0", ATTEMPT + 1, 5.0))
    assert state.happened(said(UpdateArrived, "north/0", ATTEMPT, 6.0))
    assert (job.phase, job.attempt) == ("queued", ATTEMPT + 1)


class Views:
    """Every view there is, of one state."""

    def __init__(self, config: Config, state: RunState) -> None:
        self._state = state
        self._tally = Tally(state, round_length=10.0, nodes={f.name: 2 for f in config.facility}, targets=[0.3, 0.9])
        self._outcomes = Outcomes(state, "first")
        self._meter = Meter(config, Worth(), state)
        self._jobs = Jobs(state)
        self._history = History(state, self._jobs, {f.name: 2 for f in config.facility})
        self._screen = Screen(config, quiet=True)
        state.views.append(self._screen)

    def seen(self) -> dict[str, Any]:
        """What each shows."""
        lines = {name: dataclasses.replace(line, since=0.0) for name, line in self._screen._lines.items()}
        return {
            "open": open_in(self._state),
            "tally": self._tally.summary(strategy="", seed=1, wall_seconds=0.0),
            "outcomes": vars(self._outcomes),
            "jobs": self._jobs.all(self._state.at),
            "history": self._shown(),
            "screen": (lines, self._screen._model, self._screen._score, self._screen._aggregated),
            "meter": self._meter.outcome(),  # it is asked once
        }

    def _shown(self) -> dict[str, Any]:
        """Of the live page's own view."""
        history = self._history
        history.take_in()
        names = ("scores", "rounds", "has_cutoffs", "waits", "absences", "present_absences", "troubles", "failures")
        return {name: getattr(history, name) for name in (*names, "marks", "names", "seconds", "ended")}


def seen_after(config: Config, events: Sequence[Event]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the views of a strategy's own state show after these events, and those of a state that was told of the same
    events and commands, as a coordinator's is."""
    sites = [Site(i, f, config, config.run.seed) for i, f in enumerate(config.facility)]
    strategy = make_strategy(config, make_plan(config, sites, None))
    served = RunState([f.name for f in config.facility])
    own, others = Views(config, strategy.state), Views(config, served)
    for event in events:
        served(event, strategy.handle(event))
    return own.seen(), others.seen()


def superseded(job: str, attempt: int, at: float, *, stays: bool) -> Iterator[Event]:
    """All that may still come from an attempt that its scheduler took back, and is of no use any more."""
    of_use = (UpdateArrived, UpdateRejected) if stays else ()
    for kind in JOB_EVENTS:
        if kind not in (JobSubmitted, SubmitRefused, *of_use):
            yield said(kind, job, attempt, at)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data(), noise=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_repeated_superseded_and_late_events_change_no_view(strategy: str, data: st.DataObject, noise: Any) -> None:
    config = data.draw(configs(strategy))
    told = [event for event, _ in run(config)[0]]
    noisy: list[Event] = []
    attempts: dict[str, int] = {}
    for event in told[:-1]:
        noisy.append(event)
        if isinstance(event, JobRequeued):
            attempts[event.job_id] = event.attempt
        heard = [e for e in noisy if isinstance(e, (*REPEATABLE, ModelScored))]  # in any order, however old
        for again in noise.sample(heard, min(len(heard), noise.randrange(3))):
            noisy.append(replace(again, at=event.at))
        if attempts and noise.random() < 0.5:
            job = noise.choice(sorted(attempts))
            stays = config.options().stay != "off"
            noisy += superseded(job, noise.randrange(attempts[job]), event.at, stays=stays)
    plain, served = seen_after(config, told)
    assert plain == served
    own, others = seen_after(config, [*noisy, told[-1]])
    for name, shown in plain.items():
        assert own[name] == shown, name
        assert others[name] == shown, name


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(data=st.data(), disorder=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_all_views_agree_after_events_in_any_order(strategy: str, data: st.DataObject, disorder: Any) -> None:
    """Shuffled nearby, doubled and dropped: what is shown differs from what happened, but it is one story."""
    config = data.draw(configs(strategy))
    events = [event for event, _ in run(config)[0] for _ in range(disorder.choice((0, 1, 1, 1, 2)))]
    events = [event for _, event in sorted(enumerate(events), key=lambda pair: pair[0] + disorder.uniform(0, 4))]
    own, others = seen_after(config, events)
    assert own == others
    tally, open_jobs = own["tally"], own["open"]["facilities"].values()
    jobs = tally["jobs"]
    out = sum(len(facility["jobs"]) + len(facility["cancelled"]) for facility in open_jobs)
    assert jobs["submitted"] - jobs["completed"] - jobs["failed"] >= out  # some were cancelled and have failed since
    if config.options().stay == "off":
        assert sum(line.updates for line in own["screen"][0].values()) == jobs["completed"]
    assert len(own["outcomes"]["models"]) == tally["rounds"] + 1 == own["screen"][1] + 1
    assert sum(share.updates for share in own["meter"].shares.values()) == own["screen"][3]
