"""What a facility says of itself: the agent's own config file. The coordinator has no say in any of it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fedqueue.agent.privacy import PrivacySettings
from fedqueue.agent.schedulers.base import LocalSettings, SchedulerSettings
from fedqueue.agent.transport import Own
from fedqueue.errors import ConfigError
from fedqueue.files import only_ours
from fedqueue.protocol.codec import at_least, more_than, read
from fedqueue.protocol.service import DEFAULT_OFFER, Offer, RunHere
from fedqueue.protocol.shares import ShareSettings


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    home: str  # folder on the file system that login and compute nodes share
    command: str = ""  # what a job runs, by bash: the only thing that ever runs, but for offers
    evaluate_command: str | None = None  # scores a model, if the run has this facility do so
    before: list[str] = field(default_factory=list)  # shell lines before the command, such as "module load pytorch"
    environment: dict[str, str] = field(default_factory=dict)
    poll_seconds: float = 10.0  # between two looks at the coordinator and the scheduler
    grace_seconds: float = 30.0  # for the result of a job that has ended: shared file systems lag
    node_hours: float | None = None  # cap on what all jobs may hold; None: none
    jobs_at_once: int | None = None  # of all runs together, at the scheduler; None: as many as runs ask for
    share_by: Literal["node_seconds", "jobs"] = "node_seconds"  # what is shared between runs by their weights
    proxy: str | None = None  # http://host:port towards the coordinator; None: HTTPS_PROXY
    certificate: str | None = None  # PEM file, for a server that asks for one
    key: str | None = None
    stage_worker: bool = True  # put fedqueue's worker side on the jobs' PYTHONPATH
    keep_files: bool = False  # keep the updates of closed jobs
    forecast: Literal["off", "scheduler", "boosting"] = "off"  # what is said to the coordinator of the next wait
    forecast_seconds: float = 60.0  # between two looks at the queue for it
    group_may_write: bool = False  # to this file and to the home: whoever may has its jobs do what they like
    masked_only: bool = False  # nothing is handed in to a run whose coordinator could read it by itself
    masked_least_members: int = 3  # facilities in a group, for which this one masks an update
    forecast_history: str | None = None  # boosting: a log of this queue to begin with, as `fedqueue history` reads

    def __post_init__(self) -> None:
        if not self.home:
            raise ValueError("home must not be empty")
        more_than(self, 0, "poll_seconds", "forecast_seconds")
        at_least(self, 0, "grace_seconds", "node_hours")
        at_least(self, 1, "jobs_at_once")
        at_least(self, 2, "masked_least_members")
        if self.key is not None and self.certificate is None:
            raise ValueError("key belongs to a certificate: give agent.certificate too")
        _check_variables(self.environment)


@dataclass(frozen=True, kw_only=True)
class OfferSettings:
    """A command that runs of a federation may ask for by its name. What is not said here is as for the whole site."""

    command: str
    evaluate_command: str | None = None
    before: list[str] = field(default_factory=list)  # shell lines after those of the site
    environment: dict[str, str] = field(default_factory=dict)  # beside that of the site
    node_hours: float | None = None  # cap on what all jobs of one run may hold; None: none
    jobs_at_once: int | None = None  # of one run, at the scheduler
    runs: list[str] | None = None  # which may use it, by patterns of their names; None: all
    users: list[str] | None = None  # the same of who submitted them; "operator": on the server
    scheduler: SchedulerSettings | None = None

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise ValueError("command must not be empty")
        Offer(name="any", runs=self.runs, users=self.users)  # that they can be told
        at_least(self, 0, "node_hours")
        at_least(self, 1, "jobs_at_once")
        _check_variables(self.environment)


def _check_variables(environment: dict[str, str]) -> None:
    for name in environment:
        if not name.replace("_", "a").isalnum() or name[:1].isdigit():
            raise ValueError(f"environment.{name} is not the name of a variable")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    agent: AgentSettings
    scheduler: SchedulerSettings = field(default_factory=LocalSettings)
    offer: dict[str, OfferSettings] = field(default_factory=dict)
    share: list[ShareSettings] = field(default_factory=list)
    privacy: PrivacySettings | None = None

    def __post_init__(self) -> None:
        if not self.agent.command.strip() and not self.offer:
            raise ValueError("agent.command is missing: what a job runs")

    @property
    def offers(self) -> dict[str, OfferSettings]:
        """By name; `agent.command` is one too."""
        own = self.agent
        default = OfferSettings(command=own.command, evaluate_command=own.evaluate_command) if own.command else None
        return {**({DEFAULT_OFFER: default} if default is not None else {}), **self.offer}

    def to_tell(self) -> list[Offer]:
        """All that the other side hears of offers."""
        return [
            Offer(
                name=name,
                nodes=getattr(found.scheduler or self.scheduler, "nodes", 1),
                runs=found.runs,
                users=found.users,
            )
            for name, found in self.offers.items()
        ]

    def for_run(self, run: RunHere, home: Path) -> AgentConfig | None:
        """For the jobs of one run; None: it may not use the offer that it asks for, or there is none."""
        found = self.offers.get(run.offer)
        if found is None or not Offer(name=run.offer, runs=found.runs, users=found.users).is_for(run.name, run.owner):
            return None
        agent = replace(
            self.agent,
            home=str(home),
            command=found.command,
            evaluate_command=found.evaluate_command,
            before=[*self.agent.before, *found.before],
            environment={**self.agent.environment, **found.environment},
            node_hours=found.node_hours,
            jobs_at_once=found.jobs_at_once,
        )
        return AgentConfig(agent=agent, scheduler=found.scheduler or self.scheduler, privacy=self.privacy)


def load_agent(path: Path) -> AgentConfig:
    """Read an agent's config; its home is taken as beside the file if it is not absolute."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `fedqueue enroll --init {path}` writes one to start from") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        config = read(AgentConfig, tree, "")
        only_ours(path, group="" if config.agent.group_may_write else "agent.group_may_write")
        return config
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def own_of(config: AgentConfig, path: Path) -> Own:
    """The certificate to show, and its key; named from beside the file."""
    named = (config.agent.certificate, config.agent.key)
    return Own(*(None if name is None else path.parent / Path(name).expanduser() for name in named))


def home_of(config: AgentConfig, path: Path) -> Path:
    return (path.parent / Path(config.agent.home).expanduser()).absolute()
