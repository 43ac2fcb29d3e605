"""What a page is told of a run. Summaries and ranges: a page never gets a whole ledger, however long that is."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedqueue.metrics import best_of
from fedqueue.page.follower import Follower
from fedqueue.page.history import KINDS, MARKS, Round
from fedqueue.protocol.codec import body
from fedqueue.protocol.service import RunStatus
from fedqueue.report.jobs import ReportedJob

MOST_BARS: Final = 1500
"""In one answer; beyond it shares of time are told instead, so many for each facility:"""
BUCKETS: Final = 240
MOST_MARKS: Final = 400
MOST_POINTS: Final = 500
"""Of a curve."""
MOST_ROUNDS: Final = 150
MOST_WAITS: Final = 120
"""Of each facility."""
JOBS_SHOWN: Final = 8
"""Open jobs of a facility."""
TIMELINE_ROUNDS: Final = 12
"""So many at the end of the run are shown at first."""

Answer = dict[str, Any]


def glance(follower: Follower, live: RunStatus | None) -> Answer:
    """A run as it is now. `live`: what its coordinator says, where one is at work in this very process."""
    state, history = follower.state, follower.history
    found = live or follower.status()
    config = follower.meta["config"]["run"]
    cutoff = state.timer("cutoff/")
    at_work = live is not None or follower.at_work
    best = best_of(follower.outcomes.scores)
    summary = follower.tally.summary(strategy=found.strategy, seed=0, wall_seconds=0.0)
    over = state.stopped is not None
    cut_off = not over and not at_work and follower.read == follower.newest
    return {
        "seq": follower.read,
        "read": round(follower.share, 3),
        "run": found.run,
        "strategy": found.strategy,
        "seed": follower.meta["seed"],
        "task": follower.meta["config"]["task"]["name"],
        "simulated": follower.simulated,
        "state": found.state if not cut_off else _cut_off(follower),
        "over": over,
        "at_work": at_work,
        "ticking": at_work and state.started and not state.held and not over,
        "clock": round(found.run_seconds, 1),
        "wall": round(time.time(), 2),
        "round_length": follower.round_length,
        "cutoff": None if cutoff is None or over else round(cutoff, 1),
        "model": found.model,
        "score": found.score,
        "best": None if best is None else [best, follower.outcomes.scores[best]],
        "targets": [[float(key), at] for key, at in summary["time_to"].items()],
        "rounds": config["rounds"],
        "seconds": config["seconds"],
        "jobs": summary["jobs"],
        "updates": summary["updates"],
        "node_seconds": round(summary["node_seconds"], 1),
        "idle_node_seconds": round(summary["idle_node_seconds"], 1),
        "facilities": [
            {
                **body(facility),
                "open_jobs": [body(job) for job in facility.open_jobs[:JOBS_SHOWN]],
                "troubles": [body(trouble) for trouble in facility.troubles[:5]],
                "nodes": follower.nodes[facility.name],
                "failures": history.failures[facility.name],
            }
            for facility in found.facilities
        ],
        "wrong": _wrong(follower, found, cut_off=cut_off),
        "lately": [{"at": round(t.at, 1), "facility": t.facility, "text": t.text} for t in history.troubles[-5:]],
    }


def _cut_off(follower: Follower) -> str:
    if follower.simulated:
        return f"cut off: {follower.stopped_as}" if follower.stopped_as else "being simulated, or cut off"
    return "no coordinator is at work: `fedqueue serve` goes on with it"


def _wrong(follower: Follower, found: RunStatus, *, cut_off: bool) -> list[Answer]:
    """What is wrong now, where, and for how many seconds; the worst first. While the run stands still, `at` says since
    when on the run clock, which stands too."""
    now, wrong = found.run_seconds, []
    if follower.state.stopped is not None:
        return []
    if cut_off and not follower.simulated:
        beat = follower.heartbeat
        seconds = None if beat is None else max(0.0, time.time() - beat["wall"])
        wrong.append(_fault("", "the coordinator is down", "nothing goes on until it is started again", seconds))
    for absence in sorted(follower.history.present_absences, key=lambda absence: absence.since):
        what = {"hindered": "the run stands still", "paused": "the run is paused"}.get(absence.what, absence.what)
        standing = absence.what in ("hindered", "paused")  # the run clock does not tell for how long
        seconds, at = (None, absence.since) if standing else (now - absence.since, None)
        wrong.append(_fault(absence.facility, what, absence.reason, seconds, at))
    for facility in found.facilities:
        if facility.state in ("not enrolled", "not seen yet"):
            wrong.append(_fault(facility.name, facility.state, facility.idle_because or "", None))
        for trouble in facility.troubles[:3]:
            wrong.append(_fault(facility.name, "its agent says", trouble.reason, trouble.seconds))
        if (refusal := follower.state.facilities[facility.name].refusal) is not None:
            wrong.append(_fault(facility.name, "its scheduler did not take a job", refusal, None))
    return wrong


def in_trouble(known: Answer, trouble: str) -> Answer:
    """What was known of a run whose ledger cannot be read any more."""
    fault = _fault("", "the ledger cannot be read: what is below is old", trouble, None)
    return {**known, "ticking": False, "wrong": [fault, *known["wrong"]]}


def _fault(facility: str, what: str, why: str, seconds: float | None, at: float | None = None) -> Answer:
    return {
        "facility": facility,
        "what": what,
        "why": why,
        "seconds": None if seconds is None else round(max(0.0, seconds), 1),
        "at": None if at is None else _short(at),
    }


def first_range(follower: Follower) -> tuple[float, float]:
    """What of the timeline is shown at first: the end, about twelve rounds of it."""
    end = max(follower.now, 1.0)
    models = [made.ready_at for made in follower.history.rounds if made.ready_at is not None]
    span = TIMELINE_ROUNDS * follower.round_length
    if len(models) > TIMELINE_ROUNDS:
        span = max(end - models[-TIMELINE_ROUNDS - 1], 1.0)
    return max(0.0, end - span), end


def timeline(follower: Follower, since: float | None, until: float | None) -> Answer:
    first = first_range(follower)
    since = first[0] if since is None else since
    until = max(first[1] if until is None else until, since + 1e-3)
    now, history = follower.now, follower.history
    open_jobs = follower.jobs.open(now)
    kept = {name: bars.within(since, until) for name, bars in history.bars.items()}
    many = sum(len(found[0]) for found in kept.values()) > MOST_BARS
    marks = {name: _marks(history.marks[name], since, until) for name in history.marks}
    answer: Answer = {
        "since": _short(since),
        "until": _short(until),
        "end": round(now, 1),
        "kinds": KINDS,
        "marks": MARKS,
        "cutoffs": _thin(
            [_short(at) for made in history.rounds if since <= (at := _closing(made, history.has_cutoffs)) <= until]
        ),
        "has_cutoffs": history.has_cutoffs,
        "absences": [
            [a.facility, a.what, _short(a.since), None if a.until is None else _short(a.until), a.reason]
            for a in [*history.absences, *history.present_absences]
            if a.since <= until and (a.until is None or a.until >= since)
        ][-MOST_MARKS:],
        "facilities": {},
    }
    for name, (begin, end, kind, job) in kept.items():
        still = [found for found in open_jobs if found.facility == name]
        if many:
            shares = _shares(begin, end, kind, still, since, until)
            answer["facilities"][name] = {"shares": shares, "marks": marks[name]}
            continue
        names: list[str] = []
        numbers: dict[str, int] = {}

        def number(job_id: str, names: list[str] = names, numbers: dict[str, int] = numbers) -> int:
            if job_id not in numbers:
                numbers[job_id] = len(names)
                names.append(job_id)
            return numbers[job_id]

        bars = [
            [number(history.names[j]), int(k), _short(b), _short(e)]
            for b, e, k, j in zip(begin, end, kind, job, strict=True)
        ]
        bars += [
            [number(found.job_id), KINDS.index(what), _short(b), _short(e)]
            for found in still
            for what, b, e in found.bars()
            if e > since and b < until and e > b
        ]
        answer["facilities"][name] = {"jobs": names, "bars": bars, "marks": marks[name]}
    answer["buckets"] = BUCKETS if many else 0
    return answer


def _closing(made: Round, cutoffs: bool) -> float:
    return made.asked_at if cutoffs or made.ready_at is None else made.ready_at


def _marks(found: Sequence[tuple[float, int, str]], since: float, until: float) -> list[list[Any]]:
    seen = [[_short(at), kind, job] for at, kind, job in found if since <= at <= until]
    return _thin(seen, MOST_MARKS // 4)


def _thin(found: list[Any], most: int = MOST_MARKS) -> list[Any]:
    """Every so many-th of a list that is too long, and its last."""
    if len(found) <= most:
        return found
    step = math.ceil(len(found) / most)
    return [*found[:-1:step], found[-1]]


def _shares(
    begin: NDArray[np.float64],
    end: NDArray[np.float64],
    kind: NDArray[np.float64],
    still: Sequence[ReportedJob],
    since: float,
    until: float,
) -> list[list[int]]:
    """Of each kind, how many percent of each of `BUCKETS` equal stretches jobs were at it; more than 100 where several
    were at once."""
    more = [(b, e, KINDS.index(what)) for job in still for what, b, e in job.bars() if e > since and b < until]
    width = (until - since) / BUCKETS
    found = []
    for which in range(len(KINDS)):
        own = kind == which
        b = np.concatenate([begin[own], [x[0] for x in more if x[2] == which]])
        e = np.concatenate([end[own], [x[1] for x in more if x[2] == which]])
        edges = np.linspace(since, until, BUCKETS + 1, dtype=np.float64)
        covered = _covered(np.clip(b, since, until), np.clip(e, since, until), edges)
        found.append([round(share) for share in 100 * np.diff(covered) / width])
    return found


def _covered(begin: NDArray[np.float64], end: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of all stretches together that lie before each edge."""

    def before(at: NDArray[np.float64]) -> NDArray[np.float64]:
        at = np.sort(at)
        sums = np.concatenate([[0.0], np.cumsum(at)])
        number = np.searchsorted(at, edges)
        made: NDArray[np.float64] = number * edges - sums[number]
        return made

    return before(begin) - before(end)


