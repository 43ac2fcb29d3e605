"""A real run of real processes that a test may kill: a coordinator, an agent for each facility, their jobs.

`Run` lays out a run and its facilities in a folder, starts the processes, starts again what dies, and waits for the
end. Processes are forked from one that has everything imported (`forked`: cheap, for many runs) or started as a user
would (`started`). What lies between an agent and its coordinator, and which scheduler a facility has, is the caller's:
the same harness serves other schedulers.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from fedqueue import files
from fedqueue.agent.enrolment import Enrolment
from fedqueue.coordinator.access import OPERATOR_FILE, Access
from fedqueue.coordinator.run_folder import store_config
from fedqueue.errors import RunFolderError
from tests.faults.ledger_checks import GRACE_SECONDS, Story
from tests.waiting import wait_for

COORDINATOR: Final = "coordinator"
FACILITIES: Final = ("north", "south")
WORKER: Final = Path(__file__).parent / "worker.py"
SOURCE: Final = Path(__file__).parent.parent.parent / "src"
VALUES: Final = 32
"""Of the model: small, so that transfers and sums cost nothing."""
PR_SET_PDEATHSIG: Final = 1
LOOK: Final = 0.02  # seconds between two looks at the processes


# Processes ----------------------------------------------------------------------------------------------


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None: it lives. Else its exit code, or minus the signal that ended it."""


Spawn = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Takes the arguments of `fedqueue`, further variables, and where the output goes."""


class _Forked:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def forked(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """A process of its own that has nothing left to import. Only from a process without threads."""
    from fedqueue.cli import main

    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _Forked(pid)
    code = 99
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever ends the suite ends us
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 256)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        files.arm()
        code = main(list(argv))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def started(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """As a user starts it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "fedqueue", *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
            start_new_session=True,
        )


@dataclass(slots=True)
class Actor:
    """A process of the run that is started again when it dies."""

    name: str
    argv: list[str]
    log: Path
    points: list[str] = field(default_factory=list)  # failpoints, one a life, oldest first
    environment: dict[str, str] = field(default_factory=dict)
    process: Process | None = None
    armed: str = ""  # the failpoint of this life
    killed_by_us: bool = False
    not_before: float = 0.0  # monotonic
    codes: list[int] = field(default_factory=list)  # how its lives ended
    hit: list[str] = field(default_factory=list)  # failpoints at which it died
    done: bool = False
    visits: bool = False  # it ends and comes again, as from cron


# The run ------------------------------------------------------------------------------------------------


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    def value(given: Any) -> str:
        if isinstance(given, Mapping):
            return "{ " + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in given.items()) + " }"
        return json.dumps(given)

    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {value(given)}\n" for key, given in table.items())
        for name, table in tables.items()
    )


def first_model(path: Path) -> Path:
    head = json.dumps({"weight": {"dtype": "F32", "shape": [VALUES], "data_offsets": [0, 4 * VALUES]}}).encode()
    head += b" " * (-len(head) % 8)
    values = [place / 16 for place in range(VALUES)]
    path.write_bytes(len(head).to_bytes(8, "little") + head + struct.pack(f"<{VALUES}f", *values))
    return path


def tree_of(
    strategy: str, *, rounds: int = 3, port: int = 0, options: Mapping[str, Any] | None = None, **tables: Any
) -> dict[str, Any]:
    """A config of short rounds."""
    tree: dict[str, Any] = {
        "run": {"strategy": strategy, "rounds": rounds, "round_length": 0.5},
        "task": {"name": "timing"},
        "strategy": {strategy: dict(options or {})},
        "model": {"initial": "first.safetensors"},
        "evaluation": {"where": "nowhere"},
        "server": {"port": port, "away_seconds": 60.0, "startup_allowance_seconds": 0.0},  # jobs that hang end soon
        "failures": {"retry_seconds": 0.2, "suspend_seconds": 0.5},
        "facility": [{"name": name} for name in FACILITIES],
    }
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table} if isinstance(table, dict) else table
    return tree


