"""What a run may have that was submitted from elsewhere: it reads nothing on the server but what lies in the folder
`inputs` of the federation, and runs nothing there that its operator has not named in federation.toml.

Who holds the federation's own credential is on the server's machine, may read what lies there and run what he likes
anyway; so nothing of this is for him.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fedqueue.config import Config
from fedqueue.errors import ConfigError

INPUTS: Final = "inputs"
"""In a federation's folder: where relative paths in such a run's config begin."""
PLAIN_TASKS: Final = ("timing", "digits", "mnist")


@dataclass(frozen=True, kw_only=True)
class SubmissionSettings:
    """[submissions] of federation.toml."""

    tasks: list[str] = field(default_factory=list)  # that are code, as "module:function"; with task.options
    modules: list[str] = field(default_factory=list)  # of run.modules
    commands: list[str] = field(default_factory=list)  # of evaluation.command, word for word


def must_run_nothing(tree: Mapping[str, Any], allowed: SubmissionSettings) -> None:
    """Before the config is read: to read one imports its modules."""
    run = tree.get("run")
    modules = run.get("modules", []) if isinstance(run, Mapping) else []
    for name in modules if isinstance(modules, list) else [modules]:
        if name not in allowed.modules:
            raise _not_allowed("run.modules", name, "modules")


def must_stay_inside(config: Config, inputs: Path, allowed: SubmissionSettings) -> None:
    """Nothing outside `inputs` is read, and no code of others is run."""
    task = config.task
    if task.name not in allowed.tasks:
        if ":" in task.name:
            raise _not_allowed("task.name", task.name, "tasks")
        if task.options and task.name not in PLAIN_TASKS:
            raise _not_allowed("task.options", f"of {task.name}", "tasks")
    command = config.evaluation.command
    if command is not None and command not in allowed.commands:
        raise _not_allowed("evaluation.command", command, "commands")
    if config.model.initial is not None:
        _must_be_inside("model.initial", config.model.initial, inputs)
    for facility in config.facility:
        file = getattr(facility.queue, "file", None)
        if file is not None:
            _must_be_inside(f"facility.{facility.name}.queue.file", file, inputs)


def _must_be_inside(key: str, path: str, inputs: Path) -> None:
    try:
        inside = (inputs / path).resolve().is_relative_to(inputs.resolve())
    except (OSError, ValueError, RuntimeError):  # no path at all, or links that lead in a circle
        inside = False
    if not inside or Path(path).is_absolute():
        raise ConfigError(f"{key}: must be a file in the folder {INPUTS} of the federation, named from there")


def _not_allowed(key: str, what: object, setting: str) -> ConfigError:
    said = str(what)[:100]
    return ConfigError(
        f"{key}: {said!r} would run on the server, where the operator alone says what runs: submissions.{setting} in "
        "federation.toml"
    )
