"""What the parts of an agent share: its config, its scheduler, its memory, and how it speaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedqueue.runtime.agent_settings import AgentConfig
from fedqueue.runtime.jobfolder import JobFolder
from fedqueue.runtime.reports import REASON_LENGTH
from fedqueue.runtime.schedulers import Scheduler, SchedulerUnreachableError
from fedqueue.runtime.works import Memory, Notes, Work


class Station:
    def __init__(
        self,
        config: AgentConfig,
        home: Path,
        facility: str,
        scheduler: Scheduler,
        notes: Notes,
        say: Callable[[str], None],
    ) -> None:
        self.scheduling = config.scheduler
        self.settings = config.agent
        self.home = home
        self.facility = facility
        self.scheduler = scheduler
        self.notes = notes
        self.say = say
        self._troubles: dict[str, str] = {}

    @property
    def memory(self) -> Memory:
        return self.notes.memory

    @property
    def nodes(self) -> int:
        """That a job here holds."""
        return getattr(self.scheduling, "nodes", 1)

    def folder(self, work: Work) -> JobFolder:
        return JobFolder(self.home, str(work.sequence))

    def trouble(self, where: str, what: str) -> None:
        """Say it once, not in every turn."""
        if self._troubles.get(where) != what:
            self._troubles[where] = what
            self.say(what)

    def fine(self, where: str) -> None:
        if self._troubles.pop(where, None) is not None:
            self.say(f"{where}: well again")

    def fail(self, work: Work, reason: str, *, transient: bool, newest: int = -1) -> None:
        stamp = self.folder(work).started(max(newest, 0))
        held = max(0.0, time.time() - stamp - self.settings.grace_seconds) if stamp is not None else 0.0
        self.say(f"job {work.sequence} failed: {reason}")
        self.notes.note(
            self.notes.report(
                kind="failed",
                sequence=work.sequence,
                attempt=max(work.attempt, 0),
                reason=reason[:REASON_LENGTH],
                transient=transient,
                held_seconds=held,
            ),
            self.closing(work, held),
        )

    def cancel(self, work: Work) -> bool:
        try:
            self.scheduler.cancel(work.scheduler_id or "")
        except SchedulerUnreachableError as error:
            self.trouble("scheduler", f"the scheduler did not answer: {error}")
            return False
        return True

    def held(self, work: Work) -> float:
        folder = self.folder(work)
        stamp = folder.started(work.attempt)
        result = folder.result(work.attempt)
        if stamp is None:
            return 0.0
        return max(0.0, (result.finished_at if result is not None else time.time()) - stamp)

    def closing(self, work: Work, held_seconds: float) -> dict[str, Any]:
        return {"kind": "closed", "sequence": work.sequence, "node_seconds": held_seconds * self.nodes}

    def tidy(self, work: Work) -> None:
        if not self.settings.keep_files:
            self.folder(work).drop_updates()
