"""Feed what a real run measured back to the simulator: every wait, every speed, every hand-in.

With the run's own strategy this checks the simulator: each update should meet the cutoff that it met. With --strategy
it says what another one would have made of the same queues.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from fedqueue.cli import terminal
from fedqueue.metrics import Tally

HELP = "feed a real run's delays back to the simulator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a real run")
    parser.add_argument("--strategy", metavar="NAME", help="another one than the run's own")


def run(args: argparse.Namespace) -> int:
    from fedqueue.runtime.opening import stored_config
    from fedqueue.sim.recorded import read_recording, simulate_recording

    recording = read_recording(args.folder)
    config = stored_config(args.folder)
    strategy = args.strategy or recording.strategy
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, strategy=strategy))
    tally = Tally(
        round_length=getattr(config.options(), "round_length", None) or config.run.round_length,
        nodes={facility.name: facility.nodes for facility in config.facility},
        targets=[],
    )
    fates = simulate_recording(recording, config, [tally])
    if strategy == recording.strategy:
        differ = {key: fate for key, fate in recording.fates.items() if fates.get(key) != fate}
        print(f"{len(recording.fates) - len(differ)} of {len(recording.fates)} updates met the same fate as in the run")
        for (job, attempt), (fate, version) in differ.items():
            was = f"{fate}, version {version}"
            print(f"  {job} attempt {attempt}: {was} in the run, {fates.get((job, attempt), 'nothing')} here")
        return 1 if differ else 0
    summary = tally.summary(strategy=strategy, seed=config.run.seed, wall_seconds=0.0)
    updates = "  ".join(str(n) for n in summary["updates"].values())
    rows = [
        ("virtual seconds", terminal.seconds(summary["virtual_seconds"])),
        ("models made", str(summary["rounds"])),
        ("updates admitted, deferred, rejected, expired", updates),
        ("missed cutoffs (%)", terminal.percent(summary["missed_cutoff"])),
        ("greatest staleness", str(summary["max_staleness"])),
        ("local steps", f"{summary['local_steps']:,}"),
        ("node seconds", f"{summary['node_seconds']:,.0f}"),
    ]
    terminal.show_table(
        f"{strategy}, with the delays of {args.folder} ({recording.strategy})", ("figure", "value"), rows
    )
    return 0
