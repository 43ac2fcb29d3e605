"""This machine as a facility: jobs are processes that look after themselves, records in a spool folder.

    SPOOL/counter               number of the next job, which is also its place in the queue
    SPOOL/mutex, queue/, slots/ who waits and who runs (localjob.py)
    SPOOL/jobs/NAME/record.json what was asked
    SPOOL/jobs/NAME/lock        held by the job's process from submission until it dies
    SPOOL/jobs/NAME/state.json  what has become of it, by that process
    SPOOL/jobs/NAME/cancel      someone wants its end

A job's id is its name. A job exists once its process has the lock: if we die before, there is a record and nobody who
will act on it, and the same name can be submitted again. Locks are flock: the spool must be on a local disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedqueue.agent.schedulers import localjob
from fedqueue.agent.schedulers.base import (
    NAME,
    JobRequest,
    JobStatus,
    LocalSettings,
    Scheduler,
    SchedulerError,
    SchedulerUnreachableError,
    SubmitRefusedError,
    clamp_wall,
)
from fedqueue.errors import StorageError
from fedqueue.files import is_locked, locked, write_json

State = dict[str, Any]
"""What record.json and state.json hold. No type of ours: localjob.py, which writes and reads them too, imports nothing
of ours, so that it starts at once."""


class LocalScheduler(Scheduler):
    kind = "local"

    def __init__(self, settings: LocalSettings, home: Path) -> None:
        self.settings = settings
        self.spool = (home / (settings.folder or "scheduler")).absolute()
        self._children: set[int] = set()  # processes we started: reaped when we poll, else they stay as zombies

    def submit(self, request: JobRequest) -> str:
        if not request.script.is_file():
            raise SubmitRefusedError(f"{request.script}: no such script", transient=False)
        with self._asked():
            for name in ("queue", "slots", f"jobs/{request.name}"):
                (self.spool / name).mkdir(parents=True, exist_ok=True)
            folder = self._folder(request.name)
            file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                if not _take(file) or (folder / "state.json").exists():
                    raise SubmitRefusedError(f"there is a job {request.name} already", transient=False)
                record = self._record(request)
                write_json(folder / "record.json", record)
                if request.after is None and not record["extra_wait"]:  # its place is that of its submission
                    with locked(self.spool / "mutex"):
                        localjob.queue(str(self.spool), record["number"], str(folder))
                self._start(folder, file, request.output)
            finally:
                os.close(file)
        return request.name

    def find(self, name: str) -> str | None:
        with self._asked():
            return name if self._status(name) is not None else None

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        self._reap()
        with self._asked():
            found = {job_id: self._status(job_id) for job_id in ids}
        return {job_id: status for job_id, status in found.items() if status is not None}

    def cancel(self, job_id: str) -> None:
        with self._asked():
            status = self._status(job_id)
            if status is None or status.phase == "ended":
                return
            (self._folder(job_id) / "cancel").touch()  # first: it looks for it once it can hear signals
            self._signal(job_id, signal.SIGTERM)

    def requeue(self, job_id: str) -> None:
        """End a running job and put it into the queue again, as operators do and preemption does."""
        status = self.poll([job_id]).get(job_id)
        if status is None or status.phase != "running":
            raise SchedulerError(f"{job_id}: only a running job can be requeued")
        self._signal(job_id, signal.SIGUSR1)

    # Inside ---------------------------------------------------------------------------------------------------

    def _folder(self, job_id: str) -> Path:
        return self.spool / "jobs" / job_id

    def _record(self, request: JobRequest) -> State:
        with locked(self.spool / "mutex"):
            counter = self.spool / "counter"
            number = int(counter.read_text()) if counter.exists() else 0
            write_json(counter, number + 1)
        waits = self.settings.extra_waits
        return {
            "number": number,
            "script": str(request.script),
            "folder": str(request.folder),
            "wall_seconds": clamp_wall(request.wall_seconds, self.settings),
            "kill_delay_seconds": self.settings.kill_delay_seconds,
            "extra_wait": waits[number % len(waits)] if waits else 0.0,
            "after_lock": None if request.after is None else str(self._folder(request.after) / "lock"),
            "slots": self.settings.slots,
            "spool": str(self.spool),
            "submitted_at": time.time(),
        }

    def _start(self, folder: Path, lock: int, output: Path) -> None:
        """A process that survives us, with the lock in its hand."""
        high = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 10)  # away from the numbers that the new process gets
        program = [sys.executable, "-I", "-S", str(Path(localjob.__file__).absolute()), str(folder), "3"]
        append = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        try:
            child = os.posix_spawn(
                program[0],
                program,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, high, 3),
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(output), append, 0o644),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        finally:
            os.close(high)
        self._children.add(child)

    def _status(self, job_id: str) -> JobStatus | None:
        """None: there is no such job."""
        folder = self._folder(job_id)
        if not NAME.fullmatch(job_id) or _read(folder / "record.json") is None:
            return None
        alive = is_locked(folder / "lock")  # before the state: it writes its last, then lets go
        state = _read(folder / "state.json")
        if state is None:
            return JobStatus(phase="waiting", reason="starting") if alive else None
        if state["phase"] != "ended" and not alive:
            state = self._bury(folder, state)
        return JobStatus(
            phase=state["phase"],
            reason=state.get("reason", ""),
            eligible_at=state.get("eligible_at"),
            started_at=state.get("started_at"),
            ended_at=state.get("ended_at"),
            incarnation=state["incarnation"],
            outcome=state.get("outcome"),
            exit_code=state.get("exit_code"),
        )

    def _bury(self, folder: Path, state: State) -> State:
        """The job's process was killed: what it ran is ended too, as a node that comes back is cleaned."""
        group = state.get("group")
        if group is not None and localjob.started_ticks(group) == state["group_started"]:
            localjob.send(group, signal.SIGKILL)
        state |= {"phase": "ended", "ended_at": time.time(), "outcome": "node_fail", "reason": "its process was killed"}
        write_json(folder / "state.json", state)
        return state

    def _signal(self, job_id: str, signal_number: int) -> None:
        state = _read(self._folder(job_id) / "state.json")
        if state is not None and localjob.started_ticks(state["pid"]) == state["pid_started"]:
            try:
                os.kill(state["pid"], signal_number)
            except ProcessLookupError:
                return

    def _reap(self) -> None:
        for child in list(self._children):
            try:
                ended = os.waitpid(child, os.WNOHANG)[0] != 0
            except ChildProcessError:
                ended = True
            if ended:
                self._children.discard(child)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise SchedulerUnreachableError(str(error)) from None
        except OSError as error:
            raise SchedulerUnreachableError(f"{error.filename or self.spool}: {error.strerror or error}") from None


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> State | None:
    try:
        state: State = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return state
