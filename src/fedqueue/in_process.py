"""A user's Python command, run in this process: for `fedqueue run --debug`."""

from __future__ import annotations

import bdb
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from fedqueue.errors import ConfigError

T = TypeVar("T")

PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class PythonCommand:
    """A script or module, run in this process as `python` would run it in one of its own."""

    folder: str
    environment: Mapping[str, str]
    target: str
    arguments: tuple[str, ...]
    is_module: bool

    @classmethod
    def of(cls, text: str, folder: str, key: str) -> PythonCommand:
        """Raises ConfigError for a command that is not Python's alone."""
        words = shlex.shlex(text, posix=True, punctuation_chars=True)
        words.whitespace_split, words.commenters = True, ""
        try:
            found = [os.path.expandvars(word) for word in words]
        except ValueError:  # a quote that nobody closes
            found = []
        environment = {}
        while found and (match := ASSIGNMENT.fullmatch(found[0])):
            environment[match[1]] = match[2]
            del found[0]
        is_python = bool(found) and PYTHON.fullmatch(Path(found.pop(0)).name) is not None
        found = found[1:] if found[:1] == ["-u"] else found
        is_module = found[:1] == ["-m"]
        found = found[1:] if is_module else found
        is_shell = any(word and set(word) <= set("();<>|&") for word in found)
        if not is_python or not found or found[0].startswith("-") or is_shell:
            raise ConfigError(
                f"{key}: with --debug it must be `python SCRIPT ...` or `python -m MODULE ...`, which this process can "
                f"run itself; found {text!r}"
            )
        target = found[0] if is_module else os.path.join(folder, found[0])
        if not is_module and not os.path.isfile(target):
            raise ConfigError(f"{key}: {target} is not a file")
        return cls(folder, environment, target, tuple(found[1:]), is_module)

    def run(self, **environment: str) -> int:
        """Its exit code."""
        argv, path, here, variables = sys.argv, list(sys.path), os.getcwd(), dict(os.environ)
        try:
            os.chdir(self.folder)
            os.environ.update({**self.environment, **environment})
            sys.argv = [self.target, *self.arguments]
            sys.path.insert(0, self.folder if self.is_module else str(Path(self.target).parent))
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        finally:
            sys.argv, sys.path[:] = argv, path
            os.chdir(here)
            os.environ.clear()
            os.environ.update(variables)
        return 0


def shown(function: Callable[[], T], log: Path | None = None) -> T:
    """What it returns. An error is shown with where it happened in the user's code, and raised again; to leave the
    debugger is to stop the run."""
    try:
        return function()
    except bdb.BdbQuit:
        raise KeyboardInterrupt from None
    except Exception as error:
        text = "".join(traceback.format_exception(type(error), error, _theirs(error.__traceback__)))
        print(text, end="", file=sys.stderr, flush=True)
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(text)
        raise


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames above the user's code."""
    found = frames
    while frames is not None and frames.tb_next is not None:
        if "runpy" in frames.tb_frame.f_code.co_filename:
            found = frames.tb_next
        frames = frames.tb_next
    return found
