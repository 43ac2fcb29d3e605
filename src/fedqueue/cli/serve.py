"""The coordinator of a run over several facilities: on a small server that they can reach by HTTPS.

Give it a config to begin, or the folder of a run to go on with it after a stop or a crash. Facilities enrol with an
invitation (`fedqueue invite RUN FACILITY`); the run starts when all are there, or as many as server.wait_for says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedqueue.cli import common, extras, live, simulate
from fedqueue.cli import run as run_here
from fedqueue.errors import ConfigError
from fedqueue.runs import new_folder

HELP = "coordinate a run over several facilities"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG.toml|RUN", help="a config, or the folder of a run to go on with"
    )
    common.add_changes(parser)
    common.add_out(parser)
    parser.add_argument(
        "--plain-http", action="store_true", help="no TLS; only where server.host is a loopback address"
    )


def run(args: argparse.Namespace) -> int:
    config, tree = run_here.begin(args.config, args.changes)
    extras.need_for(config, real=True)
    if tree is None:
        if args.changes or args.out:
            raise ConfigError(f"{args.config}: a run goes on as it began; begin another to change something")
        return _serve(config, args.config.absolute(), plain=args.plain_http)
    from fedqueue.coordinator.run_folder import store_config
    from fedqueue.coordinator.server import ADDRESS

    with new_folder(args.out, f"{config.run.name}-{config.run.strategy}", kept_with=ADDRESS) as folder:
        store_config(folder.absolute(), tree, args.config.parent)
        return _serve(config, folder.absolute(), plain=args.plain_http)


def _serve(config: Any, folder: Path, *, plain: bool) -> int:
    from fedqueue.coordinator.serve import coordinate

    with live.following(config, quiet=False, served=True) as screen, common.until_interrupted() as interrupted:

        @contextmanager
        def beside(coordinator: Any, access: Any, address: dict[str, Any]) -> Iterator[None]:
            screen.past = False  # its ledger is read
            screen.say(f"run folder: {folder}")
            screen.say(f"listening at {address['url']}")
            if coordinator.state.events and coordinator.state.stopped is None:
                screen.say(f"goes on from model {coordinator.state.newest} at {coordinator.now:.0f} s on the run clock")
            enrolled = access.enrolled()
            for name in coordinator.names:
                if name not in enrolled:
                    screen.say(f"{name} is not enrolled: fedqueue invite {folder} {name}")
            yield

        summary = coordinate(
            config,
            folder,
            plain=plain,
            beside=beside,
            views=[screen],
            say=screen.say,
            until=interrupted,
        )
    if summary is None:
        print(f"stopped; go on with it: fedqueue serve {folder}")
        return 130
    simulate.show(config, summary, folder, clock="run seconds")
    return 0
