"""Real runs on this machine through the built-in queue: what a user's script, config and operator can count on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedqueue import PROTOCOL
from fedqueue.cli import main
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.contract import WALL_TIME
from fedqueue.runs import replay
from tests.conftest import journal, strictly
from tests.waiting import wait_for

pytestmark = pytest.mark.waits(15)

ROOT = Path(__file__).parent.parent

WORKER = """
import time
import numpy as np
import fedqueue
from safetensors.numpy import load_file

with fedqueue.participate() as work:
    if work.purpose == "evaluate":
        work.submit(metrics={"score": float(load_file(work.model_path)["adapter.a"][0])})
    else:
        tensors = load_file(work.model_path)
        assert "frozen.w" not in tensors, "it should have stayed at home"
        for step in work.steps():
            time.sleep(0.02)
        tensors["adapter.a"] = tensors["adapter.a"] + 1
        (work.state_dir / "visits").open("a").write("x")
        work.submit({**tensors, "frozen.w": np.ones(3, np.float32)})
"""

CONFIG = """
[run]
name = "small"
strategy = "fedavg"
rounds = 3
round_length = 2.0

[strategy.fedavg]
steps = 5

[model]
initial = "first.safetensors"
include = ["adapter.*"]

[worker]
command = "{python} worker.py"
poll_seconds = 0.2

[[facility]]
name = "north"
queue = {{ kind = "fixed", delay = 0.2 }}

[[facility]]
name = "south"
"""


@pytest.fixture
def config(in_tmp: Path) -> Path:
    (in_tmp / "worker.py").write_text(WORKER)
    first = {"adapter.a": np.zeros(4, np.float32), "frozen.w": np.zeros(3, np.float32)}
    save_file(first, in_tmp / "first.safetensors")
    path = in_tmp / "small.toml"
    path.write_text(CONFIG.format(python=sys.executable))
    return path


def run(config: Path, *changes: str) -> tuple[dict[str, Any], Path]:
    folder = config.parent / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--json", "--no-plots", "--out", str(folder)]
    if changes:
        argv += ["--set", *changes]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    replay(folder)
    check_journals(folder)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary, folder


def test_one_more_field_as_the_page_adds_it_reaches_the_script(config: Path) -> None:
    """docs/contract.md: a definition, a producer, a consumer."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "contract.md").read_text(), re.DOTALL)
    source = config.parent / "changed"
    shutil.copytree(ROOT / "src" / "fedqueue", source / "fedqueue", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-p2", "-"], cwd=source, input=diff, text=True, check=True)
    told = config.parent / "told"
    worker = config.parent / "worker.py"
    worker.write_text(f"{worker.read_text()}    open({str(told)!r}, 'w').write(f'{{work.round}} of {{work.rounds}}')\n")
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--no-plots", "--set", "run.rounds=1"]
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(source)}, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert told.read_text() == "0 of 1"


def check_journals(folder: Path) -> None:
    """Of the coordinator and of each agent: JSON that every reader takes."""
    with LedgerReader(folder / FILE) as ledger:
        (wanted,) = ledger.rows("SELECT (SELECT count(*) FROM events) + (SELECT count(*) FROM commands) AS n")
    assert len(journal(folder)) == wanted["n"]
    written = [line for path in folder.glob("facilities/*/journal.jsonl") for line in path.read_text().splitlines()]
    assert len([strictly(line) for line in written]) > 4
    orders = [json.loads(order.read_text()) for order in folder.glob("facilities/*/jobs/*/order.json")]
    assert {order["protocol"] for order in orders} == {PROTOCOL}, "one number from the coordinator to the job"


def test_only_declared_tensors_travel_and_state_stays_at_the_facility(config: Path) -> None:
    summary, folder = run(config)
    assert summary["rounds"] == 3
    final = load_file(folder / "model.safetensors")
    assert set(final) == {"adapter.a"}
    assert final["adapter.a"] == pytest.approx(3.0), "each round moved it by one"
    assert len((folder / "facilities/north/state/visits").read_text()) >= 3
    assert (folder / "summary.json").exists()


def test_replay_finds_a_model_that_is_gone_or_has_changed(config: Path, capsys: Any) -> None:
    _, folder = run(config)
    assert main(["replay", str(folder)]) == 0
    assert "model files checked" in capsys.readouterr().out
    with LedgerReader(folder / FILE) as ledger:
        newest = ledger.rows("SELECT json_extract(body, '$.digest') AS sha FROM events WHERE kind = 'ModelReady'")[-1]
    path = folder / "objects" / f"{newest['sha']}.safetensors"
    right = path.read_bytes()
    path.write_bytes(right[:-4] + bytes([0, 0, 128, 63]))  # one of its numbers is 1.0 now
    assert main(["replay", str(folder)]) == 7
    assert f"model 3, objects/{path.name}, has changed on its disk" in capsys.readouterr().err
    path.unlink()
    assert main(["replay", str(folder)]) == 7
    assert "put it back" in capsys.readouterr().err
    path.write_bytes(right)
    assert main(["replay", str(folder)]) == 0


