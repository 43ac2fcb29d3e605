"""What a facility may ask of the coordinator: take my reports, what shall I do, here is an update.

Every method but `commit` runs in the coordinator's own thread. A facility is named by its credential, never by what it
says, and its jobs by their number at that facility; so it cannot even name what belongs to another.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fedqueue import masks, tensorfile, tensorsum
from fedqueue.coordinator.coordinator import Coordinator, Presence, Refused
from fedqueue.coordinator.transfers import Update
from fedqueue.files import failpoint, sync
from fedqueue.protocol.codec import body
from fedqueue.protocol.contract import (
    MOST_PARTS,
    Answer,
    EvaluationRequest,
    FurtherWork,
    JobOrder,
    MaskGroup,
    ModelFile,
    PostedWork,
    Receipt,
    Standing,
    UpdateKey,
    Verdict,
    job_id,
)
from fedqueue.protocol.messages import ForecastIssued, NodeHoursTold, UpdateArrived, UpdateRejected
from fedqueue.protocol.reports import (
    ForecastMade,
    Handin,
    Poll,
    Report,
    Scored,
    Started,
    Took,
    event_of,
    plausible,
    plausible_forecast,
)
from fedqueue.protocol.state import JobState
from fedqueue.tensorbytes import OTHER_BYTES, Content

CHECK_SECONDS: Final = 5.0
"""How long a facility is kept waiting for the check of its update; after that it asks again."""

LARGER: Final = 2.0
"""An update may be so many times as large as the model: single precision may come back as double."""

SILENT_SECONDS: Final = 30.0
"""An agent that was not heard of for so long, or for three of its polls, may be replaced by any other."""

HEADER_ROOM: Final = 1 << 20  # bytes

Ask = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Has the coordinator's thread do something for whoever asks."""


