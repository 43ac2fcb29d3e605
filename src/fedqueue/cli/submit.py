"""Begin a run in a federation. It needs nobody to enrol: the facilities that its config names are there, and have the
offer that it asks for (worker.offer), or it is said which are not. From elsewhere, relative paths in the config begin
in the folder `inputs` of the federation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedqueue.cli import common, operate
from fedqueue.config import parse, read_tree

HELP = "begin a run in a federation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("federation", type=Path, metavar="FEDERATION", help=operate.FEDERATION)
    common.add_config(parser)
    parser.add_argument("--json", action="store_true", help="print what was begun as one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    from fedqueue.agent.access_file import elsewhere
    from fedqueue.protocol.codec import encode
    from fedqueue.protocol.service import Submission

    operate.must_be_federation(args.federation)
    tree = read_tree(args.config, args.changes)
    if elsewhere(args.federation) is None:
        parse(tree, where=str(args.config), folder=args.config.parent)  # what is wrong is told before anybody is asked
        submission = Submission(config=tree, folder=str(args.config.parent.absolute()))
    else:  # what it needs beside itself lies on the server
        submission = Submission(config=tree)
    begun = operate.ask(args.federation, lambda client: client.submit(submission))
    if args.json:
        print(json.dumps(json.loads(encode(begun))))
        return 0
    print(f"run {begun.name} has begun: {args.federation / 'runs' / begun.name}")
    for note in begun.notes:
        print(f"  {note}")
    return 0
