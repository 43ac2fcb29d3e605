"""What reading a scheduler's log costs: jobs a second, and whether its memory grows with its length."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.figure import Figure

SMALL, LARGE = 50_000_000, 1_000_000_000  # bytes
# Not ru_maxrss: that of a process begins with what its parent had, and ours has loaded torch.
READ = """
import sys, time
from pathlib import Path
from fedqueue.cli import main
began = time.perf_counter()
assert main(["history", sys.argv[1], "--timezone", "UTC"]) == 0
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
print(time.perf_counter() - began, int(peak) / 1024)
"""


def measure() -> Iterable[Figure]:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "sacct.txt"
        _, small = _read(path, SMALL)
        seconds, large = _read(path, LARGE)
    return [
        Figure("history of 1 GB of sacct: megabytes a second", LARGE / 1e6 / seconds, "MB/s"),
        Figure("history of 1 GB of sacct: peak memory", large, "MB", "at most 150"),
        Figure("history of 1 GB against 50 MB of sacct: peak memory", large / small, "times", "at most 1.3"),
    ]


def _read(path: Path, size: int) -> tuple[float, float]:
    """(seconds, megabytes) for a made-up dump of so many bytes, in a process of its own."""
    write_dump(path, size)
    done = subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True, text=True)
    seconds, megabytes = map(float, done.stdout.splitlines()[-1].split())
    return seconds, megabytes


def write_dump(path: Path, size: int) -> None:
    """Jobs of a made-up cluster, one every ten seconds."""
    luck = random.Random(1)
    at, number, written = 1_600_000_000, 0, 0
    with path.open("w", encoding="utf-8") as out:
        out.write("JobID|JobName|Submit|Eligible|Start|End|Timelimit|NNodes|NCPUS|State\n")
        while written < size:
            number += 1
            at += luck.randrange(20)
            start = at + int(luck.lognormvariate(5, 3))
            nodes = 2 ** luck.randrange(8)
            times = "|".join(map(_stamp, (at, at, start, start + luck.randrange(1, 40_000))))
            written += out.write(f"{number}|job{number % 977}|{times}|1-00:00:00|{nodes}|{64 * nodes}|COMPLETED\n")


def _stamp(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")
