"""A real run's delays, fed back to the simulator: what was measured about each job happens to it again.

The strategy decides anew, in virtual time. With the run's own strategy every update should meet the same cutoff as it
did; with another one, this is what it would have made of the same queues.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fedqueue.config import Config, FixedQueue
from fedqueue.errors import ConfigError, RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.protocol.contract import Assignment, JobId, UpdateKey, facility_of, sequence_of
from fedqueue.protocol.messages import (
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    FacilityLeft,
    ForecastIssued,
    JobFailed,
    JobRequeued,
    ModelReady,
    ModelScored,
    NodeHoursTold,
    RolledBack,
    RunPaused,
    RunResumed,
    StopRequested,
    SubmitRefused,
    TimerFired,
    UpdateArrived,
    UpdateRejected,
    UpdatesWithdrawn,
)
from fedqueue.protocol.plan import Plan
from fedqueue.runs import rebuild_plan
from fedqueue.sim.site import Course as SimCourse
from fedqueue.sim.site import SimJob, Site

A_LONG_TIME = 1e9  # seconds

OUTSIDE = (
    RunPaused,
    RunResumed,
    StopRequested,
    RolledBack,
    CoordinatorResumed,
    FacilityLeft,
    FacilityJoined,
    FacilityDrained,
    ForecastIssued,
    NodeHoursTold,
    UpdatesWithdrawn,
    ModelScored,
)
"""Events that no job and no command brings about."""
TROUBLES = {SubmitRefused, JobRequeued, JobFailed, UpdateRejected}

CUTOFF = "cutoff/"
"""How the keys of timers that end rounds begin."""

CLOSE_SECONDS = 0.5
"""Between an arrival and a cutoff: which came first may turn out otherwise in virtual time."""

_JOBS = """
SELECT j.job, j.ordered_at, j.ended_at, j.arrived_at, j.started_at, j.admission_delay,
       (SELECT i.eligible_at FROM incarnations i WHERE i.job = j.job ORDER BY i.attempt LIMIT 1) AS eligible_at,
       (SELECT i.lingered FROM incarnations i WHERE i.job = j.job ORDER BY i.attempt DESC LIMIT 1) AS lingered,
       (SELECT json_extract(e.body, '$.ago') FROM events e WHERE e.job = j.job AND e.kind = 'JobStarted'
         ORDER BY e.seq DESC LIMIT 1) AS ago,
       (SELECT json_extract(e.body, '$.receipt.train_seconds') FROM events e
         WHERE e.job = j.job AND e.kind = 'UpdateArrived') AS train_seconds,
       (SELECT json_extract(e.body, '$.receipt.steps_done') FROM events e
         WHERE e.job = j.job AND e.kind = 'UpdateArrived') AS steps_done,
       (SELECT i.bound FROM incarnations i WHERE i.job = j.job ORDER BY i.attempt DESC LIMIT 1) AS bound,
       coalesce((SELECT json_extract(i.bound, '$.steps') FROM incarnations i WHERE i.job = j.job
         ORDER BY i.attempt DESC LIMIT 1), (SELECT json_extract(c.body, '$.assignment.steps') FROM commands c
         WHERE c.job = j.job AND c.kind = 'AssignWork')) AS assigned,
       (SELECT json_extract(c.body, '$.order.after') FROM commands c
         WHERE c.job = j.job AND c.kind = 'SubmitJob') AS after,
       (SELECT json_extract(c.body, '$.order.stay') FROM commands c
         WHERE c.job = j.job AND c.kind = 'SubmitJob') AS stay
FROM jobs j ORDER BY j.ordered_at
"""


_FATES = """
SELECT json_extract(body, '$.facts.job') AS job, json_extract(body, '$.facts.attempt') AS attempt,
       json_extract(body, '$.facts.part') AS part, json_extract(body, '$.facts.fate') AS fate,
       json_extract(body, '$.facts.version') AS version
