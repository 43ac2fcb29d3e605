"""What travels between a facility and the coordinator: models come, updates go, each in a thread beside.

Models and standing work lie where jobs can read them without a network. An update's bytes are sent first, then the word
that they are all there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from fedqueue.agent.jobs import STANDING, Jobs
from fedqueue.agent.journal import SiteJob
from fedqueue.agent.masking import Masking, NotMaskedError
from fedqueue.agent.privacy import PrivacySpentError
from fedqueue.agent.transport import CoordinatorRefusedError, Transport
from fedqueue.errors import ConfigError, FedQueueError, StorageError
from fedqueue.files import failpoint, write_json
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import (
    REASON_LENGTH,
    AssignmentFile,
    FurtherWork,
    ModelFile,
    PostedWork,
    StandingFile,
    Verdict,
)
from fedqueue.protocol.reports import Handin, Lost
from fedqueue.protocol.state import PartKey

GRACE_SECONDS: Final = 60.0
"""A model that was replaced stays for so long."""

DRIFT_SECONDS: Final = 0.25
"""A posted cutoff that has moved by more (the run was paused, the coordinator was down) is written anew."""
CHECKING_SECONDS: Final = 1.0
"""Between two questions whether an update has been checked."""
MOST_UPLOADS: Final = 3
"""Of one update that arrives as something else."""


class ModelCache:
    """The models and the standing work that lie at a facility."""

    def __init__(self, jobs: Jobs, transport: Transport) -> None:
        self._jobs = jobs
        self._models = jobs.home / "models"
        self._models.mkdir(exist_ok=True)
        self._look_over()
        self.standing_path = jobs.home / STANDING
        self._written = _lies_there(self.standing_path)
        self._wanted: StandingFile | None = None
        self._transport = transport
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetcher")
        self._fetching: dict[Path, Future[str]] = {}
        self.no_place = False  # the model that was fetched last could not be written

    def close(self) -> None:
        self._fetcher.shutdown(wait=True, cancel_futures=True)

    @property
    def busy(self) -> bool:
        return bool(self._fetching)

    @property
    def standing_number(self) -> int:
        """Of the standing work that lies here; 0: there is none."""
        return self._written.number if self._written is not None else 0

    def path(self, model: ModelFile) -> Path:
        return self._models / f"v{model.version}-{model.sha256[:12]}.safetensors"

    def file_of(self, version: int) -> Path | None:
        return next(iter(self._models.glob(f"v{version}-*.safetensors")), None)

    def _look_over(self) -> None:
        """Drop what is not what its name says: the machine may have gone down before it was on the disk."""
        for path in self._models.glob("v*-*.safetensors"):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if not path.stem.endswith(f"-{found[:12]}"):
                path.unlink(missing_ok=True)

    def want(self, posted: PostedWork | None, received_at: float) -> None:
        """The newest standing work, with its cutoff by the clock that jobs read; laid out once its model is here."""
        if posted is not None:
            standing = replace(posted.standing, next_cutoff=received_at + posted.standing.next_cutoff)
            self._wanted = StandingFile(number=posted.number, model=str(self.path(posted.model)), standing=standing)
            if self._fetch(posted.model):
                self._lay_out(self._wanted)

    @property
    def awaits_standing(self) -> bool:
        """Whether standing work is to come, and none lies here."""
        return self._wanted is not None and not self.standing_path.exists()

    def bring(self, further: Sequence[FurtherWork]) -> None:
        """Work for jobs that stay, into their folders, once its model is here."""
        for found in further:
            work = self._jobs.memory.works.get(found.sequence)
            if work is None or work.cancelled or work.started != found.attempt or work.ended == found.attempt:
                continue  # it is over, or runs again and has not been heard of
            if self._fetch(found.model):
                brought = AssignmentFile(assignment=found.assignment, model=str(self.path(found.model)))
                self._jobs.folder(work).bring(found.attempt, found.part, brought)

    def keep(self, models: Sequence[ModelFile], taken: Collection[int]) -> None:
        """Fetch the models of these orders; of the others, drop all but the one that standing work names and those of
        versions that open jobs took from it: their scripts may read the file late."""
        for model in models:
            self._fetch(model)
        needed = {self.path(model) for model in models}
        for standing in (self._wanted, self._written):
            if standing is not None:
                needed.add(Path(standing.model))
        for path in [path for path, future in self._fetching.items() if future.done() and path not in needed]:
            del self._fetching[path]  # nobody asks for it any more
        in_use = {f"v{version}" for version in taken}
        for path in self._models.glob("v*.safetensors*"):
            whole = path.with_name(path.name.removesuffix(".part"))
            if whole in needed or whole in self._fetching or path.name.partition("-")[0] in in_use:
                continue
            # A job may have read the standing work just before it changed: a model stays for a while.
            if self._jobs.clock.now() - path.stat().st_mtime > GRACE_SECONDS:
                path.unlink(missing_ok=True)

    def _lay_out(self, wanted: StandingFile) -> None:
        if self._written is not None and _says_the_same(wanted, self._written):
            return
        write_json(self.standing_path, wanted)
        failpoint("agent.posted")
        self._written = wanted

    def _fetch(self, model: ModelFile) -> bool:
        """Whether it is here; begins to fetch it if not."""
        path = self.path(model)
        future = self._fetching.get(path)
        if future is not None:
            if not future.done():
                return False
            del self._fetching[path]
            failpoint("agent.fetched")
            error = future.exception()
            if error is not None and not isinstance(error, FedQueueError):
                raise error
            self.no_place = isinstance(error, StorageError)
            if isinstance(error, StorageError):
                raise error
            if error is not None:
                self._jobs.trouble("model", f"model {model.version} cannot be fetched now: {error}")
        if path.exists():
            return True
        self._fetching[path] = self._fetcher.submit(self._download, model, path)
        return False

    def _download(self, model: ModelFile, path: Path) -> str:
        with suppress(OSError):  # what cannot be written says why below
            self._models.mkdir(exist_ok=True)  # it may have been tidied away
        return self._transport.download(model.version, path, model.sha256)


def _says_the_same(one: StandingFile, other: StandingFile) -> bool:
    moved = one.standing.next_cutoff - other.standing.next_cutoff
    unmoved = replace(other.standing, next_cutoff=one.standing.next_cutoff)
    return abs(moved) < DRIFT_SECONDS and one == replace(other, standing=unmoved)


def _lies_there(path: Path) -> StandingFile | None:
    """The standing work that an agent before us laid out."""
    try:
        return read(StandingFile, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError, ConfigError):
        return None


class UpdateGoneError(FedQueueError):
    """A job says that it handed in, and its update is not there."""


class Delivery:
    """How an agent hands in."""

    def __init__(self, jobs: Jobs, transport: Transport, masking: Masking) -> None:
        self._jobs = jobs
        self._transport = transport
        self._masking = masking
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="mover")  # one transfer at a time
        self._moving: dict[int, tuple[PartKey, Future[Verdict]]] = {}  # by sequence number
        self._not_before: dict[int, float] = {}  # monotonic: hand-ins that failed wait a little
        self._other_bytes: dict[int, int] = {}  # how often the coordinator got other bytes than were meant

    @property
    def moving(self) -> list[Future[Verdict]]:
        return [future for _, future in self._moving.values()]

    def on_its_way(self, work: SiteJob) -> bool:
        return work.sequence in self._moving

    def unanswered(self, work: SiteJob) -> bool:
        """Whether a hand-in is under way or broke off: then its verdict says more than that its job is closed."""
        return self.on_its_way(work) or work.sequence in self._not_before

    def close(self) -> None:
        self._mover.shutdown(wait=True, cancel_futures=True)

    def turn(self) -> None:
        """Uploads run beside; here they are begun, and what came of them is noted."""
        for sequence, (key, future) in list(self._moving.items()):
            if future.done():
                del self._moving[sequence]
                self._not_before.pop(sequence, None)
                self._handed_in(self._jobs.memory.works[sequence], key, future)
        for work in list(self._jobs.memory.works.values()):
            waits = work.sequence in self._moving or time.monotonic() < self._not_before.get(work.sequence, 0.0)
            if work.settled or waits or self._jobs.memory.untold(work.sequence):
                continue
            ready = self._ready(work)
            if ready is not None:
                self._moving[work.sequence] = ready, self._mover.submit(self._move, work, ready)
            elif work.stays and work.ended == work.attempt and self._jobs.undelivered(work) is None:
                self._jobs.notes.note(replace(work, settled=True))  # it handed in nothing more
                self._jobs.tidy(work)

    def _ready(self, work: SiteJob) -> PartKey | None:
        """What is to be handed in now. The coordinator has heard what it was made of."""
        if not work.stays:
            return (work.ended, 0) if work.ended == work.attempt and not work.cancelled else None
        key = self._jobs.undelivered(work)
        if key is None or (key[0] == work.attempt and (work.started < key[0] or work.took < key[1])):
            return None
        return key

    def _move(self, work: SiteJob, key: PartKey) -> Verdict:
        """In the mover's thread: bytes, then the word that they are all there."""
        folder, sequence, (attempt, part) = self._jobs.folder(work), work.sequence, key
        result, update = folder.result(attempt, part), folder.update(attempt, part)
        if result is None:
            raise UpdateGoneError(f"{folder.path.relative_to(self._jobs.home)}: its result is gone")
        if not update.is_file():
            raise UpdateGoneError(f"{update.relative_to(self._jobs.home)} is not there, but its result is")
        account = self._jobs.privacy
        spent = None if account is None else account.enter(folder.part(attempt, part), result)
        masked, sha256 = self._jobs.masked, result.sha256
        if self._jobs.settings.masked_only and not masked:
            raise NotMaskedError("this site hands in masked updates alone (agent.masked_only), and the run takes none")
        try:
            if masked:
                sha256 = self._masking.keep(sequence, key, update, result.trained.base_version)
            else:
                self._transport.upload(update, sequence, attempt, sha256, part)
        except CoordinatorRefusedError as error:
            if error.refusal != "superseded":
                raise
            # Its job may have been closed by this very update, and the verdict was lost on its way: ask for it.
        failpoint("agent.uploaded")
        begun = folder.work_taken_at(attempt, part) if work.stays else None
        handin = Handin(
            trained=result.trained,
            admission_delay=work.admission_delay,
            part=part,
            run=self._jobs.run,
            turn_seconds=0.0 if begun is None else max(0.0, result.began_at - begun),
            spent=spent,
            masked=masked,
        )
        while True:
            verdict = self._transport.commit(sequence, attempt, sha256, handin)
            if verdict.status != "checking":
                failpoint("agent.committed")
                return verdict
            time.sleep(CHECKING_SECONDS)

    def _handed_in(self, work: SiteJob, key: PartKey, future: Future[Verdict]) -> None:
        error = future.exception()
        which = f"part {key[1]} of {work}" if work.stays else f"the update of {work}"
        if error is None:
            verdict = future.result()
            what = f"was rejected: {verdict.reason}" if verdict.status == "rejected" else "is handed in"
            self._jobs.log.info(f"{which} {what}")
        elif isinstance(error, CoordinatorRefusedError) and error.refusal == "superseded":
            self._jobs.log.info(f"{which} is not wanted any more: {error.reason}")
        elif (reason := self._never(work, error)) is not None:
            self._give_up(work, key, reason)
            return
        elif isinstance(error, FedQueueError):
            self._jobs.trouble("hand-in", f"{which} cannot be handed in now: {error}")
            self._not_before[work.sequence] = time.monotonic() + self._jobs.settings.poll_seconds
            return
        else:
            raise error
        self._jobs.notes.note(self._settled(work, key))
        self._tidy(work, key)

    def _never(self, work: SiteJob, error: BaseException) -> str | None:
        """Why an update can never be handed in; None: it may be later."""
        if isinstance(error, UpdateGoneError | PrivacySpentError | NotMaskedError):
            return str(error)
        if isinstance(error, CoordinatorRefusedError) and error.refusal == "refused":
            return f"its update was refused: {error.reason}"
        if isinstance(error, CoordinatorRefusedError) and error.refusal == "other bytes" and self._too_often(work):
            return f"its update does not arrive as it is: {error.reason}"
        return None

    def _give_up(self, work: SiteJob, key: PartKey, reason: str) -> None:
        """Of a job that stays a part is lost, and the others count."""
        if not work.stays:
            self._jobs.fail(work, reason, transient=True, and_end=True)
            return
        attempt, part = key
        self._jobs.log.warning(f"part {part} of {work} is lost: {reason}")
        lost = self._jobs.notes.report(
            Lost, sequence=work.sequence, attempt=attempt, part=part, reason=reason[:REASON_LENGTH]
        )
        self._jobs.notes.note(lost, self._settled(work, key))
        self._tidy(work, key)

    @staticmethod
    def _settled(work: SiteJob, key: PartKey) -> SiteJob:
        if not work.stays:
            return replace(work, settled=True)
        return replace(work, delivered={**work.delivered, key[0]: key[1] + 1})

    def _tidy(self, work: SiteJob, key: PartKey) -> None:
        self._other_bytes.pop(work.sequence, None)
        if not self._jobs.settings.keep_files:
            self._jobs.folder(work).update(*key).unlink(missing_ok=True)

    def _too_often(self, work: SiteJob) -> bool:
        self._other_bytes[work.sequence] = self._other_bytes.get(work.sequence, 0) + 1
        return self._other_bytes[work.sequence] > MOST_UPLOADS