class FacilityApi:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._checks: dict[UpdateKey, asyncio.Task[Verdict]] = {}
        self._checked_now: dict[UpdateKey, Update] = {}  # of each of them
        self._looks: dict[str, asyncio.Future[Content]] = {}  # at objects that are to be sent
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
        # Before all else: who orders its first job, or hears that one is over, knows what the cap leaves.
        if asked.cap_left != coordinator.state.facilities[facility].cap_left:
            coordinator.tell(NodeHoursTold(at=coordinator.now, facility=facility, left=asked.cap_left))
        coordinator.heard(facility)
        if coordinator.masking is not None and asked.mask_key:
            coordinator.masking.keys[facility] = asked.mask_key
        known = self.must_follow(facility, asked)
        with coordinator.together():
            for report in asked.reports:
                if report.n > known:
                    self._take(facility, asked.journal, report)
                    known = report.n
        unknown = coordinator.give_up_all_but(facility, asked.open) if another_journal or asked.newest == known else []
        coordinator.scores.given_up(facility, asked.unscored)
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
        if isinstance(event, ForecastIssued):
            here = coordinator.state.facilities[facility]
            event = plausible_forecast(event, here, coordinator.strategy.round_length)
        elif isinstance(report, Started | Took) and report.bound is not None:
            event = plausible(event, self._job(facility, report.sequence), posts.get(report.bound.standing))
        elif not isinstance(report, Scored | ForecastMade):
            event = plausible(event, self._job(facility, report.sequence))
        coordinator.tell(event, origin=f"{facility}/{journal}/{report.n}")
        coordinator.received[facility, journal] = report.n

    def _job(self, facility: str, sequence: int) -> JobState | None:
        return self._coordinator.state.open_or_cancelled(job_id(facility, sequence))

    def _answer(self, facility: str, asked: Poll, received: int, unknown: list[int]) -> Answer:
        """`unknown`: jobs that we believed to be there; the scheduler may have them still."""
        state = self._coordinator.state
        here = state.facilities[facility]
        stopped = state.stopped is not None
        evaluation = self._evaluation(facility)
        over = stopped and (evaluation is None or self._coordinator.scores.waited_long_enough())
        orders = [job for job in here.jobs.values() if not job.taken]
        wanted = set() if stopped else {job.sequence for job in here.jobs.values()}
        standing = here.posts.get(here.posted)
        if standing is not None and not stopped:
            self._coordinator.presence[facility].post = here.posted
        return Answer(
            received=received,
            orders=[] if stopped or state.held else [self._order(job) for job in orders],
            further=None if stopped or state.held else self._further(here.jobs.values()),
            cancel=sorted({*asked.open, *unknown} - wanted),
            standing=self._standing(here.posted, standing) if standing is not None and not stopped else None,
            evaluate=evaluation,
            over=state.stopped if over else None,
            run=asked.run,
            masked=self._coordinator.masking is not None,
            group=None if stopped else self.group_of(facility),
        )

    def group_of(self, facility: str) -> MaskGroup | None:
        """That waits for what this facility gives."""
        masking, command = self._coordinator.masking, self._coordinator.next_wanted()
        if masking is None or command is None:
            return None
        group = masking.group(command)
        if group is None or facility not in group.keys or masking.place(group, facility).exists():
            return None
        return group

    def size_of_gift(self, version: int) -> int:
        """Bytes that a facility gives to the group of this model."""
        coordinator, masking = self._coordinator, self._coordinator.masking
        digest = coordinator.outcomes.models.get(version - 1)
        if masking is None or digest is None or not coordinator.counts_on(digest):
            raise Refused(410, f"no group of model {version} waits")
        if masking.size is None:
            masking.size = masks.masked_bytes(tensorfile.read_header(coordinator.store.path(digest)))
        return masking.size

    def may_give(self, facility: str, version: int, size: int, sha256: str) -> Path:
        """Where the bytes go that it gives to a group."""
        coordinator, group = self._coordinator, self.group_of(facility)
        if coordinator.masking is None or group is None or group.version != version:
            raise Refused(410, f"no group of model {version} waits for {facility}")
        expected = self.size_of_gift(version)
        if size != expected:
            raise Refused(413, f"what is given to a group has {expected} bytes here, this has {size}")
        if size > coordinator.store.room():
            raise Refused(507, "the coordinator's disk is full; it can come later")
        return coordinator.masking.upload(group, facility, sha256)

    async def give(self, facility: str, version: int, sha256: str, name: str, ask: Ask) -> Verdict:
        """All its bytes are there: they count if they are of the group that waits now."""

        def begin() -> tuple[Path, Path] | None:
            masking, group = self._coordinator.masking, self.group_of(facility)
            if masking is None or group is None or group.version != version:
                return None
            if masks.name_of(group) != name:
                raise Refused(410, "this is not the group that waits now")
            return masking.upload(group, facility, sha256), masking.place(group, facility)

        places: tuple[Path, Path] | None = await ask(begin)
        if places is None:  # asked again, or too late
            return Verdict(status="accepted")
        upload, place = places
        if not upload.exists():
            raise Refused(409, "its bytes are not here", offset=0)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._checker, _sha256_on_disk, upload)
        except OSError as error:
            raise Refused(503, f"what was given cannot be read now: {error.strerror}") from None
        if found != sha256:
            upload.unlink(missing_ok=True)
            raise Refused(409, f"{OTHER_BYTES} {found}, expected {sha256}", offset=0)

        def keep() -> Verdict:
            if upload.exists() and begin() is not None:
                upload.replace(place)
                sync(place.parent)
                failpoint("mask.kept")
                self._coordinator.pump()
            return Verdict(status="accepted")

        kept: Verdict = await ask(keep)
        return kept

    def _order(self, job: JobState) -> JobOrder:
        work = job.assignment
        if work is None:
            return JobOrder(order=job.order)
        return JobOrder(order=job.order, assignment=replace(work, cutoff=None), model=self._model(work.base_version))

    def _further(self, jobs: Iterable[JobState]) -> list[FurtherWork] | None:
        """Of jobs that stay: what they were given since they started, and have not taken."""
        found = [
            FurtherWork(
                sequence=job.sequence,
                attempt=job.attempt,
                part=job.part,
                assignment=replace(job.assignment, cutoff=None),
                model=self._model(job.assignment.base_version),
            )
            for job in jobs
            if job.stays and job.phase == "running" and job.assignment is not None and job.taken_at is None
        ]
        return found or None

    def _standing(self, number: int, standing: Standing) -> PostedWork:
        in_seconds = replace(standing, next_cutoff=standing.next_cutoff - self._coordinator.now)
        return PostedWork(number=number, standing=in_seconds, model=self._model(standing.version))

    def _evaluation(self, facility: str) -> EvaluationRequest | None:
        """The newest model, if this facility scores models and has not scored it."""
        newest = self._coordinator.state.newest
        if self._coordinator.config.evaluation.where != facility or not self._coordinator.scores.wants(newest):
            return None
        self._coordinator.scores.asks_for(newest)
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

    async def content(self, version: int, digest: str) -> Content:
        """What the file of this model must be, piece by piece. One that was touched, or not looked at since we
        started, is read by one thread for all who ask. Raises a `TensorFileError` if it is not what its name says."""
        store = self._coordinator.store
        if (content := store.known(digest)) is not None:
            return content
        look = self._looks.get(digest)
        if look is None:
            look = asyncio.get_running_loop().run_in_executor(self._checker, store.verify, digest)
            self._looks[digest] = look
            look.add_done_callback(lambda look: self._looked(digest, look))
        try:
            return await asyncio.wait_for(asyncio.shield(look), CHECK_SECONDS)
        except TimeoutError:
            raise Refused(503, f"model {version} is looked at before it is sent; ask again") from None

    def _looked(self, digest: str, look: asyncio.Future[Content]) -> None:
        del self._looks[digest]
        if not look.cancelled():
            look.exception()  # who asked has heard of it, or has gone

    def cannot_send(self, version: int, error: tensorfile.TensorFileError) -> Refused:
        return self._cannot_use(version, f"model {version} cannot be sent", error)

    def _cannot_use(self, version: int, doing: str, error: tensorfile.TensorFileError) -> Refused:
        """The answer when the file of a model failed somebody, unless it was deleted a moment ago."""
        digest = self._coordinator.outcomes.models[version]
        if not self._coordinator.counts_on(digest):
            return Refused(404, f"there is no model {version} any longer")
        return self._coordinator.cannot_use(digest, doing, error)

    def may_upload(self, update: Update, size: int) -> Path:
        """Where the bytes of this update go. Only an open job of this facility may bring one."""
        coordinator = self._coordinator
        if coordinator.masking is not None:
            raise Refused(422, "this run takes masked updates alone: their bytes go to a group")
        job = self._open(update)
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
        path = coordinator.store.upload(*update)
        # One a job, and those that are being checked: digests must not fill the disk.
        checked = [coordinator.store.upload(*other) for other in list(self._checked_now.values())]
        coordinator.store.drop_uploads(update.facility, update.sequence, keep=[path, *checked])
        return path

    def _open(self, update: Update) -> JobState:
        state = self._coordinator.state
        job = state.open_job(update.job_id)
        if job is None and state.stopped is None:  # one that stays was told to end, and what it handed in counts
            found = state.open_or_cancelled(update.job_id)
            job = found if found is not None and found.stays else None
        if job is None:
            raise Refused(410, f"job {update.sequence} is not open")
        if update.attempt > job.attempt or (update.attempt < job.attempt and not job.stays):
            raise Refused(410, f"attempt {update.attempt} of job {update.sequence} was superseded")
        if update.part > (job.part if update.attempt == job.attempt else MOST_PARTS):
            raise Refused(422, f"job {update.sequence} has no part {update.part}")
        return job

    async def commit(self, update: Update, handin: Handin, ask: Ask, checked: Callable[[], None]) -> Verdict:
        """All bytes are there: check them, and let the update count, if `ask` still lets who asks do so then. Asked
        again, it gives the same answer. If the check takes longer than who asks is kept waiting, `checked` is called
        when it is over."""
        key = update.key
        task = self._checks.get(key)
        if task is None:
            task = asyncio.create_task(self._check(update, handin, ask))
            self._checks[key], self._checked_now[key] = task, update
            task.add_done_callback(lambda task: self._checked(key, task))
        try:
            verdict = await asyncio.wait_for(asyncio.shield(task), CHECK_SECONDS)
        except TimeoutError:
            task.add_done_callback(lambda _: checked())
            verdict = Verdict(status="checking")
        except Refused as error:
            if error.status != 401:
                raise
            await ask(lambda: None)  # if it is not we who may ask no more, but whoever asked for this first:
            return await self.commit(update, handin, ask, checked)
        return replace(verdict, run=handin.run)

    def _checked(self, key: UpdateKey, task: asyncio.Task[Verdict]) -> None:
        """Who asks again is answered from what came of it; what could not be checked is checked anew."""
        del self._checks[key], self._checked_now[key]
        if not task.cancelled():
            task.exception()  # who asked has heard of it, or has gone

    async def _check(self, update: Update, handin: Handin, ask: Ask) -> Verdict:
        key = update.key
        verdict: Verdict | None = await ask(lambda: self._verdict(key))
        if verdict is not None:
            return verdict
        if handin.masked:
            masked: Verdict = await ask(lambda: self._settle(update, handin, None, None, None, None))
            return masked
        upload, like = await ask(lambda: self._to_check(update, handin))
        loop = asyncio.get_running_loop()
        try:
            content = Content(update.sha256)
            reason, norm = await loop.run_in_executor(self._checker, _looked_at, upload, like, content)
        except tensorfile.TensorFileError as error:
            failure = error
            if failure.path == upload:
                raise Refused(503, f"the update cannot be looked at now: {failure.reason}") from None
            doing = f"the update of {key[0]} cannot be taken"
            raise await ask(lambda: self._cannot_use(handin.trained.base_version, doing, failure)) from None
        settled: Verdict = await ask(lambda: self._settle(update, handin, upload, content, reason, norm))
        return settled

    def _verdict(self, key: UpdateKey) -> Verdict | None:
        """What became of an update, as the ledger has it; None: it has not been handed in."""
        verdicts = self._coordinator.outcomes.verdicts
        if key not in verdicts:
            return None
        reason = verdicts[key]
        return Verdict(status="accepted" if reason is None else "rejected", reason=reason)

    def _to_check(self, update: Update, handin: Handin) -> tuple[Path, Path | None]:
        """The upload, and the model it must look like; None: that is no longer there."""
        coordinator = self._coordinator
        self._open(update)
        upload, kept = coordinator.store.upload(*update), coordinator.store.path(update.sha256)
        if not upload.exists() and not kept.exists():
            raise Refused(409, "its bytes are not here", offset=0)
        base = coordinator.outcomes.models.get(handin.trained.base_version)
        like = coordinator.store.path(base) if base is not None and coordinator.counts_on(base) else None
        return (upload if upload.exists() else kept), like

    def _settle(
        self,
        update: Update,
        handin: Handin,
        upload: Path | None,
        content: Content | None,
        reason: str | None,
        norm: float | None,
    ) -> Verdict:
        """`upload` and its content are None where its bytes stay at the facility, to be masked for a group."""
        coordinator = self._coordinator
        self._open(update)  # it may have been closed while its bytes were looked at
        if handin.masked != (coordinator.masking is not None):
            takes = "masked updates alone" if coordinator.masking is not None else "no masked updates"
            raise Refused(422, f"this run takes {takes}")
        if handin.trained.base_version not in coordinator.outcomes.models:
            reason = "the model it was trained from is no longer here"
        if reason is not None and reason.startswith(OTHER_BYTES):
            # Not what was sent, or not what was meant: it may come again.
            coordinator.store.drop_uploads(update.facility, update.sequence)
            raise Refused(409, reason, offset=0)
        if reason is not None:
            if upload is not None and upload.exists() and upload.suffix == ".part":
                coordinator.store.refuse(upload)
            job, attempt, part = update.key
            event = UpdateRejected(at=coordinator.now, job_id=job, attempt=attempt, part=part, reason=reason)
            coordinator.tell(event, origin=f"update/{job}/{attempt}/{part}/rejected")
            return Verdict(status="rejected", reason=reason)
        if upload is not None and content is not None and upload.suffix == ".part":
            coordinator.store.keep(upload, content)
        done = {name: value for name, value in body(handin.trained).items() if name != "metrics"}
        receipt = Receipt(
            job_id=update.job_id,
            attempt=update.attempt,
            part=update.part,
            admission_delay=handin.admission_delay,
            turn_seconds=handin.turn_seconds,
            digest="" if handin.masked else update.sha256,
            norm=norm,
            spent=handin.spent,
            **done,
        )
        arrived = UpdateArrived(at=coordinator.now, receipt=receipt)
        told = plausible(arrived, self._job(update.facility, update.sequence))
        assert isinstance(told, UpdateArrived)
        coordinator.arrived(told)
        coordinator.store.drop_uploads(update.facility, update.sequence)
        return Verdict(status="accepted")


def _sha256_on_disk(upload: Path) -> str:
    sync(upload)
    with upload.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _looked_at(upload: Path, like: Path | None, content: Content) -> tuple[str | None, float | None]:
    """In a checker's thread: why the update cannot be used, or how far it moves the model. What is found good is on the
    disk then, and `content` has its checksums. What is wrong with our own disk is no fault of the update: it is raised
    as a `TensorFileError`."""
    if like is None:
        return "the model it was trained from is no longer here", None
    try:
        reason = tensorfile.check(upload, like, content=content)
        if reason is not None:
            return reason, None
        sync(upload)
        return None, tensorsum.norm_of_change(upload, like)
    except OSError as error:
        raise tensorfile.UnreadableFileError(upload, error) from None
    except tensorfile.UnreadableFileError:
        raise
    except tensorfile.TensorFileError as error:
        if error.path != upload:
            tensorfile.verify(like, Content(like.stem))
            raise
        return str(error).replace(str(upload), "the update"), None
