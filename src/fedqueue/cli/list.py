"""The facilities and the runs of a federation that is served."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedqueue.cli import operate

HELP = "the facilities and runs of a federation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("federation", type=Path, metavar="FEDERATION", help=operate.FEDERATION)
    parser.add_argument("--json", action="store_true", help="print it as one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    operate.must_be_federation(args.federation)
    return operate.show_federation(args.federation, as_json=args.json)
