"""What several commands take."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from fedqueue.config import Config, load
from fedqueue.errors import ConfigError

SHOW_CURSOR = b"\x1b[?25h"  # a live table hides it


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="the run's config; `fedqueue init` writes one")
    add_changes(parser)


def add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="key=value",
        nargs="+",
        action="extend",
        default=[],
        help="change keys of the config, e.g. run.rounds=20 strategy.jit.round_length=5 'facility.*.queue.rho=0.5'",
    )


def write_template(name: str, path: Path) -> None:
    """A commented file of ours to start from; an existing one is never overwritten."""
    text = (resources.files("fedqueue.cli") / name).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; nothing was changed; name another file") from None


def add_log_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of what is logged: lines, or JSON in lines"
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder to make; it must not exist (default: a new one in runs/)"
    )


def add_plots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="write no plots")


def check_ending(option: str, path: Path, *endings: str) -> None:
    """Refuse a name that something of another kind may have: what is written there replaces it."""
    if not path.name.lower().endswith(endings):
        raise ConfigError(
            f"{option} {path}: must end in {' or '.join(endings)}; nothing was changed; name another file"
        )


def load_run(path: Path, changes: Sequence[str], *, strategy: str | None = None, seed: int | None = None) -> Config:
    """A config with the choices of the command line, which count most."""
    return load(path, chosen(changes, strategy=strategy, seed=seed))


def chosen(changes: Sequence[str], *, strategy: str | None = None, seed: int | None = None) -> list[str]:
    """Changes of a config, those that have an option of their own last."""
    made = list(changes)
    if strategy is not None:
        made.append(f'run.strategy="{strategy}"')
    if seed is not None:
        made.append(f"run.seed={seed}")
    return made


@contextmanager
def until_interrupted(at_once: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C and SIGTERM are a wish that `interrupted()` tells of. The same once more ends us at once, whatever
    our threads are about: what must survive is on the disk. `at_once` is called then."""
    asked: set[int] = set()
    interrupted = threading.Event()

    def wish(number: int, _: object) -> None:
        if number in asked:
            at_once()
            os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"fedqueue: stopped at once\n")
            os._exit(130)
        asked.add(number)
        interrupted.set()

    if threading.current_thread() is not threading.main_thread():
        yield interrupted.is_set
        return
    before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
