"""A whole run on this machine: agents as processes beside the coordinator, each facility a queue of its own."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import fedqueue
from fedqueue.agent.enrolment import Enrolment
from fedqueue.agent.schedulers.base import LocalSettings, SchedulerSettings
from fedqueue.agent.schedulers.localjob import started_ticks
from fedqueue.agent.settings import AgentSettings
from fedqueue.config import Config, FacilitySettings, toml_value
from fedqueue.coordinator.access import Access
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.scoring import TASK
from fedqueue.protocol.contract import Address
from fedqueue.sim.queues import make_queue

log = logging.getLogger(__name__)

WAITS: Final = 500  # extra waits drawn for a facility; then they come again
GRACE_SECONDS: Final = 2.0  # one machine's file system does not lag
LEAVE_SECONDS: Final = 10.0
PID: Final = "agent.pid"  # in a home: the process number of its agent, and when it began


class Agents:
    """The agents of a run, one process each; a dead one is started again."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped = threading.Event()

    @contextmanager
    def beside(self, coordinator: Coordinator, access: Access, address: Address) -> Iterator[None]:
        for facility in self._config.facility:
            home = enrol(self._folder, facility.name, access, address)
            (home / "agent.toml").write_text(self._toml(facility))
        self._stopped.clear()
        watch = threading.Thread(target=self._watch, name="agents", daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._stopped.set()
            watch.join()
            self._end()

    def kill(self) -> None:
        """They forget nothing by it."""
        for process in list(self._processes.values()):
            process.kill()

    def _watch(self) -> None:
        while True:
            for facility in self._config.facility:
                process = self._processes.get(facility.name)
                if process is not None and process.poll() not in (None, 0):
                    if self._stopped.wait(2.0):  # Ctrl-C reaches it before us
                        return
                    see = home_of(self._folder, facility.name) / "agent.log"
                    log.warning(f"the agent of {facility.name} died; starting it again; see {see}")
                if (process is None or process.poll() not in (None, 0)) and not self._stopped.is_set():
                    self._processes[facility.name] = self._start(facility.name)
            if self._stopped.wait(0.5):
                return

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        home = home_of(self._folder, name)
        end_left_behind(home)
        with (home / "agent.log").open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedqueue", "agent", str(home / "agent.toml")],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": _python_path()},
            )
        (home / PID).write_text(f"{process.pid} {started_ticks(process.pid)}")
        return process

    def _end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _toml(self, facility: FacilitySettings) -> str:
        agent = agent_settings(self._config, self._folder, facility)
        own = LocalSettings(slots=facility.slots, extra_waits=extra_waits(self._config, facility))
        return _table("agent", agent) + _table("scheduler", facility.scheduler or own)


def home_of(folder: Path, name: str) -> Path:
    return folder / "facilities" / name


def enrol(folder: Path, name: str, access: Access, address: Address) -> Path:
    """The home of a facility, which has its credential then."""
    home = home_of(folder, name)
    Enrolment(
        url=address.url,
        facility=name,
        credential=access.give(name),
        certificate=address.certificate,
        run=address.run,
    ).save(home)
    return home


def agent_settings(config: Config, folder: Path, facility: FacilitySettings) -> AgentSettings:
    own = config.worker.command
    command = shlex.join(task_job(folder)) if own is None else f"cd {shlex.quote(config.folder)} && {own}"
    return AgentSettings(
        home=str(home_of(folder, facility.name)),
        command=command,
        evaluate_command=command,
        poll_seconds=config.worker.poll_seconds,
        grace_seconds=GRACE_SECONDS,
        node_hours=facility.node_hours,
        stage_worker=own is not None,
        environment={"PYTHONPATH": _python_path()} if own is None else {},
        masked_least_members=config.trust.least_members,
    )


def task_job(folder: Path) -> list[str]:
    """The job that trains the run's task."""
    return [sys.executable, "-m", "fedqueue.training.job", str(folder / TASK)]


def extra_waits(config: Config, facility: FacilitySettings) -> list[float]:
    """What the facility's queue in the config makes its jobs wait."""
    if facility.queue is None:
        return []
    waiting = make_queue(facility.queue, facility=facility.name, seed=config.run.seed, folder=Path(config.folder))
    return [round(waiting.delay(number, 0, 0.0, config.run.round_length), 3) for number in range(WAITS)]


def end_left_behind(home: Path) -> None:
    """The agent of a coordinator that was killed lives on, calls an address that is no more, and has the lease. It
    forgets nothing by being killed."""
    try:
        pid, ticks = map(int, (home / PID).read_text().split())
    except (OSError, ValueError):
        return
    if started_ticks(pid) == ticks:  # else the number is another process's by now
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + LEAVE_SECONDS
        while started_ticks(pid) == ticks and time.monotonic() < until:
            time.sleep(0.02)


def _python_path() -> str:
    """Where this very fedqueue is, also when it runs from a source tree; then what was there."""
    here = str(Path(fedqueue.__file__).parent.parent)
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


def _table(name: str, settings: AgentSettings | SchedulerSettings) -> str:
    """As TOML, which has no None."""
    given = {key: value for key, value in vars(settings).items() if value is not None}
    return f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in given.items()) + "\n"
