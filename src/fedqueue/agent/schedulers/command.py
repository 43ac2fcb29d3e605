"""Call a scheduler's command: a time-out on every call, and no process of it left behind."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fedqueue.agent.schedulers.base import SchedulerUnreachableError, last_line


@dataclass(frozen=True, kw_only=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """In one line, for a message."""
        return last_line(self.err) or last_line(self.out) or f"exit code {self.code}"


def run(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Answer:
    """What the command answered within `timeout` seconds; else SchedulerUnreachableError.

    It runs in a session of its own: a command may be a wrapper, and all that it started is ended with it.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise SchedulerUnreachableError(f"{argv[0]}: {error.strerror}; is the scheduler's `bin` folder set?") from None
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise SchedulerUnreachableError(f"{os.path.basename(argv[0])}: no answer in {timeout:g} s") from None
    finally:
        if process.returncode is None:
            _end(process)
    return Answer(code=process.returncode, out=out, err=err)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(
        subprocess.TimeoutExpired
    ):  # something that left the session may hold the pipes: not ours to wait for
        process.communicate(timeout=1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Ours, with what is set in `changes`."""
    return {**os.environ, **{key: value for key, value in changes.items() if value is not None}}


def user() -> str:
    """Our name, for lists of our own jobs; the number where the machine knows no name for it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def program(folder: str | None, name: str) -> str:
    return name if folder is None else os.path.join(folder, name)
