"""Faults that a person can mend: the run stands still, says why, tries again by itself, and goes on."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.http_transport import update_path
from fedqueue.agent.transport import CoordinatorRefusedError, CoordinatorUnreachableError
from fedqueue.cli import main
from fedqueue.protocol.messages import ModelReady, RunPaused, RunResumed, UpdateArrived
from tests.coordinators import Served, serving, update
from tests.faults.facts import check, ended_with
from tests.faults.harness import COORDINATOR, Run, free_port, tree_of
from tests.faults.ledger_checks import Story, check_fates
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(12)

PAIR = ("north", "south")
FEDAVG: dict[str, Any] = {"strategy": "fedavg", "options": {"steps": 10}, "server": {"wait_for": 2}}

Harm = Callable[[Path], AbstractContextManager[None]]


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    aside = path.with_suffix(".aside")
    path.replace(aside)
    yield
    aside.replace(path)


@contextmanager
def a_folder_instead(path: Path) -> Iterator[None]:
    with moved_away(path):
        path.mkdir()
        yield
        path.rmdir()


@contextmanager
def other_bytes(path: Path) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(b"\xff" * len(before))
    yield
    path.write_bytes(before)


@contextmanager
def another_number(path: Path) -> Iterator[None]:
    """Garbage that is finite: it is still a model, only not this one."""
    before = path.read_bytes()
    path.write_bytes(before[:-4] + struct.pack("<f", 0.25))
    yield
    path.write_bytes(before)


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    mode = path.stat().st_mode
    path.chmod(0)
    yield
    path.chmod(mode)


WAYS: dict[str, tuple[Harm, str]] = {
    "missing": (moved_away, "put it back"),
    "a folder": (a_folder_instead, "a folder is in its place"),
    "damaged": (other_bytes, "has changed on its disk"),
    "finite garbage": (another_number, "has changed on its disk"),
    "unreadable": (unreadable, "let this user read and write it"),
}
UNPRIVILEGED = [f"--{capabilities}=-dac_override,-dac_read_search" for capabilities in ("inh-caps", "bounding-set")]
"""Options of setpriv: permissions count, also for root."""


def prefix_for(way: str) -> list[str]:
    """How the coordinator must be started for such a fault to be one."""
    if way != "unreadable" or os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and there is no setpriv (util-linux) to take that away")
    return ["setpriv", *UNPRIVILEGED]


def shown(capsys: pytest.CaptureFixture[str], word: str, served: Served) -> str:
    """What a command prints for its operator."""
    capsys.readouterr()
    assert main([word, str(served.folder)]) == 0
    return capsys.readouterr().out


def objects(folder: Path) -> set[Path]:
    return set((folder / "objects").glob("*.safetensors"))


def state(served: Served) -> str:
    return str(served.status()["state"])


def restart(served: Served) -> None:
    """As after a power cut."""
    served.stop(signal.SIGKILL)
    served.start()
    for name, agent in served.agents.items():
        agent.client = served.client(served.credentials[name])


def until_it_is_over(served: Served) -> Story:
    """The run ends by itself once everybody knows."""

    def over() -> bool:
        for agent in served.agents.values():
            with suppress(CoordinatorUnreachableError):
                agent.poll(leaving=True)
        return served.process.poll() is not None

    wait_for(over, "the end of the run", served.said)
    assert served.process.returncode == 0, served.said()
    served.replays()
    story = Story(served.folder)
    check_fates(story)
    return story


@contextmanager
def a_round_but_for_one_update(
    folder: Path, rounds: int = 1, way: str = ""
) -> Iterator[tuple[Served, Path, Path, Callable[[], str]]]:
    """A coordinator, its first model, the update that north handed in, and what hands in that of south."""
    with serving(folder, PAIR, ends=True, rounds=rounds, prefix=prefix_for(way), **FEDAVG) as served:
        (model,) = objects(served.folder)
        for name in PAIR:
            served.facility(name).poll()
        orders = {name: served.facility(name).running() for name in PAIR}
        served.agents["north"].hand_in(orders["north"], update(folder, 0.5))
        (arrived,) = objects(served.folder) - {model}
        content = folder / "south.safetensors"
        content.write_bytes(update(folder, 0.7))
        digest = hashlib.sha256(content.read_bytes()).hexdigest()

        def hand_in() -> str:
            """Its verdict, or why it cannot be taken now; an agent comes again then."""
            south, sequence = served.agents["south"], orders["south"].sequence
            try:
                with suppress(CoordinatorRefusedError):  # it is in, and only its verdict was lost
                    south.client.upload(content, sequence, 0, digest)
                return str(south.commit(update_path(sequence, 0, digest), 0)["status"])
            except CoordinatorUnreachableError as error:
                return str(error)

        yield served, model, arrived, hand_in


@pytest.mark.parametrize("which", ["model", "update"])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_a_model_is_made_of_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str, which: str
) -> None:
    harm, advice = WAYS[way]
    with a_round_but_for_one_update(tmp_path, way=way) as (served, model, arrived, hand_in):
        bad, called = (model, "model 0") if which == "model" else (arrived, "the update of north/0")
        with harm(bad):
            answer = hand_in()
            assert answer == "accepted" or (which == "model" and f"objects/{bad.name}" in answer)
            wait_for(lambda: state(served).startswith("paused"), "it is held", served.said)
            for _ in range(2):
                said = shown(capsys, "status", served)
                for word in (f"the coordinator's own copy of {called}", f"objects/{bad.name}", advice):
                    assert word in said
                    assert word in served.said()
                assert "make room" not in said
                restart(served)
            assert Story(served.folder).versions == []
        shown(capsys, "resume", served)  # it need not wait for its next try
        if answer != "accepted":
            wait_for(lambda: hand_in() == "accepted", "the update is taken", served.said)
        story = until_it_is_over(served)
    assert story.versions == [1]
    assert [fate for _, fate in story.fates] == ["aggregated", "aggregated"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_facility_that_fetches_a_model_comes_again(tmp_path: Path, way: str, restarted: bool) -> None:
    harm, advice = WAYS[way]
    with serving(tmp_path, PAIR, **FEDAVG, rounds=1, prefix=prefix_for(way)) as served:
        for name in PAIR:
            served.facility(name).poll()
        (model,) = objects(served.folder)
        north, right = served.facility("north"), model.read_bytes()
        target = tmp_path / "fetched.safetensors"
        with harm(model):
            if restarted:
                restart(served)
                north.poll()
            for _ in range(3):
                with pytest.raises(CoordinatorUnreachableError) as refused:
                    north.client.download(0, target, model.stem)
                wait_for(lambda: state(served).startswith("paused"), "it is held", served.said)
            assert "model 0 cannot be sent" in str(refused.value)
            assert f"objects/{model.name}" in state(served)
            assert advice in state(served)
        wait_for(lambda: state(served) == "running", "it goes on", served.said)
        north.client.download(0, target, model.stem)
        assert target.read_bytes() == right


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_changed_is_scored_when_it_is_put_back(tmp_path: Path, way: str) -> None:
    harm, advice = WAYS[way]
    go = tmp_path / "go"
    command = f"while [ ! -e {go} ]; do sleep 0.05; done; echo '{{\"score\": 0.5}}'"
    evaluation = {"where": "coordinator", "command": command}
    with serving(tmp_path, PAIR, **FEDAVG, rounds=1, evaluation=evaluation, prefix=prefix_for(way)) as served:
        (model,) = objects(served.folder)
        with harm(model):
            restart(served)  # before it has its score
            wait_for(lambda: "model 0 cannot be scored" in served.said(), "it is found", served.said)
            assert f"objects/{model.name}" in served.said()
            assert advice in served.said()
            go.touch()
            for name in PAIR:
                served.facility(name).poll()
            assert state(served).startswith("paused")
            assert served.status()["score"] is None
        wait_for(lambda: served.status()["score"] == 0.5, "it is scored", served.said)
        assert main(["models", str(served.folder), "best", "--out", str(tmp_path / "best.safetensors")]) == 0
        assert (tmp_path / "best.safetensors").read_bytes() == model.read_bytes()
        assert state(served) == "running"


@contextmanager
def a_better_first_model(folder: Path) -> Iterator[tuple[Served, Path]]:
    """A coordinator that has made model 1, and the file of model 0, which scored higher."""
    command = 'case $FEDQUEUE_VERSION in 0) s=0.9;; *) s=0.6;; esac; echo {\\"score\\": $s}'
    evaluation = {"where": "coordinator", "command": command}
    with serving(folder, PAIR, ends=True, rounds=9, evaluation=evaluation, **FEDAVG) as served:
        (model,) = objects(served.folder)
        for name in PAIR:
            served.facility(name).poll()
        for name in PAIR:
            served.facility(name).hand_in(served.facility(name).running(), update(folder, 0.5))
        wait_for(lambda: served.status()["score"] == 0.6, "model 1 is scored", served.said)
        yield served, model


def test_the_best_model_stays_when_it_is_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a_better_first_model(tmp_path) as (served, best):
        with moved_away(best):
            restart(served)
            for agent in served.agents.values():
                agent.poll()
        for agent in served.agents.values():
            agent.poll()
        shown(capsys, "pause", served)  # after each event the coordinator deletes what it does not need
        assert best.exists()
        assert main(["models", str(served.folder), "best"]) == 0
        assert capsys.readouterr().out.strip() == str(best)


def test_the_summary_never_describes_another_best_model_than_is_laid_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_better_first_model(tmp_path) as (served, best):
        best.unlink()
        shown(capsys, "stop", served)
        until_it_is_over(served)
    described = json.loads((served.folder / "summary.json").read_text())["models"]["best"]
    laid_out = hashlib.sha256(Path(described["file"]).read_bytes()).hexdigest()
    assert (described["version"], described["score"]) == (1, 0.6)
    assert [laid_out] == [event.digest for event in Story(served.folder).events(ModelReady)]


@pytest.mark.parametrize("verdict", ["accepted", "rejected"])
def test_folders_that_hold_nothing_on_record_are_made_again(tmp_path: Path, verdict: str) -> None:
    with serving(tmp_path, PAIR, rounds=1, **FEDAVG) as served:
        for name in PAIR:
            served.facility(name).poll()
        order = served.facility("north").running()
        for name in ("uploads", "refused"):
            (served.folder / name).rmdir()
        content = update(tmp_path, 0.5 if verdict == "accepted" else float("nan"))
        assert served.facility("north").hand_in(order, content)["status"] == verdict


@pytest.mark.parametrize("way", ["deleted", "with its log", "an older one instead"])
def test_a_ledger_that_is_taken_away_is_put_back(tmp_path: Path, way: str) -> None:
    with a_round_but_for_one_update(tmp_path) as (served, _, _, hand_in):
        ledger = served.folder / "ledger.sqlite"
        if way == "an older one instead":
            shutil.copy(ledger, tmp_path / "older")
            (tmp_path / "older").replace(ledger)
        else:
            for path in served.folder.glob("ledger.sqlite*") if way == "with its log" else [ledger]:
                path.unlink()
        wait_for(lambda: "nothing is lost" in served.said(), "it is put back", served.said)
        assert len(Story(served.folder).events(UpdateArrived)) == 1
        restart(served)
        wait_for(lambda: hand_in() == "accepted", "the update is taken", served.said)
        story = until_it_is_over(served)
    assert story.versions == [1]
    assert [fate for _, fate in story.fates] == ["aggregated", "aggregated"]


@pytest.mark.parametrize("file", ["ledger.sqlite", "config.json"])
def test_a_run_is_not_begun_anew_in_its_folder_when_a_file_of_it_is_gone_or_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    with a_round_but_for_one_update(tmp_path) as (served, _, _, hand_in):
        served.stop()
        with moved_away(served.folder / file) if file == "ledger.sqlite" else other_bytes(served.folder / file):
            assert main(["serve", str(served.folder)]) == 5
            (line,) = capsys.readouterr().err.splitlines()
            assert file in line
            assert "put" in line
            assert "back" in line
        restart(served)
        wait_for(lambda: hand_in() == "accepted", "the update is taken", served.said)
        assert until_it_is_over(served).versions == [1]


def test_too_many_open_files_are_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a_round_but_for_one_update(tmp_path) as (served, _, _, hand_in):
        served.status()  # over a connection that stays open
        soft, hard = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
        used = [int(name) for name in os.listdir(f"/proc/{served.process.pid}/fd")]
        # The update can be taken, one file at a time; the model needs several at once.
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (max(used) + 2, hard))
        wait_for(lambda: hand_in() == "accepted", "the update is taken", served.said)
        wait_for(lambda: state(served).startswith("paused"), "it is held", served.said)
        assert "ulimit -n" in state(served)
        assert "make room" not in state(served)
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert until_it_is_over(served).versions == [1]


def test_an_operators_pause_stays_when_the_fault_is_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a_round_but_for_one_update(tmp_path, rounds=2) as (served, _, arrived, hand_in):
        with moved_away(arrived):
            assert hand_in() == "accepted"
            wait_for(lambda: arrived.name in state(served), "it is held", served.said)
            shown(capsys, "pause", served)
            restart(served)
            assert arrived.name in state(served)
        wait_for(lambda: arrived.name not in state(served), "it goes on", served.said)
        assert shown(capsys, "status", served).splitlines()[0].endswith("paused")
        assert not served.facility("north").poll()["orders"]
        shown(capsys, "resume", served)
        model = served.facility("north").order().model
        assert model is not None
        assert model.version == 1


def test_a_run_that_is_held_can_be_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a_round_but_for_one_update(tmp_path) as (served, _, arrived, hand_in):
        with moved_away(arrived):
            assert hand_in() == "accepted"
            wait_for(lambda: arrived.name in state(served), "it is held", served.said)
            shown(capsys, "stop", served)
            story = until_it_is_over(served)
        assert story.versions == []
        assert not {fate for _, fate in story.fates} - {"after_end"}


def test_real_agents_sit_out_three_rounds_without_a_model(tmp_path: Path) -> None:
    tree = tree_of("jit", rounds=8, port=free_port(), options={"min_steps": 3}, model={"keep": "all"})
    with Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(ModelReady), "the first model")
        digest = run.story().events(ModelReady)[-1].digest
        with moved_away(run.folder / "objects" / f"{digest}.safetensors"):
            run.run_until(lambda: run.happened(RunPaused), "it is held")
            before = run.story().steps[-1][0].at
            run.stop(COORDINATOR)
            run.start(COORDINATOR)
            end = time.monotonic() + 3 * tree["run"]["round_length"]
            run.run_until(lambda: time.monotonic() > end, "three rounds")
            assert not run.happened(RunResumed), run.tails()
        run.run_to_end()
        story = check(run, rounds=8)
        resumed = story.events(RunResumed)[0]
        assert resumed.at < before + 1.5, "the run clock went on"
        ended_with(run, -signal.SIGKILL)
