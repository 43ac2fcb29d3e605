"""The memory of a server over ten thousand rounds: does it stay as it is?

The server is `fedqueue serve`, with its ledger on disk. Eight facilities speak the real protocol, one after the other:
each takes its order, reports what a job would have done, and hands in; every update makes a model. What a facility may
report in a second is limited, so there are eight.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.figure import Figure
from benchmarks.load import Talk
from fedqueue.protocol.contract import Trained
from fedqueue.protocol.reports import Handin
from fedqueue.runs import replay
from fedqueue.tensorfile import write

ROUNDS = 10_000
FACILITIES = 8
LOOKS = 20

CONFIG = """
[run]
name = "rounds"
strategy = "fedbuff"
rounds = {rounds}

[task]
name = "timing"

[simulator]
model_megabytes = 0.004

[strategy.fedbuff]
buffer = 1

[server]
port = 0
wait_for = 1
"""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "served"
        folder.mkdir(mode=0o700)
        words = _lay_out(folder, rounds)
        server = subprocess.Popen(
            [sys.executable, "-m", "fedqueue", "serve", str(folder), "--plain-http"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (folder / "address.json").exists():
                if server.poll() is not None:
                    raise RuntimeError("the coordinator did not start")
                time.sleep(0.05)
            url = json.loads((folder / "address.json").read_text())["url"]
            began = time.monotonic()
            memory = _go_round(url, words, rounds, server.pid)
            seconds = time.monotonic() - began
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        events = replay(folder)
    at = sorted(memory)
    middle = at[len(at) // 4]
    slope = 1000 * (memory[at[-1]] - memory[middle]) / (at[-1] - middle)
    who = f"{at[-1]:,} rounds of a server"
    steps = [after - before for before, after in pairwise(memory[one] for one in at)]
    return [
        Figure(f"{who}: memory after {at[0]:,}", memory[at[0]] / 1e6, "MB"),
        Figure(f"{who}: memory after {middle:,}", memory[middle] / 1e6, "MB"),
        Figure(f"{who}: memory at the end", memory[at[-1]] / 1e6, "MB"),
        Figure(f"{who}: more for each thousand rounds, from {middle:,} on", slope / 1e6, "MB", "at most 1"),
        Figure(f"{who}: the largest step between two looks", max(steps) / 1e6, "MB"),
        Figure(f"{who}: events in the ledger", events, ""),
        Figure(f"{who}: seconds", seconds, "s"),
    ]


def _lay_out(folder: Path, rounds: int) -> dict[str, str]:
    """The run, and the credential of each facility."""
    from fedqueue.coordinator.access import Access
    from fedqueue.coordinator.run_folder import ensure_ledger, store_config, stored_config

    names = [f"f{number}" for number in range(FACILITIES)]
    tree = tomllib.loads(CONFIG.format(rounds=rounds + 1) + "".join(f'[[facility]]\nname = "{n}"\n' for n in names))
    store_config(folder, tree, folder)
    ensure_ledger(stored_config(folder), folder)
    access = Access(folder)
    return {name: access.give(name) for name in names}


def _go_round(url: str, words: dict[str, str], rounds: int, pid: int) -> dict[int, int]:
    """Bytes of memory that are the server's own, by how many rounds are over."""
    from fedqueue.agent.http_transport import Client

    talks = [Talk(Client(url, credential=word), "") for word in words.values()]
    memory: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update"
        for number in range(1, rounds + 1):
            talk = talks[number % len(talks)]
            _poll(talk)
            while not talk.waiting:  # its model is still made
                _poll(talk)
            job = talk.waiting[0]
            assert job.assignment is not None
            talk.end(job)
            _poll(talk)
            talk.waiting.remove(job)
            write(path, {"weight": np.full(1000, number, np.float32)})
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            talk.client.upload(path, job.sequence, 0, digest)
            trained = Trained(base_version=job.assignment.base_version, steps_done=100, train_seconds=0.01)
            handin = Handin(trained=trained, admission_delay=0.001)
            while talk.client.commit(job.sequence, 0, digest, handin).status == "checking":
                pass
            if number % max(1, rounds // LOOKS) == 0:
                memory[number] = _own_memory(pid)
    return memory


def _poll(talk: Talk) -> None:
    from fedqueue.agent.transport import CoordinatorBusyError

    while True:
        try:
            talk.answered(talk.client.poll(talk.poll()))
            return
        except CoordinatorBusyError:  # too many reports in a second
            time.sleep(0.2)


def _own_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10
