"""TOML -> frozen settings. Everything a person writes is checked here, once; inside, it is trusted.

`load` reads a file, applies `--set key=value` changes, and either returns a `Config` or raises a `ConfigError` of
one line: the file, the key, what was found, what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from fedqueue.errors import ConfigError
from fedqueue.plan import FailurePolicy
from fedqueue.strategies import STRATEGIES
from fedqueue.training.settings import TaskSettings

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Settings(BaseModel):
    model_config = _STRICT


class RunSettings(_Settings):
    name: Name = "run"
    strategy: str = "fedqueue"
    seed: Annotated[int, Field(ge=0)] = 1
    rounds: Annotated[int, Field(ge=1)] | None = None
    seconds: Positive | None = None
    round_length: Positive = 10.0
    learning_rate: Positive = 0.001
    targets: list[float] = [0.85, 0.90, 0.95]
    stop_at_score: float | None = None
    data_weights: Literal["equal", "size"] = "equal"
    warm_up: bool = False
    modules: list[str] = []  # imported first: where strategies of your own register themselves

    @model_validator(mode="after")
    def _ends(self) -> RunSettings:
        if self.rounds is None and self.seconds is None:
            raise ValueError("rounds or seconds is needed, else the run has no end")
        return self


class FixedQueue(_Settings):
    """Every job waits `delay` seconds."""

    kind: Literal["fixed"]
    delay: NotNegative


class LognormalQueue(_Settings):
    """Lognormal waits with the given mean; `rho` is the sd of log q, or of q in seconds."""

    kind: Literal["lognormal"]
    mean: Positive
    rho: NotNegative = 0.5
    spread: Literal["log", "seconds"] = "log"


class StepQueue(_Settings):
    """Lognormal waits whose mean changes for good at second `change_at`."""

    kind: Literal["step"]
    mean: Positive
    mean_after: Positive
    change_at: NotNegative
    rho: NotNegative = 0.5
    spread: Literal["log", "seconds"] = "log"


class SpikeQueue(_Settings):
    """Lognormal waits whose mean is `factor` times as long from `spike_at` for `spike_seconds`, and again `every`."""

    kind: Literal["spike"]
    mean: Positive
    factor: Positive
    spike_at: NotNegative
    spike_seconds: Positive
    every: Positive | None = None
    rho: NotNegative = 0.5
    spread: Literal["log", "seconds"] = "log"


class TraceQueue(_Settings):
    """Waits that a real system recorded: those of the jobs of this shape, by their time of submission."""

    kind: Literal["trace"]
    file: str
    procs: tuple[int, int] | None = Field(default=None, strict=False)  # fewest and most processors
    max_requested: Positive | None = None  # seconds of requested wall time
    start: NotNegative | None = None  # where in the trace the run begins; None: anywhere, by seed
    speed_up: Positive = 1.0  # so many trace seconds pass, and waits shrink, in one second of the run


QueueSettings = Annotated[
    FixedQueue | LognormalQueue | StepQueue | SpikeQueue | TraceQueue, Field(discriminator="kind")
]


class FacilitySettings(_Settings):
    name: Name
    queue: QueueSettings
    steps_per_second: Positive  # c, before the slow-down
    slowdown: Positive = 1.0  # how many times slower it really is; the strategy is not told
    nodes: Annotated[int, Field(ge=1)] = 1
    first_delay: NotNegative = 2.0  # expected before anything was seen, unless warm_up is on
    max_jobs: Annotated[int, Field(ge=1)] = 2  # that we put at its scheduler at once
    queue_limit: Annotated[int, Field(ge=1)] | None = None  # that the site allows; more are refused
    accrue: Share = 0.0  # how much of its age a chained job keeps while it is not yet eligible
    startup_seconds: NotNegative = 0.0
    megabytes_per_second: Positive | None = None  # None: transfers take no time
    latency_seconds: NotNegative = 0.0


class FaultSettings(_Settings):
    """What goes wrong at a facility ("*": at all): to jobs by probability or by number, or to the facility."""

    kind: Literal["fail", "preempt", "hang", "corrupt", "duplicate", "outage"]
    facility: str = "*"
    probability: Share | None = None
    jobs: list[int] | None = None  # by sequence number, from 0
    transient: bool = True  # fail: whether the same again may work
    at: NotNegative | None = None  # outage: when it begins
    seconds: Positive | None = None  # outage: how long it lasts; None: for good
    loses_jobs: bool = False  # outage: jobs die; otherwise they go on and their results wait

    @model_validator(mode="after")
    def _complete(self) -> FaultSettings:
        if self.kind == "outage":
            if self.at is None:
                raise ValueError("an outage needs at, the second it begins")
        elif (self.probability is None) == (self.jobs is None):
            raise ValueError(f"a fault of kind {self.kind} needs probability or jobs, one of the two")
        return self


class SimulatorSettings(_Settings):
    aggregate_seconds: NotNegative = 0.0
    model_megabytes: NotNegative = 1.0  # for transfers when nothing is trained; else the model's real size


class Config(_Settings):
    run: RunSettings
    facility: Annotated[list[FacilitySettings], Field(min_length=1)]
    task: SkipValidation[TaskSettings] = Field(default_factory=TaskSettings)
    strategy: dict[str, Any] = {}
    failures: SkipValidation[FailurePolicy] = Field(default_factory=FailurePolicy)
    fault: list[FaultSettings] = []
    simulator: SimulatorSettings = SimulatorSettings()
    folder: str = Field(default=".", exclude=True)  # where relative paths in it begin

    def options(self, strategy: str | None = None) -> Any:
        """The options of this strategy, by default the run's own."""
        return self.strategy[strategy or self.run.strategy]


