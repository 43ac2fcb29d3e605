"""An experiment: rows (methods, variants) under settings (one value of every axis), each run over the same seeds.

A file in experiments/ says which runs make one table or figure, what the paper published for them, and what it
claims of them. `load` reads and checks it; `cells` are its rows under its settings; `changes` and `config_of` give the
run of a cell and a seed. Everything a person may get wrong is a `ConfigError` of one line that names file and key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Final, Literal

from fedqueue import config as run_config
from fedqueue.config import Config
from fedqueue.errors import ConfigError
from fedqueue.metrics import target_key
from fedqueue.protocol.codec import read
from fedqueue.protocol.plan import AS_PUBLISHED

FOLDER: Final = "experiments"

Kept = Literal["answers", "arrivals", "errors", "facilities", "staleness"]
"""What a record may hold beside its figures; see record.py."""

Only = Mapping[str, Collection[str]]
"""Axis -> the values of it that are meant; an axis that is not named: all."""

AT_TARGET: Final = ("time_to", "interpolated", "steps_to", "node_seconds_to", "movement_to", "movement_ratio")
"""Figures that belong to a target, as in time_to.0.95."""

PLAIN: Final = (
    *("score.max", "score.final", "late_probability", "normalised_delay_mean", "normalised_delay_max"),
    *("max_staleness", "missed_cutoff", "deferred_weight", "local_steps", "model_transfers", "node_seconds", "rounds"),
    *("virtual_seconds", "updates.admitted", "updates.deferred", "arrival.p50", "arrival.p90"),
    *("loss.final", "loss.least"),
)


@dataclass(frozen=True, kw_only=True)
class Seeds:
    first: int
    count: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1:
            raise ValueError(f"count must be 1 or more and first 0 or more, found {self.count} and {self.first}")


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of an axis."""

    name: str
    changes: list[str] = field(default_factory=list)
    config: str | None = None  # the run to change instead of the experiment's
    objective: str | None = None  # of grids, instead of the experiment's


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Something that all rows are run under, as the amount of data."""

    name: str
    values: list[Value]


@dataclass(frozen=True, kw_only=True)
class Published:
    """Figures that the paper has for some settings alone."""

    only: dict[str, list[str]]
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method or variant. `tuned` names the grid, as in "tuning/fedqueue", whose winner it also takes."""

    name: str
    label: str = ""
    changes: list[str] = field(default_factory=list)
    paper: dict[str, float] = field(default_factory=dict)
    published: list[Published] = field(default_factory=list)
    only: dict[str, list[str]] = field(default_factory=dict)
    tuned: str | None = None
    grid: str | None = None  # that it belongs to


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows that are the product of alternatives; an alternative is one change or several that belong together."""

    name: str
    label: str = ""
    changes: list[str] = field(default_factory=list)
    vary: list[list[str | list[str]]]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says: `better` beats row `than` in a figure, or has about the `value` in it."""

    text: str
    paper: str = ""
    figure: str
    better: str
    than: str | None = None
    by: float | None = None  # published relative difference: 0.37 is 37 % better
    value: float | None = None
    spread: float = 0.0  # published, of the value
    only: dict[str, list[str]] = field(default_factory=dict)  # settings that it speaks of


@dataclass(frozen=True, kw_only=True)
class Quick:
    """What `--quick` makes of the experiment."""

    seeds: int = 1
    changes: list[str] = field(default_factory=list)
    keep: dict[str, list[str]] = field(default_factory=dict)
    rows: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class _File:
    title: str
    paper: str = ""
    config: str
    changes: list[str] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    seeds: Seeds
    figures: list[str]
    keep: list[Kept] = field(default_factory=list)
    about: str = ""
    objective: str | None = None
    axis: list[Axis] = field(default_factory=list)
    axes_of: str | None = None  # the experiment beside this one whose axes it has too, after its own
    row: list[Row] = field(default_factory=list)
    grid: list[Grid] = field(default_factory=list)
    claim: list[Claim] = field(default_factory=list)
    quick: Quick = field(default_factory=Quick)


