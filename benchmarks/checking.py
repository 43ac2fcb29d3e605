"""What it costs to know that the files of an aggregation are what their names say.

Four updates from one base, summed from file to file, in turns: unchecked, as the coordinator checks its objects (every
piece against its checksum), and with every file hashed anew, as right after a start. Wall seconds; ratios are the
median over the turns. What is written gets its checksums in all three; what that costs the last figure tells.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.figure import Figure
from fedqueue import tensorfile, tensorsum
from fedqueue.coordinator.store import Store
from fedqueue.tensorbytes import checksum

VALUES = 100_000_000
TENSORS = 100
UPDATES = 4
REPEATS = 11


def make(store: Store, seed: int) -> Path:
    generator = np.random.default_rng(seed)
    tensors = {f"layer{i}.weight": generator.random(VALUES // TENSORS, np.float32) for i in range(TENSORS)}
    scratch = store.scratch(str(seed))
    return store.keep(scratch, tensorfile.write(scratch, tensors))


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        kept = Store(Path(folder))
        current, *trained = [make(kept, seed) for seed in range(1 + UPDATES)]
        contributions = [
            tensorsum.FileContribution(weight=0.2, trained=path, base=current, base_key=0) for path in trained
        ]
        out = Path(folder) / "out"

        def checked(store: Store) -> None:
            with store.checking() as expected:
                tensorsum.aggregate(current, contributions, "add_deltas", out, content=expected)

        ways: dict[str, Callable[[], object]] = {
            "unchecked": lambda: tensorsum.aggregate(current, contributions, "add_deltas", out),
            "checked": lambda: checked(kept),
            "hashed": lambda: checked(Store(Path(folder))),  # which has not looked at any file yet
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(REPEATS):
            for way, work in ways.items():
                began = time.perf_counter()
                work()
                seconds[way].append(time.perf_counter() - began)
    bare = seconds["unchecked"]
    ratio = {way: statistics.median(a / b for a, b in zip(taken, bare, strict=True)) for way, taken in seconds.items()}
    size = f"{UPDATES} x {VALUES / 1e6:.0f} M float32 from file to file"
    return [
        Figure(f"{size}, objects checked: over unchecked", ratio["checked"], "x", "at most 1.15"),
        Figure(f"{size}, every file hashed anew: over unchecked", ratio["hashed"], "x"),
        Figure(f"{size}, unchecked: wall seconds", statistics.median(bare), "s"),
        Figure("checksums, one thread, 1 MiB in its cache", checksum_speed(), "GB/s"),
    ]


def checksum_speed() -> float:
    piece = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(100):
            checksum(piece)
        times.append((time.perf_counter() - began) / 100)
    return len(piece) / statistics.median(times) / 1e9
