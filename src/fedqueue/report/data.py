"""A run as plots and pages need it, read from its ledger into small dataclasses. Times are seconds on the run clock.

>>> read_run(Path("runs/timing")).facilities  # doctest: +SKIP
('first', 'second', 'third', 'fourth')
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from fedqueue.errors import RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.metrics import Tally
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import Spent, facility_of
from fedqueue.protocol.messages import Command, parse
from fedqueue.protocol.state import RunState
from fedqueue.runs import SUMMARY

Curve = Sequence[tuple[float, float]]
"""(virtual seconds, score) of every model that was scored, in order."""

Outcome = Literal["ended", "failed", "requeued", "open"]
"""How a stretch of running stopped; open: the run was over first."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job, and the wait before it."""

    eligible_at: float
    started_at: float
    stopped_at: float
    held_seconds: float  # that its nodes were held; by its own clock, once it has stopped
    admission_delay: float
    lingered: float  # seconds it held its nodes before it took its work
    outcome: Outcome
    pauses: tuple[tuple[float, float], ...] = ()  # from and until when it held them between two parts without work
    idle_seconds: float = 0.0  # that it held them without work, in all


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """One job that a scheduler took."""

    facility: str
    submitted_at: float
    closed_at: float  # its update arrived, or it failed, or the run was over
    expected_delay: float | None  # the forecast it was ordered with
    attempts: tuple[Attempt, ...]
    waits_since: float | None  # in the queue, again or still, when it closed
    failed: bool
    steps: int  # done


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
        return _round_length(self.meta)

    @cached_property
    def facilities(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    @cached_property
    def nodes(self) -> dict[str, int]:
        return _nodes(self.meta)


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
    end = float(ledger.rows("SELECT coalesce(max(at), 0) AS at FROM events")[0]["at"])
    summary, recounted = _summary(folder, ledger)
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
        jobs=_jobs(ledger, end),
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


def _summary(folder: Path, ledger: LedgerReader) -> tuple[Mapping[str, Any], str | None]:
    """The summary that the run left; without one, the same figures counted again from the ledger."""
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found, None
        why = f"{SUMMARY} holds no summary"
    except FileNotFoundError:
        why = f"{SUMMARY} is missing"
    except (OSError, ValueError) as error:
        why = f"{SUMMARY} cannot be read ({error})"
    meta = ledger.meta
    targets = meta["config"]["run"]["targets"]
    nodes = _nodes(meta)
    state = RunState(list(nodes))
    tally = Tally(state, round_length=_round_length(meta), nodes=nodes, targets=targets)
    for event, wanted in ledger.steps():
        commands: list[Command] = [parse(kind, json.loads(text)) for kind, text in wanted]  # type: ignore[misc]
        state(event, commands)
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


def _jobs(ledger: LedgerReader, end: float) -> tuple[ReportedJob, ...]:
    stays = {row["job"]: row["steps"] for row in ledger.rows(_STAYS)}
    closings: dict[
        str, tuple[float, bool]
    ] = {}  # when, and whether by a failure; the first counts, or if it stays the last
    stops: dict[tuple[str, int], Outcome] = {}  # by the attempt that stopped
    for row in _job_events(ledger, "JobRequeued", "JobEnded", "JobFailed", "UpdateArrived", "UpdateRejected"):
        job, kind, attempt = row["job"], row["kind"], row["attempt"]
        if kind == "JobRequeued":
            stops[job, attempt - 1] = "requeued"  # the event names the attempt that waits now
        elif kind == "JobEnded":
            stops[job, attempt] = "ended"
        elif job in stays:
            closings[job] = row["at"], kind == "JobFailed"
        else:
            closings.setdefault(job, (row["at"], kind != "UpdateArrived"))
        if kind == "JobFailed":
            stops.setdefault((job, attempt), "failed")
    pauses: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in ledger.rows(_PAUSES):
        pauses[row["job"], row["attempt"]].append((row["since"], row["until"]))
    idle = {(row["job"], row["attempt"]): row["idle"] for row in ledger.rows(_IDLE)}
    attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
    for row in ledger.rows("SELECT * FROM incarnations ORDER BY job, attempt"):
        attempts[row["job"]].append(
            Attempt(
                eligible_at=row["eligible_at"],
                started_at=row["started_at"],
                stopped_at=end if row["stopped_at"] is None else row["stopped_at"],
                held_seconds=end - row["started_at"] if row["held_seconds"] is None else row["held_seconds"],
                admission_delay=row["admission_delay"],
                lingered=row["lingered"],
                outcome=stops.get((row["job"], row["attempt"]), "open"),
                pauses=tuple(pauses[row["job"], row["attempt"]]),
                idle_seconds=idle.get((row["job"], row["attempt"]), 0.0),
            )
        )
    return tuple(
        _job(
            row,
            tuple(attempts[row["job"]]),
            *_closing(row["job"], attempts, closings, stays, end),
            stays.get(row["job"]),
        )
        for row in ledger.rows("SELECT * FROM jobs WHERE submitted_at IS NOT NULL ORDER BY submitted_at")
        for job in [row["job"]]
    )


def _closing(
    job: str,
    attempts: Mapping[str, Sequence[Attempt]],
    closings: Mapping[str, tuple[float, bool]],
    stays: Collection[str],
    end: float,
) -> tuple[float, bool]:
    """When a job was over, and whether by a failure. One that stays holds its nodes after its last update, too."""
    closed_at, failed = closings.get(job, (end, False))
    if job in stays and attempts.get(job):
        closed_at = max(closed_at, attempts[job][-1].stopped_at)
    return closed_at, failed


def _job(
    row: sqlite3.Row, attempts: tuple[Attempt, ...], closed_at: float, failed: bool, steps_of_parts: int | None
) -> ReportedJob:
    waits_since = row["submitted_at"]
    if attempts:
        last = attempts[-1]
        waits_since = last.stopped_at if last.outcome == "requeued" else None
    return ReportedJob(
        facility=row["facility"],
        submitted_at=row["submitted_at"],
        closed_at=closed_at,
        expected_delay=row["expected_delay"],
        attempts=attempts,
        waits_since=waits_since,
        failed=failed,
        steps=steps_of_parts or row["steps_done"] or 0,
    )


_STAYS: Final = """
SELECT c.job, (SELECT sum(json_extract(e.body, '$.receipt.steps_done')) FROM events e
                WHERE e.job = c.job AND e.kind = 'UpdateArrived') AS steps
FROM commands c WHERE c.kind = 'SubmitJob' AND json_extract(c.body, '$.order.stay') IS NOT NULL
"""
_TAKEN: Final = """
SELECT seq, job, json_extract(body, '$.attempt') AS attempt, at - json_extract(body, '$.ago') AS until,
       max(0, json_extract(body, '$.waited') - coalesce(json_extract(body, '$.ahead_seconds'), 0)) AS idle
FROM events WHERE kind = 'WorkTaken'
"""
_PAUSES: Final = f"SELECT job, attempt, until - idle AS since, until FROM ({_TAKEN}) ORDER BY seq"
_IDLE: Final = f"""
SELECT job, attempt, sum(idle) AS idle FROM (
    SELECT job, attempt, idle FROM ({_TAKEN})
    UNION ALL SELECT job, attempt, lingered FROM incarnations
    UNION ALL SELECT job, json_extract(body, '$.attempt'), coalesce(json_extract(body, '$.idle_seconds'), 0)
              FROM events WHERE kind = 'JobEnded'
    UNION ALL SELECT job, json_extract(body, '$.receipt.attempt'),
                     coalesce(json_extract(body, '$.receipt.turn_seconds'), 0)
              FROM events WHERE kind = 'UpdateArrived' AND json_extract(body, '$.receipt.part') > 0
) GROUP BY job, attempt
"""


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


def _round_length(meta: Mapping[str, Any]) -> float:
    """T in seconds: the strategy's own, or else the run's."""
    return float(meta["options"].get("round_length") or meta["plan"]["round_length"])


def _nodes(meta: Mapping[str, Any]) -> dict[str, int]:
    """Nodes of each facility, in the order of the plan."""
    return {profile["name"]: int(profile["nodes"]) for profile in meta["plan"]["facilities"]}
