"""The folder of one job on the facility's shared file system: how an agent and a job speak without a network.

The job's script makes the next free attempt-N folder: making a folder is the one thing of which a file system says to
exactly one of two that it was first, so two incarnations of a job never share one. Only result.json, which appears
whole or not at all, means that a job did its work.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from fedqueue.agent.schedulers.base import NAME, OUTPUT, last_line
from fedqueue.errors import ConfigError, StorageError, what_to_do
from fedqueue.files import write_json
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import BoundFile, OrderFile, Result, one_line

T = TypeVar("T")

WORDS_READ: Final = 8192  # bytes of a job's output
WORDS_LENGTH: Final = 200


class JobFolder:
    def __init__(self, home: Path, name: str) -> None:
        self.path = home / "jobs" / name
        self.script = self.path / "job.sh"
        self.output = self.path / OUTPUT

    def prepare(self, order: OrderFile, script: str) -> None:
        """All that the job will read; whole before the scheduler hears of it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "order.json", order)
            self.script.write_text(script, encoding="utf-8")
            self.script.chmod(0o700)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}; {what_to_do(error)}") from None

    def name(self) -> str | None:
        """Of the job at the scheduler, as far as it says."""
        order = _read(OrderFile, self.path / "order.json")
        return order.name if order is not None and NAME.fullmatch(order.name) else None

    def put_aside(self) -> None:
        """Make room for another job of this number; what is there stays, beside."""
        number = 0
        while (aside := self.path.with_name(f"before-{self.path.name}-{number}")).exists():
            number += 1
        try:
            self.path.rename(aside)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be renamed: {error.strerror}") from None

    def gone(self, started: int) -> Path | None:
        """What of it has been lost, of a job whose attempt `started` has begun."""
        wanted = [self.path, self.script, *(self.attempt(number) for number in range(started + 1))]
        return next((path for path in wanted if not path.exists()), None)

    def last_words(self) -> str:
        """The last line that the job wrote, of all its incarnations; it may be anything."""
        try:
            with self.output.open("rb") as file:
                file.seek(max(0, self.output.stat().st_size - WORDS_READ))
                return one_line(last_line(file.read().decode("utf-8", "replace")))[:WORDS_LENGTH]
        except OSError:
            return ""

    def ends_with(self, home: Path) -> str:
        """For a reason: where its output is, and how that ends."""
        words = self.last_words()
        where = f"its output is in {self.output.relative_to(home)} at the facility"
        return f"{where} and ends with: {words}" if words else where

    def attempts(self) -> int:
        """How many incarnations have begun."""
        number = 0
        while (self.path / f"attempt-{number}").is_dir():
            number += 1
        return number

    def attempt(self, number: int) -> Path:
        return self.path / f"attempt-{number}"

    def started(self, number: int) -> float | None:
        """When it began, by the clock of the file system; so are the next three."""
        return _stamp(self.attempt(number) / "started")

    def alive(self, number: int) -> float | None:
        """When it last gave a sign of life; None: it gives none."""
        return _stamp(self.attempt(number) / "alive")

    def took_work(self, number: int) -> float | None:
        return _stamp(self.attempt(number) / "bound.json")

    def finished(self, number: int) -> float | None:
        return _stamp(self.attempt(number) / "result.json")

    def bound(self, number: int) -> BoundFile | None:
        return _read(BoundFile, self.attempt(number) / "bound.json")

    def result(self, number: int) -> Result | None:
        return _read(Result, self.attempt(number) / "result.json")

    def out_of_time(self, number: int) -> bool:
        """Whether it says that not a single step fitted into its wall time."""
        return (self.attempt(number) / "out_of_time.json").exists()

    def update(self, number: int) -> Path:
        return self.attempt(number) / "update.safetensors"

    def drop_updates(self) -> None:
        for path in self.path.glob("attempt-*/update.safetensors*"):
            path.unlink(missing_ok=True)


def _stamp(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _read(kind: type[T], path: Path) -> T | None:
    """None while it is not there; a file that is no such thing is nothing either: the job's script may be anyone's."""
    try:
        return read(kind, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError, ConfigError):
        return None


def script(
    folder: JobFolder,
    *,
    command: str,
    before: Sequence[str],
    environment: Mapping[str, str],
    python_path: Path | None,
    label: str,
) -> str:
    """The batch script. bash replaces itself by the command, so that the scheduler's signals reach it."""
    job = shlex.quote(str(folder.path))
    lines = [
        "#!/bin/bash",
        f"# Made by the FedQueue agent for job {label}.",
        f"job={job}",
        "attempt=0",
        'until mkdir "$job/attempt-$attempt" 2>/dev/null; do',
        "  attempt=$((attempt + 1))",
        '  [ "$attempt" -gt 10000 ] && { echo "fedqueue: cannot make a folder in $job" >&2; exit 73; }',
        "done",
        'uname -n > "$job/attempt-$attempt/.started" && mv "$job/attempt-$attempt/.started" '  # its stamp counts
        '"$job/attempt-$attempt/started" || exit 74',
        'export FEDQUEUE_JOB="$job" FEDQUEUE_ATTEMPT="$attempt"',
    ]
    if python_path is not None:
        lines.append(f'export PYTHONPATH={shlex.quote(str(python_path))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += before
    lines.append(f"exec /bin/bash -c {shlex.quote(command)}")
    return "\n".join(lines) + "\n"