def charts(follower: Follower) -> Answer:
    """The curves, of the whole run; thinned where it is long."""
    history = follower.history
    scores = _thin([(_short(at), score, version) for at, version, score in history.scores], MOST_POINTS)
    rounds = history.rounds[-MOST_ROUNDS:]
    names = list(follower.nodes)
    return {
        "seq": follower.read,
        "scores": [[at for at, _, _ in scores], [round(score, 5) for _, score, _ in scores], [v for *_, v in scores]],
        "targets": follower.meta["config"]["run"]["targets"],
        "facilities": names,
        "rounds": {
            "version": [made.version for made in rounds],
            "at": [_short(made.ready_at or made.asked_at) for made in rounds],
            "agreement": [None if made.agreement is None else round(made.agreement, 4) for made in rounds],
            "staleness": [made.staleness for made in rounds],
            "updates": [made.updates for made in rounds],
            "deferred": [made.deferred for made in rounds],
            "weights": [[round(made.weights.get(name, 0.0), 3) for made in rounds] for name in names],
        },
        "waits": {name: _waits(history.waits[name]) for name in names},
        "costs": costs(follower),
    }


def _waits(waits: Sequence[tuple[float, float, float]]) -> list[list[float | None]]:
    """When, forecast, real, and between which waits eight of ten would have been, had the forecast been as wrong as it
    was before: by the errors until then, once there are ten."""
    found: list[list[float | None]] = [[], [], [], [], []]
    errors = [real - expected for _, expected, real in waits]
    begin = max(0, len(waits) - MOST_WAITS)
    for place in range(begin, len(waits)):
        at, expected, real = waits[place]
        before = errors[max(0, place - 50) : place]
        low = high = None
        if (number := len(before)) >= 10:
            before.sort()
            low, high = (max(0.0, expected + before[int(share * (number - 1))]) for share in (0.1, 0.9))
        for column, value in zip(found, (at, expected, real, low, high), strict=True):
            column.append(None if value is None else _short(value))
    return found


COSTS: Final = ("waiting", "training", "idle", "lost", "upload")


def costs(follower: Follower) -> Answer:
    """Where time and node-hours went, of jobs that are over."""
    return {
        name: {
            "nodes": follower.nodes[name],
            "jobs": follower.history.ended[name],
            **{what: round(follower.history.seconds[name][what], 1) for what in COSTS},
        }
        for name in follower.nodes
    }


def _short(seconds: float) -> float:
    return round(float(seconds), 2)
