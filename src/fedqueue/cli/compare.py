"""Run several strategies over the same seeds and compare them.

Every seed gives each strategy the same queue delays, faults, data split and first model, so that differences are
paired. Times to a target are those of the first model that reaches it: no finer than models are made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedqueue.cli import common, extras, terminal
from fedqueue.cli.figures import show
from fedqueue.config import Config
from fedqueue.errors import ConfigError
from fedqueue.files import write_json
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.machine import invoked, provenance
from fedqueue.processes import run_all
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.runs import new_folder
from fedqueue.sim.runner import simulate

HELP = "several strategies over the same seeds, with paired differences"

OneRun = tuple[Path, tuple[str, ...], str, int, Path]
"""Config file, changes, strategy, seed, run folder: all that another process needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)
    parser.add_argument(
        "--strategies",
        metavar="a,b,...",
        default=",".join(STRATEGIES),
        help="by default all; the first is compared against",
    )
    parser.add_argument("--seeds", type=int, metavar="N", default=3, help="how many, from the config's run.seed on (3)")
    parser.add_argument("--jobs", type=int, metavar="P", default=1, help="processes at once (1)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a run, a line each, and nothing else"
    )
    common.add_out(parser)
    common.add_plots(parser)


def run(args: argparse.Namespace) -> int:
    strategies = [name.strip() for name in args.strategies.split(",") if name.strip()]
    if not strategies or args.seeds < 1 or args.jobs < 1:
        raise ConfigError("compare needs at least one strategy, --seeds 1 or more and --jobs 1 or more")
    if len(set(strategies)) < len(strategies):
        raise ConfigError(f"--strategies {args.strategies}: names one twice")
    configs = {name: common.load_run(args.config, args.changes, strategy=name) for name in strategies}
    config = next(iter(configs.values()))
    extras.need_for(config, plots=args.plots and config.task.name != "timing")
    with new_folder(args.out, f"{config.run.name}-compare") as folder:
        _compare(args, config, strategies, folder)
    return 0


def _compare(args: argparse.Namespace, config: Config, strategies: list[str], folder: Path) -> None:
    seeds = range(config.run.seed, config.run.seed + args.seeds)
    jobs: list[OneRun] = [
        (args.config, tuple(args.changes), name, seed, folder / f"{name}-seed{seed}")
        for seed in seeds
        for name in strategies
    ]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in strategies}
    with terminal.counting(quiet=args.json) as told:
        for done, summary in enumerate(run_all(_run_one, jobs, args.jobs), 1):
            told(f"{summary['strategy']} seed {summary['seed']}", done, len(jobs))
            runs[summary["strategy"]].append(summary)
            if args.json:
                print(json.dumps(summary), flush=True)
    for summaries in runs.values():
        summaries.sort(key=lambda s: s["seed"])
    write_json(folder / "comparison.json", {**provenance(invoked()), "runs": runs})
    trained = any(s["score"]["max"] is not None for summaries in runs.values() for s in summaries)
    picture = plot(folder, strategies, seeds, config) if args.plots and trained else None
    if not args.json:
        show(runs, config, folder)
        if picture is not None:
            print(f"plot: {picture}")


def plot(folder: Path, strategies: Sequence[str], seeds: Sequence[int], config: Config) -> Path:
    """Score against virtual time, from the run folders."""
    from fedqueue.report import comparison_plot

    curves = {}
    for name in strategies:
        curves[name] = [_curve(folder / f"{name}-seed{seed}") for seed in seeds]
    title = f"{config.run.name}: {len(config.facility)} facilities, {len(seeds)} seed{'s'[: len(seeds) > 1]}"
    return comparison_plot(curves, folder / "comparison.png", targets=config.run.targets, title=title)


def _run_one(job: OneRun) -> dict[str, Any]:
    path, changes, strategy, seed, folder = job
    config = common.load_run(path, changes, strategy=strategy, seed=seed)
    with new_folder(folder, folder.name):
        return simulate(config, folder=folder)


def _curve(folder: Path) -> list[tuple[float, float]]:
    with LedgerReader(folder / FILE) as ledger:
        return [(row["scored_at"], row["score"]) for row in ledger.rows("SELECT * FROM scores ORDER BY scored_at")]
