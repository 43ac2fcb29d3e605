"""The agent of a facility: claims orders, submits jobs, watches them, hands in what they made.

It runs on a login node, as a daemon or once in a while from cron, and may be gone for days: jobs go on, results wait,
the next start goes on from its journal. It asks and is never asked, and runs nothing but its own config's command.
One turn: look at the scheduler and at the job folders, tell the coordinator what happened, do what it says.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from fedqueue.errors import FedQueueError, StorageError
from fedqueue.messages import WALL_TIME
from fedqueue.runtime.agent_settings import AgentConfig
from fedqueue.runtime.evaluation import Evaluation
from fedqueue.runtime.failpoints import failpoint
from fedqueue.runtime.jobfolder import JobFolder, script
from fedqueue.runtime.journal import Lease
from fedqueue.runtime.reports import MOST_REPORTS, PROTOCOL, REASON_LENGTH
from fedqueue.runtime.schedulers import (
    JobRequest,
    JobStatus,
    SchedulerUnreachableError,
    SubmitRefusedError,
    clamp_wall,
    make_scheduler,
)
from fedqueue.runtime.shelf import Shelf
from fedqueue.runtime.staging import stage_worker
from fedqueue.runtime.transport import Client, CoordinatorRefusedError, CoordinatorUnreachableError, update_path
from fedqueue.runtime.works import Notes, Work

DISAGREE_SECONDS: Final = 60.0
"""Scheduler and job may differ about the start by so much; beyond it the job's own stamp counts."""

LEAST_LEASE: Final = 120.0  # seconds
GOODBYE_SECONDS: Final = 5.0


class UpdateGoneError(FedQueueError):
    """A job says that it handed in, and there is no update."""


