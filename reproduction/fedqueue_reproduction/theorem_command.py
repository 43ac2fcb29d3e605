"""`fedqueue bound --theorem`: runs the cases, and says what they make of Theorem 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import floor, isfinite, log10
from pathlib import Path
from typing import Final

from fedqueue.cli import common, extras, terminal
from fedqueue.config import Config, load, read_tree
from fedqueue.errors import ConfigError, DataError, FedQueueError
from fedqueue.machine import invoked, provenance
from fedqueue.processes import run_all
from fedqueue.protocol.codec import read
from fedqueue_reproduction import experiment
from fedqueue_reproduction.theorem_results import CaseFigures, RunFacts, as_text, write

FILE: Final = "theorem.toml"
SEEDS: Final = 3
LEMMA_OPTIONS: Final = (
    *("facilities", "rounds", "epsilon", "round_length", "margin", "gamma", "shift"),
    *("procs", "requested", "predictor", "smoothing", "first_delay", "warm_up", "cases"),
)
"""What does not go with --theorem ..."""
OPTIONS: Final = ("changes", "seeds", "jobs", "models", "draws", "least_loss", "out")
"""... and what goes with nothing else."""

Told = Callable[[str, int, int], None]
"""Is told what is done, how many are, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config and what is changed in it. What is None is as the command line says, or its default."""

    name: str
    config: str
    label: str = ""
    about: str = ""
    changes: list[str] = field(default_factory=list)
    seeds: int | None = None  # at most
    models: int | None = None
    draws: int | None = None
    least_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class _File:
    case: list[Case]


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One run: all that another process needs."""

    case: int
    path: Path
    changes: tuple[str, ...]
    seed: int
    depth: tuple[int, int, float]

    def load(self) -> Config:
        return load(self.path, [*self.changes, f"run.seed={self.seed}"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--theorem",
        type=Path,
        nargs="*",
        metavar="FILE.toml",
        help=f"instead of SOURCE: run these configs, or files of cases, for Theorem 1 (experiments/{FILE})",
    )
    group = parser.add_argument_group("of --theorem")
    common.add_changes(parser)
    group.add_argument("--seeds", type=int, metavar="N", help=f"how many, from the config's run.seed on ({SEEDS})")
    group.add_argument("--jobs", type=int, metavar="P", help="processes at once (1)")
    group.add_argument("--models", type=int, metavar="N", help="models of a run where curvature is searched for (5)")
    group.add_argument("--draws", type=int, metavar="N", help="batches for the noise at each of them (16)")
    group.add_argument("--least-loss", type=float, metavar="F", help="no loss is below it: F* is taken for it (0)")
    group.add_argument("--out", type=Path, metavar="FILE.json", help="write the result here")


def run(args: argparse.Namespace) -> int:
    _check(args)
    extras.need("train")
    if args.plots:
        extras.need("plots", instead=", or add --no-plots")
    from fedqueue_reproduction.theorem_text import show  # loads what draws reports: other commands need not wait for it

    cases = [case for path in args.theorem or [experiment.folder() / FILE] for case in _cases(path, args)]
    names = [case.name for case, _ in cases]
    if len(set(names)) < len(names):
        raise ConfigError(f"two cases are called {next(name for name in names if names.count(name) > 1)!r}")
    items = list(_items(cases, args))
    with terminal.counting(quiet=args.json) as told:
        found = _measure(cases, items, args.jobs or 1, told)
        again = list(_again(found, items, cases))
        found += _measure(cases, again, args.jobs or 1, told, chosen=False) if again else []
    found.sort(key=lambda one: names.index(one.name))  # the config's rate stays first
    text = as_text(provenance(invoked()), found)
    if args.out is not None:
        write(args.out, text)
    picture = None
    if args.plots:
        from fedqueue_reproduction.theorem_plot import theorem_plot

        stem = (args.theorem or [Path(FILE)])[0].stem
        picture = theorem_plot(found, args.plot or Path(f"{stem}-bound.png"))
    if args.json:
        print(text, end="")
    else:
        show(found)
        if picture is not None:
            print(f"plot: {picture}")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in LEMMA_OPTIONS:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --theorem")
    for name, least in (("seeds", 1), ("jobs", 1), ("models", 2), ("draws", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} must be {least} or more, found {value}")
    if args.least_loss is not None and not isfinite(args.least_loss):
        raise ConfigError(f"--least-loss must be a number, found {args.least_loss}")
    if args.out is not None:
        common.check_ending("--out", args.out, ".json")


# Cases --------------------------------------------------------------------------------------------------


def _cases(path: Path, args: argparse.Namespace) -> Iterator[tuple[Case, Path]]:
    """Each with its config; those of a file of cases that lack their data are left out, with a warning."""
    from fedqueue_reproduction.theorem_run import check, departures

    tree = read_tree(path)
    if "case" not in tree:  # the config of a run is a case of its own
        config = load(path, args.changes)
        check(config)
        yield Case(name=config.run.name, config=path.name), path
        return
    try:
        listed = read(_File, tree, "").case
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    for case in listed:
        place = path.parent / case.config
        try:
            config = load(place, [*case.changes, *args.changes])
            check(config)
            departures(config)  # loads its data
        except DataError as error:
            print(f"fedqueue: warning: {case.name} is left out: {error}", file=sys.stderr)
            continue
        except FedQueueError as error:
            raise type(error)(f"{path}: {case.name}: {error}") from None
        yield case, place


def _items(cases: Sequence[tuple[Case, Path]], args: argparse.Namespace) -> Iterator[_Item]:
    for place, (case, path) in enumerate(cases):
        changes = (*case.changes, *args.changes)
        first = load(path, changes).run.seed
        count = min(args.seeds or SEEDS, case.seeds or sys.maxsize)
        depth = (
            args.models or case.models or 5,
            args.draws or case.draws or 16,
            args.least_loss if args.least_loss is not None else case.least_loss or 0.0,
        )
        for seed in range(first, first + count):
            yield _Item(case=place, path=path, changes=changes, seed=seed, depth=depth)


def _again(found: Sequence[CaseFigures], items: Sequence[_Item], cases: Sequence[tuple[Case, Path]]) -> Iterator[_Item]:
    """The runs of a case once more at half the rate that the theorem's condition allows, where its own is above that.
    Half, because smoothness is known from below: at another rate more of it may be seen."""
    places = {case.name: place for place, (case, _) in enumerate(cases)}
    for figures in found:
        if figures.allowed_rate is None or figures.holds("stated"):
            continue
        for item in items:
            if item.case == places[figures.name] and item.load().task.optimizer == "sgd":
                rate = floored(figures.allowed_rate / 2)
                yield replace(item, changes=(*item.changes, f"run.learning_rate={rate!r}"))


def floored(rate: float) -> float:
    """Two digits of it, not above it.

    >>> floored(5.8657e-05), floored(0.02)
    (5.8e-05, 0.02)
    """
    digits = 1 - floor(log10(rate))
    return float(f"{floor(rate * 10.0**digits + 1e-9)}e{-digits}")


# Runs ---------------------------------------------------------------------------------------------------


def _measure(
    cases: Sequence[tuple[Case, Path]], items: Sequence[_Item], processes: int, told: Told, *, chosen: bool = True
) -> list[CaseFigures]:
    from fedqueue_reproduction.theorem_run import departures

    facts: dict[int, list[RunFacts]] = {}
    for done, (place, one) in enumerate(run_all(_work, items, min(processes, len(items))), 1):
        facts.setdefault(place, []).append(one)
        told(f"{cases[place][0].name}, rate {one.constants.rate:g}, seed {one.seed}", done, len(items))
    found = []
    for place, runs in sorted(facts.items()):
        case, _ = cases[place]
        item = next(item for item in items if item.case == place)
        models, draws, least_loss = item.depth
        found.append(
            CaseFigures(
                name=case.name,
                label=case.label or case.name,
                about=" ".join(case.about.split()),
                config=case.config,
                changes=list(item.changes),
                least_loss=least_loss,
                models=models,
                draws=draws,
                chosen=chosen,
                departures=departures(item.load()),
                runs=sorted(runs, key=lambda run: run.seed),
            )
        )
    return found


def _work(item: _Item) -> tuple[int, RunFacts]:
    from fedqueue_reproduction.theorem_run import Depth, watch

    models, draws, least_loss = item.depth
    try:
        return item.case, watch(item.load(), Depth(models=models, draws=draws, least_loss=least_loss))
    except FedQueueError as error:
        raise type(error)(f"{item.path}, seed {item.seed}: {error}") from None
