"""How an agent watches its jobs: by what the scheduler says, and by what they leave in their folders.

Missing is never completed, a failed poll is never a failed job, and only a job's own result is success.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from fedqueue.agent.jobs import JobFolder, Jobs
from fedqueue.agent.journal import Closed, SiteJob
from fedqueue.agent.schedulers import JobStatus, SchedulerUnreachableError
from fedqueue.protocol.contract import REASON_LENGTH, WALL_TIME
from fedqueue.protocol.reports import Ended, Requeued, Started, Took

DISAGREE_SECONDS: Final = 60.0
"""A job cannot have waited for longer than since it was submitted, by more than so much; else its own stamp counts."""

PARTING_SECONDS: Final = 120.0
"""For a job to end after its update is in: a script may have something left to do."""
LAST_PARTING_SECONDS: Final = 10.0
"""The same at the end of the run, when the agent waits for it."""


class Watching:
    def __init__(self, jobs: Jobs, on_its_way: Callable[[SiteJob], bool]) -> None:
        """`on_its_way`: whether the update of a job is being handed in; then nobody looks at it."""
        self._jobs = jobs
        self._on_its_way = on_its_way
        self._lost: set[int] = set()  # jobs of which something was gone when we last looked
        self._missing: dict[int, float] = {}  # jobs without a result that have ended or are not known: since when
        self._taken_back: dict[int, float] = {}  # jobs that wait or run again: since when
        self._settled: dict[int, float] = {}  # jobs that should end by themselves: since when, monotonic

    def look(self) -> None:
        """At every job; what is new is noted as a report."""
        statuses = self._ask_scheduler()
        for work in list(self._jobs.memory.works.values()):
            self._look(work, statuses)
        if statuses is not None:
            self._tell_held(statuses)

    def _ask_scheduler(self) -> dict[str, JobStatus] | None:
        """What the scheduler knows of our jobs; None: it could not be asked, which says nothing about them."""
        ids = [work.scheduler_id for work in self._jobs.memory.works.values() if work.scheduler_id]
        if not ids:
            return {}
        try:
            found = self._jobs.scheduler.poll(ids)
        except SchedulerUnreachableError as error:
            self._jobs.trouble("scheduler", f"the scheduler did not answer: {error}")
            return None
        self._jobs.fine("scheduler")
        return found

    def _tell_held(self, statuses: dict[str, JobStatus]) -> None:
        """A job that a person holds is why the facility idles, and only a person can change that."""
        works = {work.scheduler_id: work for work in self._jobs.memory.works.values() if not work.cancelled}
        lines = [
            f"job {works[scheduler_id].sequence} is {status.held}"
            for scheduler_id, status in statuses.items()
            if status.held is not None and scheduler_id in works
        ]
        if lines:
            self._jobs.trouble("held jobs", "; ".join(lines))
        else:
            self._jobs.fine("held jobs")

    def _look(self, work: SiteJob, statuses: dict[str, JobStatus] | None) -> None:
        if work.scheduler_id is None:
            return
        status = statuses.get(work.scheduler_id) if statuses is not None else None
        if status is not None and status.name not in (None, work.name):
            status = None  # the scheduler lost ours and gave its id to another
        folder = self._jobs.folder(work)
        # One that stays gives its nodes back when it is told to, and what it handed in counts.
        released = work.stays and not work.settled and self._jobs.memory.over is None and folder.attempts() > 0
        if work.cancelled and not released:
            if not self._on_its_way(work):
                self._see_cancelled(work, statuses, status)
            return
        if work.cancelled and status is not None and status.phase != "ended":
            self._jobs.cancel(work)
        if not work.settled and not self._on_its_way(work) and self._see_loss(work, folder):
            return
        if work.ended < work.attempt:
            self._see_progress(work, folder, statuses, status)
        if work.ended == work.attempt:
            self._see_off(work, folder, statuses, status)

    def _see_progress(
        self, work: SiteJob, folder: JobFolder, statuses: dict[str, JobStatus] | None, status: JobStatus | None
    ) -> None:
        newest = folder.attempts() - 1
        if work.stays and newest > work.attempt:  # what it did before it was taken back
            if work.started < work.attempt:
                self._see_start(work, folder, work.attempt, None, asked=True)
            self._see_parts(work, folder)
        if folder.finished(work.attempt) is None:
            self._see_requeue(work, folder, newest, status)
        elif newest > work.attempt or (status is not None and status.phase == "waiting"):
            newest, status = work.attempt, None  # what it handed in counts, and not that it was taken back thereafter
        if newest >= work.attempt and work.started < newest:
            self._see_start(work, folder, newest, status, asked=statuses is not None)
        self._see_parts(work, folder)
        if work.started == newest == work.attempt and folder.finished(newest) is not None:
            self._missing.pop(work.sequence, None)
            self._see_end(work, folder, newest, folder.finished(newest))
        elif statuses is not None:
            self._see_end_without_result(work, folder, newest, status)

    def _see_parts(self, work: SiteJob, folder: JobFolder) -> None:
        """Of a job that stays: the work of which parts it took."""
        while work.stays and work.started == work.attempt:
            attempt, part = work.attempt, work.took + 1
            found = folder.taken(attempt, part)
            if found is None:
                return
            taken, at = found
            self._jobs.notes.note(
                self._jobs.notes.report(
                    Took,
                    sequence=work.sequence,
                    attempt=attempt,
                    part=part,
                    waited=taken.waited,
                    ahead=taken.ahead,
                    ahead_seconds=taken.ahead_seconds,
                    bound=taken.bound,
                    took_work_at=at,
                    ago=0.0,  # until it is told
                )
            )

    def _see_end(self, work: SiteJob, folder: JobFolder, attempt: int, finished: float | None) -> None:
        """It is done, and gives its nodes back."""
        parts = folder.parts(attempt) if work.stays else 1
        earlier = self._jobs.undelivered(work) if work.stays else None
        if earlier is not None and earlier[0] < attempt:
            return  # what an earlier attempt handed in comes before: the job is over with its last attempt
        result = folder.result(attempt, parts - 1) if parts else None
        steps, seconds = (result.trained.steps_done, result.trained.train_seconds) if result is not None else (0, 0.0)
        began = folder.started(attempt)
        idle_since = folder.without_work_since(attempt) if work.stays else None
        count = f", the last of {parts} parts" if work.stays else ""
        self._jobs.log.info(f"{work} ended: {steps} steps in {seconds:.1f} s{count}")
        self._jobs.notes.note(
            self._jobs.notes.report(
                Ended,
                sequence=work.sequence,
                attempt=attempt,
                steps_done=steps,
                train_seconds=seconds,
                held_seconds=_between(began, finished),
                parts=parts,
                idle_seconds=_between(idle_since, finished),
            )
        )

    def _see_loss(self, work: SiteJob, folder: JobFolder) -> bool:
        """Without its folder a job cannot hand in, so it is ended; once it is seen twice, as disks have bad moments."""
        lost = folder.gone(work.started)
        if lost is None:
            self._lost.discard(work.sequence)
        elif work.sequence not in self._lost:
            self._lost.add(work.sequence)
        else:
            where = lost.relative_to(self._jobs.home)
            reason = f"{where} is gone from the facility's disk, so nothing can be handed in"
            self._jobs.fail(work, reason, transient=True, and_end=True)
        return lost is not None

    def _see_requeue(self, work: SiteJob, folder: JobFolder, newest: int, status: JobStatus | None) -> None:
        """It runs again, or waits again after it ran. One that waits may be handing in still, since it was told to stop
        when it was taken back: its result has some time to show."""
        waits = status is not None and status.phase == "waiting" and work.started == newest >= work.attempt
        if newest <= work.attempt and not waits:
            self._taken_back.pop(work.sequence, None)
            return
        since = self._taken_back.setdefault(work.sequence, self._jobs.clock.now())
        if newest <= work.attempt and self._jobs.clock.now() - since < self._jobs.settings.grace_seconds:
            return
        held = self._held_until_requeue(work, folder, newest, since, status)
        reason = (status.reason if status is not None else "") or "taken back into the queue"
        report = self._jobs.notes.report(
            Requeued,
            sequence=work.sequence,
            attempt=max(newest, work.attempt + 1),
            reason=reason[:REASON_LENGTH],
            held_seconds=held,
        )
        self._jobs.log.info(f"{work} waits again: {reason}")
        self._jobs.notes.note(replace(report, at=since), Closed(node_seconds=held * self._jobs.nodes))
        del self._taken_back[work.sequence]

    def _held_until_requeue(
        self, work: SiteJob, folder: JobFolder, newest: int, taken_back: float, status: JobStatus | None
    ) -> float:
        """Seconds that it held its nodes before it was requeued. Of several runs that nobody saw, all count."""
        held = 0.0
        for attempt in range(work.attempt, max(newest, work.attempt + 1)):
            start, again = folder.started(attempt), folder.started(attempt + 1)
            if start is not None:
                newer = status if attempt + 1 == newest else None
                end = taken_back if again is None else self._end_before(work, folder, attempt + 1, again, newer)
                held += min(max(0.0, end - start), self._jobs.wall(work))
        return held

    def _end_before(
        self, work: SiteJob, folder: JobFolder, attempt: int, stamp: float, status: JobStatus | None
    ) -> float:
        """When the run before this one ended, which nobody saw: as its scheduler says, or with its last sign of life.
        Without either it ran until this one began, or for its wall time if that was shorter."""
        before = folder.started(attempt - 1)
        if before is None:
            return stamp
        last = min(stamp, before + self._jobs.wall(work))
        if status is not None and status.started_at is not None and status.eligible_at is not None:
            said = stamp - (status.started_at - status.eligible_at)
            if status.incarnation >= attempt and said >= before - DISAGREE_SECONDS:
                return min(said, last)
        return min(folder.alive(attempt - 1) or last, last)

    def _see_start(
        self, work: SiteJob, folder: JobFolder, newest: int, status: JobStatus | None, *, asked: bool
    ) -> None:
        stamp = folder.started(newest)
        has_work = work.has_work(newest)
        bound = folder.bound(newest) if not has_work else None
        if stamp is None or (not has_work and bound is None and not (work.stays and folder.waits(newest))):
            return  # it has begun to begin
        not_yet = status is not None and status.phase == "running" and status.started_at is None
        if (not asked or not_yet) and folder.result(newest) is None:
            return  # the scheduler's times will come
        waited = self._admission_delay(work, newest, stamp, status)
        self._jobs.log.info(f"{work} started{' again' if newest > 0 else ''} after {waited:.1f} s in the queue")
        self._jobs.notes.note(
            self._jobs.notes.report(
                Started,
                sequence=work.sequence,
                attempt=newest,
                admission_delay=waited,
                took_work_at=stamp if has_work else folder.work_taken_at(newest) or stamp,
                lingered=max(0.0, bound.lingered) if bound is not None else 0.0,
                bound=bound.bound if bound is not None else None,
                ago=0.0,  # until it is told
            )
        )

    def _admission_delay(self, work: SiteJob, attempt: int, stamp: float, status: JobStatus | None) -> float:
        """Start minus eligible, both by the scheduler's clock, which nothing else is compared with."""
        if status is not None and status.started_at is not None and status.eligible_at is not None:
            waited = status.started_at - status.eligible_at
            there = self._jobs.folder(work).started(attempt - 1) if attempt > 0 else work.asked_at
            if there is None or waited <= stamp - there + DISAGREE_SECONDS:
                return max(0.0, waited)
            self._jobs.log.info(
                f"{work}: its scheduler says that it waited for {waited:.0f} s, and it was there for "
                f"{stamp - there:.0f}; that counts"
            )
        eligible = work.requeued_at if attempt > 0 else work.submitted_at
        if attempt > 0 and eligible is not None and eligible > stamp:  # nobody saw it wait
            eligible = self._end_before(work, self._jobs.folder(work), attempt, stamp, None)
        return max(0.0, stamp - (eligible if eligible is not None else stamp))

    def _see_end_without_result(self, work: SiteJob, folder: JobFolder, newest: int, status: JobStatus | None) -> None:
        never = status.never_starts if status is not None else None
        if never is None and status is not None and status.phase != "ended":
            self._missing.pop(work.sequence, None)
            return
        since = self._missing.setdefault(work.sequence, time.monotonic())
        bad_luck = status is not None and status.bad_luck
        at_once = never is not None and not bad_luck
        if not at_once and time.monotonic() - since < self._jobs.settings.grace_seconds:
            return  # file systems lag: its result may be about to show; and bad luck may pass
        if never is not None:
            self._jobs.fail(work, f"it can never start: {never}", transient=bad_luck, and_end=True)
            return
        if work.stays and self._jobs.undelivered(work) is not None:
            return  # it loses no more than what it was at
        if work.cancelled and work.started == newest == work.attempt:
            self._see_end(work, folder, newest, self._jobs.clock.now())
            return
        if work.cancelled:
            self._see_cancelled(work, {}, None)  # it did nothing yet
            return
        held = None
        if status is not None and status.started_at is not None and status.ended_at is not None and newest >= 0:
            held = max(0.0, status.ended_at - status.started_at)
        self._jobs.fail(work, self._why_failed(folder, status), transient=True, newest=newest, held_seconds=held)

    def _why_failed(self, folder: JobFolder, status: JobStatus | None) -> str:
        where = folder.ends_with(self._jobs.home)
        if folder.out_of_time(folder.attempts() - 1):
            return f"{WALL_TIME}; {where}"
        if status is None:
            return f"the scheduler no longer knows the job, and it left no result; {where}"
        if status.outcome == "timeout":
            return f"{WALL_TIME}; {where}"
        code = f" with exit code {status.exit_code}" if status.exit_code is not None else ""
        how = {"cancelled": "was cancelled at the scheduler", "completed": "ended without handing anything in"}
        said = how.get(status.outcome or "", f"ended ({status.outcome}){code}")
        return f"it {said}; {where}"

    def _see_cancelled(self, work: SiteJob, statuses: dict[str, JobStatus] | None, status: JobStatus | None) -> None:
        if statuses is None:
            return
        if status is not None and status.phase != "ended":
            self._jobs.cancel(work)
            return
        self._jobs.notes.note(self._jobs.closing(work, self._jobs.held_in_all(work, status)))
        self._jobs.tidy(work)

    def _see_off(
        self, work: SiteJob, folder: JobFolder, statuses: dict[str, JobStatus] | None, status: JobStatus | None
    ) -> None:
        """A job that handed in has nothing more to do. One that stays, or that its scheduler runs again, is ended."""
        again = folder.attempts() - 1 > work.attempt or (status is not None and status.phase == "waiting")
        if again and not work.unwanted:
            self._jobs.log.info(f"{work} has handed in and is run again by its scheduler; it is ended")
            self._jobs.notes.note(replace(work, unwanted=True))
        is_there = status is not None and status.phase != "ended"
        if is_there and not work.unwanted and work.settled and self._should_have_ended(work):
            self._jobs.log.info(f"{work} has handed in and did not end; it is ended")
            self._jobs.notes.note(replace(work, unwanted=True))
        if work.unwanted and (is_there or statuses is None):
            self._jobs.cancel(work)
        elif work.settled and statuses is not None and not is_there:
            self._jobs.notes.note(self._jobs.closing(work, self._jobs.held_in_all(work, status)))
            self._settled.pop(work.sequence, None)

    def _should_have_ended(self, work: SiteJob) -> bool:
        since = self._settled.setdefault(work.sequence, time.monotonic())
        over = self._jobs.memory.over is not None
        return time.monotonic() - since > (LAST_PARTING_SECONDS if over else PARTING_SECONDS)


def _between(since: float | None, until: float | None) -> float:
    """Seconds; 0 where one of them is not known."""
    return 0.0 if since is None or until is None else max(0.0, until - since)
