"""How an agent hands in: an update's bytes, then the word that they are all there, in a thread beside."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from fedqueue.agent.agent_state import Work
from fedqueue.agent.poll_response import checked_verdict
from fedqueue.agent.station import Station
from fedqueue.agent.transport import Client, CoordinatorRefusedError, update_path
from fedqueue.errors import FedQueueError
from fedqueue.failpoints import failpoint

CHECKING_SECONDS: Final = 1.0
"""Between two questions whether an update has been checked."""
NOT_OPEN: Final = 410
"""The status for an update of a job that is closed."""
MOST_UPLOADS: Final = 3
"""Of one update that arrives as something else."""


class UpdateGoneError(FedQueueError):
    """A job says that it handed in, and its update is not there."""


class Delivery:
    def __init__(self, station: Station, client: Client) -> None:
        self._station = station
        self._client = client
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="mover")  # one transfer at a time
        self._moving: dict[int, Future[dict[str, Any]]] = {}  # by sequence number
        self._not_before: dict[int, float] = {}  # monotonic: hand-ins that failed wait a little
        self._other_bytes: dict[int, int] = {}  # how often the coordinator got other bytes than were meant

    @property
    def moving(self) -> list[Future[dict[str, Any]]]:
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
            told = not any(r.get("sequence") == work.sequence for r in self._station.memory.reports.values())
            if ready and told and time.monotonic() >= self._not_before.get(work.sequence, 0.0):
                self._moving[work.sequence] = self._mover.submit(self._move, work.sequence, work.ended, work)

    def _move(self, sequence: int, attempt: int, work: Work) -> dict[str, Any]:
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
            self._client.upload(folder.update(attempt), sequence, attempt, result.sha256)
        except CoordinatorRefusedError as error:
            if error.status != NOT_OPEN:
                raise
            # Its job may have been closed by this very update, and the verdict was lost on its way: ask for it.
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
            answer = checked_verdict(self._client.call("POST", update_path(sequence, attempt, result.sha256), handin))
            if answer["status"] != "checking":
                failpoint("agent.committed")
                return answer
            time.sleep(CHECKING_SECONDS)

    def _handed_in(self, work: Work, future: Future[dict[str, Any]]) -> None:
        error = future.exception()
        if error is None:
            answer = future.result()
            verdict = f"was rejected: {answer['reason']}" if answer["status"] == "rejected" else "is handed in"
            self._station.say(f"the update of {work} {verdict}")
        elif isinstance(error, CoordinatorRefusedError) and error.status == NOT_OPEN:
            self._station.say(f"the update of {work} is not wanted any more: {error.reason}")
        elif isinstance(error, CoordinatorRefusedError) and error.status not in (401, 403, 409):
            self._station.fail(work, f"its update was refused: {error.reason}", transient=True, and_end=True)
            return
        elif isinstance(error, CoordinatorRefusedError) and error.status == 409 and self._too_often(work):
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
        self._station.notes.note({"kind": "settled", "sequence": work.sequence})
        self._station.tidy(work)

    def _too_often(self, work: Work) -> bool:
        self._other_bytes[work.sequence] = self._other_bytes.get(work.sequence, 0) + 1
        return self._other_bytes[work.sequence] > MOST_UPLOADS
