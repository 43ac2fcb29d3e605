"""What an operator sees of a real run, and is told when something is wrong: commands, files, ledger, HTTP."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedqueue.agent.http_transport import Client
from fedqueue.agent.transport import CoordinatorUnreachableError
from fedqueue.cli import main
from fedqueue.protocol.contract import sequence_of
from fedqueue.protocol.messages import FacilityLeft, UpdateArrived
from tests.conftest import journal
from tests.coordinators import (
    Raw,
    Served,
    config_file,
    ended,
    failed,
    refusal,
    request,
    serving,
    started,
    update,
)
from tests.faults.facts import fill, small_disk
from tests.faults.harness import COORDINATOR, Run, free_port, tree_of
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(10)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, ("north", "south"), strategy="fedavg", server={"wait_for": 2}) as made:
        yield made


def told(served: Served, capsys: Any) -> str:
    """What `fedqueue status` prints."""
    capsys.readouterr()
    assert main(["status", str(served.folder)]) == 0
    return str(capsys.readouterr().out)


def of(served: Served, name: str) -> dict[str, Any]:
    (found,) = [facility for facility in served.status()["facilities"] if facility["name"] == name]
    return dict(found)


def kinds(folder: Path) -> list[str]:
    return [line["kind"] for line in journal(folder) if line["what"] == "event"]


# Status -------------------------------------------------------------------------------------------------


def test_status_says_of_each_job_whether_it_is_queued_or_running_and_since_when(served: Served, capsys: Any) -> None:
    north = served.facility("north")

    def state() -> tuple[str, float]:
        (job,) = of(served, "north")["open_jobs"]
        assert job["job"] == "north/0"
        return job["state"], job["seconds"]

    served.facility("south").poll()
    north.poll()
    assert state()[0] == "ordered"
    north.poll({"kind": "submitted", "sequence": 0})
    assert state()[0] == "queued"
    assert "north/0  queued for " in told(served, capsys)
    wait_for(lambda: state()[1] > 2.0, "an order that is old enough for a job that has run for a while", served.said)
    before = time.monotonic()
    north.poll(started(0, ago=1.5, lingered=0.4))
    assert state()[0] == "running"
    assert 1.9 <= state()[1] <= 2.0 + time.monotonic() - before, "it ran for a while before we heard of it"
    assert re.search(r"north/0  running for \d+ s", told(served, capsys))
    north.poll({"kind": "requeued", "sequence": 0, "attempt": 1, "reason": "node failure"})
    assert state()[0] == "queued"
    assert "(attempt 2)" in told(served, capsys)
    north.poll(started(0, attempt=1))
    north.poll(ended(0, attempt=1))
    assert state()[0] == "handing in"
    assert of(served, "north")["idle_because"] is None


def test_status_says_what_a_facility_without_work_waits_for(served: Served, tmp_path: Path) -> None:
    assert "not enrolled" in of(served, "south")["idle_because"]
    north, south = served.facility("north"), served.facility("south")
    north.poll()
    assert of(served, "north")["idle_because"] == "waits for south"
    south.poll()
    north.hand_in(north.running(), update(tmp_path))
    assert of(served, "north")["idle_because"] == "nothing is offered until the updates of south are here"
    served.operator().call("POST", "/v1/run/pause")
    assert "paused" in of(served, "north")["idle_because"]


def test_status_says_why_a_facility_idles_and_until_when(tmp_path: Path, capsys: Any) -> None:
    failures = {"suspend_seconds": 6000.0}
    with serving(tmp_path, ("north", "south"), strategy="fedasync", failures=failures) as served:
        north = served.facility("north")
        north.poll()
        for sequence in range(3):
            north.poll({"kind": "submitted", "sequence": sequence}, failed(sequence, reason="exit code 3"))
        found = of(served, "north")
        assert found["state"] == "suspended"
        assert "3 failures in a row, the last: exit code 3" in found["idle_because"]
        assert 5000 < found["until_seconds"] <= 6000
        said = told(served, capsys)
        assert re.search(r"^north +idle for another \d+ (min|h): 3 failures", said, re.MULTILINE), said

        def refuse(reason: str, *, transient: bool) -> str:
            served.operator().call("POST", "/v1/facilities/north/join")
            taken = sequence_of(north.poll()["orders"][0]["job_id"])
            north.poll({"kind": "refused", "sequence": taken, "reason": reason, "transient": transient})
            return str(of(served, "north")["idle_because"])

        assert "QOSMaxSubmitJobPerUserLimit" in refuse("QOSMaxSubmitJobPerUserLimit", transient=True)
        assert of(served, "north")["until_seconds"] is not None
        cap = "100.00 of 100 node-hours are used: the facility's cap; raise agent.node_hours there to go on"
        assert cap in refuse(cap, transient=False)
        assert "`fedqueue join`" in of(served, "north")["idle_because"]


def test_a_cap_that_leaves_less_shortens_orders_and_status_says_where_it_leaves_too_little(tmp_path: Path) -> None:
    with serving(tmp_path, ("north", "south"), strategy="jit") as served:
        north = served.facility("north")
        (order,) = north.poll(cap_left={"seconds": 40.0, "when_idle": 40.0})["orders"]
        assert order["wall_seconds"] == 40.0
        fell = failed(sequence_of(order["job_id"]))
        answer = north.poll({"kind": "submitted", "sequence": 0}, fell, cap_left={"seconds": 0.0, "when_idle": 400.0})
        assert not answer["orders"]
        assert "cap on node-hours leaves 0 s for a job now" in of(served, "north")["idle_because"]
        (order,) = north.poll(cap_left={"seconds": 400.0, "when_idle": 400.0})["orders"]
        assert order["wall_seconds"] <= 400.0
        assert of(served, "north")["idle_because"] is None


def test_status_says_since_when_a_facility_is_away(tmp_path: Path, capsys: Any) -> None:
    with serving(tmp_path, ("north", "south"), server={"away_seconds": 1.0}) as served:
        served.facility("north").poll(poll_seconds=0.1)
        wait_for(lambda: of(served, "north")["state"] == "away", "north is away")
        assert "away: not heard of for " in of(served, "north")["idle_because"]
        assert "since this coordinator started" not in told(served, capsys).split("south")[0]


def test_troubles_of_an_agent_are_shown_and_forgotten_when_it_is_well(served: Served, capsys: Any) -> None:
    north = served.facility("north")
    silent = {"reason": "the scheduler did not answer:\n\x1b[2Jslurm_load_jobs error", "seconds": 340.0}
    north.poll(troubles=[silent])
    (trouble,) = of(served, "north")["troubles"]
    assert trouble["reason"] == "the scheduler did not answer: ?[2Jslurm_load_jobs error"
    assert trouble["seconds"] >= 340.0
    assert "its agent says, for 6 min: the scheduler did not answer" in told(served, capsys)
    north.poll()
    assert of(served, "north")["troubles"] == []
    for wrong in ([silent] * 11, [{"reason": "x" * 501}], [{"reason": "x", "seconds": -1}], [{"what": "x"}], ["x"]):
        assert refusal(north.poll, troubles=wrong).status in (400, 422)
    assert of(served, "north")["troubles"] == []


def test_agent_that_can_do_nothing_is_not_waited_for_but_its_words_are_shown(tmp_path: Path) -> None:
    with serving(tmp_path, ("north", "south"), server={"away_seconds": 1.0}) as served:
        north = served.facility("north")
        north.poll(poll_seconds=0.1)

        def stuck() -> bool:
            north.poll(poll_seconds=0.1, stuck=True, troubles=[{"reason": "home: no space left"}])
            return bool(of(served, "north")["state"] == "away")

        wait_for(stuck, "north is away")
        assert [trouble["reason"] for trouble in of(served, "north")["troubles"]] == ["home: no space left"]
        north.poll(poll_seconds=10.0)
        assert of(served, "north")["state"] == "active"


def test_agent_of_the_protocol_before_is_taken_and_one_of_another_is_told(served: Served) -> None:
    body = json.dumps({"journal": "a" * 16, "session": "b" * 16, "generation": 1, "poll_seconds": 5.0}).encode()
    credential = served.enrol("north")
    for protocol, status in ((3, 200), (2, 200), (1, 200), (4, 426)):
        with Raw(served) as raw:
            headers = [f"FedQueue-Protocol: {protocol}"]
            raw.send(request("POST", "/v1/poll", body, credential=credential, headers=headers))
            answer = raw.answer()
            assert answer is not None
            assert answer[0] == status, answer


def test_full_disk_at_a_facility_is_told_to_the_operator(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=500, port=free_port(), options={"steps": 5}, failures={"max_attempts": 500})

    def troubles() -> str:
        argv = [sys.executable, "-m", "fedqueue", "status", str(run.folder), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True)
        return str(json.loads(done.stdout)["facilities"][0]["troubles"])

    with small_disk(tmp_path / "north", "3m"), Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(UpdateArrived), "the first update")
        ballast = fill(run.home("north"))
        run.run_until(lambda: "make room" in troubles(), "status says it")
        ballast.unlink()
        run.run_until(lambda: troubles() == "[]", "and no longer when there is room")


# The end ------------------------------------------------------------------------------------------------


def test_stop_by_the_operator_is_called_that(tmp_path: Path, capsys: Any) -> None:
    with serving(tmp_path, ("north", "south"), server={"wait_for": 2}) as served:
        north, south = served.facility("north"), served.facility("south")
        for site in (north, south):
            site.poll(poll_seconds=1.0)
        south.running()
        assert main(["stop", str(served.folder)]) == 0
        assert served.status()["state"] == "over: stopped by the operator"
        north.poll(leaving=True)
        wait_for(lambda: served.process.poll() is not None, "the coordinator has ended", served.said)
        ledger = journal(served.folder)
        assert [line["body"]["reason"] for line in ledger if line["kind"] == "StopRun"] == ["stopped by the operator"]
        assert "StopRequested" in kinds(served.folder)
        assert json.loads((served.folder / "summary.json").read_text())["stopped"] == "stopped by the operator"
        assert "over: stopped by the operator" in served.said()
        figures = {path.name: path.read_bytes() for path in served.folder.glob("*.json")}
        model = (served.folder / "model.safetensors").stat()
        served.start()  # for south, which has not heard of it
        south.client = served.client(served.credentials["south"])
        south.poll(failed(0, held_seconds=1000.0), leaving=True)
        wait_for(lambda: served.process.poll() is not None, "the coordinator has ended again", served.said)
        assert served.process.returncode == 0
        assert (served.folder / "summary.json").read_bytes() == figures["summary.json"]
        assert (served.folder / "model.safetensors").stat().st_mtime_ns == model.st_mtime_ns
        served.start()


def test_coordinator_that_was_stopped_for_a_while_does_not_call_a_site_lost(tmp_path: Path) -> None:
    with serving(tmp_path, ("north", "south"), server={"away_seconds": 10.0, "wait_for": 2}) as served:
        sites = [served.facility("north"), served.facility("south")]
        for site in sites:
            site.poll(poll_seconds=0.5)
        served.process.send_signal(signal.SIGSTOP)
        time.sleep(12.0)  # longer than away_seconds
        served.process.send_signal(signal.SIGCONT)
        for site in sites:
            site.poll(poll_seconds=0.5)
        assert FacilityLeft.__name__ not in kinds(served.folder)
        assert "has not been heard of" not in served.said()
        wait_for(lambda: FacilityLeft.__name__ in kinds(served.folder), "one that is silent is called lost")


def test_full_disk_says_one_thing_once_and_status_says_it_too(tmp_path: Path) -> None:
    tree = tree_of("fedasync", rounds=6, port=free_port(), options={"steps": 5}, model={"keep": "all"})

    def status() -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "fedqueue", "status", str(run.folder)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)

    with small_disk(tmp_path / "run", "3m"), Run(tmp_path, tree) as run:
        run.start()
        run.run_until(lambda: run.happened(UpdateArrived), "the first update")
        ballast = fill(run.folder)
        run.run_until(lambda: "waiting for room" in run.log(COORDINATOR), "the disk is full")
        for _ in range(3):  # long enough to try again, however slow this machine is
            said = status()
            assert "does not answer" not in said.stderr, said.stderr
        wait_for(lambda: "room" in status().stderr, "it says so", lambda: f"{status()}\n{run.tails()}")
        assert status().returncode != 0
        stranger = Client(f"http://127.0.0.1:{run.port}", retries=0)
        with pytest.raises(CoordinatorUnreachableError, match="nothing is lost") as told:
            stranger.call("GET", "/v1/health")
        assert str(run.folder) not in str(told.value), "where things lie is the operator's business"
        assert run.log(COORDINATOR).count("waiting for room") == 1, run.log(COORDINATOR)
        ballast.unlink()
        run.run_to_end()
        assert run.log(COORDINATOR).count("there is room again") == 1, run.log(COORDINATOR)


# The start ----------------------------------------------------------------------------------------------


def test_run_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert stat.S_IMODE(served.folder.stat().st_mode) == 0o700
    config = config_file(tmp_path)
    assert main(["simulate", str(config), "--set", "run.seconds=700", *SIMULATED, "--out", str(tmp_path / "sim")]) == 0
    assert stat.S_IMODE((tmp_path / "sim").stat().st_mode) == 0o700


SIMULATED = ["facility.*.steps_per_second=10", 'facility.*.queue={kind="fixed", delay=1.0}']


@pytest.mark.parametrize(
    ("command", "changes", "says"),
    [
        ("serve", ['model.initial="none.safetensors"'], "none.safetensors"),
        ("run", ['model.initial="none.safetensors"'], "none.safetensors"),
        ("serve", ['task.name="nothing:here"'], "nothing"),
        ("run", ['task.name="nothing:here"'], "nothing"),
        ("serve", ['server.certificate="none.pem"', 'server.key="none.key"'], "none.pem"),
        ("serve", ["server.port={port}"], "cannot listen"),
    ],
)
def test_failed_start_leaves_no_folder_behind(
    command: str, changes: list[str], says: str, tmp_path: Path, capsys: Any
) -> None:
    config = config_file(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        out = tmp_path / "runs" / "mine"
        changes = [change.format(port=port) for change in changes]
        assert main([command, str(config), "--set", *changes, "--out", str(out)]) not in (0, 70)
    caught = capsys.readouterr()
    assert says in caught.err
    assert caught.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_status_right_after_serve_waits_for_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asking = (  # for as long as it takes: how long a coordinator takes to start is not what this is about
        "from fedqueue.cli import main, operate\n"
        f"operate.FOLDER_SECONDS = operate.STARTING_SECONDS = {LONGEST}\n"
        f"raise SystemExit(main(['status', {str(folder)!r}, '--json']))\n"
    )
    argv = [sys.executable, "-c", asking]
    asked = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with serving(tmp_path):
        out, err = asked.communicate(timeout=LONGEST)
        assert asked.returncode == 0, err
        assert json.loads(out)["state"] == "waiting for facilities"


def test_commands_for_a_folder_that_is_no_run_say_so_at_once(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "other").write_text("something else")
    assert main(["status", str(tmp_path)]) == 5
    assert "is not the folder of a real run" in capsys.readouterr().err


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
from fedqueue.cli import main
sys.exit(main({argv!r}))
"""

