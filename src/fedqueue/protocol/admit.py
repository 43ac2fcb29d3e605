"""Which updates a cutoff takes: those that arrived, less those too stale to use."""

from __future__ import annotations

from dataclasses import dataclass

from fedqueue.protocol.contract import Receipt


@dataclass(frozen=True, slots=True)
class Update:
    """An update that arrived and waits for its cutoff."""

    receipt: Receipt
    facility: str
    arrived_at: float
    aimed: bool  # it aimed at a cutoff
    deferred: bool  # it missed that cutoff

    def staleness(self, version: int) -> int:
        """tau: how many versions the model has moved on, if it is used to change this version."""
        return version - self.receipt.base_version


class Buffer:
    """B: updates in order of arrival. Each leaves it once."""

    def __init__(self) -> None:
        self._waiting: list[Update] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, update: Update) -> None:
        self._waiting.append(update)

    def take(self, version: int, max_staleness: int | None = None) -> tuple[list[Update], list[Update]]:
        """Empties the buffer into (admitted, expired): a cutoff that changes `version` takes what has arrived."""
        waiting, self._waiting = self._waiting, []
        if max_staleness is None:
            return waiting, []
        admitted = [u for u in waiting if u.staleness(version) <= max_staleness]
        return admitted, [u for u in waiting if u.staleness(version) > max_staleness]
