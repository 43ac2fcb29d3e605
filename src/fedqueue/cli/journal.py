"""Print a run's ledger as JSON lines: each event, then the commands it brought.

A line has `seq` (the number of the event), `at` (seconds on the run clock), `what` (event or command), `kind`, and in
`body` what the message says.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedqueue.ledger import FILE, LedgerReader

HELP = "print a ledger as JSON lines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")


def run(args: argparse.Namespace) -> int:
    with LedgerReader(args.folder / FILE) as ledger:
        for line in ledger.lines():
            print(line)
    return 0