FROM commands WHERE kind = 'Record' AND json_extract(body, '$.kind') = 'fate'
"""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What was measured about one job, in seconds."""

    submit: float = 0.0  # from our order to its being eligible, by its scheduler, whose clock may count whole seconds:
    # it can be less than 0; or from our hearing of the end of the job it was chained to
    delay: float = 0.0  # q
    bound: Assignment | None = None  # what it took from the standing work; None: its work was assigned
    lingered: float = 0.0
    news: float = 0.0  # from its taking work to our hearing of it
    steps_per_second: float | None = None  # None: no update came of it
    assigned: int | None = None  # steps
    most_steps: int | None = None  # that it did
    startup: float = 0.0  # of a job that was heard of when it had ended: all but training, from its start until then
    rest: float = 0.0  # from there to the arrival


@dataclass(frozen=True)
class Heard:
    """An event of the run, with its place in the ledger."""

    seq: int
    event: Event


@dataclass(frozen=True)
class Course:
    """All that was heard of one job."""

    job_id: JobId
    ordered_at: float
    after: JobId | None  # chained
    heard: list[Heard] = field(default_factory=list)

    @property
    def over_at(self) -> float:
        return self.heard[-1].event.at if self.heard else A_LONG_TIME


@dataclass(frozen=True, kw_only=True)
class Recording:
    plan: Plan
    strategy: str
    jobs: dict[str, dict[int, JobRecord]]  # by facility and number: those that brought an update
    courses: dict[JobId, Course]  # of the jobs whose durations do not say how they went: see `_undisturbed`
    outside: list[Heard]  # what operators, clocks and networks did
    rang_late: dict[str, list[tuple[float, float]]]  # timers by key: when due and when they fired, later than that
    cutoffs: dict[str, float]  # timers that end rounds: when they were due
    model_seconds: dict[int, float]  # from asking for a version to its being ready
    agreements: dict[int, float]  # how far the updates of a version agreed, where that was asked for
    fates: dict[UpdateKey, tuple[str, int | None]]  # of each update: fate, and the version it went into
    ordered: dict[JobId, float]  # every job, with the time of its order
    close: dict[UpdateKey, tuple[float, float]]  # updates that came close to a cutoff: when, and the cutoff


def read_recording(folder: Path) -> Recording:
    with LedgerReader(folder / FILE) as ledger:
        if ledger.meta.get("driver") != "coordinator":
            raise RunFolderError(f"{folder}: is a simulation; only what a real run measured can be fed back")
        rows = {row["job"]: row for row in ledger.rows(_JOBS)}
        courses = {job: Course(job, row["ordered_at"], row["after"]) for job, row in rows.items()}
        outside: list[Heard] = []
        asked_at: dict[int, float] = {}
        model_seconds: dict[int, float] = {}
        set_for: dict[str, list[float]] = {}
        rang_late: dict[str, list[tuple[float, float]]] = {}
        cutoffs: dict[str, float] = {}
        agreements: dict[int, float] = {}
        for seq, (event, commands) in enumerate(ledger.steps()):
            if isinstance(event, OUTSIDE):
                outside.append(Heard(seq, event))
            elif isinstance(event, ModelReady) and event.version in asked_at:
                model_seconds.setdefault(event.version, max(0.0, event.at - asked_at[event.version]))
                if event.agreement is not None:
                    agreements[event.version] = event.agreement
            elif (job := _job_of(event)) in courses:
                courses[job].heard.append(Heard(seq, event))
            if isinstance(event, TimerFired) and set_for.get(event.key):
                due = min(set_for[event.key])
                set_for[event.key].remove(due)
                if event.at > due:
                    rang_late.setdefault(event.key, []).append((due, event.at))
            for kind, text in commands:
                if kind == "Aggregate":
                    asked_at.setdefault(json.loads(text)["to_version"], event.at)
                elif kind == "SetTimer":
                    timer = json.loads(text)
                    set_for.setdefault(timer["key"], []).append(timer["at"])
                    if timer["key"].startswith(CUTOFF):
                        cutoffs[timer["key"]] = timer["at"]
        stay = {job for job, row in rows.items() if row["stay"] is not None}
        calm = _undisturbed(courses, outside) - stay
        jobs: dict[str, dict[int, JobRecord]] = {p["name"]: {} for p in ledger.meta["plan"]["facilities"]}
        for job, row in rows.items():
            if row["arrived_at"] is not None and row["started_at"] is not None:
                jobs[facility_of(job)][sequence_of(job)] = _record(row, rows)
        fates = {
            (row["job"], row["attempt"], row["part"] or 0): (row["fate"], row["version"]) for row in ledger.rows(_FATES)
        }
        return Recording(
            plan=rebuild_plan(ledger.meta),
            strategy=ledger.meta["strategy"],
            jobs=jobs,
            courses={job: course for job, course in courses.items() if job not in calm},
            outside=outside,
            rang_late=rang_late,
            cutoffs=cutoffs,
            agreements=agreements,
            model_seconds=model_seconds,
            fates=fates,
            ordered={job: row["ordered_at"] for job, row in rows.items()},
            close=_close(ledger),
        )


