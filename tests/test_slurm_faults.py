"""Each way in which Slurm is known to fail, once, on a real cluster during a real run."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedqueue.protocol.contract import WALL_TIME
from fedqueue.protocol.messages import JobFailed, JobRequeued, JobStarted, JobSubmitted, SubmitRefused, UpdateArrived
from tests.conftest import ONE_A_ROUND
from tests.faults.harness import COORDINATOR
from tests.slurm import SYSTEM_PATH, Cluster, clusters, processes_with
from tests.slurm_runs import SlurmRun
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(400)

NODES = 9


FORGETFUL = 2
"""Seconds for which a cluster of that kind knows a job that has ended."""

CUT_OFF = """\
#!/bin/bash
# Takes the job, and says nothing.
if rm {mark} 2>/dev/null; then sbatch "$@" >/dev/null; exec sleep 60; fi
exec sbatch "$@"
"""


@pytest.fixture(scope="module")
def large() -> Iterator[Cluster]:
    with clusters(1, nodes=NODES) as found:
        yield found[0]


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Cluster]:
    with clusters(1, nodes=3) as (cluster,):
        cluster.stop_slurmctld()
        cluster.conf.write_text(cluster.conf.read_text().replace("MinJobAge=3600", f"MinJobAge={FORGETFUL}"))
        cluster.restart_slurmctld()
        cluster.wait_until_ready()
        yield cluster


def test_every_facility_has_another_trouble_and_the_run_goes_on(large: Cluster, tmp_path: Path) -> None:
    failed = large.call("sbatch", "--parsable", "--output=/dev/null", "--wrap", "exit 1").strip()
    wait_for(lambda: "FAILED" in large.call("scontrol", "show", "job", failed), "a job that failed")
    suffer = ("limit", "cancelled", "requeued", "preempted", "downed", "lost", "twice", "killed")
    special: dict[str, dict[str, Any]] = {
        "lost": {"extra": ["--no-requeue"]},
        "refused": {"partition": "nosuch"},
        "never": {"extra": [f"--dependency=afterok:{failed}"]},
    }
    names = (*suffer, "refused", "never")
    with SlurmRun(tmp_path, dict.fromkeys(names, large), scheduler=special) as run:
        for name in suffer:
            run.shut(name)
        run.shut("twice", attempt=1)
        run.start()
        run.wait(JobStarted, *(f"{name}/0" for name in suffer))

        nodes = {name: run.node(name) for name in suffer}
        large.call("scancel", run.id("cancelled"))
        large.call("scontrol", "requeue", run.id("requeued"))
        urgent = ["--partition=urgent", f"--nodelist={nodes['preempted']}", "--output=/dev/null", "--wrap", "sleep 2"]
        large.call("sbatch", *urgent)
        run.down("downed", nodes["downed"])
        run.down("lost", nodes["lost"])
        large.kill_slurmd(nodes["twice"])
        for pid in run.processes("killed"):
            os.kill(pid, signal.SIGKILL)
        run.wait(JobRequeued, "requeued/0", "preempted/0", "downed/0")
        run.wait(JobFailed, "cancelled/0", "lost/0", "killed/0")
        for name in ("downed", "lost"):
            run.up(name, nodes[name])

        # The node is gone for Slurm, not for the job that runs on it.
        again = run.job_folder("twice") / "attempt-1"
        run.run_until(lambda: (again / "started").exists(), "twice/0 runs again")
        alive = {pid for pid in run.processes("twice") if pid in processes_with("FEDQUEUE_ATTEMPT=0")}
        assert alive, "the old incarnation did not live on: this shows nothing"
        run.open("twice")
        run.run_until(lambda: (run.job_folder("twice") / "attempt-0" / "result.json").exists(), "the old result")
        run.wait(JobStarted, "twice/0", attempt=1)
        run.open("twice", attempt=1)
        large.restart_slurmd(nodes["twice"])

        run.wait(JobFailed, "limit/0")
        run.run_to_end()
        story = run.check(rounds=2)

        reasons = {event.job_id: event.reason for event in story.events(JobFailed)}
        assert reasons["limit/0"].startswith(WALL_TIME)
        assert "TIME LIMIT" not in reasons["limit/0"], "that is no word of the job"
        assert "cancelled at the scheduler" in reasons["cancelled/0"]
        assert "node_fail" in reasons["lost/0"]
        assert "exit code 137" in reasons["killed/0"]
        assert "DependencyNeverSatisfied" in reasons["never/0"]
        assert set(reasons) == {"limit/0", "cancelled/0", "lost/0", "killed/0", "never/0"}
        (refused,) = story.events(SubmitRefused)
        assert refused.job_id == "refused/0"
        assert "invalid partition" in refused.reason.lower()
        for name in ("requeued", "preempted", "downed", "twice"):
            assert (f"{name}/0", 1, 0) in story.receipts
            assert (f"{name}/0", 0, 0) not in story.receipts
        for name in suffer:
            assert sum(fate == "aggregated" and key[0].startswith(f"{name}/") for key, fate in story.fates) == 2, name
        assert run.actors[COORDINATOR].codes == [0]
    large.wait_until_ready()


def test_a_scheduler_that_is_away_or_forgets_costs_time_and_nothing_else(forgetful: Cluster, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("scontrol", "squeue", "scancel"):
        (commands / name).symlink_to(str(shutil.which(name, path=SYSTEM_PATH)))
    (commands / "sbatch").write_text(CUT_OFF.format(mark=tmp_path / "cut-off"))
    (commands / "sbatch").chmod(0o755)
    sites = {"early": forgetful, "late": forgetful}
    with SlurmRun(tmp_path, sites, rounds=4, scheduler={"late": {"bin": str(commands)}}) as run:
        for name in sites:
            run.shut(name, 0)
            run.shut(name, 1)
        run.start()
        run.wait(JobStarted, *(f"{name}/0" for name in sites))

        # Without its controller: what runs goes on and counts, what is ordered waits.
        forgetful.call("scontrol", "update", f"jobid={run.id('late')}", "comment=on-record")
        state = forgetful.folder / "state" / "job_state"
        run.run_until(lambda: state.exists() and b"on-record" in state.read_bytes(), "its state is on the disk")
        forgetful.kill_slurmctld()
        for name in sites:
            run.open(name, 0)
        run.wait(UpdateArrived, *(f"{name}/0" for name in sites))
        run.run_until(lambda: "sbatch: " in run.log("early") and "sbatch: " in run.log("late"), "nothing is submitted")
        forgetful.restart_slurmctld()
        run.wait(JobStarted, *(f"{name}/1" for name in sites))

        # Without munge nobody can ask anything.
        before = {name: run.log(name).count("did not answer") for name in sites}
        forgetful.kill_munged()
        for name in sites:
            run.run_until(lambda name=name: run.log(name).count("did not answer") > before[name], f"{name} sees it")  # type: ignore[misc]
        forgetful.restart_munged()

        # An agent that is killed when Slurm has its job; a submission that is cut off when Slurm has the job.
        run.stop("early")
        run.actors["early"].points = ["agent.submitted:1"]
        run.start("early")
        (tmp_path / "cut-off").touch()
        others = forgetful.load(jobs=4, seconds=1800.0)  # the next jobs wait behind these
        for name in sites:
            run.shut(name, 2)
            run.open(name, 1)
        run.wait(JobSubmitted, *(f"{name}/2" for name in sites))
        assert run.actors["early"].hit == ["agent.submitted"]
        assert not (tmp_path / "cut-off").exists()

        # Without their agents one job starts, ends and is forgotten; the other is cancelled and forgotten.
        numbers = {name: run.id(name, 2) for name in sites}
        run.stop("late")
        run.open("late", 2)
        waiting_since = time.time()
        wait_for(lambda: time.time() > waiting_since + 3.0, "they have waited for a while")
        forgetful.call("scancel", *others)
        run.wait(JobStarted, "early/2")
        run.stop("early")
        forgetful.call("scancel", numbers["early"])
        for name in sites:
            run.run_until(lambda name=name: run.forgets(name, numbers[name]), f"{name}/2 is forgotten")  # type: ignore[misc]
        assert (run.job_folder("late", 2) / "attempt-0" / "result.json").exists()
        run.start("early", "late")
        run.run_to_end()
        story = run.check(rounds=4)

        (failed,) = story.events(JobFailed)
        assert failed.job_id == "early/2"
        assert "no longer knows the job" in failed.reason
        assert not story.events(JobRequeued)
        assert ("late/2", 0, 0) in story.receipts
        waited = {event.job_id: event.admission_delay for event in story.events(JobStarted)}
        assert min(waited["early/2"], waited["late/2"]) > 2.0, "nobody had to wait: this shows nothing"
    forgetful.wait_until_ready()


def test_a_job_requeued_after_it_handed_in_is_cancelled_and_what_it_handed_in_counts(
    large: Cluster, tmp_path: Path
) -> None:
    """Requeued, it is told to stop and hands in. Nobody is there to see it until Slurm runs it again."""
    sites = {"watched": large, "alone": large}
    with SlurmRun(tmp_path, sites, wishes={"odd": {"0": "signal"}}, grace=30.0) as run:
        run.start()
        for name in sites:
            run.run_until((run.job_folder(name) / "attempt-0" / "listens").exists, f"{name}/0 runs")
        run.wait(JobStarted, "watched/0", "alone/0")
        run.stop("alone")
        numbers = {name: run.id(name) for name in sites}
        for number in numbers.values():
            large.call("scontrol", "requeue", number)
        run.run_until((run.job_folder("alone") / "attempt-1" / "started").exists, "alone/0 runs again")
        run.start("alone")
        run.run_to_end()
        story = run.check(rounds=2)
        assert not story.events(JobRequeued)
        assert not story.events(JobFailed)
        for name, number in numbers.items():
            assert (f"{name}/0", 0, 0) in story.receipts
            assert "JobState=CANCELLED" in large.call("scontrol", "show", "job", number)
        assert not (run.job_folder("watched") / "attempt-1").exists(), "it was cancelled while it waited again"
    large.wait_until_ready()


def test_the_job_after_one_that_was_cancelled_goes_on(large: Cluster, tmp_path: Path) -> None:
    wishes = {"odd": {"1": "slow"}, "slow_seconds": 60.0}
    options = {**ONE_A_ROUND, "min_steps": 3, "pipeline": "chain"}
    sites = {"one": large, "two": large}
    with SlurmRun(tmp_path, sites, strategy="jit", rounds=8, options=options, wishes=wishes, round_length=2.0) as run:
        run.start()
        run.wait(JobSubmitted, *(f"{name}/2" for name in sites))
        for name in sites:
            assert "Dependency=afterany:" in large.call("scontrol", "--oneliner", "show", "job", run.id(name, 2))
            large.call("scancel", run.id(name, 1))
        run.wait(JobFailed, *(f"{name}/1" for name in sites))
        run.wait(UpdateArrived, *(f"{name}/2" for name in sites))
        run.run_to_end()
        story = run.check(rounds=8)
        assert {event.job_id for event in story.events(JobFailed)} == {"one/1", "two/1"}
    large.wait_until_ready()


def test_a_controller_that_lost_our_job_and_gave_its_id_to_another(forgetful: Cluster, tmp_path: Path) -> None:
    forgetful.stop_slurmctld()
    shutil.copytree(forgetful.folder / "state", tmp_path / "state")
    forgetful.restart_slurmctld()
    with SlurmRun(tmp_path, {"only": forgetful}) as run:
        run.shut("only")
        run.start()
        run.wait(JobStarted, "only/0")
        number = run.id("only")
        run.stop("only")
        forgetful.kill_slurmctld()
        shutil.rmtree(forgetful.folder / "state")
        shutil.copytree(tmp_path / "state", forgetful.folder / "state")  # what it did not get to save
        forgetful.restart_slurmctld()
        wait_for(lambda: not run.processes("only"), "the job that nobody knows is ended")
        (other,) = forgetful.load(jobs=1, seconds=600.0)
        assert other == number
        run.start("only")
        run.run_to_end()
        story = run.check(rounds=2)
        (failed,) = story.events(JobFailed)
        assert failed.job_id == "only/0"
        assert "no longer knows the job" in failed.reason
        # Not by the job's state: a node that still had the old job may end the new one of the same number.
        told = (forgetful.folder / "log/slurmctld.log").read_text()
        assert f"JobId={other} " in told
        assert f"REQUEST_KILL_JOB JobId={other} " not in told, "it was not ours to cancel"
    forgetful.clear()


def test_a_node_that_cannot_start_a_job_is_not_the_end_of_its_facility(large: Cluster, tmp_path: Path) -> None:
    node = large.nodes[-1]
    spool, away = large.folder / "spool" / node, large.folder / "away"
    with SlurmRun(tmp_path, {"only": large}, scheduler={"only": {"extra": [f"--nodelist={node}"]}}) as run:
        spool.rename(away)
        spool.touch()
        run.start()
        run.wait(JobFailed, "only/0")
        spool.unlink()
        away.rename(spool)
        run.up("only", node)
        run.run_to_end()
        story = run.check(rounds=2)
        assert {event.transient for event in story.events(JobFailed)} == {True}
        assert "launch_failed_requeued_held" in story.events(JobFailed)[0].reason
    large.wait_until_ready()