EXTRAS = {
    "train": ("torch", "safetensors", "sklearn"),
    "plots": ("matplotlib",),
    "serve": ("uvicorn", "starlette", "cryptography"),
    "boosting": ("sklearn",),
}


@pytest.mark.parametrize(
    ("extra", "argv"),
    [
        ("train", "simulate digits.toml"),
        ("train", "compare digits.toml --strategies jit,fedavg --seeds 1"),
        ("train", "run digits.toml"),
        ("train", "serve digits.toml"),
        ("train", "demo"),
        ("train", "reproduce synthetic --quick --seeds 1"),
        ("plots", "simulate run.toml"),
        ("plots", "compare digits.toml --strategies jit,fedavg --seeds 1"),
        ("plots", "run run.toml"),
        ("plots", "report made"),
        ("plots", "history small.swf --plots pictures"),
        ("plots", "demo"),
        ("plots", "reproduce --page --docs there"),
        ("plots", "bound made"),
        ("serve", "serve run.toml"),
        ("serve", "run run.toml"),
        ("serve", "demo"),
        *(("serve", f"{word} made") for word in ("status", "pause", "resume", "stop")),
        *(("serve", f"{word} made north") for word in ("drain", "join", "invite", "revoke")),
        ("boosting", "forecast evaluate small.swf --round 3600 --predictor boosting"),
    ],
)
def test_command_whose_extra_is_not_installed_says_which_one(extra: str, argv: str, small: Path) -> None:
    before = set(small.rglob("*"))
    done = without(EXTRAS[extra], argv)
    assert done.returncode not in (0, 70), done
    assert f"pip install 'fedqueue[{extra}]'" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert set(small.rglob("*")) == before, "nothing was begun"


