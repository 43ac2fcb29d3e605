"""On what a result was made: what a reader needs to judge its figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from fedqueue import __version__


def provenance(command: list[str]) -> dict[str, Any]:
    """The command, the day and the machine, for the head of a result file."""
    return {
        "command": " ".join(command),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.system(),
            "python": platform.python_version(),
            "fedqueue": __version__,
            **{name: _version(name) for name in ("torch", "numpy")},
        },
    }


def invoked() -> list[str]:
    """This process's command as a person would type it."""
    return ["fedqueue", *sys.argv[1:]]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
