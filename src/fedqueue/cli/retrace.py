"""Feed what a real run measured back to the simulator: every wait, every speed, every hand-in.

With the run's own strategy this checks the simulator: each update should meet the cutoff that it met. Pauses, restarts,
failures, forecasts and the operator's words are fed back too; if something differs nevertheless, it says which facts of
the run are not on record. With --strategy it says what another one would have made of the same queues.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from collections.abc import Set as Keys
from pathlib import Path
from typing import TYPE_CHECKING

from fedqueue.cli import terminal
from fedqueue.protocol.messages import CoordinatorResumed, FacilityLeft, RunPaused

if TYPE_CHECKING:
    from fedqueue.protocol.contract import UpdateKey
    from fedqueue.sim.playback import Played
    from fedqueue.sim.recorded import Recording

HELP = "feed a real run's delays back to the simulator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a real run")
    parser.add_argument("--strategy", metavar="NAME", help="another one than the run's own")


def run(args: argparse.Namespace) -> int:
    from fedqueue.coordinator.run_folder import stored_config
    from fedqueue.sim.playback import simulate_recording
    from fedqueue.sim.recorded import read_recording

    recording = read_recording(args.folder)
    config = stored_config(args.folder)
    strategy = args.strategy or recording.strategy
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, strategy=strategy))
    played = simulate_recording(recording, config)
    if strategy == recording.strategy:
        return _compare(recording, played)
    summary = played.tally.summary(strategy=strategy, seed=config.run.seed, wall_seconds=0.0)
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


def _compare(recording: Recording, played: Played) -> int:
    """Each update and its fate, then and now; 1: some differ."""
    fates = played.fates
    # When a run is over, its last updates still come in; a simulation ends at once.
    same = {key for key, fate in recording.fates.items() if fates.get(key, ("after_end", None)) == fate}
    print(f"{len(same)} of {len(recording.fates)} updates met the same fate as in the run")
    for key, fate in recording.fates.items():
        if key not in same:
            part = f" part {key[2]}" if key[2] else ""
            print(
                f"  {key[0]} attempt {key[1]}{part}: {_described(fate)} in the run, {_described(fates.get(key))} here"
            )
    if len(same) == len(recording.fates):
        return 0
    unknown = sorted(_unknown(recording, played, recording.fates.keys() - same))
    if not unknown:
        print("nothing is known that is not on record, so this should not be: please report it, with the run's ledger")
        return 1
    print("what is not on record, and may be why:")
    for at, kind, what in unknown:
        print(f"  {at:.1f} s {kind}: {what}")
    return 1


def _described(fate: tuple[str, int | None] | None) -> str:
    if fate is None:
        return "none"
    return fate[0] if fate[1] is None else f"{fate[0]} into version {fate[1]}"


def _unknown(recording: Recording, played: Played, differ: Keys[UpdateKey]) -> Iterator[tuple[float, str, str]]:
    """Time, kind and words for each thing of the run that its ledger does not say."""
    from fedqueue.sim.playback import DRIFT

    for update in differ & recording.close.keys():
        at, cutoff = recording.close[update]
        side = "before" if at <= cutoff else "after"
        what = (
            f"{update[0]} came {1000 * abs(cutoff - at):.0f} ms {side} the cutoff; its parts are not known that exactly"
        )
        yield at, "UpdateArrived", what
    for heard in recording.outside:
        event = heard.event
        match event:
            case RunPaused():
                what = "how long the run clock stood still, and so when jobs that went on meanwhile did what"
            case CoordinatorResumed(down_seconds=down):
                what = f"what was in hand when the coordinator ended; its run clock stood still for {down:.0f} s"
            case FacilityLeft(facility=name):
                what = f"when things happened at {name} until it was back: only when they were told"
            case _:
                continue
        yield event.at, type(event).__name__, what
    for job in recording.ordered.keys() - played.ordered.keys():
        yield recording.ordered[job], "SubmitJob", f"{job} was ordered in the run, and not here"
    for job in played.ordered.keys() - recording.ordered.keys():
        yield played.ordered[job], "SubmitJob", f"{job} was never ordered in the run, so nobody knows how it would fare"
    for key, due in recording.cutoffs.items():
        if abs(played.cutoffs.get(key, due) - due) > DRIFT:
            yield (
                due,
                "SetTimer",
                f"{key} was due then, and at {played.cutoffs[key]:.1f} s here: rounds are not as long",
            )
            break
    for key, timers in recording.rang_late.items():
        for due, at in timers:
            yield (
                due,
                "TimerFired",
                f"{key} fired {1000 * (at - due):.0f} ms late; what came in meanwhile may count or not",
            )
