"""TOML -> frozen settings. Everything a person writes is checked here, once; inside, it is trusted.

`load` reads a file, applies `--set key=value` changes, and either returns a `Config` or raises a `ConfigError` of
one line: the file, the key, what was found, what is allowed.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from fedqueue.agent.schedulers.base import SchedulerSettings
from fedqueue.errors import ConfigError
from fedqueue.plugins import register_rules
from fedqueue.protocol.codec import at_least, more_than, read, share
from fedqueue.protocol.plan import FailurePolicy, Trust
from fedqueue.protocol.service import DEFAULT_OFFER
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.protocol.strategies.fedadam import ServerStepOptions
from fedqueue.training.causal_settings import CAUSAL_LM, averages_products, complete_options
from fedqueue.training.job import TaskSettings

MOST_STEPS = 1e9  # a second: more is a slip of the pen


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(f"name must be letters, digits, '.', '_' and '-', 64 at most, found {name!r}")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    name: str = "run"
    strategy: str = "fedqueue"
    seed: int = 1
    rounds: int | None = None
    seconds: float | None = None
    round_length: float = 10.0
    learning_rate: float = 0.001
    targets: list[float] = field(default_factory=lambda: [0.85, 0.90, 0.95])
    stop_at_score: float | None = None
    data_weights: Literal["equal", "size"] = "equal"
    warm_up: bool = False
    modules: list[str] = field(default_factory=list)  # imported first: where your own strategies register themselves

    def __post_init__(self) -> None:
        _check_name(self.name)
        at_least(self, 0, "seed")
        at_least(self, 1, "rounds")
        more_than(self, 0, "seconds", "round_length", "learning_rate")
        if self.rounds is None and self.seconds is None:
            raise ValueError("rounds or run.seconds is needed, else the run has no end")


@dataclass(frozen=True, kw_only=True)
class FixedQueue:
    """Every job waits `delay` seconds."""

    kind: Literal["fixed"] = "fixed"
    delay: float

    def __post_init__(self) -> None:
        at_least(self, 0, "delay")


@dataclass(frozen=True, kw_only=True)
class LognormalQueue:
    """Lognormal waits with the given mean; `rho` is the sd of log q, or of q in seconds. A job that asks for w seconds
    of wall time waits (w / usual_wall_seconds)^wall_power times as long."""

    kind: Literal["lognormal"] = "lognormal"
    mean: float
    rho: float = 0.5
    spread: Literal["log", "seconds"] = "log"
    wall_power: float = 0.0
    usual_wall_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_wall_power(self)
        more_than(self, 0, "mean")
        at_least(self, 0, "rho")


@dataclass(frozen=True, kw_only=True)
class StepQueue:
    """Lognormal waits whose mean changes for good at second `change_at`."""

    kind: Literal["step"] = "step"
    mean: float
    mean_after: float
    change_at: float
    rho: float = 0.5
    spread: Literal["log", "seconds"] = "log"
    wall_power: float = 0.0
    usual_wall_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_wall_power(self)
        more_than(self, 0, "mean", "mean_after")
        at_least(self, 0, "rho", "change_at")


@dataclass(frozen=True, kw_only=True)
class SpikeQueue:
    """Lognormal waits whose mean is `factor` times as long from `spike_at` for `spike_seconds`, and again `every`."""

    kind: Literal["spike"] = "spike"
    mean: float
    factor: float
    spike_at: float
    spike_seconds: float
    every: float | None = None
    rho: float = 0.5
    spread: Literal["log", "seconds"] = "log"
    wall_power: float = 0.0
    usual_wall_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_wall_power(self)
        more_than(self, 0, "mean", "factor", "spike_seconds", "every")
        at_least(self, 0, "rho", "spike_at")


@dataclass(frozen=True, kw_only=True)
class TraceQueue:
    """Waits that a real system recorded: those of the jobs of this shape, by their time of submission."""

    kind: Literal["trace"] = "trace"
    file: str
    procs: tuple[int, int] | None = None  # fewest and most processors
    max_requested: float | None = None  # seconds of requested wall time
    by_requested: bool = False  # a job waits as those of them that asked for about as much, not as any
    start: float | None = None  # where in the trace the run begins; None: anywhere, by seed
    speed_up: float = 1.0  # so many trace seconds pass in one second of the run; waits and wall times shrink alike

    def __post_init__(self) -> None:
        more_than(self, 0, "max_requested", "speed_up")
        at_least(self, 0, "start")


def _check_wall_power(queue: LognormalQueue | StepQueue | SpikeQueue) -> None:
    at_least(queue, 0, "wall_power")
    more_than(queue, 0, "usual_wall_seconds")
    if queue.wall_power and queue.usual_wall_seconds is None:
        raise ValueError("wall_power needs usual_wall_seconds: the wall time at which jobs wait as the mean says")


QueueSettings = FixedQueue | LognormalQueue | StepQueue | SpikeQueue | TraceQueue


@dataclass(frozen=True, kw_only=True)
class FacilitySettings:
    name: str
    queue: QueueSettings | None = None  # how long jobs wait: simulated, or added to the local scheduler's own wait
    steps_per_second: float | None = None  # c, before the slow-down; a real run measures it
    slowdown: float = 1.0  # how many times slower it really is; the strategy is not told
    nodes: int = 1
    first_delay: float = 2.0  # expected before anything was seen, unless warm_up is on
    max_jobs: int = 2  # that we put at its scheduler at once
    queue_limit: int | None = None  # that the site allows; more are refused
    max_wall_seconds: float | None = None  # that a job may ask for there
    node_hours: float | None = None  # cap on what all its jobs may hold; elsewhere its agent has one
    known_waits: list[tuple[float, float]] = field(default_factory=list)
    """(wall time asked for, wait) of jobs of the past: what `stay = "auto"` begins with."""
    accrue: float = 0.0  # how much of its age a chained job keeps while it is not yet eligible
    startup_seconds: float = 0.0
    megabytes_per_second: float | None = None  # None: transfers take no time
    latency_seconds: float = 0.0
    slots: int = 1  # jobs that `fedqueue run` lets it run at once
    scheduler: SchedulerSettings | None = None  # `fedqueue run`: this one instead of the built-in queue

    def __post_init__(self) -> None:
        _check_name(self.name)
        more_than(self, 0, "steps_per_second", "slowdown", "megabytes_per_second")
        if self.steps_per_second is not None and self.steps_per_second / self.slowdown > MOST_STEPS:
            raise ValueError(f"steps_per_second must be {MOST_STEPS:g} at most, found {self.steps_per_second:g}")
        more_than(self, 0, "max_wall_seconds")
        if not all(0 < wall < inf and 0 <= wait < inf for wall, wait in self.known_waits):
            raise ValueError("known_waits must be pairs of wall time (more than 0) and wait (0 or more), in seconds")
        at_least(self, 1, "nodes", "max_jobs", "queue_limit", "slots")
        at_least(self, 0, "first_delay", "startup_seconds", "latency_seconds", "node_hours")
        share(self, "accrue")


@dataclass(frozen=True, kw_only=True)
class FaultSettings:
    """What goes wrong at a facility ("*": at all): to jobs by probability or by number, or to the facility."""

    kind: Literal["fail", "preempt", "hang", "corrupt", "duplicate", "outage"]
    facility: str = "*"
    probability: float | None = None
    jobs: list[int] | None = None  # by sequence number, from 0
    transient: bool = True  # fail: whether the same again may work
    at: float | None = None  # outage: when it begins
    seconds: float | None = None  # outage: how long it lasts; None: for good
    loses_jobs: bool = False  # outage: jobs die; otherwise they go on and their results wait

    def __post_init__(self) -> None:
        share(self, "probability")
        at_least(self, 0, "at")
        more_than(self, 0, "seconds")
        if self.kind == "outage":
            if self.at is None:
                raise ValueError("at is missing: the second at which the outage begins")
        elif (self.probability is None) == (self.jobs is None):
            raise ValueError(f"kind {self.kind} needs probability or jobs, one of the two")


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings:
    aggregate_seconds: float = 0.0
    model_megabytes: float = 1.0  # for transfers when nothing is trained; else the model's real size

    def __post_init__(self) -> None:
        at_least(self, 0, "aggregate_seconds", "model_megabytes")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The tensors that travel: those of the first model."""

    initial: str | None = None  # safetensors file; None: the task makes it
    include: list[str] = field(default_factory=lambda: ["*"])  # only tensors whose names match one of these
    roles: dict[str, Literal["parameter", "statistic", "counter", "factor"]] = field(default_factory=dict)  # by pattern
    keep: Literal["needed", "best", "all"] = "best"  # which versions stay in the run folder beside the newest
    moments: Literal["auto", "own", "shared"] = "auto"
    """Of Adam: each job begins anew, or with those of all facilities (`fedqueue.moments`). auto: shared where jobs of
    `jit` stay, the optimizer is Adam, and what trains and scores is FedQueue's own task."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Who scores new models, and how."""

    where: str = "coordinator"  # or the name of a facility, or "nowhere"
    command: str | None = None  # of your own, beside the coordinator; None: the task's test samples
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        more_than(self, 0, "timeout_seconds")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the coordinator listens, and when it gives a silent facility up for away."""

    host: str = "127.0.0.1"
    port: int = 8440  # 0: any that is free
    names: list[str] = field(default_factory=list)  # by which facilities call it: for the certificate it makes itself
    certificate: str | None = None  # PEM files; None: it makes its own, unless it listens on loopback alone
    key: str | None = None
    client_authority: str | None = None  # PEM; who connects must show a certificate of it; None: nobody need have one
    away_seconds: float = 300.0  # a facility that was not heard of for so long is away
    overdue_seconds: float = 86400.0
    """`fedavg` and its like wait so long for a job to start, to end after its wall time and to hand in, or four times
    as long as any job waited there before; then the round goes on without its facility."""
    wait_for: int | None = None  # facilities that must be there before the run starts; None: all
    startup_allowance_seconds: float = 300.0  # in the wall time of jobs while nobody knows how long they take to start
    group_may_write: bool = False  # to the config and to the run's folder; else they are refused where it may
    connections: int = 1024  # at once, from everybody together; beyond it the oldest stranger has to go
    connections_per_address: int = 256  # the same of one address; many agents may be behind one
    open_reading: bool = False  # whoever reaches the server may see its live pages, without a credential
    credential_days: float = 90.0  # after which a credential expires that was not used; in use it is renewed

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 to 65535, found {self.port}")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and server.key belong together: give both or none")
        more_than(self, 0, "away_seconds", "overdue_seconds", "credential_days")
        at_least(self, 0, "startup_allowance_seconds")
        at_least(self, 1, "wait_for")
        at_least(self, 16, "connections", "connections_per_address")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What `fedqueue run` starts as a job; in other runs each facility's agent has its own command."""

    command: str | None = None  # None: trains the task
    poll_seconds: float = 0.5  # how often agents look
    offer: str = DEFAULT_OFFER  # in a federation: the name by which its sites know what to run

    def __post_init__(self) -> None:
        more_than(self, 0, "poll_seconds")


