"""Say what a facility's queue did: how long jobs waited, by shape, hour and weekday, from the log of its scheduler.

FILE is a log in any of these formats, told by its content, compressed or not: our trace CSV, SWF of the Parallel
Workloads Archive, `sacct -P`, PBS accounting (a file or the folder), Grid Engine's accounting file, or a run folder of
ours. docs/history.md says how to get each of them.

examples:
  fedqueue history sacct.txt.gz --timezone Europe/Berlin --plots plots
  fedqueue history /var/spool/pbs/server_priv/accounting --procs 2-8 --requested 14400
  fedqueue history --live slurm --days 90 --out queue.csv.gz
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from math import inf
from pathlib import Path
from typing import Any

from fedqueue import data
from fedqueue.cli.common import check_ending
from fedqueue.cli.traces import procs_range
from fedqueue.errors import ConfigError, DataError
from fedqueue.history.lines import LoggedJob, Options, Tally
from fedqueue.history.live import SOURCES, live_jobs
from fedqueue.history.read import chunks, jobs, nothing
from fedqueue.history.sketch import ERROR
from fedqueue.history.sorting import TraceWriter
from fedqueue.history.summary import Choice, Summariser, Summary

HELP = "say how long jobs waited in a facility's queue, from its scheduler's log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="log of a scheduler, or run folder")
    parser.add_argument("--live", choices=tuple(SOURCES), help="instead of FILE: ask the scheduler of this machine")
    parser.add_argument("--days", type=int, metavar="N", help="with --live: jobs of the last N days (30)")
    parser.add_argument("--facility", metavar="NAME", help="of a run folder: this facility alone")
    parser.add_argument("--procs", metavar="A-B", help="jobs of A to B processors, or of A (all)")
    parser.add_argument("--requested", type=float, metavar="S", help="jobs that requested at most so long (any)")
    parser.add_argument("--since", metavar="DATE", help="jobs submitted then or later, e.g. 2026-01-05T12:00")
    parser.add_argument("--until", metavar="DATE", help="jobs submitted before")
    parser.add_argument("--cores", action="store_true", help="count cores where the log has both nodes and cores")
    parser.add_argument(
        "--timezone", metavar="Z", help="of sacct's times, and of hours and weekdays (default: this machine's)"
    )
    parser.add_argument("--epoch", type=float, metavar="S", help="Unix time of second 0 of a trace that does not say")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots by hour, weekday and shape there")
    parser.add_argument("--out", type=Path, metavar="FILE.csv.gz", help="write these jobs as a trace")


def run(args: argparse.Namespace) -> int:
    from fedqueue.cli.history_text import show

    options = Options(timezone=args.timezone, facility=args.facility, cores=args.cores)
    zone = options.zone()
    choice = _choice(args, zone)
    tally = Tally(base=args.epoch)
    source, made = _read(args, options, tally, choice, zone)
    if args.facility is not None and tally.format != "ledger":
        raise ConfigError(f"--facility {args.facility}: {source} is no run of ours; leave --facility out")
    found = made.summary()
    pictures = []
    if args.plots is not None:
        from fedqueue.report.history import history_plots

        pictures = history_plots(found, tally.counts, args.plots, source)
    if args.json:
        print(json.dumps(as_json(source, found, tally, args.timezone)))
        return 0
    show(source, found, tally, zone, args.timezone)
    for picture in [*([args.out] if args.out else []), *pictures]:
        print(f"wrote {picture}")
    return 0


def as_json(source: str, found: Summary, tally: Tally, timezone: str | None) -> dict[str, Any]:
    """What --json prints; unknown figures and no limit are null."""
    figures = dataclasses.asdict(found)
    figures["within"] = {f"{limit:g}": share for limit, share in found.within.items()}
    for shape in figures["shapes"]:
        if shape["requested"] is not None:
            shape["requested"] = [None if seconds == inf else seconds for seconds in shape["requested"]]
    return {
        "source": source,
        "format": tally.format,
        "procs_are": tally.counts,
        "timezone": timezone,
        "dropped": dict(tally.dropped),
        "broken_lines": tally.broken,
        "quantile_error": ERROR,
        **figures,
    }


def _choice(args: argparse.Namespace, zone: tzinfo | None) -> Choice:
    if args.requested is not None and not args.requested > 0:
        raise ConfigError(f"--requested must be more than 0, found {args.requested:g}")
    if args.days is not None and args.live is None:
        raise ConfigError("--days goes with --live; choose jobs of a file with --since and --until")
    if args.out is not None:
        check_ending("--out", args.out, ".csv", ".csv.gz")
        if args.out.exists():
            raise ConfigError(f"--out {args.out}: exists already; nothing was changed; name another file")
    if bool(args.files) == (args.live is not None):
        raise ConfigError("history needs a log of a scheduler, or else --live")
    try:
        procs = procs_range(args.procs)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Choice(
        procs=procs,
        max_requested=args.requested,
        since=_moment("--since", args.since, zone),
        until=_moment("--until", args.until, zone),
    )


def _moment(option: str, text: str | None, zone: tzinfo | None) -> float | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=zone)).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"{option} must be a date such as 2026-01-05 or 2026-01-05T12:00, found {text!r}") from None


def _read(
    args: argparse.Namespace, options: Options, tally: Tally, choice: Choice, zone: tzinfo | None
) -> tuple[str, Summariser]:
    """One pass over all sources, for the summary and for --out."""
    if args.live is not None:
        source, found = args.live, live_jobs(args.live, 30 if args.days is None else args.days, options, tally)
    else:
        paths = [data.find_log(str(path), Path()) for path in args.files]
        source = paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"
        found = _all(paths, options, tally)
    made: Summariser | None = None
    with TraceWriter() as writer:
        for rows in chunks(found):
            if made is None:
                made = Summariser(zone, clock=tally.base is not None)
            kept = choice.of(rows, tally.base)
            made.add(kept)
            if args.out is not None:
                writer.add(kept)
        if made is None or not made.jobs:
            why = nothing(tally) if made is None else f"none of its {tally.jobs} jobs is as asked for"
            raise DataError(f"{source}: {why}")
        if args.out is not None:
            writer.finish(args.out, clock=tally.base is not None)
    return source, made


def _all(paths: list[Path], options: Options, tally: Tally) -> Iterator[LoggedJob]:
    """One after the other. The times of several files are put on one clock, which each of them must have."""
    epoch, several = tally.base, len(paths) > 1
    for path in paths:
        one = Tally(base=epoch)
        for job in jobs(path, options, one):
            if not several:
                tally.base = one.base
                yield job
            elif one.base is not None:
                tally.base = 0.0
                yield job[0] + one.base, *job[1:]
            else:
                raise DataError(f"{path}: has no clock times and does not go with other files; read it alone")
        tally.take(one)
