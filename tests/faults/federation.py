"""A federation of real processes: a server, an agent for each site, their jobs; and runs that are submitted to it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedqueue.agent.site import OFFER
from fedqueue.coordinator.run_folder import RUNS, SETTINGS, ensure_ledger, store_config, stored_config
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.runs import SUMMARY
from tests.faults.harness import SOURCE, WORKER, Process, Run, first_model, free_port, started, toml
from tests.faults.ledger_checks import GRACE_SECONDS, Home, Story, check_run
from tests.waiting import LONGEST, wait_for

SITES = ("north", "south")
SERVER = "server"
COMMAND = "exec " + shlex.join([sys.executable, "-I", "-S", str(WORKER), "{}"])
"""That a site offers, as `default`."""


class TwoRuns(Run):
    """Two runs at once in a federation whose server and agents are started again when they die."""

    NAMES = ("first", "second")
    in_federation = True

    def __init__(self, base: Path, trees: Sequence[Mapping[str, Any]], **changes: Any) -> None:
        """`trees`: a config for each, with the same facilities and port."""
        self._trees = [dict(tree) for tree in trees]
        super().__init__(base, self._trees[0], **changes)

    def lay_out(self) -> None:
        self.folder.chmod(0o700)
        (self.folder / SETTINGS).write_text(toml({"server": {"port": self.port}}))
        for name, tree in zip(self.NAMES, self._trees, strict=True):
            folder = self.run_folder(name)
            folder.mkdir(mode=0o700, parents=True)
            server = {key: value for key, value in tree["server"].items() if key != "port"}
            store_config(folder, {**tree, "run": {**tree["run"], "name": name}, "server": server}, self.base)
            ensure_ledger(stored_config(folder), folder)

    def run_folder(self, name: str) -> Path:
        return self.folder / RUNS / name

    def run_id(self, name: str) -> str:
        with LedgerReader(self.run_folder(name) / FILE) as ledger:
            return str(ledger.meta["run"])

    def is_over(self) -> bool:
        """Both runs, and no site has anything left to do for them."""
        if not all((self.run_folder(name) / SUMMARY).exists() for name in self.NAMES):
            return False
        homes = [self.home(facility["name"]) for facility in self.tree["facility"]]
        return not any(list(home.glob(f"{RUNS}/*/{OFFER}")) or self.jobs_running(home.name) for home in homes)

    def end(self) -> None:
        """Neither a server nor an agent of a federation ends by itself."""
        for actor in self.actors.values():
            actor.done = True
            if actor.process is not None:
                with suppress(ProcessLookupError):
                    os.kill(actor.process.pid, signal.SIGTERM)
        self.run_until(lambda: all(actor.process is None for actor in self.actors.values()), "all have ended")
        wait_for(lambda: not self.left_behind(), "no process is left", lambda: str(self.left_behind()))


class Served:
    def __init__(self, base: Path, *, sites: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`sites`: tables of their agents' configs, by name, beside [agent] and [scheduler]."""
        self.base = base
        self.folder = base / "federation"
        self.folder.mkdir(mode=0o700, parents=True)
        self.port = free_port()
        (self.folder / "federation.toml").write_text(toml({"server": {"port": self.port}}))
        first_model(base / "first.safetensors")
        self.processes: dict[str, Process] = {}
        self.sites = {name: dict(tables) for name, tables in (sites or {name: {} for name in SITES}).items()}
        for name, tables in self.sites.items():
            self._write_agent(name, tables)

    def _write_agent(self, name: str, tables: Mapping[str, Any]) -> None:
        own = dict(tables.get("agent", {}))
        agent = {"home": str(self.home(name)), "command": COMMAND, "poll_seconds": 0.1, **own}
        agent |= {"grace_seconds": GRACE_SECONDS, "stage_worker": False}
        offers = {f"offer.{offer}": given for offer, given in tables.get("offer", {}).items()}
        scheduler = {"kind": "local", "min_wall_seconds": 5.0, "slots": 2, **tables.get("scheduler", {})}
        self.toml(name).write_text(toml({"agent": agent, "scheduler": scheduler, **offers}))

    # Places

    def home(self, site: str) -> Path:
        return self.base / site

    def toml(self, site: str) -> Path:
        return self.base / f"{site}.toml"

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def run_id(self, name: str) -> str:
        with LedgerReader(self.run_folder(name) / FILE) as ledger:
            return str(ledger.meta["run"])

    # Processes

    def __enter__(self) -> Self:
        self.start(SERVER)
        try:
            self._enrol_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _enrol_all(self) -> None:
        for name in self.sites:
            invitation = self.base / f"{name}.invitation"
            self.say("invite", self.folder, name, "--out", invitation)
            self.say("enroll", self.toml(name), "--invitation", invitation)
        self.start(*self.sites)

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def start(self, *names: str) -> None:
        for name in names:
            server = ["serve", str(self.folder), "--plain-http"]
            argv = server if name == SERVER else ["agent", str(self.toml(name))]
            self.processes[name] = started(argv, {}, self.base / f"{name}.log")

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: process.poll() is not None, f"{name} is dead")

    def say(self, *argv: object, fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedqueue", *map(str, argv)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr + self.tails()
        return done.stderr if fails else done.stdout

    def tails(self) -> str:
        logs = [self.base / f"{name}.log" for name in (SERVER, *self.sites)]
        return "".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs if path.exists())

    # Runs

    def config(self, name: str, *, strategy: str = "fedasync", rounds: int = 4, **tables: Any) -> Path:
        given: dict[str, Any] = {
            "run": {"name": name, "strategy": strategy, "rounds": rounds, "round_length": 0.5},
            "task": {"name": "timing"},
            f"strategy.{strategy}": {"steps": 5} if strategy != "jit" else {"min_steps": 3},
            "model": {"initial": "first.safetensors"},
            "evaluation": {"where": "nowhere"},
            "server": {"away_seconds": 60.0, "startup_allowance_seconds": 0.0},
            "failures": {"retry_seconds": 0.2, "suspend_seconds": 0.5},
        }
        for table, changes in tables.items():
            given[table] = {**given.get(table, {}), **changes}
        path = self.base / f"{name}.toml"
        facilities = "".join(f'[[facility]]\nname = "{site}"\n' for site in self.sites)
        path.write_text(toml(given) + facilities)
        return path

    def submit(self, name: str, **changes: Any) -> str:
        return self.say("submit", self.folder, self.config(name, **changes))

    def listed(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.say("list", self.folder, "--json"))
        return found

    def story(self, name: str) -> Story:
        return Story(self.run_folder(name))

    def happened(self, name: str, kind: type[Any], times: int = 1) -> bool:
        return len(self.story(name).events(kind)) >= times

    def wait(self, what: str, true: Any) -> None:
        wait_for(true, what, self.tails)

    def wait_for_end(self, name: str) -> None:
        summary = self.run_folder(name) / "summary.json"
        self.wait(f"the end of {name}", summary.exists)

    def check(self, name: str, rounds: int) -> Story:
        """All that must hold of a run that is alone."""
        homes = [Home.below(self.home(site), self.run_id(name)) for site in self.sites]
        return check_run(self.run_folder(name), homes, rounds=rounds)
