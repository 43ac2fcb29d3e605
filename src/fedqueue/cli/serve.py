"""The server of a federation, or of one run over several facilities: a small one that they can reach by HTTPS.

Give it a folder for a federation: facilities enrol once (`fedqueue invite FOLDER FACILITY`), and runs come and go
(`fedqueue submit FOLDER CONFIG.toml`). Or give it a config for a server with one run, which starts when all its
facilities are there, or as many as server.wait_for says; and the folder of that run to go on with it after a stop.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedqueue.cli import common, extras, live, simulate
from fedqueue.cli import run as run_here
from fedqueue.errors import ConfigError
from fedqueue.files import only_ours
from fedqueue.protocol.contract import Address
from fedqueue.runs import new_folder

log = logging.getLogger(__name__)

HELP = "coordinate a run over several facilities"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        type=Path,
        metavar="FOLDER|CONFIG.toml|RUN",
        help="the folder of a federation, or a config, or the folder of a run to go on with",
    )
    common.add_changes(parser)
    common.add_out(parser)
    common.add_log_format(parser)
    parser.add_argument(
        "--plain-http", action="store_true", help="no TLS; only where server.host is a loopback address"
    )


def run(args: argparse.Namespace) -> int:
    from fedqueue.coordinator.run_folder import is_federation

    if is_federation(args.config):
        if args.changes or args.out:
            raise ConfigError(f"{args.config}: is a federation: --set and --out are for runs")
        extras.need("serve")
        return _serve_federation(args.config.absolute(), args)
    config, tree = run_here.begin(args.config, args.changes)
    extras.need_for(config, real=True, elsewhere=True)
    if tree is None:
        if args.changes or args.out:
            raise ConfigError(f"{args.config}: a run goes on as it began; begin another to change something")
        _must_be_alone(args.config)
        return _serve(config, args.config.absolute(), args)
    only_ours(args.config, group="" if config.server.group_may_write else "server.group_may_write")
    from fedqueue.coordinator.run_folder import store_config
    from fedqueue.coordinator.server import ADDRESS

    with new_folder(args.out, f"{config.run.name}-{config.run.strategy}", kept_with=ADDRESS) as folder:
        store_config(folder.absolute(), tree, args.config.parent)
        return _serve(config, folder.absolute(), args)


def _must_be_alone(folder: Path) -> None:
    from fedqueue.coordinator.server import ADDRESS

    with suppress(OSError, ValueError):
        operator = json.loads((folder / ADDRESS).read_text(encoding="utf-8")).get("operator")
        if operator is not None:
            hosted_by = Path(operator).parent
            raise ConfigError(f"{folder}: is a run of the federation {hosted_by}: fedqueue serve {hosted_by}")


def _serve_federation(folder: Path, args: argparse.Namespace) -> int:
    from fedqueue.coordinator.federation import federation

    with (
        live.logged(as_json=args.log_format == "json"),
        common.until_interrupted() as interrupted,
        federation(folder, plain=args.plain_http, make_view=partial(live.Screen, quiet=True, served=True)) as served,
    ):
        log.info(f"federation: {folder}")
        log.info(f"listening at {served.address.url}")
        going = [run.name for run in served.runs.values() if run.over is None]
        if going:
            log.info(f"goes on with {', '.join(sorted(going))}")
        if not served.access.enrolled():
            log.info(f"nobody is enrolled: fedqueue invite {folder} FACILITY")
        while not interrupted():
            time.sleep(0.2)
    print(f"stopped; go on with it: fedqueue serve {folder}")
    return 130


def _serve(config: Any, folder: Path, args: argparse.Namespace) -> int:
    from fedqueue.coordinator.serve import coordinate

    as_json = args.log_format == "json"
    with (
        live.following(config, quiet=False, served=True, as_json=as_json) as screen,
        common.until_interrupted() as interrupted,
    ):

        @contextmanager
        def beside(coordinator: Any, access: Any, address: Address) -> Iterator[None]:
            screen.past = False  # its ledger is read
            log.info(f"run folder: {folder}")
            log.info(f"listening at {address.url}")
            if coordinator.state.events and coordinator.state.stopped is None:
                log.info(f"goes on from model {coordinator.state.newest} at {coordinator.now:.0f} s on the run clock")
            enrolled = access.enrolled()
            for name in coordinator.names:
                if name not in enrolled:
                    log.info(f"{name} is not enrolled: fedqueue invite {folder} {name}")
            yield

        summary = coordinate(
            config,
            folder,
            plain=args.plain_http,
            beside=beside,
            views=[screen],
            until=interrupted,
        )
    if summary is None:
        print(f"stopped; go on with it: fedqueue serve {folder}")
        return 130
    simulate.show(config, summary, folder, clock="run seconds")
    return 0
