"""Crash schedules by the hundred: `python -m tests.faults --schedules 2000 --seed 1`.

Prints a line for each failing schedule with what it takes to repeat it, then a summary; ends with 1 if any failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from fedqueue.files import POINTS
from tests.faults.schedules import Outcome, perform, schedule_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat this one, and keep its files")
    parser.add_argument("--parallel", type=int, default=(os.cpu_count() or 2) + 1)
    parser.add_argument("--base", type=Path, help="where the runs are made (default: memory, if there is such a place)")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    args = parser.parse_args()
    memory = Path("/dev/shm")
    base = args.base or (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir()))
    root = Path(tempfile.mkdtemp(prefix="fq-faults-", dir=base))
    seeds = [args.only] if args.only is not None else list(range(args.seed, args.seed + args.schedules))
    for module in ("fedqueue.cli", "fedqueue.agent.agent", "fedqueue.coordinator.serve", "uvicorn.protocols.http.auto"):
        importlib.import_module(module)  # so that what is forked from here need not
    began = time.monotonic()
    outcomes = _all(seeds, root, args.parallel)
    bad = [outcome for outcome in outcomes if outcome.error]
    hit = Counter(point for outcome in outcomes for point in outcome.hit)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    if not bad:
        shutil.rmtree(root, ignore_errors=True)
    for point in POINTS:
        print(f"{hit[point]:5d} killed at {point}")
    kills = sum(outcome.kills for outcome in outcomes)
    print(
        f"{len(outcomes)} schedules, {kills} kills, {len(bad)} failed, {time.monotonic() - began:.0f} s"
        + (f"; seeds {[outcome.seed for outcome in bad]}" if bad else "")
    )
    return 1 if bad or len(outcomes) < len(seeds) else 0


def _all(seeds: list[int], root: Path, parallel: int) -> list[Outcome]:
    """Each of several processes takes every n-th seed; what they find comes by file."""
    children = []
    for number in range(parallel):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with (root / f"outcomes-{number}").open("w") as file:
                    for seed in seeds[number::parallel]:
                        outcome = perform(schedule_of(seed), root / f"s{seed}")
                        print(json.dumps(asdict(outcome)), file=file, flush=True)
                        if outcome.error:
                            print(
                                f"FAILED {outcome.error}\nrepeat: python -m tests.faults --only {seed}\n",
                                file=sys.stderr,
                                flush=True,
                            )
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    lines = [line for path in root.glob("outcomes-*") for line in path.read_text().splitlines()]
    return sorted((Outcome(**json.loads(line)) for line in lines), key=lambda outcome: outcome.seed)


if __name__ == "__main__":
    raise SystemExit(main())
