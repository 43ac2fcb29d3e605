"""A server under load: 64 agents that poll every second, and 20 updates of one megabyte a second, for a minute. With
one run, and with eight at once in a federation.

The server is `fedqueue serve`, with its ledgers on disk. The agents are threads of another process that speak the real
protocol: they take orders, report what a job would have done, upload an update and commit it. Afterwards the ledgers
must have every update that was accepted, each with one fate, and replay. Run as a module with arguments, it is the
process of the agents.
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
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.figure import Figure
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.contract import Answer, JobOrder, Trained
from fedqueue.protocol.reports import Ended, Handin, Poll, Report, Started, Submitted
from fedqueue.protocol.service import Offer, SitePoll
from fedqueue.runs import replay

if TYPE_CHECKING:
    from fedqueue.agent.http_transport import Client

AGENTS = 64
RUNS = 8
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
"""


class Talk:
    """What one agent says in one run."""

    def __init__(self, client: Client, run: str) -> None:
        self.client, self.run = client, run
        self.waiting: list[JobOrder] = []
        self._journal, self._session = secrets.token_hex(8), secrets.token_hex(8)
        self._reported = 0
        self._reports: list[Report] = []

    def poll(self) -> Poll:
        return Poll(
            run=self.run,
            journal=self._journal,
            session=self._session,
            generation=1,
            poll_seconds=1.0,
            open=[job.sequence for job in self.waiting],
            reports=self._reports,
        )

    def answered(self, answer: Answer) -> None:
        known = [job.sequence for job in self.waiting]
        fresh = [job for job in answer.orders if job.sequence not in known]
        self._reports = [Submitted(n=self._next(), sequence=job.sequence) for job in fresh]
        self.waiting += fresh

    def end(self, job: JobOrder) -> None:
        """It has run; the next poll says so."""
        which: Any = {"sequence": job.sequence, "attempt": 0}
        started = Started(n=self._next(), admission_delay=0.5, ago=0.1, **which)
        ended = Ended(n=self._next(), steps_done=100, train_seconds=2.0, held_seconds=2.0, **which)
        self._reports += [started, ended]

    def _next(self) -> int:
        self._reported += 1
        return self._reported


class Agent(threading.Thread):
    """One facility's agent, as the server sees it; without `runs` there is one, and a server of its own."""

    def __init__(self, url: str, credential: str, number: int, until: float, runs: Sequence[str]) -> None:
        super().__init__(daemon=True)
        from fedqueue.agent.http_transport import Client

        self._client = Client(url, credential=credential)
        self._talks = [Talk(self._client.of(run), run) for run in runs] or [Talk(self._client, "")]
        self._in_federation = bool(runs)
        self._number = number
        self._until = until
        self._due = time.monotonic() + number / UPDATES_PER_SECOND  # when its next update is
        self._values = np.random.default_rng(number).random(VALUES, np.float32)
        self.claims: list[float] = []
        self.accepted: list[tuple[str, str]] = []
        self.trouble: list[str] = []

    def run(self) -> None:
        time.sleep(self._number / AGENTS)
        while time.monotonic() < self._until:
            next_poll = time.monotonic() + 1.0
            try:
                self._poll(self._talks)
                if time.monotonic() >= self._due:
                    talk = max(self._talks, key=lambda talk: len(talk.waiting))
                    if talk.waiting:
                        self._due += AGENTS / UPDATES_PER_SECOND
                        job = talk.waiting[0]
                        talk.end(job)
                        self._poll([talk])
                        talk.waiting.remove(job)
                        self._hand_in(talk, job)
            except Exception as error:
                self.trouble.append(f"{type(error).__name__}: {error}")
            time.sleep(max(0.0, next_poll - time.monotonic()))

    def _poll(self, talks: Sequence[Talk]) -> None:
        began = time.perf_counter()
        if self._in_federation:
            said = SitePoll(poll_seconds=1.0, offers=[Offer(name="default")], runs=[talk.poll() for talk in talks])
            answers = [(found.answer, found.reason) for found in self._client.poll_all(said).answers]
        else:
            answers = [(talk.client.poll(talk.poll()), "") for talk in talks]
        self.claims.append(time.perf_counter() - began)
        for talk, (answer, reason) in zip(talks, answers, strict=True):
            if answer is None:
                raise RuntimeError(reason)
            talk.answered(answer)

    def _hand_in(self, talk: Talk, job: JobOrder) -> None:
        from fedqueue.tensorfile import write

        assert job.assignment is not None
        self._values[0] = job.sequence
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "update"
            write(path, {"weight": self._values})
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            talk.client.upload(path, job.sequence, 0, digest)
        trained = Trained(base_version=job.assignment.base_version, steps_done=100, train_seconds=2.0)
        handin = Handin(trained=trained, admission_delay=0.5, run=talk.run)
        while (verdict := talk.client.commit(job.sequence, 0, digest, handin)).status == "checking":
            pass
        if verdict.status != "accepted":
            self.trouble.append(f"{verdict}")
        else:
            self.accepted.append((talk.run, f"f{self._number}/{job.sequence}"))


