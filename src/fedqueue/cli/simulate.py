"""Run one config in virtual time.

Training is real; waiting, computing and sending take simulated time only. Leaves a run folder with the ledger, a
summary and plots.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedqueue.cli import common, extras, terminal
from fedqueue.config import Config
from fedqueue.runs import new_folder
from fedqueue.sim.runner import simulate

HELP = "one run in virtual time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument("--strategy", metavar="S", help="instead of the config's run.strategy")
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the config's run.seed")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object and nothing else")
    common.add_out(parser)
    common.add_plots(parser)


def run(args: argparse.Namespace) -> int:
    config = common.load_run(args.config, args.changes, strategy=args.strategy, seed=args.seed)
    extras.need_for(config, plots=args.plots)
    name = f"{config.run.name}-{config.run.strategy}-seed{config.run.seed}"
    with (
        new_folder(args.out, name) as folder,
        terminal.following(config.run.strategy, config, quiet=args.json) as listener,
    ):
        summary = simulate(config, folder=folder, listeners=[listener])
    if args.plots:
        from fedqueue.report import run_plots

        run_plots(folder)
    if args.json:
        print(json.dumps(summary))
    else:
        show(config, summary, folder)
    return 0


def show(config: Config, summary: dict[str, Any], folder: Path, *, clock: str = "virtual seconds") -> None:
    jobs, updates, score = summary["jobs"], summary["updates"], summary["score"]
    rows = [
        (clock, terminal.seconds(summary["virtual_seconds"])),
        ("models made", str(summary["rounds"])),
        ("score, best and final (%)", f"{terminal.percent(score['max'])}  {terminal.percent(score['final'])}"),
        *((f"seconds to {float(t):.3g}", terminal.seconds(at)) for t, at in summary["time_to"].items()),
        ("jobs submitted, completed, failed, resubmitted", "  ".join(str(n) for n in jobs.values())),
        ("updates admitted, deferred, rejected, expired", "  ".join(str(n) for n in updates.values())),
        ("late jobs (%)", terminal.percent(summary["late_probability"])),
        ("missed cutoffs (%)", terminal.percent(summary["missed_cutoff"])),
        ("greatest staleness", str(summary["max_staleness"])),
        ("local steps", f"{summary['local_steps']:,}"),
        ("node seconds", f"{summary['node_seconds']:,.0f}"),
        ("wall seconds", terminal.seconds(summary["wall_seconds"])),
    ]
    title = f"{config.run.name}: {summary['strategy']}, seed {summary['seed']}"
    terminal.show_table(title, ("figure", "value"), rows)
    for which, model in summary.get("models", {}).items():
        if model is not None:
            score = "" if model["score"] is None else f", score {terminal.percent(model['score'])} %"
            print(f"{which} model: {model['file']} (model {model['version']}{score})")
    print(f"run folder: {folder}")
    print(f"look at it: fedqueue report {folder}")
