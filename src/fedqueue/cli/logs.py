"""What the coordinator of a run in a federation has said so far."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedqueue.cli import operate
from fedqueue.errors import RunFolderError
from fedqueue.protocol.contract import one_line

HELP = "what a run's coordinator has said"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help=operate.RUN)


def run(args: argparse.Namespace) -> int:
    from fedqueue.agent.access_file import elsewhere
    from fedqueue.coordinator.run_folder import LOG

    operate.must_be_run(args.folder)
    there = elsewhere(args.folder)
    if there is not None:
        said = operate.ask_elsewhere(there, lambda client: client.log(there.run))
        for line in said.splitlines():
            print(one_line(line))
        return 0
    try:
        with (args.folder / LOG).open(encoding="utf-8", errors="replace") as file:
            for line in file:
                sys.stdout.write(line)
    except OSError:
        raise RunFolderError(f"{args.folder}: is no run of a federation: it has no {LOG}") from None
    return 0
