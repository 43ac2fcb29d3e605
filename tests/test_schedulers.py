"""One contract for all schedulers: the local one, real Slurm, real Grid Engine. PBS: see test_pbs_recordings.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from fedqueue.agent.schedulers import (
    JobRequest,
    JobStatus,
    SchedulerUnreachableError,
    SlurmScheduler,
    SlurmSettings,
    SubmitRefusedError,
)
from tests.gridengine import GridEngine, grid_engine
from tests.sites import Site, local_site
from tests.slurm import Cluster, clusters
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(100)

UNKNOWN_ID = "987654"


@pytest.fixture(scope="session")
def slurm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster, str, Path]]:
    """Two clusters, and a job at the second that runs into its limit: Slurm takes more than a minute to see it."""
    with clusters(2) as (east, west):
        folder = tmp_path_factory.mktemp("limit")
        script = folder / "job.sh"
        script.write_text("#!/bin/bash\nexec sleep 600\n")
        request = JobRequest(name="limit", script=script, folder=folder, wall_seconds=5.0)
        yield east, west, SlurmScheduler(west.settings()).submit(request), folder


@pytest.fixture(scope="session")
def engine() -> Iterator[GridEngine]:
    with grid_engine() as started:
        yield started


@pytest.fixture(params=["local", "slurm", "sge"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with SITES[request.param](request, tmp_path) as made:
        yield made


@contextmanager
def slurm_site(request: pytest.FixtureRequest, folder: Path) -> Iterator[Site]:
    east: Cluster = request.getfixturevalue("slurm_pair")[0]

    @contextmanager
    def outage() -> Iterator[None]:
        east.stop_slurmctld()
        try:
            yield
        finally:
            east.restart_slurmctld()

    yield Site("slurm", folder, east.settings, lambda job_id: east.call("scontrol", "requeue", job_id), outage)
    east.clear()


@contextmanager
def sge_site(request: pytest.FixtureRequest, folder: Path) -> Iterator[Site]:
    engine: GridEngine = request.getfixturevalue("engine")

    @contextmanager
    def outage() -> Iterator[None]:
        engine.freeze_qmaster()
        try:
            yield
        finally:
            engine.thaw_qmaster()

    yield Site("sge", folder, engine.settings, lambda job_id: engine.call("qmod", "-rj", job_id), outage)
    engine.clear()


SITES: dict[str, Callable[[pytest.FixtureRequest, Path], AbstractContextManager[Site]]] = {
    "local": lambda _, folder: local_site(folder),
    "slurm": slurm_site,
    "sge": sge_site,
}


# The contract -------------------------------------------------------------------------------------------------


def test_job_that_exits_with_0_is_completed_and_its_times_are_in_order(site: Site) -> None:
    job_id = site.submit("echo out; echo err >&2")
    status = site.wait(job_id, "ended")
    assert (status.outcome, status.exit_code, status.incarnation) == ("completed", 0, 0)
    assert status.eligible_at is not None
    assert status.started_at is not None
    assert status.ended_at is not None
    assert status.eligible_at <= status.started_at <= status.ended_at
    assert sorted(site.printed(0).split()) == ["err", "out"]


def test_job_that_exits_with_7_is_failed(site: Site) -> None:
    status = site.wait(site.submit("exit 7"), "ended")
    assert (status.outcome, status.exit_code) == ("failed", 7)


def test_job_waits_until_another_has_ended(site: Site) -> None:
    others = site.fill(3)
    job_id = site.submit("true")
    waiting = site.wait(job_id, "waiting")
    assert waiting.started_at is None, "an estimate of the scheduler is not a start"
    status = site.wait(job_id, "ended")
    ends = [site.wait(other, "ended").ended_at for other in others]
    assert status.started_at is not None
    assert waiting.eligible_at in (None, status.eligible_at)
    assert status.started_at >= min(end for end in ends if end is not None)


def test_running_job_says_since_when(site: Site) -> None:
    job_id = site.submit("sleep 60")
    status = site.wait(job_id, "running")
    assert status.eligible_at is not None
    assert status.started_at is not None
    assert status.started_at >= status.eligible_at
    assert (status.ended_at, status.outcome, status.exit_code) == (None, None, None)


def test_waiting_job_can_be_cancelled(site: Site) -> None:
    site.fill(60)
    job_id = site.submit("echo ran")
    site.wait(job_id, "waiting")
    site.scheduler.cancel(job_id)
    if site.kind == "sge":  # keeps no trace of it: absent, which is not completed
        wait_for(lambda: not site.scheduler.poll([job_id]), "its absence")
    else:
        status = site.wait(job_id, "ended")
        assert (status.outcome, status.started_at, status.exit_code) == ("cancelled", None, None)
    assert site.printed(site.slots) == ""


def test_running_job_can_be_cancelled(site: Site) -> None:
    # &&: its sleep may be ended a moment before its shell.
    job_id = site.submit("echo started; sleep 600 && echo ran", wall=1200.0)
    site.wait(job_id, "running")
    wait_for(lambda: site.printed(0) == "started\n", "its first line")
    site.scheduler.cancel(job_id)
    status = site.wait(job_id, "ended")
    assert status.outcome == ("unknown" if site.kind == "sge" else "cancelled")  # Grid Engine says only: killed
    assert "ran" not in site.printed(0)
    site.scheduler.cancel(job_id)  # it is gone: no error


def test_cancelling_an_unknown_job_is_no_error(site: Site) -> None:
    site.scheduler.cancel(UNKNOWN_ID)


def test_job_after_another_is_eligible_once_that_has_ended_however_it_ended(site: Site) -> None:
    first = site.submit("sleep 2; exit 3")
    second = site.submit("true", after=first)
    waiting = site.wait(second, "waiting")
    assert (waiting.eligible_at, waiting.never_starts) == (None, None)
    status = site.wait(second, "ended")
    ended = site.wait(first, "ended").ended_at
    assert status.outcome == "completed"
    assert ended is not None
    assert status.eligible_at is not None
    assert status.started_at is not None
    assert ended <= status.eligible_at <= status.started_at


def test_job_after_one_that_nobody_remembers_starts(site: Site) -> None:
    assert site.wait(site.submit("true", after=UNKNOWN_ID), "ended").outcome == "completed"


def test_job_of_an_agent_that_was_killed_right_after_submitting_is_found_by_its_name(site: Site) -> None:
    request = site.request("echo ran; sleep 1")
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path, PosixPath\n"
        "from fedqueue.agent.schedulers import *\n"
        f"scheduler = make_scheduler({site.settings()!r}, Path({str(site.folder)!r}))\n"
        f"scheduler.submit({request!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    agent = subprocess.run([sys.executable, "-c", program], timeout=600, capture_output=True, text=True)
    assert agent.returncode == -signal.SIGKILL, agent.stderr
    job_id = site.scheduler.find(request.name)
    assert job_id is not None
    assert site.wait(job_id, "ended").outcome == "completed"
    assert site.printed(0) == "ran\n"
    assert site.scheduler.find(request.name) == job_id, "when it has ended, too"


def test_name_that_nobody_submitted_is_not_found(site: Site) -> None:
    assert site.scheduler.find("no-such-job") is None


def test_refused_submission_says_why_in_one_line(site: Site) -> None:
    request = site.request("true")
    if site.kind == "local":
        request.script.unlink()
        scheduler, words = site.scheduler, "no such script"
    elif site.kind == "slurm":
        scheduler, words = site.scheduler_with(partition="no-such"), "partition"
    else:
        scheduler, words = site.scheduler_with(queue="no-such"), "unknown queue"
    with pytest.raises(SubmitRefusedError, match=words) as caught:
        scheduler.submit(request)
    assert not caught.value.transient
    assert "\n" not in caught.value.reason
    assert site.scheduler.find(request.name) is None


def test_unknown_job_is_absent_from_a_poll_and_the_others_are_there(site: Site) -> None:
    job_id = site.submit("true")
    site.wait(job_id, "ended")
    assert set(site.scheduler.poll([UNKNOWN_ID, job_id])) == {job_id}
    assert site.scheduler.poll([]) == {}


def test_requeued_job_has_a_second_incarnation(site: Site) -> None:
    job_id = site.submit(f"echo start; [ $(grep -c start {site.folder}/*/output.txt) = 2 ] || sleep 60")
    first = site.wait(job_id, "running")
    wait_for(lambda: site.printed(0) == "start\n", "its first line")
    site.requeue(job_id)
    seen: list[JobStatus] = []

    def ended() -> bool:
        seen.extend(site.scheduler.poll([job_id]).values())
        return seen[-1].phase == "ended"

    wait_for(ended, "its end", lambda: str(seen[-1]))
    assert all((s.incarnation, s.started_at) == (0, first.started_at) or s.incarnation == 1 for s in seen)
    assert (seen[-1].outcome, seen[-1].incarnation) == ("completed", 1)
    assert first.started_at is not None
    assert seen[-1].started_at is not None
    assert seen[-1].eligible_at is not None
    assert first.started_at <= seen[-1].eligible_at <= seen[-1].started_at
    assert site.printed(0).split().count("start") == 2, "both wrote to one file"


def test_scheduler_that_does_not_answer_is_unreachable_and_its_jobs_go_on(site: Site) -> None:
    job_id = site.submit("sleep 60")
    before = site.wait(job_id, "running")
    impatient = site.scheduler if site.kind == "local" else site.scheduler_with(timeout_seconds=1.0)
    tried = site.request("true")
    with site.outage():
        for ask in (
            lambda: impatient.poll([job_id]),
            lambda: impatient.find(tried.name),
            lambda: impatient.submit(tried),
            lambda: impatient.cancel(job_id),
        ):
            with pytest.raises(SchedulerUnreachableError):
                ask()
    after = site.wait(job_id, "running")
    assert (after.started_at, after.incarnation) == (before.started_at, 0)
    assert site.scheduler.find(tried.name) is None


@pytest.mark.parametrize("site", ["slurm", "sge"], indirect=True)  # the local one takes no job that it cannot run
def test_job_that_can_never_start_says_so(site: Site) -> None:
    request = site.request("true")
    if site.kind == "slurm":
        job_id, words = site.scheduler_with(extra=["--time=10000"]).submit(request), "Partition"
    else:
        job_id, words = site.scheduler_with(extra=["-wd", "/no/such/folder"]).submit(request), "/no/such/folder"
    wait_for(lambda: bool(site.scheduler.poll([job_id])[job_id].never_starts), "its reason")
    status = site.wait(job_id, "waiting")
    assert words in (status.never_starts or "")


HOLDS: dict[str, dict[str, tuple[str, ...]]] = {
    "slurm": {"its owner": ("scontrol", "uhold"), "an administrator": ("scontrol", "hold")},
    "sge": {"its owner": ("qhold", "-h", "u"), "an operator": ("qhold", "-h", "o")},
}


@pytest.mark.parametrize("site", ["slurm", "sge"], indirect=True)
def test_held_job_says_who_holds_it_and_what_releases_it(site: Site, request: pytest.FixtureRequest) -> None:
    real = request.getfixturevalue("slurm_pair")[0] if site.kind == "slurm" else request.getfixturevalue("engine")
    call: Callable[..., str] = real.call
    others = site.fill(600)
    chained = site.submit("true", after=others[0])
    ids = {who: site.submit("true") for who in HOLDS[site.kind]}
    for who, command in HOLDS[site.kind].items():
        call(*command, ids[who])
    found = site.scheduler.poll([*ids.values(), chained])
    assert found[chained].held is None, "it waits for another, and nobody holds it"
    for other in others:
        site.scheduler.cancel(other)
    for who, job_id in ids.items():
        held = found[job_id].held or ""
        assert held.startswith(f"held by {who}")
        call(*held.split("`")[1].split())
        assert site.wait(job_id, "ended").outcome == "completed"


# Slurm alone --------------------------------------------------------------------------------------------------


def test_clusters_side_by_side_know_nothing_of_each_other(slurm_pair: tuple[Cluster, Cluster, str, Path]) -> None:
    east, west, _, _ = slurm_pair
    assert SlurmScheduler(west.settings()).find("limit") is not None
    assert SlurmScheduler(east.settings()).find("limit") is None


@pytest.fixture
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with slurm_site(request, tmp_path) as made:
        yield made


def test_slurm_plans_the_start_of_a_job_and_lists_the_queue(slurm: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    running = slurm.fill(20.0)
    waiting = slurm.submit("true")
    wait_for(lambda: slurm.scheduler.planned(waiting) is not None, "its plan")
    for fast in (0.0, 600.0, -600.0):  # its times are compared with its own clock, whatever ours shows
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda real=time.time, fast=fast: real() + fast)
            said = slurm.scheduler.estimate(60.0), slurm.scheduler.planned(waiting)
        for seconds in said:
            assert seconds is not None
            assert 0.0 < seconds < 590.0, "all nodes are taken, for a minute each by their limits"
    listed = slurm.scheduler.listing()
    assert listed is not None
    assert listed[waiting].started is None
    for job_id in running:
        found = listed[job_id]
        assert found.started is not None
        assert found.started >= found.submitted
        assert (found.procs, found.requested) == (1, 60.0)
    for job_id in (*running, waiting):
        slurm.scheduler.cancel(job_id)


def test_preempted_job_waits_for_its_second_incarnation(slurm: Site) -> None:
    ids = slurm.fill(60)
    slurm.scheduler_with(partition="urgent", nodes=2).submit(slurm.request("sleep 3"))
    wait_for(lambda: slurm.scheduler.poll(ids)[ids[0]].incarnation == 1, "its preemption")
    assert slurm.wait(ids[0], "waiting").incarnation == 1


def test_slurm_without_munge_is_unreachable(slurm: Site, slurm_pair: tuple[Cluster, Cluster, str, Path]) -> None:
    job_id = slurm.submit("sleep 60")
    slurm.wait(job_id, "running")
    slurm_pair[0].kill_munged()
    try:
        with pytest.raises(SchedulerUnreachableError):
            slurm.scheduler_with(timeout_seconds=3.0).poll([job_id])
    finally:
        slurm_pair[0].restart_munged()
    assert slurm.wait(job_id, "running").incarnation == 0


def test_slurm_that_is_not_installed_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnreachableError, match="bin"):
        SlurmScheduler(SlurmSettings(bin=str(tmp_path))).find("a")


def test_percent_sign_in_a_folder_is_kept(slurm: Site) -> None:
    folder = slurm.folder / "100%j"
    folder.mkdir()
    request = slurm.request("echo here")
    request = JobRequest(name=request.name, script=request.script, folder=folder, wall_seconds=60.0)
    slurm.wait(slurm.scheduler.submit(request), "ended")
    assert (folder / "output.txt").read_text() == "here\n"


# Last: by now Slurm may have seen that the minute is over ---------------------------------------------------------


def test_job_over_its_wall_time_is_a_timeout(site: Site, request: pytest.FixtureRequest) -> None:
    if site.kind == "slurm":
        _, west, job_id, folder = request.getfixturevalue("slurm_pair")
        site = Site("slurm", folder, west.settings, site.requeue, site.outage)
        wait_for(lambda: site.scheduler.poll([job_id])[job_id].phase == "ended", "the end of its minute")
    else:
        job_id = site.submit("sleep 600", wall=1.0)
    status = site.wait(job_id, "ended")
    assert status.outcome == "timeout"
    assert status.started_at is not None