@dataclass(frozen=True)
class Cell:
    """A row under a setting."""

    row: Row
    under: tuple[tuple[str, Value], ...]  # axis and its value, in the order of the file

    @property
    def setting(self) -> str:
        """As in "data=full, rho=log"; empty without axes."""
        return setting_text({axis: value.name for axis, value in self.under})

    @property
    def objective(self) -> str | None:
        """Of grids, if this setting has one of its own."""
        return next((value.objective for _, value in reversed(self.under) if value.objective), None)

    def __str__(self) -> str:
        return f"{self.row.name} ({self.setting})" if self.under else self.row.name


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A checked experiment file."""

    name: str
    path: Path
    title: str
    paper: str  # what the paper calls it
    config: str
    changes: Sequence[str]
    targets: Sequence[float]
    seeds: Seeds
    figures: Sequence[str]  # to be shown, in this order
    keep: frozenset[str]
    about: str
    objective: str | None  # of grids: the figure whose mean is to be least
    axes: Sequence[Axis]
    rows: Sequence[Row]  # those of grids too
    grids: Sequence[Grid]
    claims: Sequence[Claim]
    quick: Quick

    def settings(self, *, quick: bool = False) -> list[dict[str, str]]:
        """Every setting as axis -> value, in the order of the file; one empty setting without axes."""
        return [{axis: value.name for axis, value in chosen} for chosen in self._settings(quick)]

    def cells(self, *, quick: bool = False) -> list[Cell]:
        """Every row under every setting that it exists in."""
        kept = None if not quick or self.quick.rows is None else set(self.quick.rows)
        return [
            Cell(row, under)
            for under in self._settings(quick)
            for row in self.rows
            if matches({axis: value.name for axis, value in under}, row.only)
            and (kept is None or row.name in kept or row.grid in kept)
        ]

    def seeds_of(self, count: int | None = None, *, quick: bool = False) -> range:
        """Of every cell; `count` if more or fewer are wanted than the file says."""
        wanted = count or (self.quick.seeds if quick else self.seeds.count)
        return range(self.seeds.first, self.seeds.first + wanted)

    def published(self, row: Row, setting: Mapping[str, str]) -> dict[str, float]:
        """What the paper has for a row under this setting, by figure."""
        found = dict(row.paper)
        for more in row.published:
            if matches(setting, more.only):
                found |= more.figures
        return found

    def run_of(
        self, cell: Cell, seed: int, *, quick: bool = False, winner: Sequence[str] = ()
    ) -> tuple[Path, tuple[str, ...]]:
        """The config file of a run and its changes, as `fedqueue.config.load` takes them."""
        named = next((value.config for _, value in reversed(cell.under) if value.config), self.config)
        made = (
            # The facilities of an experiment are honest, and every strategy is as published, unless it says otherwise.
            f"trust.say={AS_PUBLISHED.say}",
            f"trust.clip={AS_PUBLISHED.clip}",
            *self.changes,
            *(change for _, value in cell.under for change in value.changes),
            *cell.row.changes,
            *winner,
            *(self.quick.changes if quick else ()),
            f"run.seed={seed}",
            *([f"run.targets={list(self.targets)}"] if self.targets else ()),
        )
        return self.path.parent / named, made

    def config_of(self, cell: Cell, seed: int, *, quick: bool = False, winner: Sequence[str] = ()) -> Config:
        try:
            return run_config.load(*self.run_of(cell, seed, quick=quick, winner=winner))
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {cell}: {error}") from None

    def _settings(self, quick: bool) -> Iterator[tuple[tuple[str, Value], ...]]:
        for chosen in product(*(axis.values for axis in self.axes)):
            under = tuple((axis.name, value) for axis, value in zip(self.axes, chosen, strict=True))
            if not quick or matches({axis: value.name for axis, value in under}, self.quick.keep):
                yield under


def setting_text(setting: Mapping[str, str]) -> str:
    """How a setting is written.

    >>> setting_text({"data": "full", "rho": "log"})
    'data=full, rho=log'
    """
    return ", ".join(f"{axis}={value}" for axis, value in setting.items())


def matches(setting: Mapping[str, str], only: Only) -> bool:
    """
    >>> matches({"data": "full"}, {"data": ["full", "scarce"]})
    True
    """
    return all(setting[axis] in values for axis, values in only.items())


# Files --------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where experiments are looked for: in ./experiments, or in the source tree that this package belongs to."""
    here = Path(FOLDER)
    beside = Path(__file__).parents[2] / FOLDER
    return here if here.is_dir() or not beside.is_dir() else beside


def find(name: str) -> Path:
    """The file of an experiment, by its name or by a path to it."""
    path = Path(name) if name.endswith(".toml") else folder() / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(one.stem for one in catalogue())
        raise ConfigError(f"{name}: there is no such experiment; there are: {known or f'none in {folder()}'}")
    return path


def catalogue() -> list[Path]:
    """All experiment files, by name; configs of single runs lie beside them and are left out."""
    return sorted(path for path in folder().glob("*.toml") if "title" in run_config.read_tree(path))


def load(path: Path) -> Experiment:
    """Read and check an experiment."""
    tree = run_config.read_tree(path)
    if "title" not in tree and "facility" in tree:
        raise ConfigError(f"{path}: is the config of one run, no experiment; `fedqueue simulate` runs it")
    try:
        file = read(_File, tree, "")
        shared = () if file.axes_of is None else load(find(str(path.parent / f"{file.axes_of}.toml"))).axes
        plain = [replace(row, label=row.label or row.name) for row in file.row]
        experiment = Experiment(
            name=path.stem,
            path=path,
            title=file.title,
            paper=file.paper,
            config=file.config,
            changes=tuple(file.changes),
            targets=tuple(file.targets),
            seeds=file.seeds,
            figures=tuple(file.figures),
            keep=frozenset(file.keep),
            about=file.about,
            objective=file.objective,
            axes=(*file.axis, *shared),
            rows=(*plain, *(row for grid in file.grid for row in _rows_of(grid))),
            grids=tuple(file.grid),
            claims=tuple(file.claim),
            quick=file.quick,
        )
        _check(experiment)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return experiment


