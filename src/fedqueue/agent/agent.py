"""The agent of a facility: claims orders, submits jobs, watches them, hands in what they made.

It runs on a login node, as a daemon or once in a while from cron, and may be gone for days: jobs go on, results wait,
the next start goes on from its journal. It asks and is never asked, and runs nothing but its own config's command.
One turn: look at the scheduler and at the job folders, tell the coordinator what happened, do what it says.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from fedqueue.agent.evaluation import Evaluation
from fedqueue.agent.jobs import JobFolder, Jobs, Shared
from fedqueue.agent.journal import Lease, Memory, Notes, Received, Reported, RunOver, SiteJob
from fedqueue.agent.live_forecast import LiveForecast
from fedqueue.agent.masking import Masking
from fedqueue.agent.schedulers import (
    JobRequest,
    Scheduler,
    SchedulerUnreachableError,
    SubmitRefusedError,
    make_scheduler,
)
from fedqueue.agent.settings import AgentConfig
from fedqueue.agent.staging import stage_worker
from fedqueue.agent.transfers import Delivery, ModelCache
from fedqueue.agent.transport import CoordinatorRefusedError, CoordinatorUnreachableError, Transport
from fedqueue.agent.watching import Watching
from fedqueue.errors import FedQueueError, StorageError
from fedqueue.files import failpoint
from fedqueue.protocol.contract import (
    MOST_ORDERS,
    MOST_REPORTS,
    REASON_LENGTH,
    Answer,
    JobOrder,
    Order,
    job_id,
    sequence_of,
)
from fedqueue.protocol.reports import Poll, Refused, Report, Started, Submitted, Took, Unscored

Turn = Generator[Poll, Answer, None]
"""A turn at work: what it gives is to be said to the coordinator, and it goes on with the answer, or with the error of
who carries it (`throw`). Whoever drives it may carry the words of several agents at once."""

LEAST_LEASE: Final = 120.0  # seconds
GOODBYE_SECONDS: Final = 5.0


class Agent:
    def __init__(
        self,
        config: AgentConfig,
        home: Path,
        facility: str,
        transport: Transport,
        *,
        run: str = "",
        scheduler: Scheduler | None = None,
        site: Shared | None = None,
        name: str = "",
    ) -> None:
        """`scheduler`: instead of the one that the config names. `site`: what it shares with other runs; `name`: of
        this run among them."""
        home.mkdir(parents=True, exist_ok=True)
        (home / "state").mkdir(exist_ok=True)
        self._lease = Lease(home, max(LEAST_LEASE, 3 * config.agent.poll_seconds))
        self._session = secrets.token_hex(8)
        self._reached = False  # the coordinator, in this turn
        self._met = False  # the coordinator, since we started
        self._transport = transport
        scheduler = scheduler or make_scheduler(config.scheduler, home)
        worker = stage_worker(home) if config.agent.stage_worker else None
        self._jobs = Jobs(config, home, facility, scheduler, Notes(home), run=run, worker=worker, site=site, name=name)
        self._model_cache = ModelCache(self._jobs, transport)
        self._evaluation = Evaluation(self._jobs, self._model_cache)
        self._masking = Masking(self._jobs, transport, self._model_cache)
        self._delivery = Delivery(self._jobs, transport, self._masking)
        self._watching = Watching(self._jobs, self._delivery.on_its_way)
        self._live_forecast = LiveForecast.of(self._jobs)

    # Life -----------------------------------------------------------------------------------------------

    def run(self, *, once: bool, stopping: Callable[[], bool] = lambda: False) -> None:
        """Until the run is over, or with `once` until there is nothing more to do now."""
        turns = 0
        while not stopping():
            self.turn()
            turns += 1
            if self.is_finished:
                self.stop_scoring()
                return
            if once:
                if turns >= 2 and not self.busy():
                    return
                self._wait(min(1.0, self._jobs.settings.poll_seconds), stopping)
            else:
                self._wait(self._jobs.settings.poll_seconds, stopping)

    def turn(self) -> None:
        """Look, tell, do. What cannot be done now is done in a later turn."""
        turn = self.take_turn()
        said = next(turn, None)
        while said is not None:
            try:
                answer = self._transport.poll(said)
            except FedQueueError as error:
                said = next_after(turn, error)
            else:
                said = next_after(turn, answer)

    def take_turn(self) -> Turn:
        """A turn, without a carrier."""
        self._reached = False
        try:
            self._lease.renew()
            self._jobs.clock.read()
            if not self._met:
                yield from self._tell_and_do()  # before anything is noted: was one of us set back?
            self._watching.look()
            if self._scores:
                self._evaluation.turn()
            else:
                self._jobs.fine("scoring")
            if self._live_forecast is not None:
                self._live_forecast.turn()
            if self._met:
                yield from self._tell_and_do()
            self._submit_what_waits()
            if self._live_forecast is not None:
                self._live_forecast.follow()
        except (StorageError, OSError) as error:  # shared file systems have bad moments
            self._jobs.trouble("disk", str(error))
            with suppress(FedQueueError):  # whoever asks the coordinator why nothing is done should find out
                yield self._poll([], stuck=True)
        else:
            if not self._model_cache.no_place:  # else it is tried again, and may not be said to be well
                self._jobs.fine("disk")

    def close(self) -> None:
        """End in peace: the coordinator may take another agent at once."""
        if self._delivery.moving or self._model_cache.busy:
            self._jobs.log.info("waiting for a transfer; Ctrl-C or `kill` once more ends at once, and nothing is lost")
        self._delivery.close()
        self._masking.close()
        self._model_cache.close()
        try:
            self._say_goodbye()
        finally:
            self._jobs.notes.close()
            self._lease.release()

    @property
    def is_finished(self) -> bool:
        """The run is over, and nothing of it is left to do here."""
        return self.over is not None and not self._delivery.moving and not self._memory.works

    @property
    def jobs(self) -> Jobs:
        return self._jobs

    def busy(self) -> bool:
        """Whether there is more to do at once."""
        return self._reached and self._busy()

    def end(self, reason: str) -> None:
        """The run is over, says the federation: nobody waits for what is under way."""
        if self.over is None:
            self._jobs.notes.note(RunOver(reason=reason))
        for work in list(self._memory.works.values()):
            if not work.cancelled:
                self._cancel(work)

    def stop_scoring(self) -> None:
        if self._scores:
            self._evaluation.stop()

    def _say_goodbye(self) -> None:
        """Once; at the end of the run for a while, because a coordinator that was killed just now waits for it."""
        until = time.monotonic() + (GOODBYE_SECONDS if self.over is not None else 0.0)
        while True:
            try:
                self._transport.poll(self._poll([], leaving=True))
                return
            except CoordinatorUnreachableError:
                if time.monotonic() >= until:
                    return
            except FedQueueError:
                return
            time.sleep(min(1.0, self._jobs.settings.poll_seconds))

    def _wait(self, seconds: float, stopping: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        moving = self._delivery.moving
        while not stopping() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            if any(future.done() for future in moving):
                return

    def _busy(self) -> bool:
        waits = self._model_cache.busy or (self._scores and self._evaluation.can_begin())
        moving = bool(self._delivery.moving) or self._masking.busy
        return moving or waits or bool(self._memory.reports)

    @property
    def _scores(self) -> bool:
        """Whether a model is to be scored here, or is being scored."""
        return self._evaluation.wanted is not None or self._memory.scoring is not None

    @property
    def over(self) -> str | None:
        """Why the run is over; None: it is not, as far as we know."""
        return self._jobs.memory.over

    @property
    def _memory(self) -> Memory:
        return self._jobs.memory

    # Telling and doing ----------------------------------------------------------------------------------

    def _poll(self, reports: list[Report], *, leaving: bool = False, stuck: bool = False) -> Poll:
        return Poll(
            journal=self._memory.journal_id,
            session=self._session,
            generation=self._lease.generation,
            host=socket.gethostname(),
            poll_seconds=self._jobs.settings.poll_seconds,
            standing=self._model_cache.standing_number,
            open=sorted(n for n, work in self._memory.works.items() if not work.settled)[:MOST_REPORTS],
            newest=self._memory.newest_report,
            unscored=[Unscored(version=version, reason=why) for version, why in self._memory.unscored.items()],
            reports=reports,
            leaving=leaving,
            troubles=self._jobs.troubles(),
            stuck=stuck,
            run=self._jobs.run,
            cap_left=self._jobs.cap_left(),
            mask_key=self._masking.key if self._jobs.masked else "",
        )

    def _tell_and_do(self) -> Turn:
        memory = self._memory
        answer = yield from self._ask()
        if answer is None:
            return
        received_at = self._jobs.clock.now()
        self._jobs.fine("coordinator")
        self._compare(answer.received)
        if answer.over != memory.over:  # noted: who is killed on its way out need not find the coordinator again
            self._jobs.notes.note(RunOver(reason=answer.over))
        for job in answer.orders:
            self._take_order(job)
        for sequence in answer.cancel:
            work = memory.works.get(sequence)
            if work is None:
                self._cancel_unknown(sequence)
            elif not work.cancelled:
                self._cancel(work)
        self._model_cache.want(answer.standing, received_at)
        further = answer.further or []
        self._model_cache.bring(further)
        needed = [work.job.model for work in memory.works.values() if work.job.model is not None and work.took < 1]
        needed += [work.model for work in further]
        self._evaluation.wanted = answer.evaluate
        needed += self._evaluation.models() if self._scores else []
        self._model_cache.keep(needed, self._taken())
        self._jobs.masked = answer.masked
        self._delivery.turn()
        if answer.masked:
            self._masking.turn(answer.group)

    def _ask(self) -> Generator[Poll, Answer, Answer | None]:
        """Tell what is new, and hear what is to be done; None: the coordinator does not know us yet, or is away."""
        memory = self._memory
        # At first no report of this process: the coordinator may have others of the same numbers from a lost journal.
        numbers = [n for n in sorted(memory.reports) if self._met or n <= self._jobs.notes.found]
        reports = [self._said_now(memory.reports[n]) for n in numbers[: MOST_REPORTS // 4]]
        try:
            answer = yield self._poll(reports)
            self._must_be_ours(answer)
        except CoordinatorUnreachableError as error:
            self._jobs.trouble("coordinator", f"the coordinator is out of reach: {error}")
            return None
        except CoordinatorRefusedError as error:
            if error.refusal != "set back":
                raise
            self._met = True
            self._follow_coordinator()
            return None
        self._reached = True
        return answer

    def _must_be_ours(self, answer: Answer) -> None:
        """Job ids go into names of files and into scripts."""
        wrong = [job.order.facility for job in answer.orders if job.order.facility != self._jobs.facility]
        if answer.run not in ("", self._jobs.run) or wrong:
            raise CoordinatorUnreachableError("the coordinator's answer is for another run or facility")

    def _compare(self, received: int) -> None:
        """The coordinator's newest report of ours, against ours: an older copy of either may have been restored."""
        memory, notes = self._memory, self._jobs.notes
        acknowledged = min(memory.reports, default=memory.newest_report + 1) - 1
        if not self._met and received > notes.found:
            self._jobs.log.warning(
                "the coordinator has heard of jobs that are not in the journal: this home was restored from an older "
                "copy; the agent goes on from what is in it, and jobs that are not in it are given up"
            )
            notes.begin_anew(after=notes.found)
        elif received < acknowledged:
            self._follow_coordinator()
        elif received > acknowledged:
            notes.note(Received(n=received))
        self._met = True

    def _follow_coordinator(self) -> None:
        self._jobs.log.warning(
            "the coordinator has forgotten what it was told: its run folder was restored from an older copy; the agent "
            "goes on with the jobs that the coordinator knows"
        )
        self._jobs.notes.begin_anew(after=self._memory.newest_report)

    def _taken(self) -> set[int]:
        """Versions that open jobs took from standing work, or took while they stayed."""
        found: set[int] = set()
        for work in self._memory.works.values():
            folder = self._jobs.folder(work)
            newest = folder.attempts() - 1
            if work.job.assignment is None and (bound := folder.bound(newest)) is not None:
                found.add(bound.bound.work.base_version)
            if work.stays:  # it may be a part further than was reported
                parts = (folder.in_hand(newest, part) for part in (work.took, work.took + 1))
                found.update(taken.base_version for taken in parts if taken is not None)
        return found

    def _said_now(self, found: Reported) -> Report:
        """A report as it is sent: how long ago, instead of when."""
        if not isinstance(found.report, Started | Took) or found.took_work_at is None:
            return found.report
        return replace(found.report, ago=max(0.0, self._jobs.clock.now() - found.took_work_at))

    def _take_order(self, job: JobOrder) -> None:
        sequence, memory = job.sequence, self._memory
        if sequence in memory.works or memory.untold(sequence):
            return  # the coordinator has not heard yet of what became of it
        if sequence <= memory.known:
            reason = "this facility has had an order of this number, and no longer has it"
            self._jobs.log.warning(f"job {sequence} was refused: {reason}")
            self._jobs.notes.note(self._jobs.notes.report(Refused, sequence=sequence, reason=reason, transient=True))
        elif len(memory.works) < MOST_ORDERS:
            self._jobs.notes.note(SiteJob(ordered_at=self._jobs.clock.now(), name=self._name(sequence), job=job))
            failpoint("agent.ordered")

    def _name(self, sequence: int) -> str:
        """Of a job at the scheduler."""
        return f"fq-{self._memory.journal_id[:8]}-{sequence}"

    def _cancel(self, work: SiteJob) -> None:
        if self._delivery.unanswered(work) and not work.stays:
            return  # the coordinator will say what it thinks of its update
        if work.scheduler_id is None and not work.intended:
            self._jobs.notes.note(self._jobs.closing(work, 0.0))
            return
        self._jobs.log.info(f"{work} is cancelled: the coordinator does not want it any more")
        self._jobs.notes.note(replace(work, cancelled=True))

    def _cancel_unknown(self, sequence: int) -> None:
        """A job that was ours before the journal was lost or set back: the scheduler may have it still."""
        name = JobFolder(self._jobs.home, str(sequence)).name() or self._name(sequence)
        facility, now = self._jobs.facility, self._jobs.clock.now()
        order = Order(job_id=job_id(facility, sequence), facility=facility, round=0, wall_seconds=1.0)
        job = JobOrder(order=order)
        self._jobs.notes.note(SiteJob(name=name, job=job, ordered_at=now, intended=True, asked_at=now, cancelled=True))

    def _submit_what_waits(self) -> None:
        for work in sorted(self._memory.works.values(), key=lambda work: work.sequence):
            unbound = work.job.assignment is None and not self._model_cache.standing_path.exists()
            if work.stays:  # it waits for its work, if need be; only not without what is on its way
                unbound = work.job.assignment is None and (not self._met or self._model_cache.awaits_standing)
            if work.scheduler_id is None and (work.intended or not unbound):  # otherwise it would find no work
                if not (work.intended or self._jobs.has_place()):
                    self._jobs.trouble("place", "jobs wait: as many are at the scheduler as jobs_at_once allows")
                    return
                self._jobs.fine("place")
                try:
                    self._submit(work)
                except SchedulerUnreachableError as error:
                    self._jobs.trouble("scheduler", f"the scheduler did not answer: {error}")
                    return
                except SubmitRefusedError as refused:
                    self._jobs.log.warning(f"{work} was refused: {refused.reason}")
                    self._refuse(work, refused.reason, refused.transient)

    def _submit(self, work: SiteJob) -> None:
        folder = self._jobs.folder(work)
        if work.intended or self._memory.restored or not self._met:  # killed or cut off while we asked, or set back
            found = self._jobs.scheduler.find(work.name)
            if found is None and folder.attempts():
                found = "forgotten"  # it ran, and the scheduler no longer knows it
            if found is not None:
                self._submitted(work, found, work.asked_at or self._jobs.clock.now())
                return
            if work.cancelled:
                self._jobs.notes.note(self._jobs.closing(work, 0.0))
                return
        elif folder.attempts():
            folder.put_aside()  # of a job that is not in this journal, and may still run
        wall = self._jobs.wall(work)
        self._jobs.check_cap(wall, self._jobs.shortest_wall)
        if self._jobs.privacy is not None:
            self._jobs.privacy.must_leave_room()
        model = self._model_cache.path(work.job.model) if work.job.model is not None else None
        order, command = replace(work.order, wall_seconds=wall), self._jobs.settings.command
        self._jobs.prepare(folder, work.name, order, command, work.job.assignment, model)
        before = self._memory.works.get(sequence_of(work.order.after)) if work.order.after is not None else None
        request = JobRequest(
            name=work.name,
            script=folder.script,
            folder=folder.path,
            wall_seconds=wall,
            after=before.scheduler_id if before is not None and before.ended < before.attempt else None,
        )
        failpoint("agent.prepared")
        asked_at = self._jobs.clock.now()
        if not work.intended:
            self._jobs.notes.note(replace(work, intended=True, asked_at=asked_at))
        work.asked_at = asked_at
        failpoint("agent.intended")
        scheduler_id = self._jobs.scheduler.submit(request)
        failpoint("agent.submitted")
        self._submitted(work, scheduler_id, self._jobs.clock.now())

    def _submitted(self, work: SiteJob, scheduler_id: str, at: float) -> None:
        wall, ordered = self._jobs.wall(work), work.order.wall_seconds
        asked = wall if work.stays and wall != ordered else None
        report = self._jobs.notes.report(Submitted, sequence=work.sequence, wall_seconds=asked)
        self._jobs.notes.note(
            replace(work, scheduler_id=scheduler_id, submitted_at=at),
            *([report] if not work.cancelled else []),  # otherwise nobody waits for it
        )
        self._jobs.log.info(f"{work} is at the scheduler")

    def _refuse(self, work: SiteJob, reason: str, transient: bool) -> None:
        self._jobs.notes.note(
            self._jobs.notes.report(
                Refused, sequence=work.sequence, reason=reason[:REASON_LENGTH], transient=transient
            ),
            self._jobs.closing(work, 0.0),
        )


def next_after(turn: Turn, came: Answer | FedQueueError) -> Poll | None:
    """What a turn has to say next, after what came; None: it is over."""
    try:
        return turn.throw(came) if isinstance(came, FedQueueError) else turn.send(came)
    except StopIteration:
        return None
