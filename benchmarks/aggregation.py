"""What aggregating four updates costs, beside plain in-place adds of four ready deltas.

    python benchmarks/aggregation.py [--values 100e6] [--repeats 5] [--json PATH]

Measured in one run on one torch thread: CPU seconds (the median over the repeats, the ways taking turns) and
the peak of resident memory beyond the inputs. Goals, with every base the current model: at most 1.3 times the
CPU seconds of the plain adds, and at most 0.5 GiB for 100 million values (the result itself is 0.37 GiB).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fedqueue.aggregate import Contribution, StateDict, aggregate

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


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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


def main() -> None:
    parser = argparse.ArgumentParser(description="What aggregating four updates costs.")
    parser.add_argument("--values", type=float, default=100e6, help="float32 values in the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(int(arguments.values), arguments.repeats)
    print(f"{UPDATES} updates x {arguments.values:,.0f} float32 in {TENSORS} tensors, one thread")
    print(f"{'way':<34}{'CPU s':>9}{'x plain':>9}{'peak GiB':>10}")
    for row in rows:
        print(f"{row.way:<34}{row.cpu_seconds:>9.3f}{row.ratio:>9.2f}{row.peak_gib:>10.3f}")
    if arguments.json:
        facts = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "cpu": cpu_model(),
            "values": int(arguments.values),
            "updates": UPDATES,
            "repeats": arguments.repeats,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