class Agent:
    def __init__(
        self,
        config: AgentConfig,
        home: Path,
        facility: str,
        client: Client,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._config = config
        self._settings = config.agent
        self._home = home
        self._facility = facility
        self._client = client
        self._say = say
        home.mkdir(parents=True, exist_ok=True)
        (home / "state").mkdir(exist_ok=True)
        self._lease = Lease(home, max(LEAST_LEASE, 3 * self._settings.poll_seconds))
        self._session = secrets.token_hex(8)
        self._notes = Notes(home)
        self._scheduler = make_scheduler(config.scheduler, home)
        self._shelf = Shelf(home, client)
        self._worker = stage_worker(home) if self._settings.stage_worker else None
        self._evaluation = Evaluation(
            facility, self._settings, config.scheduler, self._scheduler, self._shelf, self._notes, self._worker, say
        )
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="mover")  # one transfer at a time
        self._moving: dict[int, Future[dict[str, Any]]] = {}  # hand-ins, by sequence number
        self._not_before: dict[int, float] = {}  # monotonic: hand-ins that failed wait a little
        self._troubles: dict[str, str] = {}

    # Life -----------------------------------------------------------------------------------------------

    def run(self, *, once: bool, stopping: Callable[[], bool] = lambda: False) -> None:
        """Until the run is over, or with `once` until there is nothing more to do now."""
        turns = 0
        while not stopping():
            self.turn()
            turns += 1
            if self.over is not None and not self._moving and not self._memory.works:
                self._evaluation.stop()
                return
            if once:
                if turns >= 2 and not self._busy():
                    return
                self._wait(min(1.0, self._settings.poll_seconds), stopping)
            else:
                self._wait(self._settings.poll_seconds, stopping)

    def turn(self) -> None:
        """Look, tell, do. What cannot be done now is done in a later turn."""
        try:
            self._lease.renew()
            statuses = self._ask_scheduler()
            for work in list(self._memory.works.values()):
                self._look(work, statuses)
            self._evaluation.turn()
            self._tell_and_do()
            self._submit_what_waits()
        except StorageError as error:
            self._trouble("disk", str(error))
        else:
            self._fine("disk")

    def close(self) -> None:
        """End in peace: the coordinator may take another agent at once."""
        self._mover.shutdown(wait=True, cancel_futures=True)
        self._shelf.close()
        try:
            self._say_goodbye()
        finally:
            self._notes.close()
            self._lease.release()

    def _say_goodbye(self) -> None:
        """Once; at the end of the run for a while, because a coordinator that was killed just now waits for it."""
        until = time.monotonic() + (GOODBYE_SECONDS if self.over is not None else 0.0)
        while True:
            try:
                self._client.call("POST", "/v1/poll", self._poll_body([], leaving=True))
                return
            except CoordinatorUnreachableError:
                if time.monotonic() >= until:
                    return
            except FedQueueError:
                return
            time.sleep(min(1.0, self._settings.poll_seconds))

    def _wait(self, seconds: float, stopping: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        moving = list(self._moving.values())
        while not stopping() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            if any(future.done() for future in moving):
                return

    def _busy(self) -> bool:
        return bool(self._moving) or self._shelf.busy or bool(self._memory.reports)

    @property
    def over(self) -> str | None:
        """Why the run is over; None: it is not, as far as we know."""
        return self._notes.memory.over

    @property
    def _memory(self) -> Any:
        return self._notes.memory

    def _trouble(self, where: str, what: str) -> None:
        """Say it once, not in every turn."""
        if self._troubles.get(where) != what:
            self._troubles[where] = what
            self._say(what)

    def _fine(self, where: str) -> None:
        if self._troubles.pop(where, None) is not None:
            self._say(f"{where}: well again")

    # Looking --------------------------------------------------------------------------------------------

    def _ask_scheduler(self) -> dict[str, JobStatus] | None:
        """What the scheduler knows of our jobs; None: it could not be asked, which says nothing about them."""
        ids = [work.scheduler_id for work in self._memory.works.values() if work.scheduler_id]
        if not ids:
            return {}
        try:
            found = self._scheduler.poll(ids)
        except SchedulerUnreachableError as error:
            self._trouble("scheduler", f"the scheduler did not answer: {error}")
            return None
        self._fine("scheduler")
        return found

    def _look(self, work: Work, statuses: dict[str, JobStatus] | None) -> None:
        if work.scheduler_id is None or work.sequence in self._moving:
            return
        status = statuses.get(work.scheduler_id) if statuses is not None else None
        if status is not None and status.name not in (None, work.name):
            status = None  # the scheduler lost ours and gave its id to another
        if work.cancelled:
            self._see_cancelled(work, statuses, status)
            return
        folder = JobFolder(self._home, str(work.sequence))
        newest = folder.attempts() - 1
        self._see_requeue(work, folder, newest, status)
        if newest >= work.attempt and work.started < newest:
            self._see_start(work, folder, newest, status, asked=statuses is not None)
        if work.started == newest >= 0 and (result := folder.result(newest)) is not None:
            work.missing_since = None
            if work.ended < newest:
                stamp = folder.started(newest) or result.began_at
                self._notes.note(
                    self._notes.report(
                        kind="ended",
                        sequence=work.sequence,
                        attempt=newest,
                        steps_done=result.steps_done,
                        train_seconds=result.train_seconds,
                        held_seconds=max(0.0, result.finished_at - stamp),
                    )
                )
        elif statuses is not None:
            self._see_end_without_result(work, folder, newest, status)

    def _see_requeue(self, work: Work, folder: JobFolder, newest: int, status: JobStatus | None) -> None:
        """It runs again, or waits again after it ran."""
        again = newest if newest > work.attempt else None
        if again is None and status is not None and status.phase == "waiting" and work.started == newest >= 0:
            again = newest + 1
        if again is not None and again > work.attempt and (work.started >= 0 or newest > 0):
            stamp = folder.started(work.attempt)
            held = max(0.0, time.time() - stamp) if stamp is not None else 0.0
            reason = (status.reason if status is not None else "") or "taken back into the queue"
            self._notes.note(
                self._notes.report(
                    kind="requeued",
                    sequence=work.sequence,
                    attempt=again,
                    reason=reason[:REASON_LENGTH],
                    held_seconds=held,
                )
            )

    def _see_start(self, work: Work, folder: JobFolder, newest: int, status: JobStatus | None, *, asked: bool) -> None:
        stamp = folder.started(newest)
        bound = folder.bound(newest) if work.order["assignment"] is None else None
        if stamp is None or (work.order["assignment"] is None and bound is None):
            return  # it has begun to begin
        if not asked and folder.result(newest) is None:
            return  # the scheduler's times will come
        took_work_at = stamp if bound is None else bound.bound_at - bound.startup_seconds
        self._notes.note(
            self._notes.report(
                kind="started",
                sequence=work.sequence,
                attempt=newest,
                admission_delay=self._admission_delay(work, newest, stamp, status),
                took_work_at=took_work_at,
                lingered=max(0.0, bound.lingered) if bound is not None else 0.0,
                bound=vars(bound.bound()) if bound is not None else None,
            )
        )

    def _admission_delay(self, work: Work, attempt: int, stamp: float, status: JobStatus | None) -> float:
        """Start minus eligible, both by the scheduler's clock; checked against the job's own stamp."""
        known = status is not None and status.started_at is not None and status.eligible_at is not None
        if known and status is not None and abs((status.started_at or 0.0) - stamp) <= DISAGREE_SECONDS:
            return max(0.0, (status.started_at or 0.0) - (status.eligible_at or 0.0))
        if status is not None and status.started_at is not None:
            self._say(f"job {work.sequence}: the scheduler's start and the job's own stamp differ; the stamp counts")
        eligible = work.requeued_at if attempt > 0 else work.submitted_at
        return max(0.0, stamp - (eligible if eligible is not None else stamp))

    def _see_end_without_result(self, work: Work, folder: JobFolder, newest: int, status: JobStatus | None) -> None:
        if status is not None and status.never_starts is not None:
            if not self._cancel_at_scheduler(work):
                return
            self._fail(work, f"it can never start: {status.never_starts}", transient=status.bad_luck)
            return
        if status is not None and status.phase != "ended":
            work.missing_since = None
            return
        if work.missing_since is None:
            work.missing_since = time.monotonic()
        if time.monotonic() - work.missing_since < self._settings.grace_seconds:
            return  # file systems lag: its result may be about to show
        self._fail(work, self._why_failed(folder, status), transient=True, newest=newest)

    def _why_failed(self, folder: JobFolder, status: JobStatus | None) -> str:
        where = f"its output is in {folder.output.relative_to(self._home)} at the facility"
        if status is None:
            return f"the scheduler no longer knows the job, and it left no result; {where}"
        if status.outcome == "timeout":
            return WALL_TIME
        code = f" with exit code {status.exit_code}" if status.exit_code is not None else ""
        how = {"cancelled": "was cancelled at the scheduler", "completed": "ended without handing anything in"}
        said = how.get(status.outcome or "", f"ended ({status.outcome}){code}")
        return f"it {said}; {where}"

    def _fail(self, work: Work, reason: str, *, transient: bool, newest: int = -1) -> None:
        stamp = JobFolder(self._home, str(work.sequence)).started(max(newest, 0))
        held = max(0.0, time.time() - stamp - self._settings.grace_seconds) if stamp is not None else 0.0
        self._say(f"job {work.sequence} failed: {reason}")
        self._notes.note(
            self._notes.report(
                kind="failed",
                sequence=work.sequence,
                attempt=max(work.attempt, 0),
                reason=reason[:REASON_LENGTH],
                transient=transient,
                held_seconds=held,
            ),
            self._closing(work, held),
        )

    def _see_cancelled(self, work: Work, statuses: dict[str, JobStatus] | None, status: JobStatus | None) -> None:
        if statuses is None:
            return
        if status is not None and status.phase != "ended":
            self._cancel_at_scheduler(work)
            return
        self._notes.note(self._closing(work, self._held(work)))
        self._tidy(work)

    def _cancel_at_scheduler(self, work: Work) -> bool:
        try:
            self._scheduler.cancel(work.scheduler_id or "")
        except SchedulerUnreachableError as error:
            self._trouble("scheduler", f"the scheduler did not answer: {error}")
            return False
        return True

    def _held(self, work: Work) -> float:
        folder = JobFolder(self._home, str(work.sequence))
        stamp = folder.started(work.attempt)
        result = folder.result(work.attempt)
        if stamp is None:
            return 0.0
        return max(0.0, (result.finished_at if result is not None else time.time()) - stamp)

    def _closing(self, work: Work, held_seconds: float) -> dict[str, Any]:
        return {"kind": "closed", "sequence": work.sequence, "node_seconds": held_seconds * self._nodes}

    def _tidy(self, work: Work) -> None:
        if not self._settings.keep_files:
            JobFolder(self._home, str(work.sequence)).drop_updates()

    @property
    def _nodes(self) -> int:
        return getattr(self._config.scheduler, "nodes", 1)

    # Telling and doing ----------------------------------------------------------------------------------

    def _poll_body(self, reports: list[dict[str, Any]], *, leaving: bool = False) -> dict[str, Any]:
        return {
            "journal": self._memory.journal_id,
            "session": self._session,
            "generation": self._lease.generation,
            "host": socket.gethostname(),
            "poll_seconds": self._settings.poll_seconds,
            "standing": self._shelf.standing_number,
            "open": sorted(self._memory.works)[:MOST_REPORTS],
            "reports": reports,
            "leaving": leaving,
        }

    def _tell_and_do(self) -> None:
        memory = self._memory
        numbers = sorted(memory.reports)[: MOST_REPORTS // 4]
        reports = [self._said_now(n, memory.reports[n]) for n in numbers]
        try:
            answer = self._client.call("POST", "/v1/poll", self._poll_body(reports))
        except CoordinatorUnreachableError as error:
            self._trouble("coordinator", f"the coordinator is out of reach: {error}")
            return
        received_at = time.time()
        self._fine("coordinator")
        if answer["received"] >= min(numbers, default=answer["received"] + 1):
            self._notes.note({"kind": "received", "n": answer["received"]})
        if answer["over"] != memory.over:  # noted: who is killed on its way out need not find the coordinator again
            self._notes.note({"kind": "over", "reason": answer["over"]})
        for order in answer["orders"]:
            self._take_order(order)
        for sequence in answer["cancel"]:
            work = memory.works.get(sequence)
            if work is not None and not work.cancelled:
                self._cancel(work)
        self._shelf.want(answer["standing"], received_at)
        needed = [work.order["model"] for work in memory.works.values() if work.order["model"] is not None]
        self._evaluation.want(answer["evaluate"])
        self._shelf.keep([*needed, *self._evaluation.models()])
        self._hand_in()

    @staticmethod
    def _said_now(n: int, report: Mapping[str, Any]) -> dict[str, Any]:
        """A report as it is sent: how long ago, instead of when."""
        said = {key: value for key, value in report.items() if key not in ("at", "took_work_at")}
        if said["kind"] == "started":
            said["ago"] = max(0.0, time.time() - report["took_work_at"])
        return {"n": n, **said}

    def _take_order(self, order: dict[str, Any]) -> None:
        sequence = int(order["sequence"])
        if sequence <= self._memory.known:
            return  # the coordinator has not heard of what became of it
        name = f"fq-{self._memory.journal_id[:8]}-{sequence}"
        self._notes.note({"kind": "order", "sequence": sequence, "at": time.time(), "order": {**order, "name": name}})
        failpoint("agent.ordered")

    def _cancel(self, work: Work) -> None:
        if work.sequence in self._moving:
            return  # its update is on the way: the coordinator will say what it thinks of it
        if work.scheduler_id is None and not work.intended:
            self._notes.note(self._closing(work, 0.0))
            return
        self._notes.note({"kind": "cancel", "sequence": work.sequence})

    def _submit_what_waits(self) -> None:
        for work in sorted(self._memory.works.values(), key=lambda work: work.sequence):
            if work.scheduler_id is None:
                try:
                    self._submit(work)
                except SchedulerUnreachableError as error:
                    self._trouble("scheduler", f"the scheduler did not answer: {error}")
                    return
                except SubmitRefusedError as refused:
                    self._say(f"job {work.sequence} was refused: {refused.reason}")
                    self._refuse(work, refused.reason, refused.transient)

    def _submit(self, work: Work) -> None:
        if work.intended:  # killed or cut off while we asked: it may be there
            found = self._scheduler.find(work.name)
            if found is None and JobFolder(self._home, str(work.sequence)).attempts():
                found = "forgotten"  # it ran, and the scheduler no longer knows it
            if found is not None:
                self._submitted(work, found, work.asked_at or time.time())
                return
            if work.cancelled:
                self._notes.note(self._closing(work, 0.0))
                return
        over_cap = self._over_cap(work)
        if over_cap is not None:
            raise SubmitRefusedError(*over_cap)
        folder = JobFolder(self._home, str(work.sequence))
        wall = clamp_wall(float(work.order["wall_seconds"]), self._config.scheduler)
        folder.prepare(self._order_file(work, wall), self._script(folder, work))
        before = self._memory.works.get(work.order["after"]) if work.order["after"] is not None else None
        request = JobRequest(
            name=work.name,
            script=folder.script,
            folder=folder.path,
            wall_seconds=wall,
            after=before.scheduler_id if before is not None and before.ended < before.attempt else None,
        )
        failpoint("agent.prepared")
        asked_at = time.time()
        if not work.intended:
            self._notes.note({"kind": "intent", "sequence": work.sequence, "at": asked_at})
        work.asked_at = asked_at
        failpoint("agent.intended")
        scheduler_id = self._scheduler.submit(request)
        failpoint("agent.submitted")
        self._submitted(work, scheduler_id, time.time())

    def _submitted(self, work: Work, scheduler_id: str, at: float) -> None:
        self._notes.note(
            {"kind": "submitted", "sequence": work.sequence, "id": scheduler_id, "at": at},
            self._notes.report(kind="submitted", sequence=work.sequence),
        )

    def _refuse(self, work: Work, reason: str, transient: bool) -> None:
        self._notes.note(
            self._notes.report(
                kind="refused", sequence=work.sequence, reason=reason[:REASON_LENGTH], transient=transient
            ),
            self._closing(work, 0.0),
        )

    def _over_cap(self, work: Work) -> tuple[str, bool] | None:
        """Why the node-hour cap forbids this job, and whether it may be tried again."""
        cap = self._settings.node_hours
        if cap is None:
            return None
        asks = float(work.order["wall_seconds"]) * self._nodes
        used = self._memory.node_seconds
        held = sum(
            float(other.order["wall_seconds"]) * self._nodes
            for other in self._memory.works.values()
            if other.scheduler_id is not None
        )
        if used + held + asks <= 3600 * cap:
            return None
        spent = f"{used / 3600:.2f} of {cap:g} node-hours are used"
        if held and used + asks <= 3600 * cap:
            return f"{spent}, and jobs under way may use the rest", True
        return f"{spent}: the facility's cap; raise agent.node_hours there to go on", False

    def _order_file(self, work: Work, wall: float) -> dict[str, Any]:
        order = work.order
        return {
            "protocol": PROTOCOL,
            "job_id": f"{self._facility}/{work.sequence}",
            "facility": self._facility,
            "round": order["round"],
            "purpose": order["purpose"],
            "wall_seconds": wall,
            "nodes": self._nodes,
            "standing": str(self._shelf.standing_path),
            "state_dir": str(self._home / "state"),
            "model": str(self._shelf.path(order["model"])) if order["model"] is not None else None,
            "assignment": order["assignment"],
        }

    def _script(self, folder: JobFolder, work: Work) -> str:
        return script(
            folder,
            command=self._settings.command,
            before=self._settings.before,
            environment=self._settings.environment,
            python_path=self._worker,
            label=f"{self._facility}/{work.sequence}",
        )

    # Handing in -----------------------------------------------------------------------------------------

    def _hand_in(self) -> None:
        """Uploads run beside; here they are begun, and what came of them is noted."""
        for sequence, future in list(self._moving.items()):
            if future.done():
                del self._moving[sequence]
                self._handed_in(self._memory.works[sequence], future)
        for work in list(self._memory.works.values()):
            ready = work.ended == work.attempt and not work.cancelled and work.sequence not in self._moving
            told = not any(r.get("sequence") == work.sequence for r in self._memory.reports.values())
            if ready and told and time.monotonic() >= self._not_before.get(work.sequence, 0.0):
                self._moving[work.sequence] = self._mover.submit(self._move, work.sequence, work.ended, work)

    def _move(self, sequence: int, attempt: int, work: Work) -> dict[str, Any]:
        """In the mover's thread: bytes, then the word that they are all there."""
        folder = JobFolder(self._home, str(sequence))
        result = folder.result(attempt)
        if result is None:
            raise StorageError(f"{folder.path}: its result is gone")
        if not folder.update(attempt).is_file():
            raise UpdateGoneError(f"{folder.update(attempt).relative_to(self._home)} is not there, but its result is")
        self._client.upload(folder.update(attempt), sequence, attempt, result.sha256)
        failpoint("agent.uploaded")
        handin = {
            "base_version": result.base_version,
            "steps_done": result.steps_done,
            "train_seconds": result.train_seconds,
            "admission_delay": work.admission_delay,
            "samples": result.samples,
            "nodes": result.nodes,
            "device": result.device,
            "metrics": result.metrics,
        }
        while True:
            answer = self._client.call("POST", update_path(sequence, attempt, result.sha256), handin)
            if answer["status"] != "checking":
                failpoint("agent.committed")
                return answer

    def _handed_in(self, work: Work, future: Future[dict[str, Any]]) -> None:
        error = future.exception()
        if error is None:
            answer = future.result()
            if answer["status"] == "rejected":
                self._say(f"the update of job {work.sequence} was rejected: {answer['reason']}")
        elif isinstance(error, CoordinatorRefusedError) and error.status == 410:
            self._say(f"the update of job {work.sequence} is not wanted any more: {error.reason}")
        elif isinstance(error, CoordinatorRefusedError) and error.status not in (401, 403, 409):
            self._fail(work, f"its update was refused: {error.reason}", transient=True)
            return
        elif isinstance(error, UpdateGoneError):
            self._fail(work, str(error), transient=True)
            return
        elif isinstance(error, FedQueueError):
            self._trouble("hand-in", f"the update of job {work.sequence} cannot be handed in now: {error}")
            self._not_before[work.sequence] = time.monotonic() + self._settings.poll_seconds
            return
        else:
            raise error
        if JobFolder(self._home, str(work.sequence)).attempts() > work.attempt + 1:
            self._notes.note({"kind": "cancel", "sequence": work.sequence})  # it runs once more, for nothing
            return
        self._notes.note(self._closing(work, self._held(work)))
        self._tidy(work)
