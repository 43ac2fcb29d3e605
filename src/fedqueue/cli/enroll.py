"""Make this facility part of a run, with the invitation that the run's operator made by `fedqueue invite`.

The invitation is asked for, or read from standard input or a file; never from the command line, where others on a
login node could read it. It works once. The credential that it is exchanged for lies in the agent's home, readable
by its owner alone.
"""

from __future__ import annotations

import argparse
import getpass
import re
import sys
from math import inf
from pathlib import Path

from fedqueue.cli import common
from fedqueue.cli.operate import SaidNoError
from fedqueue.errors import ConfigError
from fedqueue.files import only_mine, write_text

HELP = "make this facility part of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="AGENT.toml", help="the agent's own config")
    parser.add_argument("--init", action="store_true", help="write such a config to start from, and do nothing else")
    parser.add_argument(
        "--node-hours",
        metavar="NUMBER|none",
        help="the cap for a config that has none; else it is asked for",
    )
    parser.add_argument("--invitation", type=Path, metavar="FILE", help="read the invitation from here")


def run(args: argparse.Namespace) -> int:
    if args.init:
        common.write_template("agent.toml", args.config)
        print(f"wrote {args.config}; fill it in, then: fedqueue enroll {args.config}")
        return 0
    from fedqueue.agent.enrolment import enrol
    from fedqueue.agent.settings import home_of, load_agent, own_of
    from fedqueue.agent.transport import CoordinatorRefusedError

    config = load_agent(args.config)
    home = home_of(config, args.config)
    try:
        made = enrol(
            _invitation(args.invitation),
            home,
            config.agent.proxy,
            own_of(config, args.config),
            group_may_write=config.agent.group_may_write,
        )
    except CoordinatorRefusedError as error:
        raise SaidNoError(error.reason) from None
    print(f"enrolled as {made.facility} with {made.url}")
    if config.agent.node_hours is None:
        _ask_for_a_cap(args.config, args.node_hours)
    print(f"start the agent: fedqueue agent {args.config}")
    return 0


def _ask_for_a_cap(config: Path, given: str | None) -> None:
    """A coordinator orders what it likes; how much that may cost is for the site to say."""
    while True:
        if given is None and sys.stdin.isatty():
            given = input("node-hours that all its jobs together may hold (a number, or none): ")
        if given is None or given.strip() == "none":
            print(f"no cap on node-hours; {config}: agent.node_hours sets one", file=sys.stderr)
            return
        try:
            hours = float(given)
            if not 0 <= hours < inf:
                raise ValueError
            break
        except ValueError:
            print(f"{given!r} is no number of hours, 0 or more", file=sys.stderr)
            given = None
    text = config.read_text(encoding="utf-8-sig")
    write_text(config, re.sub(r"(?m)^(\s*\[agent\].*)$", rf"\1\nnode_hours = {hours}", text, count=1))
    print(f"wrote node_hours = {hours:g} into {config}")


def _invitation(path: Path | None) -> str:
    if path is not None:
        try:
            only_mine(path)
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if sys.stdin.isatty():
        return getpass.getpass("invitation (it will not show): ")
    return sys.stdin.read()
