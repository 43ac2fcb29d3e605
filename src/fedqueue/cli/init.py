"""Write a commented config to start from. An existing file is never overwritten."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedqueue.cli import common

HELP = "write a commented config to start from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, nargs="?", default=Path("fedqueue.toml"), metavar="FILE.toml", help="default: fedqueue.toml"
    )


def run(args: argparse.Namespace) -> int:
    common.write_template("starter.toml", args.path)
    print(f"wrote {args.path}")
    print(f"next: fedqueue simulate {args.path}")
    return 0
