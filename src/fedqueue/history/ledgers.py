"""The jobs of our own runs, real or simulated, from their ledgers: every incarnation that started is a job."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from pathlib import Path

from fedqueue.errors import ConfigError
from fedqueue.history.lines import NEVER_STARTED, LoggedJob, Options, Tally
from fedqueue.ledger import FILE, LedgerReader

_STARTED = """
SELECT i.eligible_at, i.admission_delay, i.started_at, i.stopped_at, i.held_seconds, j.wall_seconds, j.facility
FROM incarnations i JOIN jobs j USING (job) ORDER BY i.eligible_at
"""


def ledger_of(path: Path) -> Path | None:
    """The ledger in a run folder, or the file itself if it is one; None: neither."""
    if path.is_dir():
        return path / FILE if (path / FILE).is_file() else None
    with path.open("rb") as file:
        return path if file.read(16) == b"SQLite format 3\0" else None


def ledger_jobs(path: Path, options: Options, tally: Tally) -> Iterator[LoggedJob]:
    """Times are of the run clock, whose second 0 has no Unix time. Processors are the facility's nodes."""
    tally.format, tally.counts = "ledger", "nodes"
    with LedgerReader(path) as ledger:
        nodes = {profile["name"]: profile["nodes"] for profile in ledger.meta["plan"]["facilities"]}
        wanted = options.facility
        if wanted is not None and wanted not in nodes:
            raise ConfigError(f"--facility {wanted}: {path} has {', '.join(nodes)}")
        ordered = ledger.rows("SELECT job, facility FROM jobs WHERE started_at IS NULL")
        tally.dropped[NEVER_STARTED] += sum(wanted in (None, row["facility"]) for row in ordered)
        for row in ledger.rows(_STARTED):
            if wanted not in (None, row["facility"]):
                continue
            ran = row["held_seconds"]
            if ran is None:
                ran = nan if row["stopped_at"] is None else row["stopped_at"] - row["started_at"]
            tally.jobs += 1
            yield (
                row["eligible_at"],
                max(row["admission_delay"], 0.0),
                ran if ran >= 0 else nan,
                row["wall_seconds"],
                nodes[row["facility"]],
            )
