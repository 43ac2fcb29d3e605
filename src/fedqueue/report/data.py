"""A run as plots and pages need it, read from its ledger into small dataclasses. Times are seconds on the run clock.

>>> read_run(Path("runs/timing")).facilities  # doctest: +SKIP
('first', 'second', 'third', 'fourth')
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from fedqueue.errors import RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.metrics import Tally
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import Spent, facility_of
from fedqueue.protocol.messages import Command, parse
from fedqueue.protocol.state import RunState
from fedqueue.report.jobs import Jobs, ReportedJob
from fedqueue.runs import SUMMARY

Curve = Sequence[tuple[float, float]]
"""(virtual seconds, score) of every model that was scored, in order."""


@dataclass(frozen=True, slots=True)
class Update:
    facility: str
    fate: str
    deferred: bool
    staleness: int | None


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that went wrong with a job; `what` is a word for it, `reason` free text from outside."""

    at: float
    facility: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Absence:
    """A stretch without new work: the facility was out of reach, or suspended. `until` None: it never came back."""

    facility: str
    at: float
    until: float | None
    reason: str


@dataclass(frozen=True)
class Run:
    folder: Path
    meta: Mapping[str, Any]  # as the ledger has it: config, plan, options, version, seed
    summary: Mapping[str, Any]
    recounted: str | None  # why the summary was counted again from the ledger
    end: float
    scores: tuple[tuple[float, float], ...]
    cutoffs: tuple[float, ...]  # empty: the strategy has none
    models: tuple[float, ...]  # when each was ready
    jobs: tuple[ReportedJob, ...]
    updates: tuple[Update, ...]
    troubles: tuple[Trouble, ...]
    outages: tuple[Absence, ...]
    suspensions: tuple[Absence, ...]
    spent: Mapping[str, Spent]  # by facility, with its newest update; of those that keep an account of their privacy

    @property
    def name(self) -> str:
        return str(self.meta["config"]["run"]["name"])

    @property
    def strategy(self) -> str:
        return str(self.meta["strategy"])

    @property
    def seed(self) -> int:
        return int(self.meta["seed"])

    @property
    def simulated(self) -> bool:
        return bool(self.meta["driver"] == "simulation")

    @property
    def stopped(self) -> str | None:
        """Why it stopped; None: it was cut off, or goes on."""
        reason = self.meta.get("stopped")
        return None if reason is None else str(reason)

    @property
    def targets(self) -> list[float]:
        return [float(target) for target in self.meta["config"]["run"]["targets"]]

    @property
    def round_length(self) -> float:
        return round_length_of(self.meta)

    @cached_property
    def facilities(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    @cached_property
    def nodes(self) -> dict[str, int]:
        return nodes_of(self.meta)


def read_run(folder: Path) -> Run:
    """The run in this folder, finished, cut off or going on; a `RunFolderError` if there is none."""
    with LedgerReader(folder / FILE) as ledger:
        try:
            return _read(folder, ledger)
        except sqlite3.DatabaseError as error:
            raise RunFolderError(f"{ledger.path}: is damaged: {error}") from None
        except LookupError as error:
            raise RunFolderError(f"{ledger.path}: is of another build: {error}") from None


def _read(folder: Path, ledger: LedgerReader) -> Run:
    state, jobs, tally = follow(ledger.meta)
    for event, wanted in ledger.steps():
        state(event, [parse_command(kind, text) for kind, text in wanted])
    end = state.at
    summary, recounted = _summary(folder, ledger.meta, tally)
    return Run(
        folder=folder,
        meta=ledger.meta,
        summary=summary,
        recounted=recounted,
        end=end,
        scores=tuple(
            (row["scored_at"], row["score"])
            for row in ledger.rows("SELECT * FROM scores WHERE score IS NOT NULL ORDER BY scored_at")
        ),
        cutoffs=_cutoffs(ledger),
        models=tuple(row["ready_at"] for row in ledger.rows("SELECT ready_at FROM models ORDER BY ready_at")),
        jobs=tuple(jobs.all(end)),
        updates=tuple(
            Update(facility_of(row["job"]), row["fate"], bool(row["deferred"]), row["staleness"])
            for row in ledger.rows("SELECT * FROM updates ORDER BY settled_at")
        ),
        troubles=tuple(
            Trouble(row["at"], facility_of(row["job"]), _TROUBLES[row["kind"]], row["reason"])
            for row in _job_events(ledger, *_TROUBLES)
        ),
        outages=_absences(ledger, _LEFT),
        suspensions=_absences(ledger, _SUSPENDED),
        spent={
            facility_of(row["job"]): read(Spent, json.loads(row["spent"]), "receipt.spent")
            for row in ledger.rows(
                """SELECT job, json_extract(body, '$.receipt.spent') AS spent FROM events
                   WHERE kind = 'UpdateArrived' AND spent IS NOT NULL ORDER BY seq"""
            )
        },
    )


_TROUBLES: Final = {
    "JobFailed": "job failed",
    "JobRequeued": "job requeued",
    "SubmitRefused": "submission refused",
    "UpdateRejected": "update rejected",
}


def follow(meta: Mapping[str, Any]) -> tuple[RunState, Jobs, Tally]:
    """The state of the run of this ledger before its first event, and two views of it."""
    nodes = nodes_of(meta)
    state = RunState(list(nodes))
    jobs = Jobs(state)
    targets = meta["config"]["run"]["targets"]
    return state, jobs, Tally(state, round_length=round_length_of(meta), nodes=nodes, targets=targets)


def parse_command(kind: str, text: str) -> Command:
    command: Command = parse(kind, json.loads(text))  # type: ignore[assignment]  # the commands table holds commands
    return command


def _summary(folder: Path, meta: Mapping[str, Any], tally: Tally) -> tuple[Mapping[str, Any], str | None]:
    """The summary that the run left; without one, the same figures as they were counted from the ledger."""
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found, None
        why = f"{SUMMARY} holds no summary"
    except FileNotFoundError:
        why = f"{SUMMARY} is missing"
    except (OSError, ValueError) as error:
        why = f"{SUMMARY} cannot be read ({error})"
    counted = tally.summary(strategy=meta["strategy"], seed=meta["seed"], wall_seconds=0.0)
    return {**counted, "wall_seconds": None}, why  # the ledger does not know how long the computer took


def _cutoffs(ledger: LedgerReader) -> tuple[float, ...]:
    """When each round was closed, for strategies that set cutoffs. The timers only tell which strategies those are: a
    round that closes early leaves its timer behind, to fire later."""
    if not ledger.rows(
        "SELECT 1 FROM events WHERE kind = 'TimerFired' AND json_extract(body, '$.key') LIKE 'cutoff/%' LIMIT 1"
    ):
        return ()
    rows = ledger.rows(
        """SELECT min(e.at) AS at FROM commands c JOIN events e USING (seq)
           WHERE c.kind = 'Aggregate' GROUP BY json_extract(c.body, '$.to_version') ORDER BY 1"""
    )
    return tuple(row["at"] for row in rows)


def _job_events(ledger: LedgerReader, *kinds: str) -> list[sqlite3.Row]:
    marks = ", ".join("?" * len(kinds))
    return ledger.rows(
        f"""SELECT at, kind, job, json_extract(body, '$.attempt') AS attempt, json_extract(body, '$.reason') AS reason
            FROM events WHERE kind IN ({marks}) ORDER BY seq""",
        *kinds,
    )


_LEFT: Final = """
SELECT at, kind = 'FacilityLeft' AS begins, json_extract(body, '$.facility') AS facility, 'out of reach' AS reason
FROM events WHERE kind IN ('FacilityLeft', 'FacilityJoined') ORDER BY seq
"""
_SUSPENDED: Final = """
SELECT e.at, json_extract(c.body, '$.kind') = 'suspended' AS begins,
       json_extract(c.body, '$.facts.facility') AS facility, json_extract(c.body, '$.facts.reason') AS reason
FROM commands c JOIN events e USING (seq)
WHERE c.kind = 'Record' AND json_extract(c.body, '$.kind') IN ('suspended', 'rejoined') ORDER BY c.seq, c.place
"""


def _absences(ledger: LedgerReader, query: str) -> tuple[Absence, ...]:
    begun: dict[str, tuple[float, str]] = {}
    found: list[Absence] = []
    for row in ledger.rows(query):
        if row["begins"]:
            begun.setdefault(row["facility"], (row["at"], row["reason"]))
        elif row["facility"] in begun:
            at, reason = begun.pop(row["facility"])
            found.append(Absence(row["facility"], at, row["at"], reason))
    found += [Absence(facility, at, None, reason) for facility, (at, reason) in begun.items()]
    return tuple(sorted(found, key=lambda absence: absence.at))


def round_length_of(meta: Mapping[str, Any]) -> float:
    """T in seconds: the strategy's own, or else the run's."""
    return float(meta["options"].get("round_length") or meta["plan"]["round_length"])


def nodes_of(meta: Mapping[str, Any]) -> dict[str, int]:
    """Nodes of each facility, in the order of the plan."""
    return {profile["name"]: int(profile["nodes"]) for profile in meta["plan"]["facilities"]}
