"""What several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedqueue.config import Config, load


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="the run's config; `fedqueue init` writes one")
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="key=value",
        nargs="+",
        action="extend",
        default=[],
        help="change keys of the config, e.g. run.rounds=20 strategy.jit.round_length=5 'facility.*.queue.rho=0.5'",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder to make; it must not exist (default: a new one in runs/)"
    )


def add_plots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots")


def load_run(path: Path, changes: Sequence[str], *, strategy: str | None = None, seed: int | None = None) -> Config:
    """A config with the choices of the command line, which count most."""
    chosen = list(changes)
    if strategy is not None:
        chosen.append(f'run.strategy="{strategy}"')
    if seed is not None:
        chosen.append(f"run.seed={seed}")
    return load(path, chosen)
