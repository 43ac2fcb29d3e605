"""Six strategies side by side in virtual time, then one of them for real on this machine.

First, four simulated facilities with different queues train one classifier of handwritten digits; training is real,
the queues exist in virtual time only. Then a coordinator, three agents and their jobs, real processes in real queues,
train it in wall-clock time.
"""

from __future__ import annotations

import argparse
import time
from importlib import resources
from pathlib import Path

from fedqueue.cli import common, compare, extras, terminal
from fedqueue.cli import run as run_here
from fedqueue.cli.figures import show
from fedqueue.files import write_json
from fedqueue.machine import invoked, provenance
from fedqueue.protocol.strategies import distinct
from fedqueue.runs import new_folder
from fedqueue.sim.runner import simulate

HELP = "six strategies side by side, then a real run, in under two minutes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_out(parser)


def run(args: argparse.Namespace) -> int:
    extras.need("train", "plots", "serve")
    from fedqueue.report import write_report

    began = time.perf_counter()
    strategies = distinct()
    with resources.as_file(resources.files("fedqueue.cli") / "demo.toml") as path:
        configs = {name: common.load_run(path, (), strategy=name) for name in strategies}
    config = next(iter(configs.values()))
    print(
        f"{len(config.facility)} facilities in their own queues; "
        f"{len(strategies)} strategies with the same delays, data and first model"
    )
    runs = {}
    with new_folder(args.out, "demo") as folder:
        homes = {name: folder / f"{name}-seed{config.run.seed}" for name in strategies}
        for name, chosen in configs.items():
            with new_folder(homes[name], name), terminal.following(name, chosen) as listener:
                runs[name] = [simulate(chosen, folder=homes[name], listeners=[listener])]
        write_json(folder / "comparison.json", {**provenance(invoked()), "runs": runs})
        picture = compare.plot(folder, strategies, [config.run.seed], config)
        page = write_report(list(homes.values()), folder / "report.html")
    show(runs, config, folder)
    print(f"plot:   {picture}")
    print(f"report: {page}  (open it in a browser)")
    print()
    real = _run_for_real(folder / "real")
    print(f"done in {time.perf_counter() - began:.0f} s. Next:")
    print("  fedqueue init my.toml && fedqueue simulate my.toml       your own facilities")
    print("  fedqueue compare my.toml --strategies jit,fedqueue --seeds 5 --jobs 2")
    print("  fedqueue run my.toml                                     the same, for real, on this machine")
    print(f"  fedqueue replay {real}      its ledger, checked event by event")
    return 0


def _run_for_real(folder: Path) -> Path:
    """A real run on this machine, left in this folder."""
    from fedqueue.coordinator.run_folder import store_config
    from fedqueue.report import write_report

    with resources.as_file(resources.files("fedqueue.cli") / "demo-real.toml") as path:
        config, tree = run_here.begin(path, [])
    queues = len(config.facility)
    print(
        f"now for real: a coordinator, {queues} agents and their jobs on this machine, "
        f"{config.run.strategy}, {config.run.seconds:g} seconds"
    )
    with new_folder(folder, folder.name):
        store_config(folder, tree or {}, folder)
        summary = run_here.here(config, folder, quiet=False)
    if summary is None:
        raise KeyboardInterrupt
    jobs, score = summary["jobs"], summary["score"]
    print(
        f"{summary['rounds']} models from {sum(summary['updates'].values())} updates of {jobs['submitted']} jobs; "
        f"the last model is right about {terminal.percent(score['final'])} % of digits it never saw"
    )
    page = write_report([folder], folder / "report.html")
    print(f"model:  {folder / 'model.safetensors'}")
    print(f"report: {page}  (open it in a browser)")
    return folder
