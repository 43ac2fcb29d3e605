"""Check the installation: what is here, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Literal

from fedqueue import __version__, data
from fedqueue.cli import extras

HELP = "check the installation"

State = Literal["ok", "optional", "missing"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    checks = [
        ("fedqueue", "ok", __version__),
        _python(),
        *(_package(name, "") for name in ("numpy", "rich", "urllib3")),
        *(_package(name, extra) for extra in extras.USES for name in extras.MODULES[extra]),
        _sqlite(),
        *(_scheduler(name) for name in _COMMANDS),
        _writable(Path.cwd()),
        *(_data(name) for name in ("mnist/train-images-idx3-ubyte.gz", "traces")),
    ]
    marks = {"ok": "ok", "optional": "--", "missing": "MISSING"}
    for what, state, detail in checks:
        print(f"{marks[state]:>7}  {what:<22} {detail}")
    missing = [what for what, state, _ in checks if state == "missing"]
    print(f"missing: {', '.join(missing)}" if missing else "all that is needed is here")
    return 1 if missing else 0


def _python() -> tuple[str, State, str]:
    found = ".".join(str(n) for n in sys.version_info[:3])
    return ("Python", "ok", found) if sys.version_info >= (3, 11) else ("Python", "missing", f"{found}; 3.11 is needed")


def _package(name: str, extra: str) -> tuple[str, State, str]:
    """`extra` brings it; "": fedqueue cannot do without."""
    name = {"sklearn": "scikit-learn"}.get(name, name)
    try:
        return name, "ok", importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if extra:
            return name, "optional", f"not here; {extras.USES[extra]} needs it: {extras.install(extra)}"
        return name, "missing", f"pip install {name}"


_COMMANDS = {"Slurm": "sbatch", "PBS or Grid Engine": "qsub"}


def _scheduler(name: str) -> tuple[str, State, str]:
    found = shutil.which(_COMMANDS[name])
    return (name, "ok", found) if found else (name, "optional", f"no {_COMMANDS[name]} here; an agent can use `local`")


def _sqlite() -> tuple[str, State, str]:
    with sqlite3.connect(":memory:") as db:
        try:
            db.execute("SELECT json_extract('{\"a\": 1}', '$.a')")
        except sqlite3.OperationalError:
            return "SQLite", "missing", f"{sqlite3.sqlite_version} without JSON; use a newer Python build"
    return "SQLite", "ok", sqlite3.sqlite_version


def _writable(folder: Path) -> tuple[str, State, str]:
    if os.access(folder, os.W_OK):
        return "this folder", "ok", f"{folder} can be written; runs go to runs/"
    return "this folder", "missing", f"{folder} cannot be written; go to another, or use --out"


def _data(name: str) -> tuple[str, State, str]:
    label = f"data: {name.partition('/')[0]}"
    for place in data.candidates(name):
        if place.exists():
            return label, "ok", str(place)
    return (
        label,
        "optional",
        f"not in {data.root()}; set FEDQUEUE_DATA to the folder that has it (task digits needs none)",
    )
