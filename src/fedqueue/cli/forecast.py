"""Forecasts of queue waits: how good they would have been on a queue's past.

`fedqueue forecast evaluate` plays forecasters over logs of real queues. docs/forecasts.md explains what is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from math import inf
from pathlib import Path
from typing import Any, Final

from fedqueue import data
from fedqueue.cli import terminal
from fedqueue.cli.common import check_ending
from fedqueue.cli.traces import CASE_COLUMNS, procs_range, read_cases
from fedqueue.errors import ConfigError
from fedqueue.files import writing
from fedqueue.runs import rounded

HELP = "how good forecasts of queue waits would have been, on logs of real queues"

ROUND: Final = 7200.0
_ABOUT = """Play forecasters over logs of real queues and say what their forecasts were worth.

TRACE is a queue log of any format that `fedqueue history` reads, such as a trace CSV or SWF file. Every round has one
probe, the first job of the shape that is submitted in it, if the previous one has started. Nothing is tuned to a trace.
docs/forecasts.md explains what is printed.

examples:
  fedqueue forecast evaluate kth-sp2-1996.csv.gz --procs 2-8 --requested 14400 --round 2400 7200
  fedqueue forecast evaluate --cases experiments/queue-cases.csv --out forecasts.json --plots plots
"""

Item = tuple[Path, dict[str, Any], tuple[str, ...]]
"""Log, case, forecasters: all that another process needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    one = verbs.add_parser(
        "evaluate",
        help="MAE, late rate, budget and calibration",
        description=_ABOUT,
        formatter_class=parser.formatter_class,
    )
    one.add_argument("traces", type=Path, nargs="*", metavar="TRACE", help="queue log")
    one.add_argument("--procs", metavar="A-B", help="jobs of A to B processors, or of A (all)")
    one.add_argument("--requested", type=float, metavar="S", help="jobs that requested at most so long (any)")
    one.add_argument(
        "--round", dest="rounds", type=float, nargs="+", metavar="T", help=f"round lengths in seconds ({ROUND:g})"
    )
    one.add_argument(
        "--predictor",
        dest="names",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="forecasters, conformal/NAME too (all but static; boosting if scikit-learn is there)",
    )
    one.add_argument(
        "--cases",
        type=Path,
        metavar="FILE.csv",
        help=f"instead of TRACE: a table with the columns {', '.join(CASE_COLUMNS)}",
    )
    one.add_argument("--jobs", type=int, metavar="P", help="processes at once (2, or 1 for one case)")
    one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    one.add_argument("--out", type=Path, metavar="FILE.json", help="also write that object here")
    one.add_argument("--plots", type=Path, metavar="DIR", help="draw forecasts.png here")


def run(args: argparse.Namespace) -> int:
    from fedqueue.cli.forecast_text import show
    from fedqueue.forecasting.evaluate import Evaluation
    from fedqueue.processes import run_all

    cases = _cases(args)
    names = _names(args)
    if args.out is not None:
        check_ending("--out", args.out, ".json")
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, found {args.jobs}")
    items = [(path, case, names) for path, case in cases]
    evaluations: dict[int, Evaluation] = {}
    processes = min(args.jobs or min(2, os.cpu_count() or 1), len(items))
    with terminal.counting(quiet=args.json or len(items) == 1) as told:
        for place, evaluation in run_all(_work, list(enumerate(items)), processes):
            evaluations[place] = evaluation
            case = cases[place][1]
            told(f"{case['case']}, rounds of {case['round_length']:g} s", len(evaluations), len(items))
    found = [(case, evaluations[place]) for place, (_, case) in enumerate(cases)]
    text = as_json(found)
    if args.json:
        print(text, end="")
    else:
        show(found)
    if args.out is not None:
        with writing(args.out):
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(text, encoding="utf-8")
    if args.plots is not None:
        from fedqueue.report.forecasts import forecasts_plot

        picture = forecasts_plot(found, args.plots / "forecasts.png")
        if not args.json:
            print(f"plot: {picture}")
    return 0


def as_json(found: list[tuple[dict[str, Any], Any]]) -> str:
    """One object, a line a case; numbers with six digits."""
    from fedqueue.forecasting.evaluate import NOMINAL, means
    from fedqueue.machine import invoked, provenance

    head = {**provenance(invoked()), "nominal": NOMINAL, "means": rounded(means([one for _, one in found]))}
    lines = []
    for case, evaluation in found:
        figures = dataclasses.asdict(evaluation)
        del figures["stretch"]
        lines.append(json.dumps(rounded({**case, **figures})))
    return json.dumps({**head, "cases": []}).removesuffix("]}") + "\n" + ",\n".join(lines) + "\n]}\n"


def _cases(args: argparse.Namespace) -> list[tuple[Path, dict[str, Any]]]:
    if bool(args.traces) == (args.cases is not None):
        raise ConfigError("forecast evaluate needs a queue log, or else --cases")
    if args.cases is not None:
        for name, option in (("procs", "--procs"), ("requested", "--requested"), ("rounds", "--round")):
            if getattr(args, name) is not None:
                raise ConfigError(f"{option} does not go with --cases")
        cases = [(data.find_log(case["file"], args.cases.parent), case) for case in read_cases(args.cases)]
    else:
        shape = {"procs": args.procs, "requested": args.requested}
        cases = [
            (
                data.find_log(str(path), Path()),
                {"case": _stem(path), "file": path.name, **shape, "round_length": length},
            )
            for path in args.traces
            for length in args.rounds or [ROUND]
        ]
    for _, case in cases:
        try:
            procs_range(case["procs"])
        except ValueError as error:
            raise ConfigError(f"{case['case']}: {error}") from None
        if not 0 < case["round_length"] < inf:
            raise ConfigError(f"{case['case']}: a round must last more than 0 s, found {case['round_length']:g}")
        if case["requested"] is not None and not case["requested"] > 0:
            raise ConfigError(f"{case['case']}: requested must be more than 0 s, found {case['requested']:g}")
    return cases


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    from fedqueue.forecasting.boosting import MISSING
    from fedqueue.forecasting.evaluate import BOOSTING, available, check_forecaster

    if args.names:
        for name in args.names:
            check_forecaster(name)
        return tuple(dict.fromkeys(args.names))
    if BOOSTING not in available():
        print(f"fedqueue: warning: boosting is left out: {MISSING}", file=sys.stderr)
    return available()


def _work(numbered: tuple[int, Item]) -> tuple[int, Any]:
    from fedqueue.forecasting.evaluate import Shape, evaluate
    from fedqueue.history.read import read_log

    place, (path, case, names) = numbered
    shape = Shape(procs=procs_range(case["procs"]), requested=case["requested"])
    return place, evaluate(read_log(path), shape, case["round_length"], names)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0] or path.name