@pytest.mark.parametrize(
    "argv",
    [
        "doctor",
        "init my.toml",
        "simulate run.toml --no-plots",
        "compare run.toml --strategies jit,fedavg --seeds 1",
        "journal made",
        "replay made",
        "history small.swf",
        "bound made --no-plots",
        "enroll --init agent.toml",
        "reproduce --list",
    ],
)
def test_command_that_needs_no_extra_works_without_any(argv: str, small: Path) -> None:
    done = without({name for names in EXTRAS.values() for name in names}, argv)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def small(in_tmp: Path) -> Path:
    """A config that trains nothing, one that does, a run and a queue log."""
    text = config_file(in_tmp).read_text().replace("seconds = 36000.0", "seconds = 1300.0")
    text = text.replace("[[facility]]", '[[facility]]\nsteps_per_second = 1.0\nqueue = { kind = "fixed", delay = 1.0 }')
    (in_tmp / "run.toml").write_text(text)
    (in_tmp / "digits.toml").write_text(text.replace('"timing"', '"digits"'))
    assert main(["simulate", "run.toml", "--no-plots", "--out", "made", "--json"]) == 0
    shutil.copy(Path(__file__).parent / "logs" / "small.swf", in_tmp)
    return in_tmp


def without(modules: Collection[str], argv: str) -> subprocess.CompletedProcess[str]:
    """A command, as if these modules were not installed."""
    program = BLOCKED.format(blocked=set(modules), argv=argv.split())
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
