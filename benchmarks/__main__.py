"""Measure everything, print a table, and with --json write the figures down.

Ratios are taken within this one run. A goal that is missed is marked, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks import (
    aggregation,
    checking,
    forecasts,
    history,
    language,
    load,
    planning,
    resnet,
    rounds,
    simulator,
    staying,
    training,
    transfer,
)
from fedqueue.files import write_json
from fedqueue.machine import provenance

PARTS = {
    "simulator": simulator,
    "forecasts": forecasts,
    "history": history,
    "planning": planning,
    "training": training,
    "resnet": resnet,
    "language": language,
    "aggregation": aggregation,
    "checking": checking,
    "transfer": transfer,
    "load": load,
    "rounds": rounds,
    "staying": staying,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures to this file")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="measure these parts alone")
    args = parser.parse_args()
    figures = []
    for part in (PARTS[name] for name in args.only):
        for figure in part.measure():
            figures.append(figure)
            mark = {True: "ok", False: "MISSED", None: ""}[figure.met]
            shown = f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.3g}"
            print(f"{figure.what:<78}{shown:>9} {figure.unit:<6}{figure.goal:<17}{mark}", flush=True)
    if args.json:
        rows = [{**asdict(f), "met": f.met} for f in figures]
        write_json(args.json, {**provenance(["python", "-m", "benchmarks", *sys.argv[1:]]), "figures": rows})
    return 1 if any(f.met is False for f in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
