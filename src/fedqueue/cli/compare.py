"""Run several strategies over the same seeds and compare them.

Every seed gives each strategy the same queue delays, faults, data split and first model, so that differences are
paired. Times to a target are those of the first model that reaches it: no finer than models are made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedqueue.cli import common, terminal
from fedqueue.comparison import Estimate, estimates, paired
from fedqueue.config import Config
from fedqueue.errors import ConfigError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.machine import invoked, provenance
from fedqueue.metrics import target_key
from fedqueue.runs import new_folder, write_json
from fedqueue.sim.runner import simulate
from fedqueue.strategies import STRATEGIES

HELP = "several strategies over the same seeds, with paired differences"

Job = tuple[Path, tuple[str, ...], str, int, Path]
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
    with new_folder(args.out, f"{config.run.name}-compare") as folder:
        _compare(args, config, strategies, folder)
    return 0


def _compare(args: argparse.Namespace, config: Config, strategies: list[str], folder: Path) -> None:
    seeds = range(config.run.seed, config.run.seed + args.seeds)
    jobs: list[Job] = [
        (args.config, tuple(args.changes), name, seed, folder / f"{name}-seed{seed}")
        for seed in seeds
        for name in strategies
    ]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in strategies}
    for summary in _progress(_run_all(jobs, args.jobs), len(jobs), quiet=args.json):
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


def show(runs: Mapping[str, Sequence[dict[str, Any]]], config: Config, folder: Path) -> None:
    """The tables that a person reads."""
    names = list(runs)
    count = len(runs[names[0]])
    targets = [target_key(target) for target in config.run.targets]
    trained = any(s["score"]["max"] is not None for summaries in runs.values() for s in summaries)
    figures = [("best score %", "score.max", 100.0, 1)] if trained else []
    figures += [(f"s to {float(t):.3g}", f"time_to.{t}", 1.0, 1) for t in targets] if trained else []
    figures += [
        ("late %", "late_probability", 100.0, 1),
        ("missed cutoff %", "missed_cutoff", 100.0, 1),
        ("staleness", "max_staleness", 1.0, 0),
        ("local steps", "local_steps", 1.0, 0),
        ("node s", "node_seconds", 1.0, 0),
        ("transfers", "model_transfers", 1.0, 0),
    ]
    columns = {title: estimates(runs, key) for title, key, _, _ in figures}
    rows = [[name, *(_cell(columns[t][name], scale, n, count) for t, _, scale, n in figures)] for name in names]
    last = f"time_to.{targets[-1]}" if trained and targets else None
    best = None
    if last is not None:
        reached = {n: e for n, e in estimates(runs, last).items() if e.count == count and e.mean is not None}
        best = names.index(min(reached, key=lambda n: reached[n].mean or 0.0)) if reached else None
    spread = f", mean ± sd over {count} seeds; (n) where only n reached it" if count > 1 else ""
    terminal.show(
        terminal.table(f"{config.run.name}{spread}", ("strategy", *(title for title, *_ in figures)), rows, best=best)
    )
    if last is not None and count > 1 and len(names) > 1:
        _show_paired(runs, names, targets)
    print(f"run folders and comparison.json: {folder}")


def _show_paired(runs: Mapping[str, Sequence[dict[str, Any]]], names: list[str], targets: list[str]) -> None:
    against = names[0]
    rows = []
    differences = {t: paired(runs, f"time_to.{t}", against) for t in targets}
    for name in names[1:]:
        rows.append([name, *(_interval(differences[t][name]) for t in targets)])
    title = f"seconds more (+) or fewer (-) than {against}, same seeds: mean, 95 % interval, pairs"
    terminal.show(terminal.table(title, ("strategy", *(f"to {float(t):.3g}" for t in targets)), rows))


def _run_all(jobs: Sequence[Job], processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1:
        yield from map(_run_one, jobs)
        return
    # A fresh process each: nothing of a parent's torch state is inherited.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_run_one, job) for job in jobs]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_one(job: Job) -> dict[str, Any]:
    path, changes, strategy, seed, folder = job
    config = common.load_run(path, changes, strategy=strategy, seed=seed)
    with new_folder(folder, folder.name):
        return simulate(config, folder=folder)


def _progress(summaries: Iterator[dict[str, Any]], total: int, *, quiet: bool) -> Iterator[dict[str, Any]]:
    screen = terminal.console(stderr=True)
    if quiet or not screen.is_terminal:
        for number, summary in enumerate(summaries, 1):
            if not quiet:
                screen.print(f"run {number} of {total}: {summary['strategy']} seed {summary['seed']}")
            yield summary
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("runs", total=total)
        for summary in summaries:
            progress.update(task, advance=1, description=f"{summary['strategy']} seed {summary['seed']}")
            yield summary


def _curve(folder: Path) -> list[tuple[float, float]]:
    with LedgerReader(folder / FILE) as ledger:
        return [(row["scored_at"], row["score"]) for row in ledger.rows("SELECT * FROM scores ORDER BY scored_at")]


def _cell(value: Estimate, scale: float, digits: int, count: int) -> str:
    if value.mean is None:
        return "-"
    if value.sd is None:
        text = f"{value.mean * scale:,.{digits}f}"
    else:
        digits = digits if value.mean * scale >= 100 else 1
        text = f"{value.mean * scale:,.{digits}f} ± {value.sd * scale:,.{digits}f}"
    return text if value.count == count else f"{text} ({value.count})"


def _interval(value: Estimate) -> str:
    if value.mean is None:
        return "-"
    if value.half_width is None:
        return f"{value.mean:+.1f} (1)"
    low, high = value.mean - value.half_width, value.mean + value.half_width
    return f"{value.mean:+.1f} [{low:+.1f}, {high:+.1f}] ({value.count})"
