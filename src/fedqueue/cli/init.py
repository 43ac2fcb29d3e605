"""Write a commented config to start from. An existing file is never overwritten."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from fedqueue.errors import ConfigError

HELP = "write a commented config to start from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, nargs="?", default=Path("fedqueue.toml"), metavar="FILE.toml", help="default: fedqueue.toml"
    )


def run(args: argparse.Namespace) -> int:
    text = resources.files("fedqueue.cli").joinpath("starter.toml").read_text(encoding="utf-8")
    try:
        with args.path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{args.path}: exists already; nothing was changed; name another file") from None
    print(f"wrote {args.path}")
    print(f"next: fedqueue simulate {args.path}")
    return 0
