"""`fedqueue run --debug`: all of a run in one process, where breakpoints work."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedqueue.cli import main
from fedqueue.errors import ConfigError
from fedqueue.in_process import PythonCommand
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.messages import JobFailed
from fedqueue.runs import replay
from fedqueue.training.scorer import load_task, write_first_model
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(12)

CONFIG = """
[run]
name = "debugged"
strategy = "fedavg"
rounds = 2
round_length = 2.0

[strategy.fedavg]
steps = 5

[task]
name = "digits"

[model]
initial = "first.safetensors"

[evaluation]
command = "PYTHON score.py"

[worker]
command = "TRIED=here PYTHON -u train.py --rate=$HOME"
poll_seconds = 0.2

[[facility]]
name = "north"
queue = { kind = "fixed", delay = 1.5 }

[[facility]]
name = "south"
""".replace("PYTHON", sys.executable)

STRATEGY = """
from fedqueue.protocol.strategies import register
from fedqueue.protocol.strategies.fedavg import FedAvg


@register
class Stopping(FedAvg):
    name = "stopping"

    def model_ready(self):
        breakpoint()
        super().model_ready()
"""

TRAIN = """
import os
import sys
import time

import fedqueue
import helper
from fedqueue.training.scorer import load_task

assert sys.argv[1:] == ["--rate=" + os.environ["HOME"]]
assert os.environ["TRIED"] == "here"
{before}
with fedqueue.participate() as work:
    number = int(work.job_id.partition("/")[2])
    {inside}
    trained = load_task(helper.TASK).train(
        facility=0, model=work.model(), steps=work.assigned_steps, learning_rate=0.01, key=number, during=work.steps()
    )
    work.submit(trained.model)
"""

LITTLE = """
import fedqueue

with fedqueue.participate() as work:
    for _ in work.steps():
        pass
    work.submit(work.model())
"""

SCORE = """
import json
import os

from safetensors.torch import load_file

import helper
from fedqueue.training.scorer import load_task

breakpoint()
print(json.dumps(load_task(helper.TASK).score(load_file(os.environ["FEDQUEUE_MODEL"]))))
"""

RECORDER = """
import json
import os
import sys
import threading


def record():
    frames = sys._current_frames()
    running = {thread.name: [] for thread in threading.enumerate()}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident)
        while frame is not None:
            running[thread.name].append(frame.f_code.co_filename)
            frame = frame.f_back
    called = sys._getframe(1)
    said = {
        "by": os.path.basename(called.f_code.co_filename),
        "pid": os.getpid(),
        "main": threading.current_thread() is threading.main_thread(),
        "files": sorted({name for names in running.values() for name in names}),
    }
    with open(os.environ["RECORDED"], "a") as file:
        file.write(json.dumps(said) + "\\n")
"""

TASK = """
from pathlib import Path

TASK = Path(__file__).parent / "task.json"
"""


@pytest.fixture
def config(in_tmp: Path) -> Path:
    """The digits, trained and scored by scripts of one's own."""
    stored = {"task": {"name": "digits"}, "seed": 1, "facilities": ["north", "south"], "steps_per_second": {}}
    (in_tmp / "task.json").write_text(json.dumps({**stored, "folder": str(in_tmp)}))
    write_first_model(load_task(in_tmp / "task.json"), in_tmp / "first.safetensors")
    for name, text in {"own": STRATEGY, "score": SCORE, "recorder": RECORDER, "helper": TASK}.items():
        (in_tmp / f"{name}.py").write_text(text)
    write_train(in_tmp)
    (in_tmp / "debugged.toml").write_text(CONFIG)
    return in_tmp / "debugged.toml"


def write_train(folder: Path, inside: str = "pass", before: str = "") -> None:
    (folder / "train.py").write_text(TRAIN.format(inside=inside, before=before))


