"""The agent of this facility: claims orders, submits jobs to the scheduler, hands in what they made.

Start it on a login node, where it stays until the run is over; or with --once from cron, every few minutes. It may be
gone for days: jobs go on, results wait, and the next start goes on from its journal.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fedqueue.cli import common, live

if TYPE_CHECKING:
    from fedqueue.agent.http_transport import Client
    from fedqueue.agent.settings import AgentConfig

log = logging.getLogger(__name__)

HELP = "be the agent of this facility"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="AGENT.toml", help="the agent's own config")
    parser.add_argument("--once", action="store_true", help="do what there is to do now, and end: for cron")
    common.add_log_format(parser)


def run(args: argparse.Namespace) -> int:
    from fedqueue.agent.agent import Agent
    from fedqueue.agent.enrolment import Enrolment
    from fedqueue.agent.settings import home_of, load_agent, own_of

    config = load_agent(args.config)
    home = home_of(config, args.config)
    enrolment = Enrolment.load(home, group_may_write=config.agent.group_may_write)
    transport = enrolment.client(home, config.agent.proxy, own_of(config, args.config))
    if enrolment.federation:
        return _serve_federation(config, home, enrolment.facility, transport, args)
    with live.logged(as_json=args.log_format == "json"), common.until_interrupted() as interrupted:
        agent = Agent(config, home, enrolment.facility, transport, run=enrolment.run)
        try:
            if not args.once:
                every = f"{config.agent.poll_seconds:g} s"
                log.info(f"agent of {enrolment.facility} on {config.scheduler.kind}; looks every {every}")
            agent.run(once=args.once, stopping=interrupted)
            if agent.over is not None:
                log.info(f"the run is over: {agent.over}")
            return 130 if interrupted() and agent.over is None else 0
        finally:
            agent.close()


def _serve_federation(
    config: AgentConfig, home: Path, facility: str, transport: Client, args: argparse.Namespace
) -> int:
    from fedqueue.agent.site import Site

    with live.logged(as_json=args.log_format == "json"), common.until_interrupted() as interrupted:
        site = Site(config, home, facility, transport)
        try:
            if not args.once:
                every = f"{config.agent.poll_seconds:g} s"
                log.info(f"agent of {facility}, offers {', '.join(config.offers)}; looks every {every}")
            site.run(once=args.once, stopping=interrupted)
            return 130 if interrupted() else 0
        finally:
            site.close()
