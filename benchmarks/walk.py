"""Which files of the package does one real round enter? `python -m benchmarks.walk`

A run on this machine (`fedqueue run`, the published strategy, two facilities) is followed in all its processes:
coordinator, scorer, agents and jobs. From the start of a job until one has started from the model that its update went
into, every function of ours that is called names its file. Imports do not count, since they are no steps of the walk.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

import fedqueue

PACKAGE = Path(fedqueue.__file__).parent
LONGEST = 550.0
"""Seconds until a run that hangs is given up."""

TRIES = 4
WENT_WRONG = "errors.py"

CONFIG = """
[run]
strategy = "fedqueue"
rounds = 1000
round_length = 12.0
learning_rate = 0.003

[task]
name = "digits"

[[facility]]
name = "north"
queue = { kind = "fixed", delay = 0.5 }

[[facility]]
name = "south"
queue = { kind = "fixed", delay = 1.0 }
"""

# Every Python process imports this by itself when it starts.
FOLLOWER = """
import atexit, os, sys, threading, time

PACKAGE, NOTES = os.environ["WALK_PACKAGE"] + os.sep, os.environ["WALK_NOTES"]
MARK = os.path.join(NOTES, "walking")
walking, seen = [False], {}
FUNCTION = 1  # CO_OPTIMIZED: modules and classes have it not

def follow(frame, event, argument):
    if walking[0] and event == "call":
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and code.co_flags & FUNCTION and code.co_filename not in seen:
            while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
                frame = frame.f_back
            if frame is None:  # nobody imports it just now
                seen[code.co_filename] = code.co_name

def write():
    path = os.path.join(NOTES, f"{os.getpid()}.txt")
    with open(path + ".part", "w") as notes:  # whoever is killed meanwhile leaves its last whole notes
        notes.write(" ".join(sys.argv[:3]) + "\\n")
        notes.writelines(f"{name[len(PACKAGE):]} {function}\\n" for name, function in list(seen.items()))
    os.replace(path + ".part", path)

def watch():
    written = 0
    while True:
        walking[0] = os.path.exists(MARK)
        if len(seen) != written:
            written = len(seen)
            write()
        time.sleep(0.02)

walking[0] = os.path.exists(MARK)
threading.setprofile(follow)
threading.Thread(target=watch, daemon=True).start()
sys.setprofile(follow)
atexit.register(write)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fedqueue")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = walk(Path(name), args.strategy)
    files = sorted({file for who in found.values() for file in who})
    for who, seen in found.items():
        print(f"{who}: {len(seen)}")
    for file in files:
        print(f"  {file}  ({', '.join(who for who, seen in found.items() if file in seen)})")
    print(f"{len(files)} files")
    return 0


def walk(folder: Path, strategy: str = "fedqueue") -> dict[str, set[str]]:
    """The files that each kind of process enters between two models of a real run. On a busy machine a job may have no
    time for a step, and say so in words of `WENT_WRONG`: that is another walk, and another run is followed."""
    for number in range(TRIES):
        found = _follow(folder / f"try{number}", strategy)
        if not any(WENT_WRONG in seen for seen in found.values()):
            break
    return found


def _follow(folder: Path, strategy: str) -> dict[str, set[str]]:
    notes = folder / "notes"
    notes.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(FOLLOWER)
    (folder / "walk.toml").write_text(CONFIG)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent)]),
        "WALK_PACKAGE": str(PACKAGE),
        "WALK_NOTES": str(notes),
    }
    argv = [sys.executable, "-m", "fedqueue", "run", "walk.toml", "--out", "run", "--no-plots", "--strategy", strategy]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        begun = _wait_for(folder, process, SECOND_JOB, ())
        (notes / "walking").touch()
        _wait_for(folder, process, ROUND_OF, (begun,))
        return _noted(notes)
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its agents
        process.wait(LONGEST)


def _noted(notes: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in notes.glob("*.txt"):
        first, *lines = path.read_text().splitlines()
        found.setdefault(_who(first), set()).update(line.split()[0] for line in lines)
    return {who: seen for who, seen in sorted(found.items()) if seen}


# The walk begins after the warm-up, with a job that has a model which is made of updates, once the scorer is at work.
SECOND_JOB = """SELECT min(seq) FROM events WHERE kind = 'JobStarted' AND seq > (SELECT min(seq) FROM events
                WHERE kind = 'ModelReady' AND json_extract(body, '$.version') = 2)
                AND seq > (SELECT min(seq) FROM events WHERE kind = 'ModelScored')"""

# From the first start after this one, by its update and by the next model, to the next start.
ROUND_OF = """SELECT min(started.seq) FROM events AS started WHERE kind = 'JobStarted' AND seq > (
              SELECT min(made.seq) FROM events AS made WHERE kind = 'ModelReady' AND seq > (
              SELECT min(arrived.seq) FROM events AS arrived WHERE kind = 'UpdateArrived' AND job IN (
              SELECT job FROM events WHERE kind = 'JobStarted' AND seq > ?)))"""


def _wait_for(folder: Path, process: subprocess.Popen[bytes], query: str, given: tuple[int, ...]) -> int:
    """The number of the event that the query finds, once it is in the ledger."""
    end = time.monotonic() + LONGEST
    while process.poll() is None and time.monotonic() < end:
        with suppress(sqlite3.Error):  # it may not be there yet
            with closing(sqlite3.connect(f"file:{folder / 'run/ledger.sqlite'}?mode=ro", uri=True)) as ledger:
                found: int | None = ledger.execute(query, given).fetchone()[0]
            if found is not None:
                return found
        time.sleep(0.05)
    why = "was over too early" if process.poll() is not None else f"did not come so far in {LONGEST:g} s"
    raise RuntimeError(f"the run {why}: {(folder / 'log').read_text()[-500:]}")


def _who(command: str) -> str:
    for word, who in (("scorer", "scorer"), ("job.py", "job"), (" agent", "agent")):
        if word in command:
            return who
    return "coordinator"


if __name__ == "__main__":
    raise SystemExit(main())
