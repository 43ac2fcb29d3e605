"""How a real run gets on, in numbers that a person asks for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedqueue.runtime.access import Access
    from fedqueue.runtime.coordinator import Coordinator


def status(coordinator: Coordinator, access: Access) -> dict[str, Any]:
    """For `fedqueue status` and whoever else asks."""
    books, strategy = coordinator.books, coordinator.strategy
    if books.stopped is not None:
        state = f"over: {books.stopped}"
    elif not books.started:
        state = "waiting for facilities"
    else:
        state = "paused" if books.paused else "running"
    enrolled = access.enrolled()
    return {
        "run": coordinator.config.run.name,
        "strategy": coordinator.config.run.strategy,
        "state": state,
        "run_seconds": round(coordinator.now, 1),
        "model": books.newest,
        "score": coordinator.tally.score,
        "unscored": len(books.unscored()),
        "folder": str(coordinator.folder),
        "facilities": [
            {
                "name": name,
                "state": _state(coordinator, name, enrolled),
                "heard_seconds_ago": round(time.monotonic() - presence.heard, 1) if presence.ever else None,
                "host": presence.host,
                "jobs": len(books.facilities[name].jobs),
                "ordered": books.facilities[name].ordered,
                "steps_per_second": _rounded(strategy.facilities[name].steps_per_second),
                "expected_delay": _rounded(strategy.forecast(strategy.facilities[name]).mean),
                "overhead": _rounded(strategy.facilities[name].overhead),
            }
            for name, presence in coordinator.presence.items()
        ],
    }


def _state(coordinator: Coordinator, name: str, enrolled: set[str]) -> str:
    book = coordinator.books.facilities[name]
    if name not in enrolled:
        return "not enrolled"
    if not coordinator.presence[name].ever and not book.ordered:
        return "not seen yet"
    if book.drained:
        return "drained"
    return "away" if book.away else coordinator.strategy.facilities[name].status


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
