"""PBS where no recording has it: the adapter and a whole run against a stand-in (tests/pbs.py) whose answers have the
form of the recorded ones."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.schedulers import PbsScheduler, PbsSettings
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.messages import JobFailed, JobStarted, JobSubmitted
from tests.conftest import ONE_A_ROUND
from tests.faults.harness import SOURCE, Run, free_port, tree_of
from tests.faults.test_clocks import shim
from tests.pbs import Job, StandIn, stand_in
from tests.sites import Site
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(20)

CHAIN = {**ONE_A_ROUND, "min_steps": 3, "pipeline": "chain"}
WAIT = 5.0
"""Seconds that a job waits between its two runs."""


@pytest.fixture
def pbs(tmp_path: Path) -> Iterator[StandIn]:
    with stand_in(tmp_path) as made:
        yield made


@pytest.fixture
def site(pbs: StandIn, tmp_path: Path) -> Site:
    def settings(**changes: Any) -> PbsSettings:
        return PbsSettings(bin=str(pbs.bin), **changes)

    return Site("pbs", tmp_path, settings, lambda job_id: call(pbs, "qrerun", job_id), lambda: NotImplemented)


def call(pbs: StandIn, command: str, *arguments: str) -> None:
    subprocess.run([pbs.bin / command, *arguments], check=True, timeout=600)


@contextmanager
def run_of(folder: Path, pbs: StandIn, strategy: str = "jit", rounds: int = 8, **changes: Any) -> Iterator[Run]:
    options = changes.pop("options", CHAIN if strategy == "jit" else {"steps": 5})
    length = {"round_length": 2.0} if strategy == "jit" else {}
    only = [{"name": "only"}]
    tree = tree_of(strategy, rounds=rounds, port=free_port(), options=options, facility=only, run=length)
    scheduler = {"kind": "pbs", "bin": str(pbs.bin), "min_wall_seconds": 600.0, **changes.pop("scheduler", {})}
    environments = changes.pop("environments", {})
    with Run(folder, tree, scheduler=scheduler, **changes) as run:
        for name, environment in environments.items():
            run.actors[name].environment = environment
        run.start()
        yield run


def incarnations(run: Run) -> dict[tuple[str, int], dict[str, Any]]:
    with LedgerReader(run.folder / FILE) as ledger:
        rows = ledger.rows("SELECT * FROM incarnations")
    return {(str(row["job"]), int(row["attempt"])): dict(row) for row in rows}


# Held -----------------------------------------------------------------------------------------------------


def test_a_chained_job_whose_predecessor_was_deleted_while_it_waited_is_replaced(tmp_path: Path, pbs: StandIn) -> None:
    pbs.slots = 1
    wishes = {"odd": {"1": "slow"}, "slow_seconds": 600.0}
    with run_of(tmp_path, pbs, wishes=wishes) as run:
        run.run_until(lambda: run.happened(JobSubmitted, "only/2"), "a job is chained")
        first, second = pbs.of("-1"), pbs.of("-2")
        assert (second.state, second.substate) == ("H", 22)
        pbs.slots = 0
        call(pbs, "qrerun", first.id)
        run.run_until(lambda: first.state == "Q", "its predecessor waits")
        call(pbs, "qdel", first.id)
        run.run_until(lambda: run.happened(JobFailed, "only/2"), "it is given up")
        run.run_until(lambda: second.deleted, "it is deleted")
        pbs.slots = 1
        run.run_to_end()
        (reason,) = (event.reason for event in run.story().events(JobFailed) if event.job_id == "only/2")
        assert f"it comes after {first.id}" in reason


def test_a_job_that_waits_for_its_turn_in_a_chain_is_not_held_for_good(site: Site) -> None:
    first = site.submit("sleep 1")
    second = site.submit("true", after=first)
    seen = []

    def ended() -> bool:
        seen.append(site.scheduler.poll([second])[second])
        return seen[-1].phase == "ended"

    wait_for(ended, "its end", every=0.01)
    assert {(status.never_starts, status.held) for status in seen} == {(None, None)}


@pytest.mark.parametrize(("kind", "who"), [("u", "its owner"), ("o", "an operator"), ("us", "its owner")])
def test_who_holds_a_job_is_told(pbs: StandIn, site: Site, kind: str, who: str) -> None:
    pbs.slots = 0
    job_id = site.submit("true")
    pbs.hold(pbs.of("-0"), kind)
    status = site.scheduler.poll([job_id])[job_id]
    assert status.held is not None
    assert who in status.held
    assert status.never_starts is None
    call(pbs, *status.held.split("`")[1].split())
    pbs.slots = 1
    assert site.wait(job_id, "ended").outcome == "completed"


# When it waits, and when it starts ------------------------------------------------------------------------


def test_the_wait_in_a_routing_queue_counts_and_is_listed(tmp_path: Path, pbs: StandIn) -> None:
    pbs.route_seconds = 3.0
    with run_of(tmp_path, pbs, rounds=1000, scheduler={"queue": "route"}) as run:

        def name_of(job: Job) -> str:
            return f"only/{job.name.rpartition('-')[2]}"

        def a_chained_one_has_started() -> bool:
            told = {name for name, _ in incarnations(run)}
            return any(job_after(job) and name_of(job) in told for job in pbs.jobs.values())

        run.run_until(lambda: len(pbs.jobs) > 0 and pbs.jobs[1].queue == "route", "it is in the routing queue")
        (listed,) = PbsScheduler(PbsSettings(bin=str(pbs.bin))).listing().values()
        assert (listed.started, listed.procs, listed.submitted) == (None, 1, int(pbs.jobs[1].created))
        run.run_until(a_chained_one_has_started, "a chained job starts")
        jobs = {name_of(job): job for job in pbs.jobs.values()}
        for (name, _), row in incarnations(run).items():
            job = jobs[name]
            assert job.started is not None
            since = max([job.created, *(before_of(pbs, job).ended or 0.0 for _ in job_after(job))])
            assert abs(row["admission_delay"] - (job.started - since)) <= 1.1, name
            assert row["admission_delay"] >= 2.0


def job_after(job: Job) -> list[int]:
    """The number of the job that it was submitted to come after, if there is one."""
    return [int(word.partition(":")[2].partition(".")[0]) for word in job.arguments if word.startswith("depend=")]


def before_of(pbs: StandIn, job: Job) -> Job:
    return pbs.jobs[job_after(job)[0]]


def test_a_running_job_without_a_start_yet_is_a_running_job(pbs: StandIn, site: Site) -> None:
    pbs.stime_seconds = 1e6
    job_id = site.submit("sleep 600")
    status = site.wait(job_id, "running")
    assert (status.started_at, status.eligible_at is not None) == (None, True)
    listed = site.scheduler.listing()
    assert listed is not None
    assert job_id in listed
    pbs.stime_seconds = 0.0
    assert site.wait(job_id, "running").started_at == int(pbs.of("-0").started or 0)
    assert site.scheduler.listing()[job_id].started == int(pbs.of("-0").started or 0)  # type: ignore[index]


def test_a_start_that_is_not_known_yet_is_waited_for(tmp_path: Path, pbs: StandIn) -> None:
    """Else the wait of a chained job would be counted from its submission, with all that its predecessor ran."""
    pbs.stime_seconds = 1.0
    wishes = {"train_seconds": 4.0}
    with run_of(tmp_path, pbs, wishes=wishes) as run:
        run.run_to_end()
        chained = [job for job in pbs.jobs.values() if job_after(job) and job.started]
        assert chained
        for job in chained:
            row = incarnations(run).get((f"only/{job.name.rpartition('-')[2]}", 0))
            assert job.started is not None
            waited = job.started - (before_of(pbs, job).ended or 0.0)
            assert row is None or row["admission_delay"] <= waited + 1.1  # PBS says whole seconds


# Broken JSON ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tabs", [True, False], ids=["tabs", "spaces"])
@pytest.mark.parametrize("value", [".5", "nan", "+5", "005", '"a "b" c\\, \\\' d"', '"one\ntwo"', "0x1f", "-", "{", ""])
def test_a_variable_of_one_job_hides_no_job(pbs: StandIn, site: Site, tabs: bool, value: str) -> None:
    pbs.tabs, pbs.slots = tabs, 1
    ids = [site.submit("sleep 600") for _ in range(3)]
    site.wait(ids[0], "running")
    good = site.scheduler.listing()
    assert good is not None
    assert set(good) == set(ids)
    statuses = site.scheduler.poll(ids)
    for job in pbs.jobs.values():
        job.variables = {"FIRST": '"1"', "W": value, "LAST": '"2"'}
        with pytest.raises(ValueError, match=r"Expecting|delimiter|control character"):
            json.loads(pbs.answer(["qstat", "-f", "-F", "json", job.id], "UTC")["stdout"])
    assert site.scheduler.listing() == good
    assert site.scheduler.poll(ids) == statuses


# Again ----------------------------------------------------------------------------------------------------


def stamp(run: Run, attempt: int, name: str) -> float:
    return (run.home("only") / f"jobs/0/attempt-{attempt}" / name).stat().st_mtime


@pytest.mark.parametrize("away_until", ["the end", "the start"])
@pytest.mark.parametrize("participates", [True, False])
def test_a_rerun_between_two_polls_has_its_own_wait_and_its_own_held_time(
    tmp_path: Path, pbs: StandIn, participates: bool, away_until: str
) -> None:
    """PBS forgets when the first run ended once the second has; the stamps that the job's script leaves tell it,
    whatever the script runs. No second is counted twice, and none is lost."""
    pbs.slots = 1
    wishes = {"odd": {"0": "slow"}, "slow_seconds": 600.0}
    wishes["train_seconds"] = 600.0 if away_until == "the start" else 0.1
    changes: dict[str, Any] = {"options": {"steps": 30_000}, "wishes": wishes}
    if not participates:  # it is killed before it could have begun to
        second = "sleep 600" if away_until == "the start" else "exit 1"
        changes["agent"] = {"command": f"[ $FEDQUEUE_ATTEMPT = 0 ] && sleep 600; {second}"}
    with run_of(tmp_path, pbs, "fedavg", rounds=1, **changes) as run:
        run.run_until(lambda: run.happened(JobStarted, "only/0"), "it runs")
        run.stop("only")
        job = pbs.of("-0")
        first = job.started or 0.0
        pbs.slots = 0
        call(pbs, "qrerun", job.id)
        wait_for(lambda: job.state == "Q", "the end of its first run")
        interrupted = job.ended or 0.0
        unsigned = interrupted - stamp(run, 0, "alive")  # long on a slow machine; the wait must stand out from it
        wait_for(lambda: time.time() > interrupted + max(WAIT, 3 * unsigned), "it waits again")
        pbs.slots = 1
        reached = "F" if away_until == "the end" else "R"
        wait_for(lambda: job.state == reached, f"{away_until} of its second run")
        again = job.started or 0.0
        wait_for((run.home("only") / "jobs/0/attempt-1/started").exists, "its script runs")
        wait_for(lambda: time.time() > again + 4.0, "the agent is away for a while longer")
        run.start("only")
        run.run_until(lambda: ("only/0", 1) in incarnations(run), "its second start")
        if away_until == "the start":
            call(pbs, "qdel", job.id)
        run.run_until(lambda: incarnations(run)["only/0", 1]["held_seconds"] is not None, "its second end")
        rows = incarnations(run)
        # PBS says whole seconds, and a script begins a little later than its job: by so much its figures may differ.
        late, late_again = stamp(run, 0, "started") - first, stamp(run, 1, "started") - again
        near = 1.1 + late + late_again + unsigned
        held, waited = rows["only/0", 0]["held_seconds"], rows["only/0", 1]["admission_delay"]
        assert abs(held - (interrupted - first)) <= near
        assert abs(waited - (again - interrupted)) <= near
        ended = job.ended or 0.0
        said = ended - stamp(run, 1, "result.json") if participates and away_until == "the end" else 0.0
        assert abs(rows["only/0", 1]["held_seconds"] - (ended - again)) <= 1.1 + late_again + said


def test_the_held_time_of_a_failed_run_ends_with_it_however_late_the_agent_looks(tmp_path: Path, pbs: StandIn) -> None:
    with run_of(tmp_path, pbs, "fedavg", rounds=1, agent={"command": "sleep 2; exit 1"}) as run:
        run.run_until(lambda: run.happened(JobStarted, "only/0"), "it runs")
        run.stop("only")
        job = pbs.of("-0")
        wait_for(lambda: job.state == "F", "its end")
        held = (job.ended or 0.0) - (job.started or 0.0)
        wait_for(lambda: time.time() > (job.ended or 0.0) + 4.0, "the agent is away for a while longer")
        run.start("only")
        run.run_until(lambda: run.happened(JobFailed, "only/0"), "its failure")
        (failed,) = (event for event in run.story().events(JobFailed) if event.job_id == "only/0")
        assert abs(failed.held_seconds - held) <= 1.1  # PBS says whole seconds


# Forecasts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [0.0, 600.0, -600.0])
def test_forecasts_by_the_scheduler_learn_from_the_plan_of_the_very_job(
    tmp_path: Path, pbs: StandIn, fast: float
) -> None:
    """PBS plans jobs that it has, so there is no estimate before a submission. By so many seconds the agent's clock is
    fast; what PBS says it compares with what PBS says."""
    pbs.plan_seconds, pbs.slots = 500.0, 0
    agent = {"forecast": "scheduler", "forecast_seconds": 0.2}
    off = {"PYTHONPATH": f"{shim(tmp_path / 'shim', fast)}:{SOURCE}"} if fast else {}
    with run_of(tmp_path, pbs, "fedavg", rounds=3, agent=agent, environments={"only": off}) as run:
        kept = run.home("only") / "forecasts.json"
        for number in range(3):
            run.run_until(lambda number=number: len(pbs.jobs) > number, "it is submitted")  # type: ignore[misc]
            if number > 0:  # the first is there to measure the speed, and is not forecast
                run.run_until(lambda number=number: planned(kept, number) is not None, "its plan is on file")  # type: ignore[misc]
                assert abs((planned(kept, number) or 0.0) - 500.0) <= 1.1, "from its submission to its planned start"
            job = pbs.jobs[number + 1]
            pbs.slots = 1
            run.run_until(lambda job=job: job.started is not None, "it starts")  # type: ignore[misc]
            pbs.slots = 0
        run.run_to_end()
        assert len(pairs(kept)) == 2
        assert all(abs(estimate - 500.0) <= 1.1 for estimate, _ in pairs(kept))


def pairs(path: Path) -> list[tuple[float, float]]:
    return [(estimate, wait) for estimate, wait in json.loads(path.read_text())["pairs"]]


def planned(path: Path, job: int) -> float | None:
    """What PBS is known to plan for a job that waits."""
    if not path.exists():
        return None
    found = json.loads(path.read_text())["open"].get(str(job))
    return None if found is None else found[1]