def begin(
    config: Path, *changes: str, hook: str = "0", options: tuple[str, ...] = ("--debug",), **streams: Any
) -> subprocess.Popen[str]:
    """A run, or what is left of it. `hook`: what `breakpoint()` calls; "0": nothing."""
    folder = config.parent / "run"
    argv = [sys.executable, "-m", "fedqueue", "run", *options, "--no-plots"]
    argv += [str(folder)] if folder.exists() else [str(config), "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(config.parent), "PYTHONBREAKPOINT": hook}
    environment["RECORDED"] = str(config.parent / "recorded")
    given = ["--set", *changes] if changes else []
    return subprocess.Popen([*argv, *given], env=environment, text=True, **streams)


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == code, out
    return out


TOLD: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def events(config: Path, kind: type) -> list[Any]:
    with LedgerReader(config.parent / "run" / FILE) as ledger:
        return [event for event, _ in ledger.steps() if isinstance(event, kind)]


def test_breakpoints_in_all_parts_are_in_one_process_with_the_coordinator_and_the_agents(config: Path) -> None:
    write_train(config.parent, inside="breakpoint()")
    config.write_text(CONFIG.replace("fedavg", "stopping").replace("[run]", '[run]\nmodules = ["own"]'))
    process = begin(config, hook="recorder.record", **TOLD)
    finished(process)
    said = [json.loads(line) for line in (config.parent / "recorded").read_text().splitlines()]
    stops = {name: [line for line in said if line["by"] == name] for name in ("train.py", "score.py", "own.py")}
    assert {line["pid"] for line in said} == {process.pid}
    assert len(stops["train.py"]) == 4, "a job each facility and round"
    assert stops["score.py"]
    assert stops["own.py"]
    assert all(line["main"] for line in stops["train.py"] + stops["score.py"])
    assert not any(line["main"] for line in stops["own.py"]), "the coordinator has a thread of its own"
    for line in stops["train.py"]:
        for part in ("coordinator/coordinator.py", "agent/agent.py", "train.py"):
            assert any(name.endswith(part) for name in line["files"]), part
    summary = json.loads((config.parent / "run/summary.json").read_text())
    assert summary["score"]["final"] > 0.1
    with LedgerReader(config.parent / "run" / FILE) as ledger:
        waits = ledger.rows("SELECT admission_delay FROM incarnations WHERE job LIKE 'north/%'")
    assert all(row["admission_delay"] >= 1.4 for row in waits), "the queue of the config"


def test_the_built_in_job_and_scores_run_in_this_process_too(config: Path) -> None:
    text = CONFIG.replace('initial = "first.safetensors"', "")
    config.write_text("\n".join(line for line in text.splitlines() if not line.startswith("command")))
    out = finished(begin(config, hook="recorder.record", **TOLD))
    summary = json.loads((config.parent / "run/summary.json").read_text())
    assert (summary["models"]["newest"]["version"], summary["jobs"]["failed"]) == (2, 0), out
    assert summary["score"]["final"] > 0.1


# By hand --------------------------------------------------------------------------------------------------


class Terminal:
    """A run under the debugger, and somebody who types."""

    def __init__(self, config: Path) -> None:
        self._here, there = pty.openpty()
        self.process = begin(config, hook="pdb.set_trace", stdin=there, stdout=there, stderr=there)
        os.close(there)
        self.seen = ""

    def expect(self, text: str) -> None:
        until = time.monotonic() + LONGEST
        while text not in self.seen:
            assert time.monotonic() < until, self.seen
            if select.select([self._here], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self._here, 4096).decode("utf-8", "replace")
                except OSError:  # everybody at the other end has gone
                    assert text in self.seen, self.seen

    def type(self, line: str) -> None:
        self.seen = ""
        os.write(self._here, f"{line}\n".encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._here)


@pytest.fixture(params=["train.py", "score.py"])
def terminal(config: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    if request.param == "train.py":
        (config.parent / "score.py").write_text(SCORE.replace("breakpoint()", ""))
        write_train(config.parent, inside="if number == 1 and work.facility == 'south': breakpoint()")
    made = Terminal(config)
    yield made
    made.close()


@pytest.mark.parametrize("terminal", ["train.py"], indirect=True)
def test_pdb_asks_in_a_training_script_and_the_run_goes_on(terminal: Terminal) -> None:
    terminal.expect("(Pdb) ")
    terminal.type("p work.job_id")
    terminal.expect("'south/1'")
    terminal.expect("(Pdb) ")
    terminal.type("c")
    terminal.expect("run folder:")
    assert terminal.process.wait(LONGEST) == 0


def test_leaving_pdb_stops_the_run_which_can_go_on(terminal: Terminal, config: Path) -> None:
    terminal.expect("(Pdb) ")
    terminal.type("q")
    terminal.expect("go on with it: fedqueue run")
    assert terminal.process.wait(LONGEST) == 130
    write_train(config.parent)
    finished(begin(config, **TOLD))
    replay(config.parent / "run")


# What goes wrong ------------------------------------------------------------------------------------------


def test_an_error_in_a_training_script_is_shown_and_the_job_counts_as_failed(config: Path) -> None:
    write_train(config.parent, inside="if (work.facility, number) == ('south', 0): raise ZeroDivisionError('mine')")
    out = finished(begin(config, **TOLD))
    assert "Traceback" in out
    assert f'File "{config.parent / "train.py"}", line' in out
    assert "runpy" not in out
    (failed,) = events(config, JobFailed)
    assert failed.job_id == "south/0"
    assert "ZeroDivisionError: mine" in failed.reason


@pytest.mark.parametrize("where", ["inside", "before"])
def test_after_an_interrupt_the_run_goes_on(config: Path, where: str) -> None:
    mark = config.parent / "reached"
    write_train(config.parent, **{where: f"open({str(mark)!r}, 'w'); time.sleep(600)"})
    process = begin(config, **TOLD)
    wait_for(mark.exists, "a job runs")
    process.send_signal(signal.SIGINT)
    assert "go on with it: fedqueue run" in finished(process, 130)
    write_train(config.parent)
    if where == "before":  # on without --debug, where jobs have the worker's part of fedqueue alone
        (config.parent / "train.py").write_text(LITTLE)
    finished(begin(config, options=("--debug",) if where == "inside" else (), **TOLD))
    replay(config.parent / "run")


@pytest.mark.parametrize("where", ["inside", "before"])
def test_a_job_that_runs_when_the_run_is_over_is_ended(config: Path, where: str) -> None:
    """Inside `participate` it hears the signal, as of a scheduler; outside it is ended by it."""
    waits = "while not work.should_stop: time.sleep(0.05)" if where == "inside" else "time.sleep(600)"
    write_train(config.parent, **{where: waits})
    out = finished(begin(config, "run.seconds=6", **TOLD))
    assert "the run is over" in out


@pytest.mark.parametrize(
    "command",
    ["torchrun train.py", "cd . && python train.py", "python", "python -c 1", "python train.py > log", "python 'a", ""],
)
def test_a_command_that_is_not_pythons_is_refused_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    changes = ["--set", f"worker.command={json.dumps(command)}"]
    assert main(["run", str(config), "--debug", "--out", "run", *changes]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "worker.command: with --debug it must be `python SCRIPT ...`" in said
    assert len(said.splitlines()) == 1
    assert not Path("run").exists()


def test_a_script_that_is_not_there_is_said_before_anything_begins(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "train.py").unlink()
    assert main(["run", str(config), "--debug", "--out", "run"]) == ConfigError.exit_code
    assert "train.py is not a file" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_command_leaves_the_process_as_it_was(in_tmp: Path) -> None:
    body = "import os, sys\nos.environ['LEFT'] = '1'\nos.chdir('/')\nsys.path.append('x')\nsys.argv.append('y')\n"
    (in_tmp / "odd.py").write_text(body + "raise SystemExit(int(sys.argv[1]))\n")
    before = sys.argv[:], sys.path[:], Path.cwd(), dict(os.environ)
    assert PythonCommand.of("python3.11 odd.py 7", str(in_tmp), "").run() == 7
    assert PythonCommand.of(f"{sys.executable} -m odd 0", str(in_tmp), "").run() == 0
    assert (sys.argv, sys.path, Path.cwd(), dict(os.environ)) == before
