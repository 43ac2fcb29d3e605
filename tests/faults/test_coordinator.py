"""A coordinator that is down, killed, paused or without room, with real processes on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from fedqueue.errors import RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.messages import CoordinatorResumed, JobStarted, ModelScored, UpdateArrived
from tests.coordinators import refusal, serving, update
from tests.faults.facts import check, ended_with, fill, small_disk, updates
from tests.faults.harness import (
    COORDINATOR,
    FACILITIES,
    SOURCE,
    WORKER,
    Run,
    first_model,
    free_port,
    processes_in,
    toml,
    tree_of,
)
from tests.faults.ledger_checks import Story, check_run
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(12)


def test_the_run_clock_stands_still_while_the_coordinator_is_down(tmp_path: Path) -> None:
    tree = tree_of("jit", rounds=6, port=free_port(), options={"min_steps": 3})
    with Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(UpdateArrived), "the first update")
        run.stop(COORDINATOR)
        stood_at = run.story().steps[-1][0].at
        time.sleep(4.0)
        run.start(COORDINATOR)
        run.run_until(lambda: run.happened(CoordinatorResumed), "it goes on")
        run.run_to_end()
        story = check(run, rounds=6)
        (resumed,) = story.events(CoordinatorResumed)
        assert resumed.down_seconds >= 4.0
        assert stood_at <= resumed.at <= stood_at + 2.0  # the newest heartbeat may be a moment after the newest event
        ended_with(run, -signal.SIGKILL)


def test_a_verdict_outlives_the_coordinator_and_its_update_counts_once(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        north = served.facility("north")
        north.poll()
        given = []
        for content in (update(tmp_path), update(tmp_path, value=float("nan"))):
            path = north.put(north.running(), content)
            given.append((path, north.commit(path, 0)))
            north.taken = None
        assert [verdict["status"] for _, verdict in given] == ["accepted", "rejected"]
        served.stop(signal.SIGKILL)
        served.start()
        north.client = client = served.client(served.credentials["north"])  # at another port
        for path, verdict in given:
            again = {"base_version": 0, "steps_done": 99, "train_seconds": 1.0, "admission_delay": 0.5}
            assert [client.call("POST", path, again) for _ in range(2)] == [verdict, verdict]
        other = f"/v1/updates/{north.running().sequence + 1}/0/{'a' * 64}"
        assert refusal(client.call, "POST", other, again).status == 410
        served.replays()
        with LedgerReader(served.folder / FILE) as ledger:
            kinds = [row["kind"] for row in ledger.rows("SELECT kind FROM events WHERE origin LIKE 'update/%'")]
    assert kinds == ["UpdateArrived", "UpdateRejected"]


def test_a_run_on_one_machine_that_is_killed_goes_on_from_its_folder(tmp_path: Path) -> None:
    """Its agents live on, and call an address that is no more."""
    first_model(tmp_path / "first.safetensors")
    tree = tree_of("fedasync", rounds=6, options={"steps": 5})
    worker = shlex.join([sys.executable, "-I", "-S", str(WORKER), "{}"])
    tables = {name: table for name, table in tree.items() if name not in ("strategy", "facility")}
    text = toml({**tables, "strategy.fedasync": {"steps": 5}, "worker": {"command": worker, "poll_seconds": 0.1}})
    (tmp_path / "run.toml").write_text(text + "".join(f'[[facility]]\nname = "{name}"\n' for name in FACILITIES))
    folder = tmp_path / "run"

    def begin(*arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            argv = [sys.executable, "-m", "fedqueue", "run", "--no-plots", *arguments]
            return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=log, stderr=log)

    def has_updates() -> bool:
        try:
            return bool(Story(folder).receipts)
        except RunFolderError:
            return False

    first = begin(str(tmp_path / "run.toml"), "--out", str(folder))
    wait_for(has_updates, "the first update")
    first.kill()
    first.wait()
    second = begin(str(folder))
    try:
        assert second.wait(LONGEST) == 0, (tmp_path / "log").read_text()
    finally:
        second.kill()
    story = check_run(folder, [folder / "facilities" / name for name in FACILITIES], rounds=6)
    assert len(story.events(CoordinatorResumed)) == 1
    wait_for(lambda: not processes_in(folder), "nothing is left behind", lambda: str(processes_in(folder)))


def test_a_paused_run_whose_coordinator_is_killed_stays_paused(tmp_path: Path) -> None:
    tree = tree_of("jit", rounds=100_000, port=free_port(), options={"min_steps": 3})  # it ends when it is told to

    def tell(word: str) -> None:
        argv = [sys.executable, "-m", "fedqueue", word, str(run.folder)]
        subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True, capture_output=True)

    with Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(UpdateArrived), "the first update")
        tell("pause")
        run.stop(COORDINATOR)
        run.start(COORDINATOR)
        run.run_until(lambda: run.happened(CoordinatorResumed), "it is back")
        time.sleep(1.5)  # three rounds
        tell("resume")
        made = len(run.story().versions)
        run.run_until(lambda: len(run.story().versions) > made, "it goes on")
        tell("stop")
        run.run_to_end()
        story = check(run, rounds=made)
        kinds_of = [type(event).__name__ for event, _ in story.steps]
        held = kinds_of[kinds_of.index("RunPaused") : kinds_of.index("RunResumed")]
        assert "CoordinatorResumed" in held
        assert "TimerFired" not in held
        ended_with(run, -signal.SIGKILL)


def test_a_scorer_that_is_killed_is_asked_again(tmp_path: Path) -> None:
    command = f"mkdir {tmp_path}/killed 2>/dev/null && kill -9 $$; echo '{{\"score\": 0.5}}'"
    evaluation = {"where": "coordinator", "command": command}
    tree = tree_of("fedasync", rounds=3, port=free_port(), options={"steps": 5}, evaluation=evaluation)
    with Run(tmp_path, tree) as run:
        run.start()
        run.run_to_end()
        story = check(run)
        assert (tmp_path / "killed").exists()
        assert {event.version for event in story.events(ModelScored)} == {0, 1, 2, 3}
        ended_with(run)


# Disks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [0, 20_000])
def test_a_full_disk_at_the_coordinator_is_waited_for(tmp_path: Path, leave: int) -> None:
    tree = tree_of("fedasync", rounds=6, port=free_port(), options={"steps": 5}, model={"keep": "all"})
    with small_disk(tmp_path / "run", "3m"), Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(UpdateArrived), "the first update")
        ballast = fill(run.folder, leave)
        run.run_until(lambda: "room" in run.log(COORDINATOR) or "full" in run.log(COORDINATOR), "the disk is full")
        time.sleep(2.5)  # longer than the coordinator waits between two looks
        run.turn()
        ballast.unlink()
        run.run_to_end()
        check(run, rounds=6)
        ended_with(run)


def test_a_coordinator_that_is_killed_and_started_on_a_full_disk_has_its_ledger_still(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=6, port=free_port(), options={"steps": 5})
    with small_disk(tmp_path / "run", "3m"), Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(UpdateArrived), "the first update")
        assert run.actors[COORDINATOR].process is not None
        os.kill(run.actors[COORDINATOR].process.pid, signal.SIGTERM)
        wait_for(lambda: not list(run.folder.glob("ledger.sqlite-*")), "the ledger is closed")
        run.stop(COORDINATOR)
        ballast = fill(run.folder)
        run.start(COORDINATOR)
        run.run_until(lambda: "waiting for room" in run.log(COORDINATOR), "the disk is full")
        ballast.unlink()
        run.run_to_end()
        story = check(run, rounds=6)
        assert story.events(CoordinatorResumed), "it began anew"
        ended_with(run, 130, -signal.SIGKILL)


def test_a_full_disk_at_a_facility_is_waited_for(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=8, port=free_port(), options={"steps": 5}, failures={"max_attempts": 50})
    with small_disk(tmp_path / "north", "3m"), Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "north/0"), "the first job at north")
        ballast = fill(run.home("north"))
        run.run_until(lambda: "make room" in run.log("north"), "the disk is full")
        before = len(updates(run.story(), "north"))
        ballast.unlink()
        run.run_to_end()
        story = check(run, rounds=8)
        assert len(updates(story, "north")) > before, run.tails()
        ended_with(run)


@pytest.mark.parametrize("way", ["removed", "a file instead"])
def test_a_facilitys_folder_of_models_is_made_again_or_missed_once(tmp_path: Path, way: str) -> None:
    tree = tree_of("fedasync", rounds=8, port=free_port(), options={"steps": 5}, failures={"max_attempts": 50})
    with Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(JobStarted, "north/0"), "the first job at north")
        models = run.home("north") / "models"
        if way == "removed":
            models.rename(tmp_path / "removed")
        else:
            for attempt in count():  # its agent, which lives, may make it again before we are there
                models.rename(tmp_path / f"removed-{attempt}")
                with suppress(FileExistsError):
                    models.touch(exist_ok=False)
                    break
            run.run_until(lambda: "Not a directory" in run.log("north"), "it is missed")
            models.unlink()
        run.run_to_end()
        story = check(run, rounds=8)
        assert updates(story, "north"), run.tails()
        assert "make room" not in run.log("north")
        assert run.log("north").count("disk: well again") == (way != "removed"), run.log("north")
