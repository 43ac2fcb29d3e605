"""What a run's page shows that its state has forgotten: a view of the state, which grows with the run."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedqueue.protocol.contract import facility_of
from fedqueue.protocol.messages import (
    Aggregate,
    Command,
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    FacilityLeft,
    JobFailed,
    JobRequeued,
    JobStarted,
    ModelReady,
    ModelScored,
    Record,
    RunPaused,
    RunResumed,
    SubmitRefused,
    TimerFired,
    UpdateRejected,
)
from fedqueue.protocol.state import JobState, RunState
from fedqueue.report.jobs import Bar, Jobs, ReportedJob

KINDS: Final[tuple[Bar, ...]] = ("waiting", "lingering", "training", "upload")
MARKS: Final = ("failed", "requeued", "deferred")
KEPT_WAITS: Final = 400
"""Of each facility, the newest."""
KEPT_TROUBLES: Final = 20


@dataclass(slots=True)
class Round:
    """A model and what it was made of."""

    version: int
    asked_at: float
    ready_at: float | None = None
    agreement: float | None = None
    weights: dict[str, float] = field(default_factory=dict)  # by facility
    updates: int = 0
    deferred: int = 0
    staleness: int = 0  # the largest


class Absence(NamedTuple):
    """A stretch without new work; `until` None: it is not over."""

    facility: str  # empty: the whole run
    what: str
    since: float
    until: float | None
    reason: str


class Trouble(NamedTuple):
    at: float
    facility: str
    text: str


class Bars:
    """Of all jobs of a facility that are over, as columns: there are hundreds of thousands in a long run."""

    def __init__(self) -> None:
        self.since, self.until = array("d"), array("d")
        self.kind, self.job = array("b"), array("l")

    def add(self, kind: int, since: float, until: float, job: int) -> None:
        if until > since:
            self.since.append(since)
            self.until.append(until)
            self.kind.append(kind)
            self.job.append(job)

    def within(self, since: float, until: float) -> tuple[NDArray[np.float64], ...]:
        """since, until, kind, job of those that are seen then."""
        begin, end = np.array(self.since), np.array(self.until)
        seen = (end > since) & (begin < until)
        return begin[seen], end[seen], np.array(self.kind)[seen], np.array(self.job)[seen]


class History:
    def __init__(self, state: RunState, jobs: Jobs, nodes: Mapping[str, int]) -> None:
        self._state, self._jobs, self._nodes = state, jobs, nodes
        self.scores: list[tuple[float, int, float]] = []  # when, of which version, what
        self.rounds: list[Round] = []
        self.has_cutoffs = False
        self.waits: dict[str, list[tuple[float, float, float]]] = {name: [] for name in nodes}  # when, forecast, real
        self.absences: list[Absence] = []  # that are over
        self.troubles: list[Trouble] = []  # the newest
        self.failures: Counter[str] = Counter()
        self.bars = {name: Bars() for name in nodes}
        self.marks: dict[str, list[tuple[float, int, str]]] = {name: [] for name in nodes}  # when, kind, job
        self.names: list[str] = []  # of jobs that are over, by number
        # Of jobs that are over, by kind.
        self.seconds: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in nodes}
        self.ended: Counter[str] = Counter()  # jobs
        self._scored: set[int] = set()  # versions
        self._made: dict[int, Round] = {}
        self._gone: dict[tuple[str, str], tuple[float, str]] = {}  # absences that go on
        self._taken = 0  # jobs that are over and in the bars
        state.views.append(self)

    @property
    def present_absences(self) -> list[Absence]:
        return [Absence(name, what, at, None, reason) for (name, what), (at, reason) in self._gone.items()]

    def take_in(self) -> None:
        """The jobs that have ended since, into the bars."""
        for job in self._jobs.over[self._taken :]:
            number = len(self.names)
            self.names.append(job.job_id)
            self.ended[job.facility] += 1
            bars, seconds = self.bars[job.facility], self.seconds[job.facility]
            for kind, since, until in job.bars():
                bars.add(KINDS.index(kind), since, until, number)
            for name, span in spent(job):
                seconds[name] += max(0.0, span)  # of other clocks
            self.marks[job.facility] += [(at, MARKS.index(mark), job.job_id) for mark, at in job.marks()]
        self._taken = len(self._jobs.over)

    def __call__(self, told: Event | Command, job: JobState | None) -> None:
        match told:
            case ModelScored(version=version, metrics=metrics):
                score = metrics.get("score")
                if score is not None and version not in self._scored:
                    self._scored.add(version)
                    self.scores.append((told.at, version, score))
            case Aggregate(to_version=version, weights=shares):
                made = self._made[version] = Round(version, self._state.at, updates=len(shares))
                for share in shares:
                    name = facility_of(share.job_id)
                    made.weights[name] = made.weights.get(name, 0.0) + share.weight * share.clip
            case ModelReady(version=version, agreement=agreement):
                made = self._made.pop(version) if version in self._made else Round(version, told.at)
                made.ready_at, made.agreement = told.at, agreement
                self.rounds.append(made)
            case TimerFired(key=key) if key.startswith("cutoff/"):
                self.has_cutoffs = True
            case Record(kind="fate", facts=facts) if facts["fate"] == "aggregated":
                self._fate(str(facts["job"]), bool(facts.get("deferred")), int(facts.get("staleness") or 0))
            case Record(kind="suspended", facts=facts):
                self._begin(str(facts["facility"]), "suspended", self._state.at, str(facts["reason"]))
            case Record(kind="rejoined", facts=facts):
                for what in ("suspended", "drained"):
                    self._end(str(facts["facility"]), what)
            case JobStarted(attempt=0, admission_delay=delay) if job is not None:
                self._waited(told, job, delay)
            case JobFailed(job_id=name, reason=reason):
                self._trouble(name, f"{name} failed: {reason}")
            case SubmitRefused(job_id=name, reason=reason):
                self._trouble(name, f"{name} was refused by its scheduler: {reason}")
            case UpdateRejected(job_id=name, reason=reason):
                self._trouble(name, f"the update of {name} was rejected: {reason}")
            case JobRequeued(job_id=name, reason=reason):
                self._trouble(name, f"{name} waits again: {reason}")
            case FacilityLeft(facility=name):
                self._begin(name, "away", told.at, "its agent has not been heard of")
            case FacilityDrained(facility=name):
                self._begin(name, "drained", told.at, "an operator said so")
            case FacilityJoined(facility=name):
                self._end(name, "away")
                if self._state.facilities[name].status != "drained":
                    self._end(name, "drained")
            case RunPaused(reason=reason):
                self._begin("", "hindered" if reason else "paused", told.at, reason or "an operator said so")
            case RunResumed(mended=mended):
                self._end("", "hindered" if mended else "paused")
            case CoordinatorResumed(down_seconds=down):
                self.absences.append(
                    Absence("", "down", told.at, told.at, f"the coordinator was down for {down:.0f} s")
                )

    def _fate(self, job: str, deferred: bool, staleness: int) -> None:
        made = self.rounds[-1] if self.rounds else None
        if made is not None:
            made.deferred += deferred
            made.staleness = max(made.staleness, staleness)
        if deferred and (name := facility_of(job)) in self.marks:
            self.marks[name].append((self._state.at, MARKS.index("deferred"), job))

    def _waited(self, event: JobStarted, job: JobState, delay: float) -> None:
        if job.order.expected_delay is not None:
            waits = self.waits[job.order.facility]
            waits.append((event.at - event.ago - event.lingered, job.order.expected_delay, delay))
            del waits[:-KEPT_WAITS]

    def _trouble(self, job: str, text: str) -> None:
        self.failures[facility_of(job)] += 1
        self.troubles.append(Trouble(self._state.at, facility_of(job), text))
        del self.troubles[:-KEPT_TROUBLES]

    def _begin(self, name: str, what: str, at: float, reason: str) -> None:
        self._gone.setdefault((name, what), (at, reason))

    def _end(self, name: str, what: str) -> None:
        begun = self._gone.pop((name, what), None)
        if begun is not None:
            self.absences.append(Absence(name, what, begun[0], self._state.at, begun[1]))


def spent(job: ReportedJob) -> Iterator[tuple[str, float]]:
    """Where the time of a job went, in seconds: waiting, idle, training, lost, upload. Lost: it trained, and nothing
    came of it. A job that stays loses the part that it was at."""
    starts = {attempt.started_at: attempt for attempt in job.attempts}
    last = job.attempts[-1] if job.attempts else None
    attempt = None
    for kind, since, until in job.bars():
        attempt = starts.get(since, attempt)
        if kind == "lingering":
            yield "idle", until - since
        elif kind == "training" and attempt is not None:
            failed = attempt.outcome in ("failed", "requeued") or (job.failed and attempt is last)
            at_last_part = not attempt.pauses or since >= attempt.pauses[-1][1]
            yield "lost" if failed and at_last_part else "training", until - since
        else:
            yield kind, until - since
