"""Hold Lemma 1 of the paper against measured forecast errors: the staleness it bounds, the margin it needs, how far
the errors are from what it assumes, and what the bound becomes in log space. With --theorem, hold Theorem 1 against
training: its constants, its conditions on the rate, and its bound beside the gradient norm that is measured.

SOURCE is a run folder; or a queue trace or another log of docs/history.md, over which a forecaster is replayed
(--round-length is needed, --procs and --requested choose the jobs); or a CSV file with a column `error`, or
`admission_delay` and `expected_delay`, and perhaps `facility`; or a plain file with one error a line. docs/protocol.md
and docs/theorem.md explain what is printed.

examples:
  fedqueue bound runs/timing-fedqueue-seed1
  fedqueue bound kth-sp2-1996.csv.gz --procs 2-8 --requested 14400 --round-length 7200 --margin 600
  fedqueue bound errors.csv --facilities 4 --rounds 50 --round-length 10 --margin 2 --gamma 1
  fedqueue bound --theorem my.toml --seeds 5 --set task.optimizer=sgd
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from fedqueue import data
from fedqueue.cli import common, extras
from fedqueue.cli.traces import CASE_COLUMNS, procs_range, read_cases
from fedqueue.config import TraceQueue
from fedqueue.errors import ConfigError
from fedqueue.history.read import is_log
from fedqueue.machine import invoked, provenance
from fedqueue.protocol.predict import PREDICTORS
from fedqueue.runs import rounded
from fedqueue_reproduction import theorem_command
from fedqueue_reproduction.bound import ENOUGH, Assessment, Setting, assess, least_shift
from fedqueue_reproduction.forecast_errors import Measured, of_file, of_run, of_trace

HELP = "hold the paper's bounds, on staleness and on the gradient, against what is measured"

_TRACE_OPTIONS = ("procs", "requested", "predictor", "smoothing", "first_delay")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help="run folder, queue trace or error file")
    parser.add_argument("--facilities", type=int, metavar="K", help="default: as many as the source has")
    parser.add_argument("--rounds", type=int, metavar="R", help="default: as many as the source has")
    parser.add_argument("--epsilon", type=float, help="chance that the bound may fail in a run (0.05)")
    parser.add_argument("--round-length", type=float, metavar="S", help="T in seconds; default: the run's")
    parser.add_argument("--margin", type=float, metavar="S", help="delta in seconds; default: the run's, or 0")
    parser.add_argument("--gamma", type=float, metavar="G", help="also say the margin that this gamma needs")
    parser.add_argument(
        "--shift", type=float, metavar="S", help="seconds added before a logarithm (0; 1 if a delay or forecast is 0)"
    )
    trace = parser.add_argument_group("of a trace")
    trace.add_argument("--procs", metavar="A-B", help="jobs of A to B processors, or of A (all)")
    trace.add_argument("--requested", type=float, metavar="S", help="jobs that requested at most so long (any)")
    trace.add_argument("--predictor", choices=tuple(PREDICTORS), help="the forecaster (ewma)")
    trace.add_argument("--smoothing", type=float, metavar="A", help="weight of the newest delay in it (0.5)")
    trace.add_argument("--first-delay", type=float, metavar="S", help="its first forecast (the first delay)")
    parser.add_argument(
        "--warm-up",
        type=int,
        metavar="N",
        help="leave out the first errors of a facility (0; of a trace a fifth, at least 150, at most half)",
    )
    parser.add_argument(
        "--cases",
        type=Path,
        metavar="FILE.csv",
        help=f"instead of SOURCE: traces in a table with the columns {', '.join(CASE_COLUMNS)}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="default: plots/bound.png of the run, or NAME-bound.png here"
    )
    common.add_plots(parser)
    theorem_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from fedqueue_reproduction.bound_text import show  # loads what draws reports: other commands need not wait for it

    if sum(given is not None for given in (args.source, args.cases, args.theorem)) != 1:
        raise ConfigError("bound needs a run folder, a trace or an error file, or else --cases, or else --theorem")
    if args.theorem is not None:
        return theorem_command.run(args)
    for name in theorem_command.OPTIONS:
        if getattr(args, name) not in (None, []):
            raise ConfigError(f"--{'set' if name == 'changes' else name.replace('_', '-')} is for --theorem")
    if args.cases is not None:
        return _run_cases(args)
    if args.plots:
        extras.need("plots", instead=", or add --no-plots")
    measured = _measure(args)
    assessment = _assess(measured, args)
    _warn(assessment)
    picture = None
    if args.plots:
        from fedqueue_reproduction.bound_plot import bound_plot

        picture = bound_plot(measured.series, assessment, args.plot or _beside(args.source, measured), measured.name)
    if args.json:
        print(json.dumps(as_json(assessment, measured)))
    else:
        show(assessment, measured)
        if picture is not None:
            print(f"plot: {picture}")
    return 0


def as_json(assessment: Assessment, measured: Measured) -> dict[str, Any]:
    """What --json prints; numbers with six digits."""
    from fedqueue_reproduction.bound_text import notes, verdict

    setting, lemma = assessment.setting, assessment.checks[0]
    found: dict[str, Any] = {
        "source": measured.name,
        "kind": measured.kind,
        **dataclasses.asdict(setting),
        "errors": assessment.errors,
        "lemma": {
            "rho": lemma.rho,
            "needed_margin": lemma.needed_margin,
            "gamma": lemma.gamma,
            "staleness_bound": lemma.lemma_bound,
            "sharper_bound": lemma.sharper_bound,
            "margin_for_gamma": assessment.margin_for_gamma,
            "above_gamma": assessment.above_gamma,
        },
        "checks": [dataclasses.asdict(check) for check in assessment.checks],
        "rules": {
            "of_run": {rule.name: _without_name(rule) for rule in assessment.rules_of_run},
            "of_round": {rule.name: _without_name(rule) for rule in assessment.rules_of_round},
        },
        "worst": assessment.worst,
        "by_facility": {name: dataclasses.asdict(figures) for name, figures in assessment.by_facility.items()},
        "observed": None if measured.observed is None else dataclasses.asdict(measured.observed),
        "notes": notes(assessment, measured),
        "verdict": verdict(assessment),
    }
    made: dict[str, Any] = rounded(found)
    return made


def _measure(args: argparse.Namespace) -> Measured:
    source: Path = args.source
    if args.warm_up is not None and args.warm_up < 0:
        raise ConfigError(f"--warm-up must be 0 or more, found {args.warm_up}")
    given = [name for name in _TRACE_OPTIONS if getattr(args, name) is not None]
    if source.is_dir():
        kind, measured = "a run folder", of_run(source)
    else:
        source = data.find_log(str(source), Path())
        if is_log(source):
            return _replay(source, args, procs=args.procs, requested=args.requested, round_length=args.round_length)
        kind, measured = "no trace", of_file(source)
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for traces, and {args.source} is {kind}")
    return measured if args.warm_up is None else measured.after(args.warm_up)


def _replay(
    path: Path, args: argparse.Namespace, *, procs: str | None, requested: float | None, round_length: float | None
) -> Measured:
    if round_length is None:
        raise ConfigError(f"{path.name}: a trace has no rounds; say how long they are with --round-length")
    smoothing = 0.5 if args.smoothing is None else args.smoothing
    if not 0 < smoothing <= 1:
        raise ConfigError(f"--smoothing must be more than 0 and at most 1, found {smoothing:g}")
    if args.first_delay is not None and not 0 <= args.first_delay < inf:
        raise ConfigError(f"--first-delay must be 0 or more, found {args.first_delay:g}")
    try:
        shape = TraceQueue(file=path.name, procs=procs_range(procs), max_requested=requested)
        Setting(facilities=1, rounds=1, round_length=round_length)
    except ValueError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    return of_trace(
        path,
        shape,
        round_length=round_length,
        predictor=args.predictor or "ewma",
        smoothing=smoothing,
        first=args.first_delay,
        warm_up=args.warm_up,
    )


def _assess(measured: Measured, args: argparse.Namespace) -> Assessment:
    round_length = args.round_length if args.round_length is not None else measured.round_length
    if round_length is None:
        raise ConfigError(f"{measured.name}: does not say how long a round is; say it with --round-length")
    least = least_shift(measured.series)
    if args.shift == 0 and least > 0:
        raise ConfigError("--shift 0: a delay or a forecast is 0 and has no logarithm; leave it out, or say more")
    try:
        setting = Setting(
            facilities=len(measured.series) if args.facilities is None else args.facilities,
            rounds=measured.rounds if args.rounds is None else args.rounds,
            round_length=round_length,
            epsilon=0.05 if args.epsilon is None else args.epsilon,
            margin=(measured.margin or 0.0) if args.margin is None else args.margin,
            gamma=args.gamma,
            shift=least if args.shift is None else args.shift,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return assess(measured.series, setting)


def _warn(assessment: Assessment) -> None:
    few = {name: f.shape.errors for name, f in assessment.by_facility.items() if f.shape.errors < ENOUGH}
    if few:
        which = ", ".join(f"{name} {count}" for name, count in few.items())
        print(f"fedqueue: warning: fewer than {ENOUGH} errors say little about tails: {which}", file=sys.stderr)


def _beside(source: Path, measured: Measured) -> Path:
    if measured.kind == "run":
        return source / "plots" / "bound.png"
    return Path(f"{source.name.partition('.')[0]}-bound.png")


# Many traces at once ------------------------------------------------------------------------------------------


def _run_cases(args: argparse.Namespace) -> int:
    from fedqueue_reproduction.bound_text import show_cases

    for name in ("procs", "requested", "round_length", "plot"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --cases")
    found = [(case, measured, _assess(measured, args)) for case, measured in _measure_cases(args)]
    if args.json:
        head = json.dumps({**provenance(invoked()), "cases": []})
        lines = [json.dumps({**case, **as_json(assessment, measured)}) for case, measured, assessment in found]
        print(head.removesuffix("]}") + "\n" + ",\n".join(lines) + "\n]}")
    else:
        show_cases([(case["case"], assessment) for case, _, assessment in found])
    return 0


def _measure_cases(args: argparse.Namespace) -> list[tuple[dict[str, Any], Measured]]:
    found = []
    for case in read_cases(args.cases):
        shape = {name: case[name] for name in ("procs", "requested", "round_length")}
        found.append((case, _replay(data.find_log(case["file"], args.cases.parent), args, **shape)))
    return found


def _without_name(rule: Any) -> Mapping[str, Any]:
    return {key: value for key, value in dataclasses.asdict(rule).items() if key != "name"}