def _close(ledger: LedgerReader) -> dict[UpdateKey, tuple[float, float]]:
    """Durations are measured at several places, so virtual time is right to a part of a second and no better."""
    fired = ledger.rows("SELECT at FROM events WHERE kind = 'TimerFired' AND body LIKE '%\"cutoff/%'")
    found = {}
    for event in ledger.rows("SELECT at, body FROM events WHERE kind = 'UpdateArrived'"):
        receipt, at = json.loads(event["body"])["receipt"], event["at"]
        nearest = min((row["at"] for row in fired), key=lambda cutoff: abs(cutoff - at), default=None)
        if nearest is not None and abs(nearest - at) <= CLOSE_SECONDS:
            found[receipt["job_id"], receipt["attempt"], receipt.get("part", 0)] = at, nearest
    return found


def _job_of(event: Event) -> JobId:
    receipt = getattr(event, "receipt", None)
    return str(getattr(event if receipt is None else receipt, "job_id", ""))


def _undisturbed(courses: Mapping[JobId, Course], outside: Sequence[Heard]) -> set[JobId]:
    """Jobs that went from order to arrival while the run clock ran and their facility was in reach, and nothing failed:
    their measured durations say all. Of the others it counts when we heard of what."""
    stops = [heard.event.at for heard in outside if isinstance(heard.event, RunPaused | CoordinatorResumed)]
    away: dict[str, list[tuple[float, float]]] = {}
    for heard in outside:
        if isinstance(heard.event, FacilityLeft):
            away.setdefault(heard.event.facility, []).append((heard.event.at, A_LONG_TIME))
        elif isinstance(heard.event, FacilityJoined) and (found := away.get(heard.event.facility)):
            found[-1] = (found[-1][0], min(found[-1][1], heard.event.at))
    calm: set[JobId] = set()
    for job, course in courses.items():  # in order, so that a chained job comes after the one before it
        kinds = [type(heard.event) for heard in course.heard]
        stood = any(course.ordered_at <= at <= course.over_at for at in stops)
        unheard = any(a <= course.over_at and course.ordered_at <= b for a, b in away.get(facility_of(job), []))
        chained = course.after is not None and course.after in courses and course.after not in calm
        if UpdateArrived in kinds and not (TROUBLES & set(kinds)) and not (stood or unheard or chained):
            calm.add(job)
    return calm