def agents(url: str, credentials: Path, runs: Sequence[str]) -> None:
    """All agents in this process; prints what they saw."""
    until = time.monotonic() + SECONDS
    everyone = [Agent(url, word, i, until, runs) for i, word in enumerate(json.loads(credentials.read_text()))]
    for one in everyone:
        one.start()
    for one in everyone:
        one.join()
    print(
        json.dumps(
            {
                "claims": [seconds for one in everyone for seconds in one.claims],
                "accepted": [key for one in everyone for key in one.accepted],
                "trouble": [line for one in everyone for line in one.trouble],
            }
        )
    )


def measure() -> list[Figure]:
    return [*_measure("one run", 0), *_measure(f"{RUNS} runs of a federation", RUNS)]


def _measure(what: str, number: int) -> list[Figure]:
    from fedqueue.coordinator.access import Access

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "served"
        folder.mkdir(mode=0o700)
        runs = _lay_out(folder, number)
        access = Access(folder)
        words = Path(home) / "credentials.json"
        words.write_text(json.dumps([access.give(f"f{i}") for i in range(AGENTS)]))
        server = subprocess.Popen(
            [sys.executable, "-m", "fedqueue", "serve", str(folder), "--plain-http"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            addresses = [run / "address.json" for run in (folder, *runs.values())]
            while not all(address.exists() for address in addresses):
                if server.poll() is not None:
                    raise RuntimeError("the coordinator did not start")
                time.sleep(0.05)
            url = json.loads(addresses[0].read_text())["url"]
            argv = [sys.executable, "-m", "benchmarks.load", url, str(words), *(runs if number else [])]
            seen = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        lost = sum(
            _lost(run, [job for there, job in seen["accepted"] if there in ("", name)]) for name, run in runs.items()
        )
    claims = sorted(seen["claims"])
    if seen["trouble"]:
        print(f"{len(seen['trouble'])} requests went wrong, the first: {seen['trouble'][0]}")
    rate = len(seen["accepted"]) / SECONDS
    who = f"{AGENTS} agents, {what}"
    return [
        Figure(f"{who}: polls a second", len(claims) / SECONDS, "/s"),
        Figure(f"{who}: updates of 1 MB a second", rate, "/s", "at least 19"),
        Figure(f"{who}: a poll, median", 1000 * statistics.median(claims), "ms"),
        Figure(f"{who}: a poll, 99 of 100", 1000 * claims[int(0.99 * len(claims))], "ms", "at most 250"),
        Figure(f"{who}: lost, doubled or gone wrong", lost + len(seen["trouble"]), "", "at most 0"),
    ]


def _lay_out(folder: Path, number: int) -> dict[str, Path]:
    """One run in this folder, or so many in a federation: their folders, by what tells runs apart."""
    from fedqueue.coordinator.run_folder import RUNS as BELOW
    from fedqueue.coordinator.run_folder import SETTINGS, ensure_ledger, store_config, stored_config

    if number:
        (folder / SETTINGS).write_text("[server]\nport = 0\n")
    found = {}
    for run in [folder / BELOW / f"run-{n}" for n in range(number)] or [folder]:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        tree = tomllib.loads(CONFIG + "".join(f'[[facility]]\nname = "f{i}"\n' for i in range(AGENTS)))
        if not number:
            tree["server"] = {"port": 0}
        store_config(run, tree, folder)
        ensure_ledger(stored_config(run), run)
        with LedgerReader(run / FILE) as ledger:
            found[str(ledger.meta["run"])] = run
    return found


def _lost(run: Path, accepted: Sequence[str]) -> int:
    """How many updates the ledger does not have as they were accepted."""
    replay(run)
    with LedgerReader(run / FILE) as ledger:
        arrived = [row["job"] for row in ledger.rows("SELECT job FROM events WHERE kind = 'UpdateArrived'")]
        settled = [row["job"] for row in ledger.rows("SELECT job FROM updates")]
    doubled = len(arrived) - len(set(arrived)) + len(settled) - len(set(settled))
    return len(set(accepted) ^ set(arrived)) + doubled


if __name__ == "__main__":
    agents(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
