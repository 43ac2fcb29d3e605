"""A coordinator under load: 64 agents that poll every second, and 20 updates of one megabyte a second, for a minute.

The coordinator is a process of its own with its ledger on disk, as `fedqueue serve` runs it. The agents are threads of
another process that speak the real protocol: they claim orders, report what a job would have done, upload an update
and commit it. Afterwards the ledger must have every update that was accepted, each with one fate, and replay.
Run as a module with arguments, it is the process of the agents.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure import Figure
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.contract import JobOrder
from fedqueue.protocol.reports import Ended, Handin, Poll, Report, Started, Submitted
from fedqueue.runs import replay

AGENTS = 64
SECONDS = 60.0
UPDATES_PER_SECOND = 20.0
VALUES = 1_000_000 // 4  # float32 of an update


CONFIG = f"""
[run]
name = "load"
strategy = "fedbuff"
seconds = 100000.0

[task]
name = "timing"

[simulator]
model_megabytes = 1.0

[strategy.fedbuff]
steps = 100
buffer = {AGENTS // 4}

[server]
port = 0
"""


class Agent(threading.Thread):
    """One facility's agent, as the coordinator sees it."""

    def __init__(self, url: str, credential: str, number: int, until: float) -> None:
        super().__init__(daemon=True)
        from fedqueue.agent.http_transport import Client

        self._client = Client(url, credential=credential)
        self._journal, self._session = secrets.token_hex(8), secrets.token_hex(8)
        self._number = number
        self._until = until
        self._reported = 0
        self._due = time.monotonic() + number / UPDATES_PER_SECOND  # when its next update is
        self._values = np.random.default_rng(number).random(VALUES, np.float32)
        self.claims: list[float] = []
        self.accepted: list[str] = []
        self.trouble: list[str] = []

    def run(self) -> None:
        time.sleep(self._number / AGENTS)
        waiting: list[JobOrder] = []
        reports: list[Report] = []
        while time.monotonic() < self._until:
            next_poll = time.monotonic() + 1.0
            try:
                known = [job.sequence for job in waiting]
                fresh = [job for job in self._poll(reports, known) if job.sequence not in known]
                reports = [Submitted(n=self._next(), sequence=job.sequence) for job in fresh]
                waiting += fresh
                if waiting and time.monotonic() >= self._due:
                    self._due += AGENTS / UPDATES_PER_SECOND
                    job = waiting.pop(0)
                    which: Any = {"sequence": job.sequence, "attempt": 0}
                    started = Started(n=self._next(), admission_delay=0.5, ago=0.1, **which)
                    ended = Ended(n=self._next(), steps_done=100, train_seconds=2.0, held_seconds=2.0, **which)
                    self._poll([*reports, started, ended], [job.sequence])
                    reports = []
                    self._hand_in(job)
            except Exception as error:
                self.trouble.append(f"{type(error).__name__}: {error}")
            time.sleep(max(0.0, next_poll - time.monotonic()))

    def _next(self) -> int:
        self._reported += 1
        return self._reported

    def _poll(self, reports: list[Report], open_jobs: list[int]) -> list[JobOrder]:
        said = Poll(
            journal=self._journal,
            session=self._session,
            generation=1,
            poll_seconds=1.0,
            open=open_jobs,
            reports=reports,
        )
        began = time.perf_counter()
        answer = self._client.poll(said)
        self.claims.append(time.perf_counter() - began)
        return answer.orders

    def _hand_in(self, job: JobOrder) -> None:
        from fedqueue.tensorfile import write

        assert job.assignment is not None
        self._values[0] = job.sequence
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "update"
            write(path, {"weight": self._values})
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            self._client.upload(path, job.sequence, 0, digest)
        base = job.assignment.base_version
        handin = Handin(base_version=base, steps_done=100, train_seconds=2.0, admission_delay=0.5)
        while (verdict := self._client.commit(job.sequence, 0, digest, handin)).status == "checking":
            pass
        if verdict.status != "accepted":
            self.trouble.append(f"{verdict}")
        else:
            self.accepted.append(f"{self._number}/{job.sequence}")


def agents(url: str, credentials: Path) -> None:
    """All agents in this process; prints what they saw."""
    until = time.monotonic() + SECONDS
    everyone = [Agent(url, word, i, until) for i, word in enumerate(json.loads(credentials.read_text()))]
    for one in everyone:
        one.start()
    for one in everyone:
        one.join()
    print(
        json.dumps(
            {
                "claims": [seconds for one in everyone for seconds in one.claims],
                "accepted": [f"f{job}" for one in everyone for job in one.accepted],
                "trouble": [line for one in everyone for line in one.trouble],
            }
        )
    )


def measure() -> list[Figure]:
    from fedqueue.coordinator.access import Access

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        config = folder / "load.toml"
        config.write_text(CONFIG + "".join(f'\n[[facility]]\nname = "f{i}"\n' for i in range(AGENTS)))
        run = folder / "run"
        run.mkdir()
        access = Access(run)
        words = folder / "credentials.json"
        words.write_text(json.dumps([access.give(f"f{i}") for i in range(AGENTS)]))
        run_server = [sys.executable, "-m", "benchmarks.load", "serve", str(config), str(run)]
        server = subprocess.Popen(run_server, stdout=subprocess.DEVNULL)
        try:
            address = run / "address.json"
            while not address.exists():
                if server.poll() is not None:
                    raise RuntimeError("the coordinator did not start")
                time.sleep(0.05)
            url = json.loads(address.read_text())["url"]
            argv = [sys.executable, "-m", "benchmarks.load", "agents", url, str(words)]
            seen = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        replay(run)
        with LedgerReader(run / FILE) as ledger:
            arrived = [row["job"] for row in ledger.rows("SELECT job FROM events WHERE kind = 'UpdateArrived'")]
            settled = [row["job"] for row in ledger.rows("SELECT job FROM updates")]
    doubled = len(arrived) - len(set(arrived)) + len(settled) - len(set(settled))
    lost = len(set(seen["accepted"]) ^ set(arrived)) + doubled
    claims = sorted(seen["claims"])
    if seen["trouble"]:
        print(f"{len(seen['trouble'])} requests went wrong, the first: {seen['trouble'][0]}")
    rate = len(seen["accepted"]) / SECONDS
    return [
        Figure(f"{AGENTS} agents: claims a second", len(claims) / SECONDS, "/s"),
        Figure(f"{AGENTS} agents: updates of 1 MB a second", rate, "/s", "at least 19"),
        Figure(f"{AGENTS} agents: a claim, median", 1000 * statistics.median(claims), "ms"),
        Figure(f"{AGENTS} agents: a claim, 99 of 100", 1000 * claims[int(0.99 * len(claims))], "ms", "at most 250"),
        Figure(f"{AGENTS} agents: lost, doubled or gone wrong", lost + len(seen["trouble"]), "", "at most 0"),
    ]


def serve(config: Path, folder: Path) -> None:
    """As `fedqueue serve` does, in a folder that has its credentials already."""
    from contextlib import nullcontext

    from fedqueue.cli.common import until_interrupted
    from fedqueue.config import parse, read_tree
    from fedqueue.coordinator.run_folder import store_config
    from fedqueue.coordinator.serve import coordinate

    tree = read_tree(config)
    store_config(folder, tree, config.parent)
    with until_interrupted() as interrupted:
        settings = parse(tree, folder=config.parent)
        coordinate(settings, folder, plain=True, beside=lambda *_: nullcontext(), until=interrupted)


if __name__ == "__main__":
    what, first, second = sys.argv[1:]
    if what == "serve":
        serve(Path(first), Path(second))
    else:
        agents(first, Path(second))
