"""What a facility says of itself: the agent's own config file. The coordinator has no say in any of it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedqueue.agent.schedulers.settings import LocalSettings, SchedulerSettings
from fedqueue.errors import ConfigError
from fedqueue.protocol.checks import at_least, more_than
from fedqueue.protocol.codec import read


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    home: str  # folder on the file system that login and compute nodes share
    command: str  # what a job runs, by bash: the only thing that ever runs
    evaluate_command: str | None = None  # scores a model, if the run has this facility do so
    before: list[str] = field(default_factory=list)  # shell lines before the command, such as "module load pytorch"
    environment: dict[str, str] = field(default_factory=dict)
    poll_seconds: float = 10.0  # between two looks at the coordinator and the scheduler
    grace_seconds: float = 30.0  # for the result of a job that has ended: shared file systems lag
    node_hours: float | None = None  # cap on what all jobs may hold; None: none
    proxy: str | None = None  # http://host:port towards the coordinator; None: HTTPS_PROXY
    stage_worker: bool = True  # put fedqueue's worker side on the jobs' PYTHONPATH
    keep_files: bool = False  # keep the updates of closed jobs
    forecast: Literal["off", "scheduler", "boosting"] = "off"  # what is said to the coordinator of the next wait
    forecast_seconds: float = 60.0  # between two looks at the queue for it
    forecast_history: str | None = None  # boosting: a log of this queue to begin with, as `fedqueue history` reads

    def __post_init__(self) -> None:
        if not self.home or not self.command.strip():
            raise ValueError("home and command must not be empty")
        more_than(self, 0, "poll_seconds", "forecast_seconds")
        at_least(self, 0, "grace_seconds", "node_hours")
        for name in self.environment:
            if not name.replace("_", "a").isalnum() or name[:1].isdigit():
                raise ValueError(f"environment.{name} is not the name of a variable")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    agent: AgentSettings
    scheduler: SchedulerSettings = field(default_factory=LocalSettings)


def load_agent(path: Path) -> AgentConfig:
    """Read an agent's config; its home is taken as beside the file if it is not absolute."""
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `fedqueue enroll --init {path}` writes one to start from") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        return read(AgentConfig, tree, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def home_of(config: AgentConfig, path: Path) -> Path:
    return (path.parent / Path(config.agent.home).expanduser()).absolute()
