"""What aggregating four updates costs, beside plain in-place adds of four ready deltas.

Measured in one run on one torch thread: CPU seconds (the median over the repeats, the ways taking turns) and the
peak of resident memory beyond the inputs. The result itself is 0.37 GiB for 100 million values.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.figure import Figure
from fedqueue.aggregate import Contribution, StateDict, aggregate

VALUES = 100_000_000
REPEATS = 5
UPDATES = 4
TENSORS = 100
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    way: str
    cpu_seconds: float
    ratio: float
    peak_gib: float


def make_model(values: int, seed: int) -> StateDict:
    """`values` random float32, in `TENSORS` tensors of one size."""
    generator = torch.Generator().manual_seed(seed)
    size = values // TENSORS
    return {f"layer{i}.weight": torch.rand(size, generator=generator) for i in range(TENSORS)}


def plain_adds(current: StateDict, deltas: list[StateDict]) -> StateDict:
    total = {name: tensor.clone() for name, tensor in current.items()}
    for delta in deltas:
        for name, tensor in total.items():
            tensor.add_(delta[name])
    return total


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the peak since it was last cleared), from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def cpu_seconds(work: Callable[[], StateDict]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_gib(work: Callable[[], StateDict]) -> float:
    """The peak of resident memory beyond what was resident before."""
    gc.collect()
    # Memory freed earlier but not given back would be used again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # 5 clears the peak
    before = resident_bytes("VmRSS")
    work()
    return (resident_bytes("VmHWM") - before) / GIB


def run(values: int, repeats: int) -> list[Row]:
    current = make_model(values, 0)
    trained = [make_model(values, 1 + i) for i in range(UPDATES)]
    bases = [make_model(values, 101 + i) for i in range(UPDATES)]
    weights = [0.3, 0.1, 0.2, 0.25]
    fresh = [Contribution(weight=w, trained=t, base=current) for w, t in zip(weights, trained, strict=True)]
    stale = [Contribution(weight=w, trained=t, base=b) for w, t, b in zip(weights, trained, bases, strict=True)]
    # The trained models stand in for ready deltas: an add costs the same whatever the values are.
    ways: dict[str, Callable[[], StateDict]] = {
        "plain in-place adds": lambda: plain_adds(current, trained),
        "add_deltas, base is current": lambda: aggregate(current, fresh, "add_deltas"),
        "mix_models": lambda: aggregate(current, fresh, "mix_models"),
        "add_deltas, four distinct bases": lambda: aggregate(current, stale, "add_deltas"),
    }
    peaks = {way: peak_gib(work) for way, work in ways.items()}  # this also warms up
    results: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, work in ways.items():
            results[way].append(cpu_seconds(work))
    medians = {way: statistics.median(seconds) for way, seconds in results.items()}
    plain = medians["plain in-place adds"]
    return [Row(way, medians[way], medians[way] / plain, peaks[way]) for way in ways]


def measure() -> list[Figure]:
    torch.set_num_threads(1)
    rows = {row.way: row for row in run(VALUES, REPEATS)}
    fresh, stale = rows["add_deltas, base is current"], rows["add_deltas, four distinct bases"]
    size = f"{UPDATES} x {VALUES / 1e6:.0f} M float32"
    return [
        Figure(f"aggregate {size}: CPU seconds over plain in-place adds", fresh.ratio, "x", "at most 1.3"),
        Figure(f"aggregate {size}: memory beyond the inputs", fresh.peak_gib, "GiB", "at most 0.5"),
        Figure(f"aggregate {size}: CPU seconds", fresh.cpu_seconds, "s"),
        Figure(f"aggregate {size} from four different bases: over plain in-place adds", stale.ratio, "x"),
    ]
