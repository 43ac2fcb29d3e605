"""Feed the events of a run into a fresh strategy and check that it wants the same again; check the models too.

Exact on the same build. A difference is reported with the event and both commands, and the exit is not zero. So is an
update that is on record as part of a model that does not exist, and a model of a real run whose file is not there or
is not what it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedqueue.runs import replay

HELP = "check that a ledger's events bring the same commands again, and its models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")


def run(args: argparse.Namespace) -> int:
    from fedqueue.models import check_models

    files = check_models(args.folder)
    count = replay(args.folder)
    models = f"; model files checked: {files}" if files else ""
    print(f"{args.folder}: {count} events replayed, every command the same{models}")
    return 0
