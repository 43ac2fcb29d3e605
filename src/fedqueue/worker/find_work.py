"""How a job finds its work when none came with its order: it takes standing work, or waits for what is brought.

Only the first process of a job looks; what it took lies in a file for the others. Nothing here uses a network: the
agent lays files on the shared file system, and the job looks at them. Part of the worker: Python 3.9 and the standard
library.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from fedqueue.files import failpoint
from fedqueue.protocol.budget import Further, binding, further_work, idle_limit, linger_until
from fedqueue.protocol.contract import (
    Assignment,
    AssignmentFile,
    Bound,
    BoundFile,
    StandingFile,
    TakenFile,
    sequence_of,
)
from fedqueue.worker.job_folder import (
    FILE_PATIENCE,
    POLL_SECONDS,
    ParticipateError,
    ThisJob,
    made_folder,
    read_file,
    say,
    write_file,
)

LONGEST_POLL_SECONDS = 1.0
"""Between two looks of a job that stays: a fiftieth of what it has waited, and no more than this."""


def await_assignment(job: ThisJob, part: int) -> AssignmentFile | None:
    """For the other processes: what the first one took; None: no work came, and the job ends."""
    path, until = job.place(part) / "assignment.json", time.monotonic() + job.wall_left
    while not path.exists() and time.monotonic() < until:
        if (job.folder / "left.json").exists():
            return None
        time.sleep(POLL_SECONDS)
    return read_file(AssignmentFile, path, time.monotonic() + FILE_PATIENCE)


class WorkFinder:
    """For the first process. `hurried` says that there is no time left to linger; `seconds_left`: until the job must
    have handed in."""

    def __init__(self, job: ThisJob, hurried: Callable[[], bool], seconds_left: Callable[[], float]) -> None:
        self._job = job
        self._hurried = hurried
        self._seconds_left = seconds_left
        self._number = sequence_of(job.order.job_id) if job.order.stay is not None else 0
        self._stamp: tuple[int, int] | None = None
        self._standing: StandingFile | None = None  # as it was when we looked last

    def first(self, part: int) -> AssignmentFile | None:
        """The work that a job without an assignment begins with; None: it stays, and none came."""
        job = self._job
        if part > 0 and job.stay is None:
            raise ParticipateError(f"{job.order.job_id} has handed in already; a script takes part once")
        shared = job.place(part) / "assignment.json"
        if shared.exists():  # a launcher restarted the processes: the same job, so the same work
            return await_assignment(job, part)
        if part == 0 and (job.order.stay is None or job.standing.exists()):
            return job.share(0, self._bind_first(), self._hurried)
        write_file(job.folder / "waiting.json", {})  # its agent says that it has started
        say("waiting for work")
        since, base = job.clock.now(), None
        if part > 0:  # a launcher restarted the processes of a job that had handed in
            base = read_file(AssignmentFile, job.place(part - 1) / "assignment.json").assignment.base_version
        while (found := self.look(part, base, since)) == "wait":
            time.sleep(self.pause_seconds(since))
        return self.take(part, since) if found == "take" else None

    def look(self, part: int, base_version: int | None, idle_since: float) -> Further:
        """Whether there is work for this part of a job that stays; `base_version` was its last."""
        job, now, left = self._job, self._job.clock.now(), self._seconds_left()
        if self._hurried() or left <= 0:
            return "leave"
        if (job.place(part) / "further.json").exists():
            return "take"
        standing = self._read_standing()
        if standing is not None:
            found = further_work(standing.standing, self._number, base_version, now, now + left)
            if found != "wait":
                return found
        limit = idle_limit(job.order.stay or inf, None if standing is None else standing.standing)
        return "leave" if now - idle_since >= limit else "wait"

    def take(self, part: int, idle_since: float, ahead: int = 0, ahead_seconds: float = 0.0) -> AssignmentFile:
        """What `look` found; meanwhile it trained so many steps ahead."""
        job = self._job
        place = made_folder(job.place(part))
        waited = max(0.0, job.clock.now() - idle_since)
        failpoint("worker.found")
        if (place / "further.json").exists():
            taken = read_file(AssignmentFile, place / "further.json", time.monotonic() + FILE_PATIENCE)
            bound = None
        else:
            assert self._standing is not None
            bound, taken = self._bind(self._standing, job.clock.now(), stayed=True)
        note = TakenFile(waited=waited, ahead=ahead, ahead_seconds=ahead_seconds, bound=bound)
        write_file(place / "taken.json", note)
        failpoint("worker.taken")
        return job.share(part, taken, self._hurried)

    def pause_seconds(self, idle_since: float) -> float:
        """Between two looks."""
        waited = self._job.clock.now() - idle_since
        return min(LONGEST_POLL_SECONDS, max(POLL_SECONDS, waited / 50))

    def wants_ahead(self) -> bool:
        """Whether a job shall train on from its own weights while there is no work."""
        standing = self._read_standing()
        return standing is not None and standing.standing.ahead

    def _read_standing(self) -> StandingFile | None:
        """What lies there now; read again only when it has changed."""
        try:
            found = self._job.standing.stat()
        except OSError:
            return self._standing
        if (found.st_mtime_ns, found.st_ino) != self._stamp:
            try:
                self._standing = read_file(StandingFile, self._job.standing)
            except ParticipateError:  # a network file system has bad moments while a file is replaced
                return self._standing
            self._stamp = found.st_mtime_ns, found.st_ino
        return self._standing

    def _bind_first(self) -> AssignmentFile:
        job, stays = self._job, self._job.stay is not None
        file = read_file(StandingFile, job.standing, time.monotonic() + FILE_PATIENCE)
        until = None if job.order.purpose == "evaluate" else linger_until(file.standing, job.entered_at, stays=stays)
        if until is not None:
            version = file.standing.version
            while job.clock.now() < until and not self._hurried():
                time.sleep(POLL_SECONDS)
                file = read_file(StandingFile, job.standing, time.monotonic() + until - job.clock.now())
                newer = file.standing.version > version
                if newer or linger_until(file.standing, job.clock.now(), stays=stays) is None:
                    break
        # The learned overhead has the start-up in it, which is over: we count as if we had started that much earlier.
        startup, bound_at = max(0.0, job.entered_at - job.started_at), job.clock.now()
        bound, taken = self._bind(file, bound_at - startup, stayed=False)
        record = BoundFile(bound=bound, bound_at=bound_at, lingered=bound_at - job.entered_at, startup_seconds=startup)
        write_file(job.folder / "bound.json", record)
        return taken

    def _bind(self, file: StandingFile, began: float, *, stayed: bool) -> tuple[Bound, AssignmentFile]:
        ends_at = inf if self._job.stay is None else began + self._seconds_left()
        found = binding(file.standing, began, ends_at, stayed=stayed)
        work = Assignment(
            base_version=file.standing.version,
            steps=found.steps,
            learning_rate=found.learning_rate,
            train_budget=found.train_budget,
        )
        bound = Bound(standing=file.number, cutoff_index=found.cutoff_index, work=work)
        return bound, AssignmentFile(assignment=work, model=file.model)
