"""docs/operating.md is true: its commands are given one after the other, at two real Slurm clusters, over TLS."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedqueue import __version__
from fedqueue.agent.settings import load_agent
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.runs import replay
from tests.faults.harness import free_port
from tests.faults.ledger_checks import Story, check_counts, check_end, check_fates
from tests.slurm import Cluster, clusters, processes_with
from tests.waiting import LONGEST, wait_for

pytestmark = pytest.mark.waits(120)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operating.md"
PACKAGES = Path(pytest.__file__).parent.parent  # what this Python has, without this checkout
COMMAND = re.compile(r"^(server|north|south)\$ (.+)$", re.MULTILINE)
UNITS = ROOT / "examples" / "systemd"
NOT_HERE = ("pip install ", "python3 -m venv ")  # they want a package index
HASTE = {  # what the page says, and what a test can wait for
    "study.toml": {
        'host = "0.0.0.0"': 'host = "127.0.0.1"',
        "port = 8440": "port = {port}",
        'names = ["fl.example.org"]': "names = []",
        "rounds = 50": "rounds = 100000",  # it goes on until the page stops it
        "round_length = 600.0": "round_length = 4.0",
        "model_megabytes = 1.0": "model_megabytes = 0.01",
    },
    "agent.toml": {"poll_seconds = 10.0": "poll_seconds = 0.5"},
    "own.toml": {"round_length = 600.0": "round_length = 20.0", 'train.py"': 'train.py"\npoll_seconds = 0.2'},
}

# The machine's own commands, as far as the page needs them: another host is another folder.
SHIMS = {
    "python": 'exec {python} "$@"',
    "fedqueue": 'exec {python} -m fedqueue "$@"',
    "activate": 'export PATH="$HOME/fedqueue/bin:$PATH"',
    "scp": 'host="${{2%%:*}}"; exec cp "$1" "{root}/${{host%%.*}}/${{2#*:}}"',
    "crontab": 'if [ "$1" = - ]; then exec cat > "$HOME/crontab"; fi; cat "$HOME/crontab" 2>/dev/null; true',
}


def named_block(language: str, name: str, port: int) -> str:
    (found,) = re.findall(
        rf"^```{language}\n# {re.escape(name)}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    text = str(found)
    for said, here in HASTE.get(name, {}).items():
        assert said in text, f"the page's {name} does not say {said}"
        text = text.replace(said, here.format(port=port))
    return text


class Machine:
    """A user's account on a host of the page."""

    def __init__(self, root: Path, name: str, cluster: Cluster | None) -> None:
        self.name = name
        self.home = root / name
        self.folder = self.home if cluster is None else self.home / "study"
        commands = self.home / "fedqueue" / "bin"
        commands.mkdir(parents=True)
        for program, text in SHIMS.items():
            words = text.format(python=shlex.quote(sys.executable), root=root)
            (commands / program).write_text(f"#!/bin/bash\n{words}\n")
            (commands / program).chmod(0o755)
        self.environment = {
            **os.environ,
            "HOME": str(self.home),
            "PATH": f"{commands}:{os.environ['PATH']}",
            **({} if cluster is None else {"SLURM_CONF": str(cluster.conf)}),
        }
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []  # what was started with &

    @property
    def where(self) -> Path:
        """A shell of its own for each command begins where the last `cd` of the page led to."""
        return self.folder if self.folder.exists() else self.home

    def say(self, command: str) -> str:
        if command.endswith("&"):
            argv = ["bash", "-c", f"exec {command[:-1]}"]
            process = subprocess.Popen(argv, cwd=self.where, env=self.environment, start_new_session=True)
            self.running.append((command, process))
            return ""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.where, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{self.name}$ {command}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"{path}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        for _, process in self.running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def cron(machine: Machine) -> Iterator[None]:
    """Does what the machine's crontab says, at every full second instead of minute."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(1.0):
            table = machine.home / "crontab"
            for line in table.read_text().splitlines() if table.exists() else []:
                command = line.split(maxsplit=5)[5]
                subprocess.run(["bash", "-c", command], cwd=machine.home, env=machine.environment, timeout=600)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Follower:
    """Someone who follows the page; waits where a person would look first whether it is time."""

    def __init__(self, machines: dict[str, Machine]) -> None:
        self.machines = machines
        self.server = machines["server"]
        self.run = self.server.folder / "study"
        self.port = free_port()
        self.server.folder.joinpath("study.toml").write_text(named_block("toml", "study.toml", self.port))

    def give(self, machine: Machine, command: str) -> None:
        verb = " ".join(command.split()[:2])
        if command.startswith("nohup fedqueue serve study >>"):  # the server was rebooted
            self.served().kill()
            self.served().wait()
        if verb == "fedqueue pause":
            self.wait(lambda s: s["state"] == "running" and s["model"] >= 1, "a first model")
        if verb == "fedqueue stop":
            self.wait(lambda s: s["model"] >= 4 and self.updates() >= {"north", "south"}, "work of both sites")
        said = machine.say(command)
        if "serve study" in command:
            self.wait(lambda s: True, "an answer")
        if "enroll --init" in command:
            tomllib.loads((machine.folder / "agent.toml").read_text())
            (machine.folder / "agent.toml").write_text(named_block("toml", "agent.toml", 0))
            (machine.folder / "rehearse.py").write_text(named_block("python", "rehearse.py", 0))
        if "status" in command and "--json" in command:
            assert {site["name"] for site in json.loads(said)["facilities"]} == {"north", "south"}
        if verb == "fedqueue pause":
            assert self.status()["state"] == "paused"
        if verb == "fedqueue drain":
            assert [site["state"] for site in self.status()["facilities"]] == ["active", "drained"]
        if verb == "fedqueue stop":
            assert self.served().wait(LONGEST) == 0, self.server.logs()

    def served(self) -> subprocess.Popen[bytes]:
        return [process for command, process in self.server.running if "fedqueue serve" in command][-1]

    def status(self) -> dict[str, Any]:
        """Empty: it does not answer."""
        argv = [sys.executable, "-m", "fedqueue", "status", str(self.run), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def wait(self, true: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Until this is true of the status."""

        def logs() -> str:
            return "\n".join(machine.logs() for machine in self.machines.values())

        wait_for(lambda: bool(found := self.status()) and true(found), what, logs)

    def updates(self) -> set[str]:
        with LedgerReader(self.run / FILE) as ledger:
            rows = ledger.rows("SELECT job FROM updates WHERE fate = 'aggregated'")
        return {str(row["job"]).partition("/")[0] for row in rows}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    with clusters(2) as (first, second):
        sites = {"server": None, "north": first, "south": second}
        made = {name: Machine(tmp_path, name, cluster) for name, cluster in sites.items()}
        try:
            yield made
        finally:
            for machine in made.values():
                machine.close()


