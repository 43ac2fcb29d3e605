"""How an agent hands in: an update's bytes, then the word that they are all there, in a thread beside."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from fedqueue.agent.agent_state import Marked, Work
from fedqueue.agent.station import Station
from fedqueue.agent.transport import CoordinatorRefusedError, Transport
from fedqueue.errors import FedQueueError
from fedqueue.failpoints import failpoint
from fedqueue.protocol.contract import Verdict
from fedqueue.protocol.reports import Handin

CHECKING_SECONDS: Final = 1.0
"""Between two questions whether an update has been checked."""
MOST_UPLOADS: Final = 3
"""Of one update that arrives as something else."""


class UpdateGoneError(FedQueueError):
    """A job says that it handed in, and its update is not there."""


class Delivery:
    def __init__(self, station: Station, transport: Transport) -> None:
        self._station = station
        self._transport = transport
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="mover")  # one transfer at a time
        self._moving: dict[int, Future[Verdict]] = {}  # by sequence number
        self._not_before: dict[int, float] = {}  # monotonic: hand-ins that failed wait a little
        self._other_bytes: dict[int, int] = {}  # how often the coordinator got other bytes than were meant

    @property
    def moving(self) -> list[Future[Verdict]]:
        return list(self._moving.values())

    def on_its_way(self, work: Work) -> bool:
        return work.sequence in self._moving

    def unanswered(self, work: Work) -> bool:
        """Whether a hand-in is under way or broke off: then its verdict says more than that its job is closed."""
        return self.on_its_way(work) or work.sequence in self._not_before

    def close(self) -> None:
        self._mover.shutdown(wait=True, cancel_futures=True)

    def turn(self) -> None:
        """Uploads run beside; here they are begun, and what came of them is noted."""
        for sequence, future in list(self._moving.items()):
            if future.done():
                del self._moving[sequence]
                self._not_before.pop(sequence, None)
                self._handed_in(self._station.memory.works[sequence], future)
        for work in list(self._station.memory.works.values()):
            over = work.settled or work.cancelled or work.sequence in self._moving
            ready = work.ended == work.attempt and not over
            told = not self._station.memory.untold(work.sequence)
            if ready and told and time.monotonic() >= self._not_before.get(work.sequence, 0.0):
                self._moving[work.sequence] = self._mover.submit(self._move, work.sequence, work.ended, work)

    def _move(self, sequence: int, attempt: int, work: Work) -> Verdict:
        """In the mover's thread: bytes, then the word that they are all there."""
        folder = self._station.folder(work)
        result = folder.result(attempt)
        if result is None:
            raise UpdateGoneError(f"{folder.path.relative_to(self._station.home)}: its result is gone")
        if not folder.update(attempt).is_file():
            raise UpdateGoneError(
                f"{folder.update(attempt).relative_to(self._station.home)} is not there, but its result is"
            )
        try:
            self._transport.upload(folder.update(attempt), sequence, attempt, result.sha256)
        except CoordinatorRefusedError as error:
            if error.refusal != "superseded":
                raise
            # Its job may have been closed by this very update, and the verdict was lost on its way: ask for it.
        failpoint("agent.uploaded")
        handin = Handin(
            base_version=result.base_version,
            steps_done=result.steps_done,
            train_seconds=result.train_seconds,
            admission_delay=work.admission_delay,
            samples=result.samples,
            nodes=result.nodes,
            device=result.device,
            metrics=result.metrics,
            run=self._station.run,
        )
        while True:
            verdict = self._transport.commit(sequence, attempt, result.sha256, handin)
            if verdict.status != "checking":
                failpoint("agent.committed")
                return verdict
            time.sleep(CHECKING_SECONDS)

    def _handed_in(self, work: Work, future: Future[Verdict]) -> None:
        error = future.exception()
        if error is None:
            verdict = future.result()
            what = f"was rejected: {verdict.reason}" if verdict.status == "rejected" else "is handed in"
            self._station.say(f"the update of {work} {what}")
        elif isinstance(error, CoordinatorRefusedError) and error.refusal == "superseded":
            self._station.say(f"the update of {work} is not wanted any more: {error.reason}")
        elif isinstance(error, CoordinatorRefusedError) and error.refusal == "refused":
            self._station.fail(work, f"its update was refused: {error.reason}", transient=True, and_end=True)
            return
        elif isinstance(error, CoordinatorRefusedError) and error.refusal == "other bytes" and self._too_often(work):
            reason = f"its update does not arrive as it is: {error.reason}"
            self._station.fail(work, reason, transient=True, and_end=True)
            return
        elif isinstance(error, UpdateGoneError):
            self._station.fail(work, str(error), transient=True, and_end=True)
            return
        elif isinstance(error, FedQueueError):
            self._station.trouble("hand-in", f"the update of {work} cannot be handed in now: {error}")
            self._not_before[work.sequence] = time.monotonic() + self._station.settings.poll_seconds
            return
        else:
            raise error
        self._station.notes.note(Marked(kind="settled", sequence=work.sequence))
        self._station.tidy(work)

    def _too_often(self, work: Work) -> bool:
        self._other_bytes[work.sequence] = self._other_bytes.get(work.sequence, 0) + 1
        return self._other_bytes[work.sequence] > MOST_UPLOADS
