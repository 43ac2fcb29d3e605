"""What a federation's runs have learnt of its sites, for the next one: waits, speeds and overheads outlive a run.

Read from the ledgers: each is fed to its strategy once more, which then knows what it knew. Speeds and overheads are of
an offer, waits of the site whoever asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Final

from fedqueue.errors import FedQueueError
from fedqueue.files import write_json
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.codec import message, read
from fedqueue.protocol.messages import Command, Event, JobStarted
from fedqueue.protocol.state import JobState
from fedqueue.runs import rebuild_strategy

LEARNED: Final = "learned.json"
"""In a run's folder: what was known when it began."""
FRESH_SECONDS: Final = 14 * 86400.0
"""A run that ended longer ago says nothing: queues and machines change."""
MOST_RUNS: Final = 10
"""The newest of an offer, and the newest of all, that are looked at."""
MOST_WAITS: Final = 64
"""Of a site, the newest."""


@message
class Learned:
    """Of one facility."""

    steps_per_second: float | None = None
    overhead: float | None = None  # seconds of a job that are not training
    first_delay: float | None = None  # expected, as the newest run would
    waits: list[tuple[float, float]] = field(default_factory=list)  # (wall time asked for, wait), the oldest first


def read_learned(folder: Path) -> dict[str, Learned]:
    try:
        found = json.loads((folder / LEARNED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {name: read(Learned, given, LEARNED) for name, given in found.items()}


def write_learned(folder: Path, runs: Iterable[tuple[Path, str]], offer: str) -> None:
    """Into the folder of a run that is about to begin, from these others, each with the offer that it used."""
    write_json(folder / LEARNED, learned_of(runs, offer))


def learned_of(runs: Iterable[tuple[Path, str]], offer: str) -> dict[str, Learned]:
    """By facility."""
    dated = [(when, folder, used) for folder, used in runs if (when := _newest_entry(folder)) is not None]
    fresh = sorted((found for found in dated if time.time() - found[0] <= FRESH_SECONDS), reverse=True)
    alike = [folder for _, folder, used in fresh if used == offer][:MOST_RUNS]
    everyone = [folder for _, folder, _ in fresh][:MOST_RUNS]
    known = {folder: _in_run(folder) for folder in {*alike, *everyone}}
    made: dict[str, Learned] = {}
    for name in sorted({name for found in known.values() for name in found}):
        speeds = [known[folder][name] for folder in alike if name in known[folder]]
        waits = [known[folder][name] for folder in everyone if name in known[folder]]
        made[name] = Learned(
            steps_per_second=next((one.steps_per_second for one in speeds if one.steps_per_second is not None), None),
            overhead=next((one.overhead for one in speeds if one.overhead is not None), None),
            first_delay=next((one.first_delay for one in waits if one.first_delay is not None), None),
            waits=[pair for one in reversed(waits) for pair in one.waits][-MOST_WAITS:],
        )
    return made


def _newest_entry(folder: Path) -> float | None:
    with suppress(OSError):
        return max(path.stat().st_mtime for path in folder.glob(f"{FILE}*"))
    return None


def _in_run(folder: Path) -> Mapping[str, Learned]:
    """What its strategy knows now; nothing if its ledger cannot be read."""
    waits: dict[str, list[tuple[float, float]]] = {}

    def look(told: Event | Command, job: JobState | None) -> None:
        if isinstance(told, JobStarted) and job is not None:
            waits.setdefault(job.order.facility, []).append((job.wall_seconds, told.admission_delay))

    try:
        with LedgerReader(folder / FILE) as ledger:
            strategy = rebuild_strategy(ledger.meta)
            strategy.state.views.append(look)
            for event, _ in ledger.steps():
                strategy.handle(event)
    except FedQueueError:
        return {}
    return {
        name: Learned(
            steps_per_second=facility.steps_per_second,
            overhead=facility.overhead if facility.steps_per_second is not None else None,
            first_delay=strategy.forecast(facility).mean if name in waits else None,
            waits=waits.get(name, []),
        )
        for name, facility in strategy.facilities.items()
    }
