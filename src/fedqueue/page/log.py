"""The event log of a run, read from its ledger a page at a time, newest first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fedqueue.ledger import LedgerReader
from fedqueue.protocol.contract import facility_of

ROWS: Final = 100
LONGEST_TEXT: Final = 400

WORDS: Final[dict[str, str]] = {
    "RunStarted": "run began",
    "RunPaused": "run paused",
    "RunResumed": "run goes on",
    "StopRequested": "stop asked for",
    "RolledBack": "models taken back",
    "CoordinatorResumed": "coordinator back",
    "FacilityJoined": "facility is here",
    "FacilityLeft": "facility is away",
    "FacilityDrained": "facility drained",
    "ForecastIssued": "forecast",
    "NodeHoursTold": "node-hours left",
    "JobSubmitted": "job queued",
    "SubmitRefused": "job refused",
    "JobStarted": "job started",
    "WorkTaken": "next part taken",
    "JobRequeued": "job queued again",
    "JobEnded": "job ended",
    "JobFailed": "job failed",
    "UpdateArrived": "update arrived",
    "UpdateRejected": "update rejected",
    "UpdatesWithdrawn": "updates withdrawn",
    "ModelReady": "model ready",
    "ModelScored": "model scored",
    "TimerFired": "timer",
    "suspended": "facility suspended",
    "rejoined": "facility works again",
    "StopRun": "run over",
}
"""What happened, as people say it, by the kind in the ledger."""

TROUBLE: Final = (
    *("RunPaused", "RolledBack", "CoordinatorResumed", "FacilityLeft", "FacilityDrained", "SubmitRefused"),
    *("JobRequeued", "JobFailed", "UpdateRejected", "UpdatesWithdrawn", "suspended"),
)
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "trouble": TROUBLE,
    "jobs": tuple(kind for kind in WORDS if kind.startswith(("Job", "Submit", "Work", "Update"))),
    "models": ("ModelReady", "ModelScored", "RolledBack"),
    "run": (
        *(kind for kind in WORDS if kind.startswith(("Run", "Stop", "Coordinator", "Facility"))),
        *("suspended", "rejoined"),
    ),
}
"""Kinds that somebody looks for together, by the word for them."""

_EVENTS: Final = "SELECT seq, -1 AS place, at, kind, job, body FROM events WHERE seq < ?"
_COMMANDS: Final = """
SELECT * FROM (
    SELECT c.seq, c.place, e.at, coalesce(json_extract(c.body, '$.kind'), c.kind) AS kind, c.job, c.body
    FROM commands c JOIN events e USING (seq) WHERE c.kind IN ('Record', 'StopRun')
) WHERE kind IN ('suspended', 'rejoined', 'StopRun') AND seq < ?
"""
"""Of what was wanted, that which people ask for."""


def rows(
    ledger: LedgerReader, *, before: int | None = None, group: str = "", facility: str = "", text: str = ""
) -> list[dict[str, Any]]:
    """About `ROWS` of them. `before`: the number of an event. `text`: is looked for in all that the ledger has of an
    event."""
    where = ""
    values: list[str] = []
    if group:
        kinds = GROUPS[group]
        where += f" AND kind IN ({', '.join('?' * len(kinds))})"
        values += kinds
    if facility:
        where += " AND (job LIKE ? ESCAPE '\\' OR json_extract(body, '$.facility') = ?"
        where += " OR json_extract(body, '$.facts.facility') = ?)"
        values += [f"{_plain(facility)}/%", facility, facility]
    if text:
        where += " AND (body LIKE ? ESCAPE '\\' OR kind LIKE ? ESCAPE '\\')"
        values += [f"%{_plain(text)}%"] * 2
    order, first = " ORDER BY seq DESC, place DESC LIMIT ?", 2**62 if before is None else before
    found = [row for query in (_EVENTS, _COMMANDS) for row in ledger.rows(query + where + order, first, *values, ROWS)]
    found.sort(key=lambda row: (row["seq"], row["place"]), reverse=True)
    if len(found) > ROWS:  # an event and what came of it stay together: who reads on asks by its number
        found = [row for row in found if row["seq"] >= found[ROWS - 1]["seq"]]
    return [_row(row["seq"], row["at"], row["kind"], row["job"], json.loads(row["body"])) for row in found]


def _plain(text: str) -> str:
    """As LIKE wants what shall stand for itself."""
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _row(seq: int, at: float, kind: str, job: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
    facts = body.get("facts", body)
    facility = facility_of(job) if job is not None else str(facts.get("facility", ""))
    text = _text(kind, facts)
    return {
        "seq": seq,
        "at": round(at, 2),
        "what": WORDS.get(kind, kind),
        "facility": facility,
        "job": job or "",
        "text": text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…",
        "bad": kind in TROUBLE,
    }


def _text(kind: str, body: Mapping[str, Any]) -> str:
    match kind:
        case "JobStarted":
            part = f", then {body['lingered']:.1f} s for work" if body.get("lingered") else ""
            return f"waited {body['admission_delay']:.1f} s{part}{_attempt(body)}"
        case "JobEnded":
            return f"{body['steps_done']} steps, nodes held {body['held_seconds']:.1f} s{_attempt(body)}"
        case "UpdateArrived":
            receipt = body["receipt"]
            part = f", part {receipt['part']}" if receipt.get("part") else ""
            return f"{receipt['steps_done']} steps from model {receipt['base_version']}{part}"
        case "WorkTaken":
            return f"part {body['part']} after {body['waited']:.1f} s"
        case "ModelReady":
            agreement = body.get("agreement")
            return f"model {body['version']}" + ("" if agreement is None else f", updates agree {agreement:.2f}")
        case "ModelScored":
            known = [f"{name} {value:.4g}" for name, value in body["metrics"].items() if value is not None]
            return f"model {body['version']}: {', '.join(known) or 'not a number'}"
        case "RolledBack":
            return f"all after model {body['version']}"
        case "CoordinatorResumed":
            return f"it was down for {body['down_seconds']:.0f} s"
        case "ForecastIssued":
            return f"{body['mean']:.1f} s on average, by {body['source']}"
        case "RunPaused":
            return str(body["reason"] or "an operator said so")
        case "RunResumed":
            return "what was wrong is mended" if body["mended"] else "an operator said so"
        case "TimerFired":
            return str(body["key"])
        case "suspended":
            until = body["until"]
            return f"{body['reason']} ({'until it joins' if until is None else f'until {until:.0f} s'})"
    return str(body.get("reason", "")) + (_attempt(body) if "attempt" in body else "")


def _attempt(body: Mapping[str, Any]) -> str:
    return f" (attempt {body['attempt'] + 1})" if body["attempt"] else ""