def _record(row: Any, rows: dict[str, Any]) -> JobRecord:
    eligible_from = row["ordered_at"]
    before = rows.get(row["after"]) if row["after"] is not None else None
    if before is not None and before["ended_at"] is not None:
        eligible_from = max(eligible_from, before["ended_at"])
    took_work_at = row["started_at"] + row["lingered"]
    ended_at = row["ended_at"] if row["stay"] is None else row["arrived_at"]  # of one that stays, its first part counts
    trained = row["train_seconds"] is not None and row["train_seconds"] > 0
    return JobRecord(
        submit=row["eligible_at"] - eligible_from,
        delay=row["admission_delay"],
        bound=Assignment(**json.loads(row["bound"])) if row["bound"] is not None else None,
        lingered=row["lingered"],
        news=row["ago"],
        steps_per_second=row["steps_done"] / row["train_seconds"] if trained else None,
        assigned=row["assigned"],
        most_steps=row["steps_done"] if trained else None,
        startup=max(0.0, ended_at - took_work_at - row["train_seconds"]) if trained else 0.0,
        rest=max(0.0, row["arrived_at"] - ended_at) if trained else 0.0,
    )


class RecordedSite(Site):
    """A facility whose job meets what the job of its number met in the recording; or what another one met, where that
    one brought no update."""

    def __init__(
        self, index: int, name: str, records: Mapping[int, JobRecord], config: Config, *, same_strategy: bool
    ) -> None:
        """`same_strategy`: what a job found at the site when it began is that of the recording, too."""
        known = [r.steps_per_second for r in records.values() if r.steps_per_second is not None]
        if not known and not same_strategy:
            raise ConfigError(f"facility {name} brought no update in the recording: there is nothing to feed back")
        settings = next(f for f in config.facility if f.name == name)
        plain = dataclasses.replace(
            settings,
            queue=FixedQueue(delay=0.0),
            steps_per_second=fmean(known or [1.0]),
            slowdown=1.0,
            startup_seconds=0.0,
        )
        super().__init__(index, plain, config, seed=0)
        self._records = records
        self._in_turn = list(records.values()) or [JobRecord()]  # it brought no update
        self._same_strategy = same_strategy

    def take_work(self, job: SimJob, at: float) -> tuple[float, Assignment]:
        """What the recorded job took when it began: the agent there may not have had the newest yet."""
        bound = self._of(job).bound
        if not self._same_strategy or bound is None:
            return super().take_work(job, at)
        newest = self.staged[-1][1].version
        return at, dataclasses.replace(bound, base_version=min(bound.base_version, newest))

    def _of(self, job: SimJob) -> JobRecord:
        return self._records.get(job.number) or self._in_turn[job.number % len(self._in_turn)]

    def submit_seconds(self, job: SimJob) -> float:
        return self._of(job).submit

    def news_seconds(self, job: SimJob) -> float:
        return self._of(job).news

    def return_seconds(self, job: SimJob, megabytes: float) -> float:
        return self._of(job).rest

    def linger_until(self, job: SimJob, at: float) -> float | None:
        if not self._same_strategy:
            return super().linger_until(job, at)
        lingered = self._of(job).lingered
        return at + lingered if lingered > 0 else None

    def lingering(self) -> list[SimJob]:
        # When a new model reached a waiting job is in what was measured.
        return [] if self._same_strategy else super().lingering()

    def startup_of(self, job: SimJob) -> float:
        return self._of(job).startup

    def wall_of(self, job: SimJob) -> float:
        # A site may give more time than was asked for: a job that brought an update was not cut short.
        return A_LONG_TIME if self._of(job).steps_per_second is not None else super().wall_of(job)

    def speed_of(self, job: SimJob) -> float:
        return self._of(job).steps_per_second or self.speed

    def transfer_seconds(self, megabytes: float) -> float:
        return 0.0  # it is in what was measured

    def wait(self, job: SimJob, at: float) -> float:
        return self._of(job).delay

    def course(self, job: SimJob, work: Assignment, at: float, delay: float) -> SimCourse:
        record = self._of(job)
        if record.most_steps is not None and record.assigned is not None:
            if self._same_strategy and work.steps == record.assigned:  # the same work: what came of it is known
                work = dataclasses.replace(work, steps=max(1, record.most_steps), train_budget=None)
            elif record.most_steps < record.assigned:  # it stopped before: out of time, or told to
                work = dataclasses.replace(work, steps=max(1, min(work.steps, record.most_steps)))
        return super().course(job, work, at, delay)
