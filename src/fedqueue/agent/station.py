"""What the parts of an agent share: its config, its scheduler, its memory, and how it speaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fedqueue.agent.agent_state import CancelSent, Closed, Marked, Memory, Notes, Work
from fedqueue.agent.job_folder import JobFolder
from fedqueue.agent.schedulers import (
    JobStatus,
    Scheduler,
    SchedulerUnreachableError,
    SubmitRefusedError,
    clamp_wall,
)
from fedqueue.agent.settings import AgentConfig
from fedqueue.filetime import FileClock
from fedqueue.protocol.contract import REASON_LENGTH, one_line
from fedqueue.protocol.reports import MOST_TROUBLES, Failed, Trouble

SCORING_SECONDS: Final = 1800.0
"""Of wall time, for one model."""
MOST_DOUBLINGS: Final = 10
"""Of the time between two cancels of one job."""


class Station:
    def __init__(
        self,
        config: AgentConfig,
        home: Path,
        facility: str,
        scheduler: Scheduler,
        notes: Notes,
        say: Callable[[str], None],
        run: str = "",
    ) -> None:
        self.scheduling = config.scheduler
        self.settings = config.agent
        self.home = home
        self.facility = facility
        self.scheduler = scheduler
        self.notes = notes
        self.say = say
        self.run = run  # which one; empty: an invitation of before did not say
        self._troubles: dict[str, tuple[str, float]] = {}  # what, and since when (monotonic)

    @property
    def memory(self) -> Memory:
        return self.notes.memory

    @property
    def clock(self) -> FileClock:
        return self.notes.clock

    @property
    def nodes(self) -> int:
        """That a job here holds."""
        return getattr(self.scheduling, "nodes", 1)

    def folder(self, work: Work) -> JobFolder:
        return JobFolder(self.home, str(work.sequence))

    def wall(self, work: Work) -> float:
        """Seconds to ask the scheduler for."""
        return clamp_wall(work.order.wall_seconds, self.scheduling)

    @property
    def scoring_wall(self) -> float:
        """Seconds that a job which scores a model asks for."""
        return clamp_wall(SCORING_SECONDS, self.scheduling)

    def check_cap(self, wall: float) -> None:
        """Raises SubmitRefusedError where the node-hour cap forbids another job; jobs under way count in full."""
        cap = self.settings.node_hours
        if cap is None:
            return
        there = [work for work in self.memory.works.values() if work.scheduler_id is not None]
        ending = [work for work in there if work.settled and not work.unwanted]
        asks, used = wall * self.nodes, self.memory.node_seconds + sum(map(self.held, ending)) * self.nodes
        walls = [self.wall(work) for work in there if work not in ending]
        scores = self.memory.scoring is not None and self.memory.scoring.job is not None
        held = (sum(walls) + (self.scoring_wall if scores else 0.0)) * self.nodes
        if used + held + asks <= 3600 * cap:
            return
        spent = f"{used / 3600:.2f} of {cap:g} node-hours are used"
        if held and used + asks <= 3600 * cap:
            raise SubmitRefusedError(f"{spent}, and jobs under way may use the rest", transient=True)
        reason = f"{spent}: the facility's cap; raise agent.node_hours there to go on"
        raise SubmitRefusedError(reason, transient=False)

    def trouble(self, where: str, what: str) -> None:
        """Say it once, not in every turn."""
        before, since = self._troubles.get(where, (None, time.monotonic()))
        if before != what:
            self._troubles[where] = what, since
            self.say(what)

    def fine(self, where: str) -> None:
        if self._troubles.pop(where, None) is not None:
            self.say(f"{where}: well again")

    def troubles(self) -> list[Trouble]:
        """What the coordinator should know of; that it was out of reach it knows when it hears us."""
        current = [found for where, found in self._troubles.items() if where != "coordinator"]
        return [
            Trouble(reason=one_line(what)[:REASON_LENGTH], seconds=time.monotonic() - since)
            for what, since in current[:MOST_TROUBLES]
        ]

    def fail(
        self,
        work: Work,
        reason: str,
        *,
        transient: bool,
        newest: int = -1,
        held_seconds: float | None = None,
        and_end: bool = False,
    ) -> None:
        """`held_seconds` of its newest attempt, where the scheduler says; else as far as its own stamp tells.
        `and_end`: the scheduler has it still, and shall end it."""
        held = held_seconds
        if held is None:
            stamp = self.folder(work).started(max(newest, 0))
            held = max(0.0, self.clock.now() - stamp - self.settings.grace_seconds) if stamp is not None else 0.0
        self.say(f"{work} failed: {reason}")
        self.notes.note(
            self.notes.report(
                Failed,
                sequence=work.sequence,
                attempt=max(work.attempt, 0),
                reason=reason[:REASON_LENGTH],
                transient=transient,
                held_seconds=held,
            ),
            Marked(kind="cancelled", sequence=work.sequence) if and_end else self.closing(work, held),
        )

    def cancel(self, work: Work) -> bool:
        """Ask for the end of a job, once. PBS begins its delay from SIGTERM to SIGKILL anew each time it is asked, so a
        job that hangs would never end; a scheduler may also forget what it was asked. So it is asked again when twice
        the delay has passed, then after twice as long: however wrong the delay in the config is, the job ends."""
        if work.cancel_sent_at is not None:
            patience = self.scheduling.kill_delay_seconds * 2.0 ** min(work.cancels_sent, MOST_DOUBLINGS)
            if 0 <= self.clock.now() - work.cancel_sent_at < patience:  # less than 0: the clock was set back
                return True
        try:
            self.scheduler.cancel(work.scheduler_id or "")
        except SchedulerUnreachableError as error:
            self.trouble("scheduler", f"the scheduler did not answer: {error}")
            return False
        self.notes.note(CancelSent(sequence=work.sequence, at=self.clock.now()))
        return True

    def held(self, work: Work) -> float:
        folder = self.folder(work)
        stamp = folder.started(work.attempt)
        if stamp is None:
            return 0.0
        return max(0.0, (folder.finished(work.attempt) or self.clock.now()) - stamp)

    def held_in_all(self, work: Work, status: JobStatus | None) -> float:
        """By a job that is over, in this attempt and in what its scheduler ran thereafter; `status` is its last."""
        folder, held, end = self.folder(work), [], self.clock.now()
        for attempt in reversed(range(work.attempt, folder.attempts())):
            stamp = folder.started(attempt)
            if stamp is not None:
                held.append((folder.finished(attempt) or end) - stamp)
                end = stamp
        if held and status is not None and status.started_at is not None and status.ended_at is not None:
            held[0] = status.ended_at - status.started_at
        return sum(min(self.wall(work), max(0.0, seconds)) for seconds in held)

    def closing(self, work: Work, held_seconds: float) -> Closed:
        return Closed(sequence=work.sequence, node_seconds=held_seconds * self.nodes)

    def tidy(self, work: Work) -> None:
        if not self.settings.keep_files:
            self.folder(work).drop_updates()