def test_the_best_model_is_kept_and_can_be_fetched(config: Path, capsys: Any) -> None:
    scores = 'case $FEDQUEUE_VERSION in 0) s=0.9;; 1) s=NaN;; 2) s=0.5;; *) s=0.6;; esac; echo {\\"score\\": $s}'
    summary, folder = run(config, f"evaluation.command='{scores}'")
    assert summary["models"]["newest"] == {"version": 3, "score": 0.6, "file": str(folder / "model.safetensors")}
    assert summary["models"]["best"] == {"version": 0, "score": 0.9, "file": str(folder / "best.safetensors")}
    best = load_file(folder / "best.safetensors")["adapter.a"]
    assert not best.any()  # the first model, which nobody has trained

    assert main(["models", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "best" in shown
    assert "newest" in shown
    assert main(["models", str(folder), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(row["version"], row["score"], row["best"], row["newest"]) for row in listed] == [
        (0, 0.9, True, False),
        (3, 0.6, False, True),
    ]

    out = config.parent / "fetched.safetensors"
    for which, wanted in (("best", listed[0]), ("newest", listed[1]), ("0", listed[0])):
        out.unlink(missing_ok=True)
        assert main(["models", str(folder), which, "--out", str(out)]) == 0
        assert hashlib.sha256(out.read_bytes()).hexdigest() == wanted["sha256"] == Path(wanted["file"]).stem
    before = out.read_bytes()
    capsys.readouterr()
    assert main(["models", str(folder), "newest", "--out", str(out)]) != 0
    assert "exists already" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main(["models", str(folder), "1", "--out", str(out), "--replace"]) != 0
    assert "model 1 is not kept; kept are 0, 3" in capsys.readouterr().err
    Path(listed[1]["file"]).write_bytes(before)  # another model under its name
    assert main(["models", str(folder), "newest", "--out", str(out), "--replace"]) == 11
    assert "has changed on its disk" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main(["models", str(folder), "best", "--out", str(out), "--replace"]) == 0


@pytest.mark.parametrize("keep", ["best", "needed"])
def test_no_other_model_is_called_the_best_where_its_file_is_not_there(config: Path, capsys: Any, keep: str) -> None:
    scores = 'case $FEDQUEUE_VERSION in 1) s=0.9;; *) s=0.6;; esac; echo {\\"score\\": $s}'
    _, folder = run(config, f"evaluation.command='{scores}'", f"model.keep={keep}")
    capsys.readouterr()
    out = config.parent / "fetched.safetensors"
    if keep == "best":
        assert main(["models", str(folder), "best"]) == 0
        file = Path(capsys.readouterr().out.strip())
        file.unlink()
        assert main(["replay", str(folder)]) == 7
        assert f"model 1, objects/{file.name}, cannot be read" in capsys.readouterr().err
    assert main(["models", str(folder), "best", "--out", str(out)]) != 0
    assert (
        "put it back" if keep == "best" else "the best, model 1, is not kept; kept are 3"
    ) in capsys.readouterr().err
    assert not out.exists()
    assert main(["models", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "best" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_receipts_say_what_was_really_done(config: Path) -> None:
    _, folder = run(config)
    with LedgerReader(folder / FILE) as ledger:
        rows = ledger.rows("SELECT body FROM events WHERE kind = 'UpdateArrived'")
    receipts = [json.loads(row["body"])["receipt"] for row in rows]
    assert len(receipts) >= 6
    for receipt in receipts:
        assert receipt["steps_done"] == 5
        assert receipt["train_seconds"] > 0
        assert receipt["nodes"] == 1
        assert receipt["device"] == "cpu"
        assert len(receipt["digest"]) == 64


def test_facility_scores_models_where_the_run_says_so(config: Path) -> None:
    summary, _ = run(config, "evaluation.where=south", "run.targets=[2.5]")
    assert summary["score"]["final"] == pytest.approx(3.0), "the last model's score is waited for"
    assert summary["time_to"]["2.50"] is not None


def test_command_beside_the_coordinator_scores_models(config: Path) -> None:
    script = (
        "import json, os; from safetensors.numpy import load_file; "
        "print(json.dumps({'score': float(load_file(os.environ['FEDQUEUE_MODEL'])['adapter.a'].mean())}))"
    )
    (config.parent / "score.py").write_text(script)
    summary, _ = run(config, f"evaluation.command='{sys.executable} score.py'")
    assert summary["score"]["final"] == pytest.approx(3.0)


def test_interrupted_run_goes_on_where_it_was(config: Path) -> None:
    folder = config.parent / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--no-plots", "--out", str(folder)]
    argv += ["--set", "run.rounds=6"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    wait_for(lambda: models(folder) >= 2, "two models")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert f"fedqueue run {folder}" in out
    done = subprocess.run(
        [sys.executable, "-m", "fedqueue", "run", str(folder), "--json", "--no-plots"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert json.loads(done.stdout)["rounds"] == 6
    replay(folder)
    assert load_file(folder / "model.safetensors")["adapter.a"] == pytest.approx(6.0)
    with LedgerReader(folder / FILE) as ledger:
        (resumed,) = ledger.rows("SELECT body FROM events WHERE kind = 'CoordinatorResumed'")
    assert json.loads(resumed["body"])["down_seconds"] > 0


def models(folder: Path) -> int:
    if not (folder / FILE).exists():
        return 0
    try:
        with LedgerReader(folder / FILE) as ledger:
            return int(ledger.rows("SELECT count(*) AS n FROM models")[0]["n"])
    except Exception:  # it is being made
        return 0


def test_training_command_that_fails_is_told_in_one_line_and_the_run_ends(config: Path) -> None:
    (config.parent / "worker.py").write_text("raise SystemExit(3)")
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--no-plots", "--out", "run"]
    changes = ["failures.max_attempts=1", "failures.suspend_seconds=0.1", "failures.max_suspensions=0"]
    done = subprocess.run([*argv, "--set", *changes], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    with LedgerReader(Path("run") / FILE) as ledger:
        assert ledger.meta["stopped"] == "no facility is left"
        failures = {row["failure"] for row in ledger.rows("SELECT failure FROM jobs")}
    assert any("exit code 3" in str(failure) for failure in failures), failures


def test_settings_of_a_real_run_that_do_not_fit_are_refused_in_one_line(config: Path, capsys: Any) -> None:
    assert main(["run", str(config), "--set", "model.initial=none.safetensors", "--out", "x"]) == 2
    assert "model.initial" in capsys.readouterr().err
    assert main(["run", str(config), "--set", "model.include=['nothing*']", "--out", "y"]) != 0
    assert "no tensor's name matches" in capsys.readouterr().err
    assert main(["run", str(config.parent)]) == 5
    assert "is not the folder of a real run" in capsys.readouterr().err


def test_run_folder_has_one_coordinator(config: Path) -> None:
    folder = config.parent / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--no-plots", "--out", str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (folder / "address.json").exists(), "a coordinator")
        second = subprocess.run(
            [sys.executable, "-m", "fedqueue", "run", str(folder)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert second.returncode == 5
        assert "at work already" in second.stderr
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=600)


COLD_START = """
if os.environ["FEDQUEUE_JOB"].endswith("/0"):  # all but what is kept free for handing in, of 16 s
    began = (pathlib.Path(os.environ["FEDQUEUE_JOB"]) / "attempt-0" / "started").stat().st_mtime
    time.sleep(max(0.0, began + 12.5 - time.time()))
"""


def test_job_whose_wall_time_holds_no_step_says_so_and_its_agent_asks_for_more(config: Path) -> None:
    """A cold start that leaves no time for a step: the job ends by itself, and the next one gets more."""
    slow = WORKER.replace("import time\n", "import time, pathlib, os\n").replace(
        "with fedqueue.participate() as work:", f"{COLD_START}\nwith fedqueue.participate() as work:"
    )
    (config.parent / "worker.py").write_text(slow)
    scheduler = '{kind = "local", max_wall_seconds = 16.0}'
    summary, folder = run(config, f"facility.north.scheduler={scheduler}", "run.rounds=2")
    assert summary["rounds"] == 2
    with LedgerReader(folder / FILE) as ledger:
        rows = ledger.rows("SELECT body FROM events WHERE kind = 'JobFailed' AND job = 'north/0'")
    (reason,) = (json.loads(row["body"])["reason"] for row in rows)
    assert reason.startswith(WALL_TIME)
    assert "jobs/0/output.txt at the facility and ends with: " in reason


SLOW = """
import json, os, sys, time
from pathlib import Path
from safetensors.numpy import load_file

version = int(os.environ["FEDQUEUE_VERSION"])
with open("asked", "a") as file:
    file.write(f"{version}\\n")
while version == 0 and not Path(sys.argv[1]).exists():  # until the run has stopped making models
    time.sleep(0.02)
print(json.dumps({"score": float(load_file(os.environ["FEDQUEUE_MODEL"])["adapter.a"].mean())}))
"""


def test_scorer_that_is_behind_goes_on_with_the_newest_model_and_says_so(config: Path) -> None:
    (config.parent / "score.py").write_text(SLOW)
    folder, over = config.parent / "run", config.parent / "over"
    argv = [sys.executable, "-m", "fedqueue", "run", str(config), "--no-plots", "--out", str(folder)]
    argv += ["--set", f"evaluation.command='{sys.executable} score.py {over}'", "run.rounds=4"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: models(folder) >= 4, "all models", every=0.1)
    over.touch()
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert (config.parent / "asked").read_text().split() == ["0", "4"], "the last one is always scored"
    assert "3 models, 1 to 3, passed over without a score" in out
    replay(folder)