class Run:
    """One run in `base`; at the end `close` leaves no process behind."""

    in_federation = False  # what its sites enrol with is a federation

    def __init__(
        self,
        base: Path,
        tree: Mapping[str, Any],
        *,
        spawn: Spawn = started,
        wishes: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        scheduler: Mapping[str, Any] | None = None,
        url: Callable[[str], str] | None = None,
        delay: Callable[[], float] = lambda: 0.1,
    ) -> None:
        """`wishes` go to worker.py; `agent` and `scheduler` change what the agents' configs say; `url` gives the
        address by which a facility calls the coordinator; `delay`: seconds before what died is started again."""
        self.base = base
        self.folder = base / "run"
        self.tree = dict(tree)
        self.port = int(tree["server"]["port"])
        self._spawn = spawn
        self._delay = delay
        self.wishes = dict(wishes or {})
        self.folder.mkdir(parents=True, exist_ok=True)  # a test may have put a small disk there
        first_model(base / "first.safetensors")
        self.lay_out()
        access = Access(self.folder)
        self.actors = {
            COORDINATOR: Actor(COORDINATOR, ["serve", str(self.folder), "--plain-http"], base / "coordinator.log")
        }
        for facility in self.tree["facility"]:
            name = facility["name"]
            address = url(name) if url is not None else f"http://127.0.0.1:{self.port}"
            credential = access.give(name)
            enrolment = Enrolment(url=address, facility=name, credential=credential, federation=self.in_federation)
            enrolment.save(self.home(name))
            self.write_agent(name, dict(agent or {}), dict(scheduler or {}))
            log = base / f"{name}.log"
            self.actors[name] = Actor(name, ["agent", str(self.toml(name))], log)
        (self.folder / OPERATOR_FILE).unlink()  # so that the coordinator itself has a secret to write

    def lay_out(self) -> None:
        """What the coordinator begins with."""
        store_config(self.folder, self.tree, self.base)

    def home(self, facility: str) -> Path:
        return self.base / facility

    def toml(self, facility: str) -> Path:
        return self.base / f"{facility}.toml"

    def write_agent(self, facility: str, agent: Mapping[str, Any], scheduler: Mapping[str, Any]) -> None:
        command = shlex.join([sys.executable, "-I", "-S", str(WORKER), json.dumps(self.wishes)])
        tables = {
            "agent": {
                "home": str(self.home(facility)),
                "command": f"exec {command}",
                "poll_seconds": 0.1,
                "grace_seconds": GRACE_SECONDS,
                "stage_worker": False,
                **agent,
            },
            "scheduler": {"kind": "local", "min_wall_seconds": 5.0, **scheduler},
        }
        self.toml(facility).write_text(toml(tables))

    # Processes ------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        for name in names or tuple(self.actors):
            actor = self.actors[name]
            actor.armed = actor.points.pop(0) if actor.points else ""
            actor.killed_by_us = False
            variables = {**actor.environment, "FEDQUEUE_FAILPOINT": actor.armed}
            actor.process = self._spawn(actor.argv, variables, actor.log)

    def kill(self, name: str) -> None:
        actor = self.actors[name]
        if actor.process is not None and actor.process.poll() is None:
            actor.killed_by_us = True
            os.kill(actor.process.pid, signal.SIGKILL)

    def stop(self, name: str) -> None:
        """Kill it, and do not start it again until `start`."""
        self.kill(name)
        actor = self.actors[name]
        wait_for(lambda: actor.process is None or actor.process.poll() is not None, f"{name} is dead")
        if actor.process is not None:
            self._bury(actor)
        actor.process = None

    def turn(self) -> None:
        """Look at every process once: note the dead, start again who may be."""
        for actor in self.actors.values():
            if actor.process is not None and actor.process.poll() is not None:
                self._bury(actor)
                actor.process = None
                actor.not_before = time.monotonic() + self._delay()
                if actor.done:
                    continue
                actor.done = actor.codes[-1] == 0 and not actor.visits
            elif actor.process is None and not actor.done and 0 < actor.not_before <= time.monotonic():
                self.start(actor.name)

    def _bury(self, actor: Actor) -> None:
        assert actor.process is not None
        code = actor.process.poll()
        if code is None:
            return
        actor.not_before = 0.0
        actor.codes.append(code)
        if code == -signal.SIGKILL and not actor.killed_by_us:
            actor.hit.append(actor.armed.partition(":")[0])

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        def true() -> bool:
            if condition():
                return True
            self.turn()
            return False

        wait_for(true, what, self.tails, LOOK)

    def run_to_end(self) -> None:
        """Until the coordinator and all agents have ended by themselves, and no job is left."""
        self.run_until(lambda: all(actor.done or actor.visits for actor in self.actors.values()), "the end of the run")
        wait_for(lambda: not self.left_behind(), "no process is left", lambda: str(self.left_behind()), LOOK)

    def story(self) -> Story:
        """The ledger as it is now; empty before there is one."""
        return Story(self.folder)

    def happened(self, kind: type[Any], job: str | None = None) -> bool:
        """Whether the ledger has such an event, of this job."""
        try:
            story = self.story()
        except RunFolderError:  # it has only begun to be made
            return False
        return any(job in (None, getattr(event, "job_id", None)) for event in story.events(kind))

    def jobs_running(self, facility: str) -> list[dict[str, Any]]:
        """States of the local scheduler's jobs that live."""
        found = []
        for path in sorted(self.home(facility).glob("scheduler/jobs/*/state.json")):
            with suppress(ValueError, OSError):
                state = json.loads(path.read_text())
                if state["phase"] != "ended":
                    found.append({**state, "name": path.parent.name})
        return found

    def left_behind(self) -> list[str]:
        """Processes that belong to this run."""
        ours = {actor.process.pid for actor in self.actors.values() if actor.process is not None}
        return processes_in(self.base, ours)

    def close(self) -> None:
        for name in self.actors:
            self.stop(name)

        def none_left() -> bool:
            found = self.left_behind()
            for line in found:  # a scheduler may just have started what an agent submitted last
                with suppress(ProcessLookupError):
                    os.kill(int(line.split()[0]), signal.SIGKILL)
            return not found

        wait_for(none_left, "nothing is left behind")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tails(self, lines: int = 12) -> str:
        """The last lines of every log, for a person."""
        parts = []
        for actor in self.actors.values():
            text = actor.log.read_text(errors="replace").splitlines()[-lines:] if actor.log.exists() else []
            parts.append(f"--- {actor.name}: ended with {actor.codes}\n" + "\n".join(text))
        return "\n".join(parts)

    def log(self, name: str) -> str:
        path = self.actors[name].log
        return path.read_text(errors="replace") if path.exists() else ""


def processes_in(folder: Path, known: Collection[int] = ()) -> list[str]:
    """Processes that are known, are at work in this folder or were given a path in it; number and words of each."""
    mark = f"{folder}/".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes()
            over = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            inside = mark in words + b"/" or f"{os.readlink(path / 'cwd')}/".startswith(f"{folder}/")
            if not over and (int(path.name) in known or (inside and int(path.name) != os.getpid())):
                found.append(f"{path.name} {words.replace(bytes(1), b' ').decode(errors='replace')[:200]}")
    return found


def free_port(first: int = 18000, last: int = 30000) -> int:
    """Below the range from which the kernel takes ports for connections, so that it stays free for a while."""
    begin = first + (os.getpid() * 101 + time.monotonic_ns() // 1000) % (last - first)
    for port in range(begin, last):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
