"""How quickly the live page of a long run is there, how much of it travels, and how long its frames take.

    python -m benchmarks.page --json benchmarks/page.json

Twelve facilities and 2,000 rounds, simulated; Debian's chromium, headless, on the same machine. Times are of loads
after the server has read the ledger, which is measured by itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from fedqueue.files import write_json
from fedqueue.machine import provenance
from fedqueue.page.follower import Follower
from fedqueue.sim.runner import simulate
from tests.browser import chromium, tab
from tests.conftest import config_of, facility
from tests.test_page import PageServer

ROUNDS: Final = 2000
FACILITIES: Final = 12
LOADS: Final = 5
GOALS: Final = {"kilobytes": 300.0, "seconds_to_load": 1.5}

FRAMES: Final = """async () => {
    const gaps = [], { timeline } = fedqueue;
    timeline.whole();
    await new Promise((resolve) => setTimeout(resolve, 1500));
    timeline.frames.length = 0;
    let last = performance.now();
    for (let n = 0; n < 240; n++) {
        if (n % 120 < 60) timeline.zoom(0.93); else timeline.zoom(1 / 0.93);
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        gaps.push(now - last);
        last = now;
    }
    return { gaps, painting: timeline.frames };
}"""
"""Zooms in and out again, twice, by a step in each frame."""


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "long"
        folder.mkdir()
        sites = [facility(f"site-{n:02}", nodes=1 + n % 3) for n in range(FACILITIES)]
        simulate(config_of("fedqueue", facilities=sites, rounds=ROUNDS), folder=folder)
        began, follower = time.monotonic(), Follower(folder)
        while follower.catch_up():
            pass
        reading = time.monotonic() - began
        server = PageServer(Path(base), folder)
        try:
            loads, sent, frames = [], 0, {}
            with chromium() as browser:
                with tab(browser, server.url) as first:
                    first.is_ready()
                for _ in range(LOADS):
                    began = time.monotonic()
                    with tab(browser, server.url) as seen:
                        seen.is_ready()
                        seen.shows("#waits canvas")
                        loads.append(time.monotonic() - began)
                        sent = seen.bytes
                with tab(browser, server.url) as seen:
                    seen.is_ready()
                    frames = seen.page.evaluate(FRAMES)
        finally:
            server.stop()
        return {
            "events": follower.read + 1,
            "seconds_to_read_the_ledger": round(reading, 2),
            "seconds_to_load": round(statistics.median(loads), 2),
            "seconds_to_load_most": round(max(loads), 2),
            "kilobytes": round(sent / 1000, 1),
            "frame_milliseconds": _spread(frames["gaps"]),
            "painting_milliseconds": _spread(frames["painting"]),
        }


def _spread(found: list[float]) -> dict[str, float]:
    ordered = sorted(found)
    places = {"median": 0.5, "p95": 0.95, "most": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) for name, share in places.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = measure()
    for name, value in found.items():
        print(f"{name:30} {value}")
    if args.json is not None:
        write_json(args.json, {**provenance(["python", "-m", "benchmarks.page"]), **found})
    return int(any(found[name] > most for name, most in GOALS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