def _rows_of(grid: Grid) -> list[Row]:
    """The product of the alternatives; rows are numbered, and labelled by what they change."""
    rows = []
    for number, chosen in enumerate(product(*grid.vary), 1):
        changes = [change for one in chosen for change in ([one] if isinstance(one, str) else one)]
        label = ", ".join(_short(change) for change in changes)
        name = f"{grid.name}/{number:02d}"
        rows.append(Row(name=name, label=label, changes=[*grid.changes, *changes], grid=grid.name))
    return rows


def _short(change: str) -> str:
    """
    >>> _short("strategy.jit.round_length=5.0")
    'round_length 5.0'
    """
    key, _, value = change.partition("=")
    return f"{key.rpartition('.')[2]} {value}"


# Checks that no single key can do -----------------------------------------------------------------------


def _check(experiment: Experiment) -> None:
    axes = {axis.name: [value.name for value in axis.values] for axis in experiment.axes}
    _unique("axis", [axis.name for axis in experiment.axes])
    for name, values in axes.items():
        _unique(f"axis.{name}.values", values)
    rows = [row.name for row in experiment.rows]
    grids = [grid.name for grid in experiment.grids]
    if not rows:
        raise ConfigError("row: at least one [[row]] or [[grid]] is needed")
    _unique("row", rows)
    _unique("grid", grids)
    if grids and experiment.objective is None:
        raise ConfigError("objective: is missing; a grid needs the figure whose mean is to be least")
    _check_figures("figures", experiment.figures, experiment.targets)
    _check_figures("objective", [experiment.objective] if experiment.objective else [], experiment.targets)
    for axis in experiment.axes:
        for value in axis.values:
            own = [value.objective] if value.objective else []
            _check_figures(f"axis.{axis.name}.{value.name}.objective", own, experiment.targets)
    for row in experiment.rows:
        _check_only(f"row.{row.name}.only", row.only, axes)
        _check_figures(f"row.{row.name}.paper", row.paper, experiment.targets)
        for published in row.published:
            _check_only(f"row.{row.name}.published.only", published.only, axes)
            _check_figures(f"row.{row.name}.published.figures", published.figures, experiment.targets)
        if row.tuned is not None and row.tuned.count("/") != 1:
            raise ConfigError(f"row.{row.name}.tuned: must be EXPERIMENT/GRID, found {row.tuned!r}")
    for number, claim in enumerate(experiment.claims):
        where = f"claim.{number}"
        for key, row_name in (("better", claim.better), ("than", claim.than)):
            if row_name is not None and row_name not in rows:
                raise ConfigError(f"{where}.{key}: there is no row {row_name!r}; there are {', '.join(rows)}")
        if (claim.than is None) == (claim.value is None):
            raise ConfigError(f"{where}: needs than (a row) or value, one of the two")
        _check_figures(f"{where}.figure", [claim.figure], experiment.targets)
        _check_only(f"{where}.only", claim.only, axes)
    _check_only("quick.keep", experiment.quick.keep, axes)
    for name in experiment.quick.rows or ():
        if name not in rows and name not in grids:
            raise ConfigError(f"quick.rows: there is no row {name!r}; there are {', '.join([*rows, *grids][:20])}")


def _unique(where: str, names: Sequence[str]) -> None:
    for name in names:
        if not name or set(name) & set("=,"):
            raise ConfigError(f"{where}: a name must not be empty and have no '=' or ',', found {name!r}")
        if list(names).count(name) > 1:
            raise ConfigError(f"{where}.{name}: there are two of this name; rename one")


def _check_only(where: str, only: Only, axes: Mapping[str, Sequence[str]]) -> None:
    for axis, values in only.items():
        if axis not in axes:
            raise ConfigError(f"{where}.{axis}: there is no axis of this name; there are {', '.join(axes) or 'none'}")
        for value in values:
            if value not in axes[axis]:
                raise ConfigError(f"{where}.{axis}: {value!r} is none of {', '.join(axes[axis])}")


def _check_figures(where: str, keys: Collection[str], targets: Sequence[float]) -> None:
    names = [target_key(target) for target in targets]
    for key in keys:
        head, _, rest = key.partition(".")
        if head in AT_TARGET and rest not in names:
            raise ConfigError(f"{where}: {key!r} needs one of the targets {', '.join(names) or '(there are none)'}")
        if head not in AT_TARGET and key not in PLAIN:
            known = ", ".join((*PLAIN, *(f"{name}.TARGET" for name in AT_TARGET)))
            raise ConfigError(f"{where}: there is no figure {key!r}; there are {known}")
