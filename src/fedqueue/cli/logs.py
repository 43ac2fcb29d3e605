"""What the coordinator of a run in a federation has said so far."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedqueue.errors import RunFolderError

HELP = "what a run's coordinator has said"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's folder, in its federation")


def run(args: argparse.Namespace) -> int:
    from fedqueue.coordinator.run_folder import LOG

    try:
        with (args.folder / LOG).open(encoding="utf-8", errors="replace") as file:
            for line in file:
                sys.stdout.write(line)
    except OSError:
        raise RunFolderError(f"{args.folder}: is no run of a federation: it has no {LOG}") from None
    return 0
