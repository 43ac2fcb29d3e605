"""A real run's delays, fed back to the simulator: what was measured about each job happens to it again.

The strategy decides anew, in virtual time. With the run's own strategy every update should meet the same cutoff as it
did; with another one, this is what it would have made of the same queues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedqueue.config import Config, FixedQueue
from fedqueue.engine import Listener
from fedqueue.errors import ConfigError, RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.messages import Assignment, Record, Standing
from fedqueue.plan import Plan
from fedqueue.runs import rebuild_plan
from fedqueue.sim.learning import TimingOnly
from fedqueue.sim.simulation import Simulation, make_strategy
from fedqueue.sim.site import Course, SimJob, Site

A_LONG_TIME = 1e9  # seconds

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
       (SELECT json_extract(e.body, '$.receipt.base_version') FROM events e
         WHERE e.job = j.job AND e.kind = 'UpdateArrived') AS base_version,
       coalesce((SELECT json_extract(i.bound, '$.steps') FROM incarnations i WHERE i.job = j.job
         ORDER BY i.attempt DESC LIMIT 1), (SELECT json_extract(c.body, '$.assignment.steps') FROM commands c
         WHERE c.job = j.job AND c.kind = 'AssignWork')) AS assigned,
       (SELECT json_extract(c.body, '$.order.after') FROM commands c
         WHERE c.job = j.job AND c.kind = 'SubmitJob') AS after
FROM jobs j ORDER BY j.ordered_at
"""


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What was measured about one job, in seconds."""

    submit: float  # from our order (or the end of the job it was chained to) to its being eligible
    delay: float  # q
    base_version: int | None  # that it trained from; None: no update came of it
    lingered: float
    news: float  # from its taking work to our hearing of it
    steps_per_second: float | None  # None: no update came of it
    most_steps: int | None  # it stopped here, before its steps were done: out of time, or told to
    startup: float  # of a job that was heard of when it had ended: all but training, from its start until then
    rest: float  # from there to the arrival


@dataclass(frozen=True, kw_only=True)
class Recording:
    plan: Plan
    strategy: str
    jobs: dict[str, list[JobRecord]]  # by facility, in order of their numbers
    model_seconds: dict[int, float]  # from asking for a version to its being ready
    fates: dict[tuple[str, int], tuple[str, int | None]]  # of each update: fate, and the version it went into


def read_recording(folder: Path) -> Recording:
    with LedgerReader(folder / FILE) as ledger:
        if ledger.meta.get("driver") != "coordinator":
            raise RunFolderError(f"{folder}: is a simulation; only what a real run measured can be fed back")
        rows = {row["job"]: row for row in ledger.rows(_JOBS)}
        jobs: dict[str, list[JobRecord]] = {p["name"]: [] for p in ledger.meta["plan"]["facilities"]}
        for job, row in rows.items():
            if row["started_at"] is not None:
                jobs[job.rpartition("/")[0]].append(_record(row, rows))
        model_seconds: dict[int, float] = {}
        query = """SELECT json_extract(c.body, '$.to_version') AS version, m.ready_at - e.at AS seconds
                   FROM commands c JOIN events e USING (seq)
                   JOIN models m ON m.version = json_extract(c.body, '$.to_version') WHERE c.kind = 'Aggregate'"""
        for row in ledger.rows(query):
            model_seconds[row["version"]] = max(0.0, row["seconds"])
        fates = {
            (row["job"], row["attempt"]): (row["fate"], row["version"]) for row in ledger.rows("SELECT * FROM updates")
        }
        return Recording(
            plan=rebuild_plan(ledger.meta),
            strategy=ledger.meta["strategy"],
            jobs=jobs,
            model_seconds=model_seconds,
            fates=fates,
        )


def _record(row: Any, rows: dict[str, Any]) -> JobRecord:
    eligible_from = row["ordered_at"]
    before = rows.get(row["after"]) if row["after"] is not None else None
    if before is not None and before["ended_at"] is not None:
        eligible_from = max(eligible_from, before["ended_at"])
    took_work_at = row["started_at"] + row["lingered"]
    trained = row["train_seconds"] is not None and row["train_seconds"] > 0
    return JobRecord(
        submit=max(0.0, row["eligible_at"] - eligible_from),
        delay=row["admission_delay"],
        base_version=row["base_version"],
        lingered=row["lingered"],
        news=row["ago"],
        steps_per_second=row["steps_done"] / row["train_seconds"] if trained else None,
        most_steps=row["steps_done"] if trained and row["steps_done"] < (row["assigned"] or 0) else None,
        startup=max(0.0, row["ended_at"] - took_work_at - row["train_seconds"]) if trained else 0.0,
        rest=max(0.0, row["arrived_at"] - row["ended_at"]) if trained else 0.0,
    )


class RecordedSite(Site):
    """A facility whose j-th job meets what the j-th job of the recording met; after the last the first comes again."""

    def __init__(
        self, index: int, name: str, records: Sequence[JobRecord], config: Config, *, same_strategy: bool
    ) -> None:
        """`same_strategy`: what a job found at the site when it began is that of the recording, too."""
        known = [r.steps_per_second for r in records if r.steps_per_second is not None]
        if not known:
            raise ConfigError(f"facility {name} brought no update in the recording: there is nothing to feed back")
        settings = next(f for f in config.facility if f.name == name)
        plain = dataclasses.replace(
            settings, queue=FixedQueue(delay=0.0), steps_per_second=fmean(known), slowdown=1.0, startup_seconds=0.0
        )
        super().__init__(index, plain, config, seed=0)
        self._records = records
        self._same_strategy = same_strategy
        self._posted: dict[int, Standing] = {}  # the newest of each version

    def stage(self, standing: Standing, at: float, megabytes: float) -> float:
        self._posted[standing.version] = standing
        return super().stage(standing, at, megabytes)

    def work_for(self, job: SimJob, at: float) -> tuple[float, Standing]:
        """What lay at the site when the recorded job began: the agent there may not have had the newest yet."""
        version = self._of(job).base_version
        if not self._same_strategy or version not in self._posted:
            return super().work_for(job, at)
        return at, self._posted[version]

    def _of(self, job: SimJob) -> JobRecord:
        return self._records[job.number % len(self._records)]

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

    def course(self, job: SimJob, work: Assignment, at: float, delay: float) -> Course:
        most = self._of(job).most_steps
        if most is not None:
            work = dataclasses.replace(work, steps=max(1, min(work.steps, most)))
        return super().course(job, work, at, delay)


def simulate_recording(
    recording: Recording, config: Config, listeners: Sequence[Listener] = ()
) -> dict[tuple[str, int], tuple[str, int | None]]:
    """Run the config's strategy over the recording, in virtual time; the fate of every update."""
    same = config.run.strategy == recording.strategy
    sites = [
        RecordedSite(i, f.name, recording.jobs[f.name], config, same_strategy=same)
        for i, f in enumerate(config.facility)
    ]
    fates: dict[tuple[str, int], tuple[str, int | None]] = {}

    def collect(event: object, commands: Sequence[object]) -> None:
        for command in commands:
            if isinstance(command, Record) and command.kind == "fate":
                facts = command.facts
                version = facts.get("version")
                fates[str(facts["job"]), int(facts["attempt"] or 0)] = (
                    str(facts["fate"]),
                    version if isinstance(version, int) else None,
                )

    typical = fmean(recording.model_seconds.values()) if recording.model_seconds else 0.0
    strategy = make_strategy(config, recording.plan)
    Simulation(
        config,
        sites,
        TimingOnly(0.0),
        strategy,
        [collect, *listeners],
        aggregate_seconds=lambda version: recording.model_seconds.get(version, typical),
    ).run()
    return fates