def load(path: Path, changes: Iterable[str] = ()) -> Config:
    """Read a config file and apply changes such as "run.rounds=20" or "facility.*.queue.rho=0.5"."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `fedqueue init` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for change in changes:
        _apply(tree, change)
    return parse(tree, where=str(path), folder=path.parent)


def parse(tree: Mapping[str, Any], *, where: str = "config", folder: Path | None = None) -> Config:
    """Check a tree of plain values, as TOML gives it."""
    tree = dict(tree)
    _import_modules(tree.get("run"), where, folder or Path())
    sections = {"task": (TaskSettings, tree.get("task", {})), "failures": (FailurePolicy, tree.get("failures", {}))}
    strategies = tree.get("strategy", {})
    if not isinstance(strategies, dict):
        raise ConfigError(f"{where}: strategy: found {strategies!r}, must be tables such as [strategy.fedqueue]")
    for name, given in strategies.items():
        sections[f"strategy.{name}"] = (_strategy(name, f"{where}: strategy").Options, given)
    parsed = {key: _dataclass(kind, given, f"{where}: {key}") for key, (kind, given) in sections.items()}
    for name, kind in STRATEGIES.items():  # strategies that the file does not mention have their defaults
        parsed.setdefault(f"strategy.{name}", kind.Options())
    tree["task"], tree["failures"] = parsed["task"], parsed["failures"]
    tree["strategy"] = {name: parsed[f"strategy.{name}"] for name in STRATEGIES}
    tree["folder"] = str(folder or Path())
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error, tree, Config)}") from None
    _check_across(config, where)
    return config


def _import_modules(run: Any, where: str, folder: Path) -> None:
    """Import run.modules, which may lie beside the config file, so that what they register is known."""
    names = run.get("modules", []) if isinstance(run, Mapping) else []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{where}: run.modules: must be a list of module names, found {names!r}")
    for name in names:
        if str(folder.absolute()) not in sys.path:
            sys.path.insert(0, str(folder.absolute()))
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a user's module does wrong is the user's to know, in one line
            raise ConfigError(f"{where}: run.modules: cannot import {name!r}: {error}") from error


def _check_across(config: Config, where: str) -> None:
    """What no single key can know."""
    _strategy(config.run.strategy, f"{where}: run.strategy")
    names = [f.name for f in config.facility]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise ConfigError(f"{where}: facility.{twice}: there are two facilities of this name; rename one")
    for i, fault in enumerate(config.fault):
        if fault.facility not in ("*", *names):
            raise ConfigError(
                f"{where}: fault.{i}.facility: found {fault.facility!r}, must be * or one of {', '.join(names)}"
            )
    for strategy, options in config.strategy.items():
        steps = getattr(options, "steps", None)
        if isinstance(steps, dict) and set(steps) != set(names):
            raise ConfigError(
                f"{where}: strategy.{strategy}.steps: must be a number, or name each facility once: {', '.join(names)}"
            )


def _strategy(name: str, where: str) -> Any:
    if name not in STRATEGIES:
        raise ConfigError(f"{where}: there is no strategy {name!r}; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def _dataclass(kind: type, given: Any, where: str) -> Any:
    """A plain dataclass from a table, with its types, its keys and its own checks enforced."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: found {given!r}, must be a table")
    hints = get_type_hints(kind)
    defaults = {f.name: (hints[f.name], _default(f)) for f in dataclasses.fields(kind)}
    shape: type[BaseModel] = create_model(kind.__name__, __config__=_STRICT, **defaults)  # type: ignore[call-overload]
    try:
        checked = shape.model_validate(dict(given))
        return kind(**{name: getattr(checked, name) for name in defaults})
    except ValidationError as error:
        raise ConfigError(f"{where}.{_explain(error, given, kind)}") from None
    except ValueError as error:  # the dataclass's own checks; they begin with the key
        raise ConfigError(f"{where}.{error}") from None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


