"""Feed the events of a run into a fresh strategy and check that it wants the same again.

Exact on the same build. A difference is reported with the event and both commands, and the exit is not zero.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedqueue.runs import replay

HELP = "check that a ledger's events bring the same commands again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")


def run(args: argparse.Namespace) -> int:
    count = replay(args.folder)
    print(f"{args.folder}: {count} events replayed, every command the same")
    return 0
