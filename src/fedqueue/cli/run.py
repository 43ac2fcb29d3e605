"""A real run on this machine: a coordinator, an agent for each facility, and jobs that wait in a real queue.

Give it a config to begin, or the folder of a run that was cut short to go on with it. Each facility gets the built-in
queue, with as many slots as the config says and its queue model as extra waiting, unless it names a scheduler.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from fedqueue.cli import common, extras, live, simulate
from fedqueue.config import Config, parse, read_tree
from fedqueue.errors import ConfigError
from fedqueue.runs import new_folder

HELP = "a real run on this machine, through real queues"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG.toml|RUN", help="a config, or the folder of a run to go on with"
    )
    common.add_changes(parser)
    parser.add_argument("--strategy", metavar="NAME", help="instead of the config's run.strategy")
    told = parser.add_mutually_exclusive_group()
    told.add_argument("--json", action="store_true", help="print the summary as one JSON object and nothing else")
    told.add_argument("--debug", action="store_true", help="all in this process, jobs too, so that breakpoints work")
    common.add_out(parser)
    common.add_plots(parser)


def run(args: argparse.Namespace) -> int:
    config, tree = begin(args.config, common.chosen(args.changes, strategy=args.strategy))
    extras.need_for(config, plots=args.plots, real=True)
    if tree is None:
        folder = args.config
        if args.changes or args.strategy or args.out:
            raise ConfigError(f"{folder}: a run goes on as it began; begin another to change something")
        summary = here(config, folder, quiet=args.json, debugged=args.debug)
    else:
        from fedqueue.coordinator.run_folder import store_config
        from fedqueue.coordinator.server import ADDRESS

        with new_folder(args.out, f"{config.run.name}-{config.run.strategy}-real", kept_with=ADDRESS) as folder:
            folder = folder.absolute()
            store_config(folder, tree, args.config.parent)
            summary = here(config, folder, quiet=args.json, debugged=args.debug)
    if summary is None:
        print(f"stopped; go on with it: fedqueue run {folder}{' --debug' if args.debug else ''}")
        return 130
    if args.plots:
        from fedqueue.report import run_plots

        run_plots(folder)
    if args.json:
        print(json.dumps(summary))
    else:
        simulate.show(config, summary, folder, clock="run seconds")
    return 0


def begin(path: Path, changes: list[str]) -> tuple[Config, dict[str, Any] | None]:
    """The config, with its plain values if it is a new run's; None: it is that of a folder."""
    if path.is_dir():
        from fedqueue.coordinator.run_folder import stored_config

        return stored_config(path), None
    tree = read_tree(path, changes)
    return parse(tree, where=str(path), folder=path.parent), tree


def here(config: Config, folder: Path, *, quiet: bool, debugged: bool = False) -> dict[str, Any] | None:
    """Coordinate it in this process; None: interrupted, and can go on."""
    from fedqueue.coordinator.serve import coordinate
    from fedqueue.one_machine import Agents

    # Any port: only this run's own agents call it.
    server = dataclasses.replace(config.server, host="127.0.0.1", port=0, wait_for=None)
    config = dataclasses.replace(config, server=server)
    if debugged:
        from fedqueue.debugging import debug

        with live.following(config, quiet=quiet, debugged=True) as screen:
            return debug(config, folder.absolute(), views=[screen])
    agents = Agents(config, folder.absolute())
    with live.following(config, quiet=quiet) as screen, common.until_interrupted(agents.kill) as interrupted:
        return coordinate(
            config,
            folder.absolute(),
            plain=True,
            beside=agents.beside,
            views=[screen],
            until=interrupted,
        )