@dataclass(frozen=True, kw_only=True)
class Config:
    run: RunSettings
    facility: list[FacilitySettings]
    task: TaskSettings = field(default_factory=TaskSettings)
    strategy: dict[str, Any] = field(default_factory=dict)  # options of every strategy there is
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    trust: Trust = field(default_factory=Trust)
    fault: list[FaultSettings] = field(default_factory=list)
    simulator: SimulatorSettings = field(default_factory=SimulatorSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    folder: str = "."  # where relative paths in it begin

    def options(self, strategy: str | None = None) -> Any:
        """The options of this strategy, by default the run's own."""
        return self.strategy[strategy or self.run.strategy]


def load(path: Path, changes: Iterable[str] = ()) -> Config:
    """Read a config file and apply changes such as "run.rounds=20" or "facility.*.queue.rho=0.5"."""
    return parse(read_tree(path, changes), where=str(path), folder=path.parent)


def read_tree(path: Path, changes: Iterable[str] = ()) -> dict[str, Any]:
    """The plain values of a config file, with changes."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `fedqueue init` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for change in changes:
        _apply(tree, change)
    return tree


def parse(tree: Mapping[str, Any], *, where: str = "config", folder: Path | None = None) -> Config:
    """Check a tree of plain values, as TOML gives it."""
    home = (folder or Path()).absolute()
    import_modules(tree.get("run"), where, home)
    try:
        if "folder" in tree:
            raise ConfigError("folder: unknown key; it is where the config file lies")
        options = _read_options(tree.get("strategy", {}))
        config = read(Config, {**tree, "strategy": options, "folder": str(home)}, "")
        _check_across(config)
        if (proximal := getattr(config.options(), "proximal", None)) is not None:
            config = replace(config, task=replace(config.task, proximal=proximal))
        config = replace(config, model=replace(config.model, moments=_moments_of(config)))
        if config.task.name == CAUSAL_LM:
            options = complete_options(config.task.options, [f.name for f in config.facility], home)
            if "test" not in options and config.evaluation.where != "nowhere" and config.evaluation.command is None:
                raise ConfigError(
                    'task.options.test: is missing; name the file to score on, or evaluation.where "nowhere"'
                )
            config = replace(config, task=replace(config.task, options=options))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def _read_options(given: Any) -> dict[str, Any]:
    """The options of every strategy; those that the file does not mention have their defaults."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"strategy: must be tables such as [strategy.fedqueue], found {given!r}")
    for name in given:
        _check_strategy(name, "strategy")
    return {name: read(kind.Options, given.get(name, {}), f"strategy.{name}") for name, kind in STRATEGIES.items()}


def import_modules(run: Any, where: str, folder: Path) -> None:
    """Make known what installed packages add, and what run.modules register, which may lie beside the config file."""
    register_rules()
    names = run.get("modules", []) if isinstance(run, Mapping) else []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{where}: run.modules: must be a list of module names, found {names!r}")
    for name in names:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a user's module does wrong is the user's to know, in one line
            raise ConfigError(f"{where}: run.modules: cannot import {name!r}: {error}") from error


def _check_across(config: Config) -> None:
    """What no single key can know."""
    _check_strategy(config.run.strategy, "run.strategy")
    names = [f.name for f in config.facility]
    if not names:
        raise ConfigError("facility: at least one [[facility]] is needed")
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise ConfigError(f"facility.{twice}: there are two facilities of this name; rename one")
    if config.evaluation.where not in ("coordinator", "nowhere", *names):
        found = config.evaluation.where
        raise ConfigError(f"evaluation.where: must be coordinator, nowhere or a facility, found {found!r}")
    for i, fault in enumerate(config.fault):
        if fault.facility not in ("*", *names):
            raise ConfigError(f"fault.{i}.facility: must be * or one of {', '.join(names)}, found {fault.facility!r}")
    _check_factors(config)
    _check_masks(config)
    for strategy, options in config.strategy.items():
        steps = getattr(options, "steps", None)
        if isinstance(steps, dict) and set(steps) != set(names):
            raise ConfigError(
                f"strategy.{strategy}.steps: must be a number, or name each facility once: {', '.join(names)}"
            )


def _check_masks(config: Config) -> None:
    """Of what is masked only sums can be known."""
    if not config.trust.masked:
        return
    name, options = config.run.strategy, config.options()
    if not STRATEGIES[name].sums_several or STRATEGIES[name].keeps_variates:
        raise ConfigError(f"trust.masked: {name} does not sum the updates of several facilities")
    if getattr(options, "absent", 0.0):
        raise ConfigError(f"strategy.{name}.absent: must be 0 with trust.masked: what is masked counts once")
    if getattr(options, "rounds", "fixed") == "auto":
        raise ConfigError(f"strategy.{name}.rounds: cannot be auto with trust.masked: nobody sees how updates agree")
    if "factor" in config.model.roles.values():
        raise ConfigError("model.roles: factors cannot be masked: it is their products that are summed")
    if len(config.facility) < config.trust.least_members:
        raise ConfigError(f"trust.least_members: there are only {len(config.facility)} facilities")


def _check_factors(config: Config) -> None:
    """Low-rank factors can be averaged by their products, and there is no more to be done with these."""
    of_task = config.task.name == CAUSAL_LM and averages_products(config.task.options)
    if not of_task and "factor" not in config.model.roles.values():
        return
    kind = STRATEGIES[config.run.strategy]
    if kind.keeps_variates or issubclass(kind.Options, ServerStepOptions):
        raise ConfigError(
            f"run.strategy: {config.run.strategy} cannot average products of factors; "
            'use averaging "plain" or "frozen-a", or another strategy'
        )
    if config.trust.rule != "mean":
        raise ConfigError(
            f'trust.rule: "{config.trust.rule}" cannot average products of factors; '
            'use averaging "plain" or "frozen-a", or rule "mean"'
        )


def _moments_of(config: Config) -> Literal["own", "shared"]:
    chosen, task = config.model.moments, config.task
    is_ours = task.name != "timing" and config.worker.command is None
    if chosen == "shared" and is_ours and task.optimizer == "sgd":
        raise ConfigError('model.moments: "shared" is for Adam, but task.optimizer is "sgd"')
    if chosen == "shared" and config.trust.masked:
        raise ConfigError("model.moments: cannot be shared with trust.masked: statistics are not summed there")
    if chosen != "auto":
        return chosen
    gains = STRATEGIES[config.run.strategy].shares_moments and config.options().stay != "off"
    gains = gains and config.evaluation.command is None and not config.trust.masked
    return "shared" if gains and is_ours and task.optimizer != "sgd" else "own"


def _check_strategy(name: str, where: str) -> None:
    if name not in STRATEGIES:
        raise ConfigError(f"{where}: there is no strategy {name!r}; there are {', '.join(STRATEGIES)}")


# --set ------------------------------------------------------------------------------------------------------


def _apply(tree: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {change}: must be key=value, such as run.rounds=20")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a text
    _set(tree, key.strip().split("."), value, change)


def _set(node: Any, path: list[str], value: Any, change: str) -> None:
    head, *rest = path
    if isinstance(node, list):
        if not all(isinstance(n, dict) for n in node):
            raise ConfigError(f"--set {change}: {head} is inside a list; give the whole list")
        chosen = [n for i, n in enumerate(node) if head in ("*", str(i), n.get("name"))]
        if not chosen:
            names = ", ".join(str(n.get("name", i)) for i, n in enumerate(node))
            raise ConfigError(f"--set {change}: {head} is none of {names} (or * for all)")
        if not rest:
            raise ConfigError(f"--set {change}: names a whole table; say which of its keys")
        for item in chosen:
            _set(item, rest, value, change)
    elif not isinstance(node, dict):
        raise ConfigError(f"--set {change}: {head} is inside a value that is not a table")
    elif rest:
        _set(node.setdefault(head, {}), rest, value, change)
    else:
        node[head] = value


def toml_key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key) else json.dumps(key)


def toml_value(value: Any) -> str:
    """TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value)
