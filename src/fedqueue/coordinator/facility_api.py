"""What a facility may ask of the coordinator: take my reports, what shall I do, here is an update.

Every method but `commit` runs in the coordinator's own thread. A facility is named by its credential, never by what it
says, and its jobs by their number at that facility; so it cannot even name what belongs to another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from fedqueue import tensorfile
from fedqueue.coordinator.coordinator import Coordinator, Presence, Refused
from fedqueue.failpoints import failpoint
from fedqueue.files import sync
from fedqueue.protocol.contract import (
    Answer,
    EvaluationRequest,
    JobOrder,
    ModelFile,
    PostedWork,
    Receipt,
    Standing,
    UpdateKey,
    Verdict,
    job_id,
)
from fedqueue.protocol.messages import UpdateArrived, UpdateRejected
from fedqueue.protocol.reports import Handin, Poll, Report, event_of
from fedqueue.protocol.state import JobState

CHECK_SECONDS: Final = 5.0
"""How long a facility is kept waiting for the check of its update; after that it asks again."""

LARGER: Final = 2.0
"""An update may be so many times as large as the model: single precision may come back as double."""

SILENT_SECONDS: Final = 30.0
"""An agent that was not heard of for so long, or for three of its polls, may be replaced by any other."""

HEADER_ROOM: Final = 1 << 20  # bytes


class FacilityApi:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._checks: dict[tuple[str, int], asyncio.Task[Verdict]] = {}
        self._checker = ThreadPoolExecutor(2, thread_name_prefix="checker")

    def close(self) -> None:
        self._checker.shutdown(wait=True, cancel_futures=True)

    # Polls ----------------------------------------------------------------------------------------------

    def poll(self, facility: str, asked: Poll) -> Answer:
        """Take the reports that are new, and say what is to be done."""
        coordinator = self._coordinator
        presence = coordinator.presence[facility]
        self._fence(facility, presence, asked)
        presence.poll_seconds, presence.left = asked.poll_seconds, False
        another_journal = bool(presence.journal) and presence.journal != asked.journal
        presence.journal = asked.journal
        presence.troubles, presence.spoke = [trouble.plain() for trouble in asked.troubles], time.monotonic()
        if asked.stuck:  # it is not there in the sense that counts: nobody should wait for it
            received = coordinator.received.get((facility, asked.journal), 0)
            return Answer(received=received, orders=[], cancel=[], over=coordinator.state.stopped, run=asked.run)
        coordinator.heard(facility)
        known = self.must_follow(facility, asked)
        with coordinator.together():
            for report in asked.reports:
                if report.n > known:
                    self._take(facility, asked.journal, report)
                    known = report.n
        unknown = coordinator.give_up_all_but(facility, asked.open) if another_journal or asked.newest == known else []
        coordinator.unscorable(facility, asked.unscored)
        # One more than it needs stays: a job may just read it.
        coordinator.state.facilities[facility].forget_posts(lambda number: number < asked.standing - 1)
        failpoint("answer.before")
        answer = self._answer(facility, asked, known, unknown)
        if answer.over and presence.told_end is None:
            presence.told_end = time.monotonic()
        if asked.leaving:
            coordinator.leaves(facility)
        return answer

    def must_follow(self, facility: str, asked: Poll) -> int:
        """The number of the newest report that is here. Refuses those that do not follow: one of us was set back."""
        known = self._coordinator.received.get((facility, asked.journal), 0)
        if asked.reports and asked.reports[0].n > known + 1:
            first = asked.reports[0].n
            raise Refused(409, f"reports begin with {first}, but {known} is the newest here", received=known)
        return known

    def _fence(self, facility: str, presence: Presence, asked: Poll) -> None:
        """One agent a facility: a newer holder of its lease replaces an older one, a stranger waits."""
        if asked.session == presence.session:
            return
        left = max(SILENT_SECONDS, 3 * presence.poll_seconds) - (time.monotonic() - presence.heard)
        is_newer = asked.journal == presence.journal and asked.generation > presence.generation
        if presence.session and not is_newer and left > 0:  # a home that was restored has an older lease: it waits
            raise Refused(
                409,
                f"another agent of {facility} is at work (on {presence.host or 'another host'}); stop that one, "
                f"or try again in {left:.0f} s if it is gone",
            )
        presence.session, presence.generation, presence.host = asked.session, asked.generation, asked.host

    def _take(self, facility: str, journal: str, report: Report) -> None:
        coordinator = self._coordinator
        posts = coordinator.state.facilities[facility].posts
        event = event_of(report, facility, coordinator.now, posts)
        coordinator.tell(event, origin=f"{facility}/{journal}/{report.n}")
        coordinator.received[facility, journal] = report.n

    def _answer(self, facility: str, asked: Poll, received: int, unknown: list[int]) -> Answer:
        """`unknown`: jobs that we believed to be there; the scheduler may have them still."""
        state = self._coordinator.state
        here = state.facilities[facility]
        stopped = state.stopped is not None
        evaluation = self._evaluation(facility)
        over = stopped and (evaluation is None or self._coordinator.waited_for_score())
        orders = [job for job in here.jobs.values() if not job.taken]
        wanted = set() if stopped else {job.sequence for job in here.jobs.values()}
        standing = here.posts.get(here.posted)
        if standing is not None and not stopped:
            self._coordinator.presence[facility].post = here.posted
        return Answer(
            received=received,
            orders=[] if stopped or state.held else [self._order(job) for job in orders],
            cancel=sorted({*asked.open, *unknown} - wanted),
            standing=self._standing(here.posted, standing) if standing is not None and not stopped else None,
            evaluate=evaluation,
            over=state.stopped if over else None,
            run=asked.run,
        )

    def _order(self, job: JobState) -> JobOrder:
        work = job.assignment
        if work is None:
            return JobOrder(order=job.order)
        return JobOrder(order=job.order, assignment=replace(work, cutoff=None), model=self._model(work.base_version))

    def _standing(self, number: int, standing: Standing) -> PostedWork:
        in_seconds = replace(standing, next_cutoff=standing.next_cutoff - self._coordinator.now)
        return PostedWork(number=number, standing=in_seconds, model=self._model(standing.version))

    def _evaluation(self, facility: str) -> EvaluationRequest | None:
        """The newest model, if this facility scores models and has not scored it."""
        newest = self._coordinator.state.newest
        if self._coordinator.config.evaluation.where != facility or not self._coordinator.wants_score(newest):
            return None
        self._coordinator.asks_for_score(newest)
        return EvaluationRequest(version=newest, model=self._model(newest))

    def _model(self, version: int) -> ModelFile:
        return ModelFile(version=version, sha256=self._coordinator.outcomes.models[version])

    # Models and updates ---------------------------------------------------------------------------------

    def model(self, version: int) -> tuple[Path, str]:
        coordinator = self._coordinator
        digest = coordinator.outcomes.models.get(version)
        if digest is None or not coordinator.counts_on(digest):
            raise Refused(404, f"there is no model {version}, or no longer")
        if coordinator.suspects(digest):
            raise Refused(503, f"model {version} cannot be sent now: {coordinator.state.hindrance}")
        return coordinator.store.path(digest), digest

    def cannot_send(self, version: int, error: tensorfile.TensorFileError) -> Refused:
        return self._cannot_use(version, f"model {version} cannot be sent", error)

    def _cannot_use(self, version: int, doing: str, error: tensorfile.TensorFileError) -> Refused:
        """The answer when the file of a model failed somebody, unless it was deleted a moment ago."""
        digest = self._coordinator.outcomes.models[version]
        if not self._coordinator.counts_on(digest):
            return Refused(404, f"there is no model {version} any longer")
        return self._coordinator.cannot_use(digest, doing, error)

    def may_upload(self, facility: str, sequence: int, attempt: int, digest: str, size: int) -> Path:
        """Where the bytes of this update go. Only an open job of this facility may bring one."""
        coordinator = self._coordinator
        job = self._open(facility, sequence, attempt)
        newest = coordinator.state.newest
        like = job.assignment.base_version if job.assignment is not None else newest
        if not coordinator.counts_on(coordinator.outcomes.models[like]):  # the check will say so; here its size counts
            like = newest
        path = coordinator.store.path(coordinator.outcomes.models[like])
        try:
            most = int(LARGER * path.stat().st_size) + HEADER_ROOM
        except OSError as error:
            raise self._cannot_use(
                like, "no update can be taken", tensorfile.UnreadableFileError(path, error)
            ) from None
        if not 8 <= size <= most:
            raise Refused(413, f"an update may have 8 to {most} bytes, this one has {size}")
        if size > coordinator.store.room():
            raise Refused(507, "the coordinator's disk is full; the update can come later")
        path = coordinator.store.upload(facility, sequence, attempt, digest)
        check = self._checks.get((job.order.job_id, attempt))
        if check is None or check.done():
            coordinator.store.drop_uploads(facility, sequence, keep=path)  # one a job: digests must not fill the disk
        return path

    def _open(self, facility: str, sequence: int, attempt: int) -> JobState:
        job = self._coordinator.state.open_job(job_id(facility, sequence))
        if job is None:
            raise Refused(410, f"job {sequence} is not open")
        if attempt != job.attempt:
            raise Refused(410, f"attempt {attempt} of job {sequence} was superseded")
        return job

    async def commit(
        self, facility: str, sequence: int, attempt: int, digest: str, handin: Handin, checked: Callable[[], None]
    ) -> Verdict:
        """All bytes are there: check them, and let the update count. Asked again, it gives the same answer. If the
        check takes longer than who asks is kept waiting, `checked` is called when it is over."""
        key = (job_id(facility, sequence), attempt)
        task = self._checks.get(key)
        if task is None:
            task = asyncio.create_task(self._check(facility, sequence, attempt, digest, handin))
            self._checks[key] = task
            task.add_done_callback(lambda task: self._checked(key, task))
        try:
            verdict = await asyncio.wait_for(asyncio.shield(task), CHECK_SECONDS)
        except TimeoutError:
            task.add_done_callback(lambda _: checked())
            verdict = Verdict(status="checking")
        return replace(verdict, run=handin.run)

    def _checked(self, key: tuple[str, int], task: asyncio.Task[Verdict]) -> None:
        """Who asks again is answered from what came of it; what could not be checked is checked anew."""
        del self._checks[key]
        if not task.cancelled():
            task.exception()  # who asked has heard of it, or has gone

    async def _check(self, facility: str, sequence: int, attempt: int, digest: str, handin: Handin) -> Verdict:
        coordinator = self._coordinator
        key = job_id(facility, sequence), attempt, handin.part
        verdict = await asyncio.wrap_future(coordinator.ask(lambda: self._verdict(key)))
        if verdict is not None:
            return verdict
        upload, like = await asyncio.wrap_future(
            coordinator.ask(lambda: self._to_check(facility, sequence, attempt, digest, handin))
        )
        loop = asyncio.get_running_loop()
        try:
            reason = await loop.run_in_executor(self._checker, _why_not, upload, like, digest)
        except tensorfile.TensorFileError as error:
            failure = error
            if failure.path == upload:
                raise Refused(503, f"the update cannot be looked at now: {failure.reason}") from None
            doing = f"the update of {key[0]} cannot be taken"
            raise await asyncio.wrap_future(
                coordinator.ask(lambda: self._cannot_use(handin.base_version, doing, failure))
            ) from None
        return await asyncio.wrap_future(
            coordinator.ask(lambda: self._settle(facility, sequence, attempt, digest, handin, upload, reason))
        )

    def _verdict(self, key: UpdateKey) -> Verdict | None:
        """What became of an update, as the ledger has it; None: it has not been handed in."""
        verdicts = self._coordinator.outcomes.verdicts
        if key not in verdicts:
            return None
        reason = verdicts[key]
        return Verdict(status="accepted" if reason is None else "rejected", reason=reason)

    def _to_check(
        self, facility: str, sequence: int, attempt: int, digest: str, handin: Handin
    ) -> tuple[Path, Path | None]:
        """The upload, and the model it must look like; None: that is no longer there."""
        coordinator = self._coordinator
        self._open(facility, sequence, attempt)
        upload = coordinator.store.upload(facility, sequence, attempt, digest)
        if not upload.exists() and not coordinator.store.path(digest).exists():
            raise Refused(409, "its bytes are not here", offset=0)
        base = coordinator.outcomes.models.get(handin.base_version)
        like = coordinator.store.path(base) if base is not None and coordinator.counts_on(base) else None
        return (upload if upload.exists() else coordinator.store.path(digest)), like

    def _settle(
        self,
        facility: str,
        sequence: int,
        attempt: int,
        digest: str,
        handin: Handin,
        upload: Path,
        reason: str | None,
    ) -> Verdict:
        coordinator = self._coordinator
        self._open(facility, sequence, attempt)  # it may have been closed while its bytes were looked at
        key = job_id(facility, sequence)
        if reason is not None and reason.startswith(tensorfile.OTHER_BYTES):
            # Not what was sent, or not what was meant: it may come again.
            coordinator.store.drop_uploads(facility, sequence)
            raise Refused(409, reason, offset=0)
        if reason is not None:
            if upload.exists() and upload.suffix == ".part":
                coordinator.store.refuse(upload)
            event = UpdateRejected(at=coordinator.now, job_id=key, attempt=attempt, reason=reason, part=handin.part)
            coordinator.tell(event, origin=f"update/{key}/{attempt}/rejected")
            return Verdict(status="rejected", reason=reason)
        if upload.suffix == ".part":
            coordinator.store.keep(upload, digest)
        receipt = Receipt(
            job_id=key,
            attempt=attempt,
            base_version=handin.base_version,
            steps_done=handin.steps_done,
            train_seconds=handin.train_seconds,
            admission_delay=handin.admission_delay,
            samples=handin.samples,
            nodes=handin.nodes,
            device=handin.device,
            digest=digest,
            part=handin.part,
        )
        coordinator.arrived(UpdateArrived(at=coordinator.now, receipt=receipt))
        coordinator.store.drop_uploads(facility, sequence)
        return Verdict(status="accepted")


def _why_not(upload: Path, like: Path | None, digest: str) -> str | None:
    """In a checker's thread: one pass over the file. What is found good is on the disk then. What is wrong with our own
    disk is no fault of the update: it is raised as a `TensorFileError`."""
    if like is None:
        return "the model it was trained from is no longer here"
    try:
        reason = tensorfile.check(upload, like, sha256=digest)
        if reason is None:
            sync(upload)
        return reason
    except OSError as error:
        raise tensorfile.UnreadableFileError(upload, error) from None
    except tensorfile.UnreadableFileError:
        raise
    except tensorfile.TensorFileError as error:
        if error.path != upload:
            tensorfile.verify(like, like.stem)
            raise
        return str(error).replace(str(upload), "the update")
