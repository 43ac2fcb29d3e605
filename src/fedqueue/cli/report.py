"""Write one self-contained HTML page about one or more runs, with PNG files of its plots beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedqueue.errors import RunFolderError
from fedqueue.ledger import FILE

HELP = "an HTML page with plots and tables of one or more runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run folders, or folders of comparisons; several are compared",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="where to write it (default: report.html in the first run folder)"
    )


def run(args: argparse.Namespace) -> int:
    from fedqueue.report import write_report

    if args.out is not None and args.out.exists():
        raise RunFolderError(f"{args.out}: exists already; nothing was changed; name another file")
    page = write_report(_runs_in(args.folders), args.out or args.folders[0] / "report.html")
    print(f"wrote {page}")
    return 0


def _runs_in(folders: Sequence[Path]) -> list[Path]:
    """Run folders as they are; of a comparison, the runs it holds."""
    found: list[Path] = []
    for folder in folders:
        inside = [] if (folder / FILE).exists() else sorted(ledger.parent for ledger in folder.glob(f"*/{FILE}"))
        found += inside or [folder]
    return found
