"""Write one self-contained HTML page about one or more runs, with PNG files of its plots beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "an HTML page with plots and tables of one or more runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="run folders; several are compared")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="where to write it (default: report.html in the first run folder)"
    )


def run(args: argparse.Namespace) -> int:
    from fedqueue.report import write_report

    page = write_report(args.folders, args.out or args.folders[0] / "report.html")
    print(f"wrote {page}")
    return 0