# Making pydantic's errors one line a person can act on ----------------------------------------------------


def _explain(error: ValidationError, tree: Mapping[str, Any], kind: type) -> str:
    # An unknown key explains the missing one that it was meant to be, so it goes first.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    key, found = _key(first, tree), first["input"]
    if first["type"] == "extra_forbidden":
        allowed = _keys_beside(first, kind)
        close = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
        hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(allowed)}"
        return f"{key}: unknown key; {hint}"
    if first["type"] == "missing":
        return f"{key}: is missing"
    if first["type"] in ("value_error", "union_tag_not_found"):
        return f"{key}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    said = first["msg"].removeprefix("Input should be ")
    return f"{key}: must be {said}, found {found!r}"


def _key(error: ErrorDetails, tree: Any) -> str:
    """The dotted key of an error: facilities by name, and without the tags of pydantic's unions."""
    parts: list[str] = []
    node: Any = tree
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(node, list) and part < len(node):
            node = node[part]
            name = node.get("name") if isinstance(node, Mapping) else None
            parts.append(str(name or part))
        elif isinstance(node, Mapping) and part in node:
            node = node[part]
            parts.append(str(part))
        elif part == error["loc"][-1] and error["type"] in ("missing", "extra_forbidden"):
            parts.append(str(part))
    return ".".join(parts)


def _keys_beside(error: ErrorDetails, kind: type) -> list[str]:
    """The keys allowed where an unknown one was found."""
    if dataclasses.is_dataclass(kind):
        return [f.name for f in dataclasses.fields(kind)]
    inner: dict[str, Any] = {
        "run": RunSettings,
        "facility": FacilitySettings,
        "fault": FaultSettings,
        "simulator": SimulatorSettings,
        **{q.model_fields["kind"].annotation.__args__[0]: q for q in _QUEUES},  # type: ignore[union-attr]
    }
    owner: Any = Config
    for part in error["loc"][:-1]:
        owner = inner.get(str(part), owner)
    return [name for name in owner.model_fields if name != "folder"]


_QUEUES: tuple[type[_Settings], ...] = (FixedQueue, LognormalQueue, StepQueue, SpikeQueue, TraceQueue)


# --set ------------------------------------------------------------------------------------------------------


def _apply(tree: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {change}: must be key=value, such as run.rounds=20")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    _set(tree, key.strip().split("."), value, change)


def _set(node: Any, path: list[str], value: Any, change: str) -> None:
    head, *rest = path
    if isinstance(node, list):
        chosen = [n for i, n in enumerate(node) if head in ("*", str(i), n.get("name"))]
        if not chosen or not rest:
            names = ", ".join(str(n.get("name", i)) for i, n in enumerate(node))
            raise ConfigError(f"--set {change}: {head} is none of {names} (or * for all)")
        for item in chosen:
            _set(item, rest, value, change)
    elif not isinstance(node, dict):
        raise ConfigError(f"--set {change}: {head} is inside a value that is not a table")
    elif rest:
        _set(node.setdefault(head, {}), rest, value, change)
    else:
        node[head] = value
