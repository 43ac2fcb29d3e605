"""Follows the ledger of a run, which may be growing: the run's one state, and views of it, as far as it was read."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any, Final

from fedqueue.coordinator.status import Known, status_of
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.page.history import History
from fedqueue.protocol.service import RunStatus
from fedqueue.protocol.state import Outcomes
from fedqueue.report.data import follow, nodes_of, parse_command, round_length_of

AT_ONCE: Final = 4000
"""Events that are read before others get a look in."""
HEARTBEAT_LASTS: Final = 10.0
"""Seconds: whose heartbeat is older is not at work."""


class Follower:
    """One thread at a time may have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = {}
        self.heartbeat: dict[str, float] | None = None
        self.stopped_as: str | None = None
        self.newest = -1  # number of an event that is there
        self._begin()

    def _begin(self) -> None:
        with LedgerReader(self.folder / FILE) as ledger:
            self.meta = ledger.meta
        self.state, self.jobs, self.tally = follow(self.meta)
        self.nodes = nodes_of(self.meta)
        self.outcomes = Outcomes(self.state, self.meta.get("first_model", ""))
        self.history = History(self.state, self.jobs, self.nodes)
        self.round_length = round_length_of(self.meta)
        self.read = -1  # number of the newest event that was read

    @property
    def share(self) -> float:
        """Of the ledger, read so far."""
        return (self.read + 1) / (self.newest + 1) if self.newest >= 0 else 1.0

    @property
    def simulated(self) -> bool:
        return bool(self.meta["driver"] == "simulation")

    @property
    def at_work(self) -> bool:
        """Whether a coordinator of it lives, as far as its ledger tells."""
        return self.heartbeat is not None and time.time() - self.heartbeat["wall"] < HEARTBEAT_LASTS

    @property
    def now(self) -> float:
        """On the run clock."""
        if self.heartbeat is None or self.state.stopped is not None:
            return self.state.at
        at = self.heartbeat["clock"]
        if self.at_work and not self.state.held and self.state.started:
            at += max(0.0, time.time() - self.heartbeat["wall"])
        return max(at, self.state.at)

    def catch_up(self) -> bool:
        """Read on; False: all that was there is read."""
        with LedgerReader(self.folder / FILE) as ledger:
            newest = int(ledger.rows("SELECT coalesce(max(seq), -1) AS seq FROM events")[0]["seq"])
            if newest < self.read or ledger.meta.get("run") != self.meta.get("run"):  # another lies there now
                self._begin()
            self.newest = newest
            self.heartbeat = ledger.meta.get("heartbeat")
            self.stopped_as = ledger.meta.get("stopped")
            if newest == self.read:
                return False
            for event, wanted in islice(ledger.steps(self.read), AT_ONCE):
                self.state(event, [parse_command(kind, text) for kind, text in wanted])
                self.read += 1
            self.history.take_in()
            return self.read < newest

    def status(self) -> RunStatus:
        """As far as the ledger knows."""
        config = self.meta["config"]["run"]
        return status_of(
            Known(
                name=config["name"],
                folder=self.folder,
                state=self.state,
                tally=self.tally,
                outcomes=self.outcomes,
                strategy_name=self.meta["strategy"],
                now=self.now,
            )
        )
