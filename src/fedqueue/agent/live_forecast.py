"""What a facility knows of its own queue, turned into a forecast of the next wait.

Off unless the agent's config asks for it. `scheduler` calibrates what the scheduler itself says of a job's start;
`boosting` learns from the whole queue. A forecast is a report, sent when it has changed, and enters the run as
`ForecastIssued`. Whatever goes wrong here costs a forecast and nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from fedqueue.agent.jobs import Jobs
from fedqueue.agent.journal import SiteJob
from fedqueue.agent.schedulers import SchedulerUnreachableError
from fedqueue.errors import FedQueueError
from fedqueue.files import write_json
from fedqueue.forecasting.state import Kind, Listed, events, tell_differences
from fedqueue.protocol.predict.base import Forecast
from fedqueue.protocol.reports import ForecastMade

if TYPE_CHECKING:
    from fedqueue.forecasting.boosting import Boosting

FILE: Final = "forecasts.json"  # in the agent's home
KEPT: Final = 300  # jobs whose estimate and wait are remembered
CHANGED: Final = 0.05  # a forecast that differs by less from the last one is not sent
HISTORY_DAYS: Final = 60.0
OWN_IN_HISTORY: Final = 600  # newest jobs of our shape there that count as ours


class Sight(Protocol):
    """How the wait of a job that is submitted now is foreseen."""

    source: str

    def forecast(self, now: float, wall_seconds: float) -> Forecast | None:
        """None: nothing can be said yet. Raises SchedulerUnreachableError."""

    def submitted(self, work: SiteJob) -> None: ...

    def waits(self, work: SiteJob) -> None:
        """It has not started yet."""

    def started(self, work: SiteJob, at: float) -> None: ...

    def gone(self, sequence: int) -> None:
        """It will not start any more, or nobody will say when it did."""


class LiveForecast:
    @classmethod
    def of(cls, jobs: Jobs) -> LiveForecast | None:
        """None: the config does not ask for it."""
        return cls(jobs) if jobs.settings.forecast != "off" else None

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._sight: Sight | None = None
        self._followed: dict[int, bool] = {}  # our jobs at the scheduler: whether their start was told
        self._next = 0.0  # monotonic
        self._sent: Forecast | None = None

    def turn(self) -> None:
        """Look, every `forecast_seconds`; what is new is noted as a report."""
        due = time.monotonic() >= self._next and bool(self._jobs.memory.works)
        if due:
            self._next = time.monotonic() + self._jobs.settings.forecast_seconds
        self._with_sight(looks=due)

    def follow(self) -> None:
        """See what our jobs do: as soon as one was submitted, since it may start before the next turn."""
        self._with_sight(looks=False)

    def _with_sight(self, *, looks: bool) -> None:
        try:
            if self._sight is None:
                self._sight = _sight(self._jobs)
            self._follow(self._sight)
            if looks:
                self._look(self._sight)
        except SchedulerUnreachableError:
            return  # who watches the jobs says so
        except FedQueueError as error:
            self._jobs.trouble("forecast", f"no forecast: {error}")

    def _look(self, sight: Sight) -> None:
        newest = max(self._jobs.memory.works.values(), key=lambda work: work.sequence)
        found = sight.forecast(self._jobs.clock.now(), newest.order.wall_seconds)
        self._jobs.fine("forecast")
        if found is None or (self._sent is not None and not _differs(found, self._sent)):
            return
        self._sent = found
        self._jobs.notes.note(
            self._jobs.notes.report(
                ForecastMade,
                mean=found.mean,
                levels=[level for level, _ in found.quantiles],
                seconds=[seconds for _, seconds in found.quantiles],
                source=sight.source,
            )
        )

    def _follow(self, sight: Sight) -> None:
        works = self._jobs.memory.works
        for work in works.values():
            if work.scheduler_id is None or work.submitted_at is None or work.order.purpose != "train":
                continue
            if work.sequence not in self._followed:
                self._followed[work.sequence] = False
                sight.submitted(work)
            if work.started < 0:
                sight.waits(work)
            if work.started == 0 and not self._followed[work.sequence]:  # a requeued job waits by other rules
                self._followed[work.sequence] = True
                sight.started(work, work.submitted_at + work.admission_delay)
        for sequence in self._followed.keys() - works.keys():
            if not self._followed.pop(sequence):
                sight.gone(sequence)


def _sight(jobs: Jobs) -> Sight:
    return ByEstimates(jobs) if jobs.settings.forecast == "scheduler" else ByBoosting(jobs)


def _differs(one: Forecast, other: Forecast) -> bool:
    pairs = [(one.mean, other.mean), *((a, b) for (_, a), (_, b) in zip(one.quantiles, other.quantiles, strict=True))]
    return any(abs(a - b) > CHANGED * max(a, b) and abs(a - b) > 1.0 for a, b in pairs)


class ByEstimates:
    """What the scheduler says of a job's start, calibrated by what became of ours; remembered from visit to visit."""

    def __init__(self, jobs: Jobs) -> None:
        from fedqueue.forecasting.estimates import SchedulerEstimates  # nobody else here needs it

        self._jobs = jobs
        self._path = jobs.home / FILE
        self._forecaster = SchedulerEstimates()
        self.source = self._forecaster.source
        self._estimate: float | None = None  # the newest of a job that is not submitted yet
        self._pairs: list[tuple[float | None, float]] = []  # estimate, wait
        self._open: dict[int, tuple[float, float | None]] = {}  # by sequence: submission, estimate
        self._remember()

    def forecast(self, now: float, wall_seconds: float) -> Forecast | None:
        self._estimate = estimate = self._jobs.scheduler.estimate(wall_seconds)
        waiting = [w for w in self._jobs.memory.works.values() if w.scheduler_id and w.started < 0]
        if estimate is None and waiting:
            newest = waiting[-1]
            wait = self._jobs.scheduler.planned(newest.scheduler_id or "")
            if wait is not None:
                estimate = max(0.0, wait - (now - (newest.submitted_at or now)))
        if not self._pairs:
            return None
        self._forecaster.still_waiting(now)
        return self._forecaster.forecast(now, estimate)

    def submitted(self, work: SiteJob) -> None:
        at, estimate = self._open.get(work.sequence, (work.submitted_at or self._jobs.clock.now(), self._estimate))
        self._open[work.sequence] = at, estimate
        self._forecaster.submitted(work.sequence, at, estimate)
        self._write()

    def waits(self, work: SiteJob) -> None:
        """PBS, and sites that let nobody ask for a job which is not there, plan the jobs that they have."""
        at, estimate = self._open.get(work.sequence, (0.0, None))
        if estimate is not None or work.scheduler_id is None or work.sequence not in self._open:
            return
        estimate = self._jobs.scheduler.planned(work.scheduler_id)
        if estimate is not None:
            self._open[work.sequence] = at, estimate
            self._forecaster.submitted(work.sequence, at, estimate)
            self._write()

    def started(self, work: SiteJob, at: float) -> None:
        submitted, estimate = self._open.pop(work.sequence, (at, None))
        self._pairs = [*self._pairs, (estimate, max(0.0, at - submitted))][-KEPT:]
        self._forecaster.started(work.sequence, at)
        self._write()

    def gone(self, sequence: int) -> None:
        if self._open.pop(sequence, None) is not None:
            self._forecaster.ended(sequence)
            self._write()

    def _write(self) -> None:
        opened = {str(sequence): list(entry) for sequence, entry in self._open.items()}
        write_json(self._path, {"pairs": self._pairs, "open": opened})

    def _remember(self) -> None:
        try:
            kept: Mapping[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
            pairs = [(None if e is None else float(e), float(wait)) for e, wait in kept["pairs"]]
            opened = {int(n): (float(at), None if e is None else float(e)) for n, (at, e) in kept["open"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._jobs.log.info(f"{self._path.name} in the agent's home cannot be read: forecasts begin anew")
            return
        self._pairs, self._open = pairs, opened
        for number, (estimate, wait) in enumerate(pairs):
            self._forecaster.submitted(("kept", number), 0.0, estimate)
            self._forecaster.started(("kept", number), wait)


class ByBoosting:
    """A model of the whole queue, as listings show it; its past comes from `forecast_history`, if there is one."""

    def __init__(self, jobs: Jobs) -> None:
        from fedqueue.forecasting.boosting import Boosting  # numpy, and scikit-learn when it is made

        self._jobs = jobs
        self._forecaster = Boosting((jobs.nodes, jobs.nodes))
        self.source = self._forecaster.source
        self._listed: dict[Hashable, Listed] | None = None
        if jobs.settings.forecast_history is not None:
            self._learn(Path(jobs.settings.forecast_history).expanduser())

    def forecast(self, now: float, wall_seconds: float) -> Forecast | None:
        found = self._jobs.scheduler.listing()
        if found is None:
            raise FedQueueError(f"{self._jobs.scheduler.kind} does not list its queue; set agent.forecast to off")
        listed: dict[Hashable, Listed] = dict(found.items())
        # What had begun to wait before our first look counts for the state of the queue, but was not forecast.
        known = self._listed is not None
        ours = {work.scheduler_id for work in self._jobs.memory.works.values() if known}
        tell_differences(_Told(self._forecaster, ours), self._listed or {}, listed, now)
        self._listed = listed
        return self._forecaster.forecast(now, self._jobs.nodes, wall_seconds)

    def submitted(self, work: SiteJob) -> None:
        """The listings show it, and all the rest."""

    def waits(self, work: SiteJob) -> None: ...

    def started(self, work: SiteJob, at: float) -> None: ...

    def gone(self, sequence: int) -> None: ...

    def _learn(self, path: Path) -> None:
        from fedqueue.history.read import read_log

        log = read_log(path)
        log = log.only(log.submit >= log.submit.max(initial=0.0) - HISTORY_DAYS * 86400)
        like_ours = [n for n in range(len(log)) if log.procs[n] == self._jobs.nodes]
        told = _Told(self._forecaster, {("history", n) for n in like_ours[-OWN_IN_HISTORY:]})
        for kind, n, at in events(log):
            job, moment = ("history", n), at + (log.epoch or 0.0)
            if kind is Kind.SUBMITTED:
                told.submitted(job, moment, int(log.procs[n]), float(log.requested[n]))
            elif kind is Kind.STARTED:
                told.started(job, moment)
            else:
                told.ended(job, moment)


class _Told:
    """Tells a forecaster of all jobs, and which of them are ours."""

    def __init__(self, forecaster: Boosting, ours: Collection[Hashable]) -> None:
        self._forecaster = forecaster
        self._ours = ours
        self.started = forecaster.started
        self.ended = forecaster.ended

    def submitted(self, job: Hashable, at: float, procs: int, requested: float) -> None:
        self._forecaster.submitted(job, at, procs, requested, ours=job in self._ours)
