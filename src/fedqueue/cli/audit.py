"""Who did what at a federation, or at a server with one run: invitations, enrolments, revocations, users, submissions,
words to runs, and credentials that were refused."""

from __future__ import annotations

import argparse
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedqueue.errors import ConfigError
from fedqueue.protocol.contract import one_line

HELP = "who did what at a federation, and when"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a federation, or of a served run")
    parser.add_argument("--since", metavar="WHEN", help="from then on: 2026-11-30, 2026-11-30T12:00, 12h or 7d ago")
    parser.add_argument("--json", action="store_true", help="print the lines as they are in the file")


def run(args: argparse.Namespace) -> int:
    from fedqueue.coordinator.audit import read_audit

    since = _moment(args.since)
    found = [line for line in read_audit(args.folder) if datetime.fromisoformat(line["at"]) >= since]
    if args.json:
        for line in found:
            print(json.dumps(line))
        return 0
    for line in found:
        more = [f"{key} {value}" for key, value in line.items() if key not in ("at", "who", "from", "what")]
        when, who, where = line["at"][:19].replace("T", " "), line["who"] or "-", line["from"] or "-"
        print(one_line(f"{when} UTC  {who} at {where}: {', '.join([line['what'], *more])}"))
    return 0


def _moment(given: str | None) -> datetime:
    if given is None:
        return datetime.min.replace(tzinfo=UTC)
    ago = re.fullmatch(r"([0-9]{1,5})([hd])", given)
    if ago is not None:
        return datetime.now(UTC) - timedelta(**{{"h": "hours", "d": "days"}[ago[2]]: int(ago[1])})
    try:
        found = datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(f"--since: {given!r} is no moment; say 2026-11-30, 2026-11-30T12:00, 12h or 7d") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
