"""Six strategies side by side: four facilities with different queues train one classifier of handwritten digits.

Training is real and takes seconds; the queues exist in virtual time only.
"""

from __future__ import annotations

import argparse
import time
from importlib import resources

from fedqueue.cli import common, compare, terminal
from fedqueue.cli.figures import show
from fedqueue.machine import invoked, provenance
from fedqueue.runs import new_folder, write_json
from fedqueue.sim.runner import simulate
from fedqueue.strategies import STRATEGIES

HELP = "six strategies side by side, in under a minute"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_out(parser)


def run(args: argparse.Namespace) -> int:
    from fedqueue.report import write_report

    began = time.perf_counter()
    strategies = list(STRATEGIES)
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
    print(f"done in {time.perf_counter() - began:.0f} s. Next:")
    print("  fedqueue init my.toml && fedqueue simulate my.toml       your own facilities")
    print("  fedqueue compare my.toml --strategies jit,fedqueue --seeds 5 --jobs 2")
    print(f"  fedqueue replay {homes['jit']}      the ledger, checked event by event")
    return 0