def test_following_the_page_makes_a_run_over_two_slurm_sites(machines: dict[str, Machine]) -> None:
    follower = Follower(machines)
    with cron(machines["south"]):
        for name, command in COMMAND.findall(PAGE.read_text()):
            if not command.startswith(NOT_HERE):
                follower.give(machines[name], command)
        (agent,) = [process for _, process in machines["north"].running]
        assert agent.wait(LONGEST) == 0, machines["north"].logs()

    story = Story(follower.run)
    check_end(story, rounds=4)
    check_counts(story)
    check_fates(story)
    assert replay(follower.run) == len(story.steps)
    assert (follower.run / "report.html").exists()
    address = json.loads((follower.run / "address.json").read_text())
    assert address["url"].startswith("https://")
    for name in ("north", "south"):
        home = machines[name].folder / "fedqueue-home"
        assert not processes_with(f"FEDQUEUE_JOB={home}/jobs/0")
        assert (home / "credential").stat().st_mode & 0o077 == 0
        assert not list(machines[name].home.rglob("*.invitation"))
    log = (follower.server.folder / "serve.log").read_text()
    for line in ("the run begins", "paused", "south is drained", "goes on from model", "over: stopped by the operator"):
        assert line in log


def commands(prompt: str) -> list[str]:
    return re.findall(rf"^{prompt}\$ (.+)$", PAGE.read_text(), re.MULTILINE)


def test_own_model_with_own_scoring_learns_as_the_page_says(tmp_path: Path) -> None:
    laptop = Machine(tmp_path, "laptop", None)
    for name in ("own_model.py", "first.py", "train.py", "score.py"):
        (laptop.home / name).write_text(named_block("python", name, 0))
    (laptop.home / "own.toml").write_text(named_block("toml", "own.toml", 0))
    for command in commands("laptop"):
        laptop.say(command)
    summary = json.loads((laptop.home / "rehearsal" / "summary.json").read_text())
    assert summary["rounds"] == 5
    assert summary["score"]["final"] > 0.7
    assert summary["time_to"]["0.70"] is not None


def test_wheel_is_built_and_installed_as_the_page_says(tmp_path: Path) -> None:
    machines = {name: Machine(tmp_path, name, None) for name in ("checkout", "site")}
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, machines["checkout"].home / name)
    shutil.rmtree(machines["site"].home / "fedqueue")  # the page makes it
    here = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: no isolation; so pip reads it
    said = ""
    for name, command in re.findall(r"^(checkout|site)\$ (.+)$", PAGE.read_text(), re.MULTILINE):
        machines[name].environment |= here
        said = machines[name].say(command if "--version" not in command else f"PYTHONPATH={PACKAGES} {command}")
    assert said == f"fedqueue {__version__}\n"
    assert list(machines["site"].home.glob("fedqueue/lib/python*/site-packages/fedqueue/__init__.py"))


@pytest.mark.parametrize("name", ["with torchrun", "with modules", "with conda", "with Apptainer"])
def test_agents_of_the_page_are_sound(name: str, tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text(named_block("toml", f"agent.toml {name}", 0))
    config = load_agent(tmp_path / "agent.toml")
    script = "\n".join([*config.agent.before, config.agent.command])
    subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_units_of_the_page_are_sound(unit: str, tmp_path: Path) -> None:
    assert unit in PAGE.read_text()
    home = Machine(tmp_path, "home", None).home
    (home / "study").mkdir()
    environment = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(tmp_path)}
    argv = ["systemd-analyze", "verify", "--user", str(UNITS / unit)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_extra_that_the_page_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"fedqueue\[([\w,]+)\]", PAGE.read_text()):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
