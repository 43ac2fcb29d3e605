"""A site of a federation: one process at the login node that serves all runs which this facility takes part in.

Each run has an agent of its own, with a home of its own below the site's: what happens to one is nothing to another.
They take their turns together, so that one poll carries what all of them say. What the site has to share, its caps on
node-hours and on jobs at once, goes first to the run that has used least of it for its weight (protocol/shares.py).
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from fedqueue.agent.agent import LEAST_LEASE, Agent, Turn, next_after
from fedqueue.agent.jobs import Jobs
from fedqueue.agent.journal import Lease
from fedqueue.agent.privacy import account_of
from fedqueue.agent.schedulers import Scheduler, make_scheduler
from fedqueue.agent.settings import AgentConfig
from fedqueue.agent.transport import (
    CoordinatorBusyError,
    CoordinatorRefusedError,
    CoordinatorUnreachableError,
    FederationTransport,
)
from fedqueue.errors import FedQueueError
from fedqueue.files import write_json
from fedqueue.protocol.codec import message, read
from fedqueue.protocol.contract import MOST_REPORTS, Answer, one_line
from fedqueue.protocol.reports import Poll
from fedqueue.protocol.service import RunAnswer, RunHere, SiteAnswer, SitePoll
from fedqueue.protocol.shares import ShareSettings, after_rest, next_in_line, share_of

log = logging.getLogger("fedqueue.agent")

RUNS: Final = "runs"
"""In a site's home: the homes of its runs."""
RUN: Final = re.compile(r"[0-9a-f]{8,64}")
"""What tells runs apart. It comes from the server, and is the name of a folder here."""
USES: Final = "uses.json"
"""In a site's home: how much of it each run has used."""
OFFER: Final = "offer"
"""In a run's home: which offer it uses, the run's name and whose it is, for a start without the server."""
OPERATOR: Final = "operator"
"""Whose a run is that was submitted on the server's machine."""


@message
class Use:
    """Of what a site has, by one run."""

    level: float  # by its weight
    used: float  # node-seconds, when that was counted last


class Site:
    def __init__(self, config: AgentConfig, home: Path, facility: str, transport: FederationTransport) -> None:
        self._config = config
        self._home = self.home = home
        self._facility = facility
        self._transport = transport
        (home / RUNS).mkdir(parents=True, exist_ok=True)
        self._lease = Lease(home, max(LEAST_LEASE, 3 * config.agent.poll_seconds))
        self._schedulers: dict[str, Scheduler] = {}  # by offer; those without one of their own share the site's
        self._agents: dict[str, Agent] = {}  # by run
        self._said: dict[str, str] = {}  # of troubles, by what is troubled
        self._here: list[RunHere] = []  # as the server said last
        self._told: dict[str, RunHere] = {}  # the same of each run
        self._uses = _read_uses(home)  # by run
        self._written = dict(self._uses)
        self._highest = min((use.level for use in self._uses.values()), default=0.0)  # level at which a place was given
        self._turn = 0
        self._refused: dict[str, int] = {}  # runs that found no place, and in which turn that was
        self.node_hours = config.agent.node_hours
        self.privacy = account_of(config.privacy, home)
        for folder in sorted((home / RUNS).iterdir()):  # their jobs go on, whether or not the server can be reached
            with suppress(OSError, ValueError):
                offer, name, *owner = (folder / OFFER).read_text(encoding="utf-8").splitlines()
                self._begin(RunHere(run=folder.name, name=name, offer=offer, owner=(owner or [OPERATOR])[0]))

    # Life -----------------------------------------------------------------------------------------------

    def run(self, *, once: bool, stopping: Callable[[], bool] = lambda: False) -> None:
        """Until it is told to stop; with `once` until there is nothing more to do now."""
        turns = 0
        while not stopping():
            self.turn()
            turns += 1
            if once and turns >= 2 and not any(agent.busy() for agent in self._agents.values()):
                return
            seconds = self._config.agent.poll_seconds
            self._wait(min(1.0, seconds) if once else seconds, stopping)

    def turn(self) -> None:
        """One of each run, in step; what they want to say goes together."""
        self._lease.renew()
        self._turn += 1
        turns = {run: agent.take_turn() for run, agent in self._by_use()}
        self._here = []
        waiting = self._go_on(turns, dict.fromkeys(turns))
        asked = False
        while waiting or not asked:  # also if nobody has anything to say: which runs are there?
            waiting, asked = self._go_on(turns, self._tell(waiting)), True
        self._follow()
        self._keep_uses()

    def close(self) -> None:
        for run in list(self._agents):
            self._leave(run)
        self._lease.release()

    def _wait(self, seconds: float, stopping: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while not stopping() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))

    # Telling --------------------------------------------------------------------------------------------

    def _go_on(self, turns: Mapping[str, Turn], came: Mapping[str, Answer | FedQueueError | None]) -> dict[str, Poll]:
        """Let runs go on with what came for them, or begin; what they want to say. What goes wrong with one is nothing
        to the others."""
        waiting = {}
        for run, found in came.items():
            try:
                said = next(turns[run], None) if found is None else next_after(turns[run], found)
            except FedQueueError as error:
                self._trouble(run, f"run {run}: {error}")
                continue
            if said is not None:
                waiting[run] = said
            else:
                self._said.pop(run, None)
        return waiting

    def _tell(self, waiting: Mapping[str, Poll]) -> dict[str, Answer | FedQueueError]:
        """What each run is answered."""
        answers: dict[str, Answer | FedQueueError] = {}
        for together in _portions(waiting):
            found = self._ask([waiting[run] for run in together])
            if found is None:
                answers |= {run: CoordinatorUnreachableError(self._said["server"]) for run in together}
                continue
            self._here = found.runs
            by_run = {answer.run: answer for answer in found.answers}
            for run in together:
                if run in found.over:
                    self._agents[run].end(found.over[run])
                answers[run] = _answered(by_run.get(run), found.over.get(run))
        return answers

    def _ask(self, polls: list[Poll]) -> SiteAnswer | None:
        said = SitePoll(poll_seconds=self._config.agent.poll_seconds, offers=self._config.to_tell(), runs=polls)
        try:
            found = self._transport.poll_all(said)
        except CoordinatorUnreachableError as error:
            self._trouble("server", f"the server is out of reach: {error}")
            return None
        if self._said.pop("server", None) is not None:
            log.info("server: well again")
        return found

    def _trouble(self, whose: str, what: str) -> None:
        """Say it once, not in every turn."""
        if self._said.get(whose) != what:
            self._said[whose] = what
            log.warning(one_line(what))

    # Runs that come and go ------------------------------------------------------------------------------

    def _follow(self) -> None:
        for found in self._here:
            self._told[found.run] = found
            if found.run not in self._agents:
                self._begin(found)
        for run, agent in list(self._agents.items()):
            if agent.is_finished:
                agent.stop_scoring()
                log.info(f"run {run} is over: {agent.over}")
                self._leave(run)
                with suppress(OSError):
                    (self._home / RUNS / run / OFFER).unlink()

    def _begin(self, run: RunHere) -> None:
        if not RUN.fullmatch(run.run):
            self._trouble(run.run, f"run {one_line(run.run)[:80]!r} has no name that this site takes")
            return
        home = self._home / RUNS / run.run
        config = self._config.for_run(run, home)
        if config is None:
            why = f"this site has no offer {run.offer!r} that it may use"
            self._trouble(run.run, f"run {one_line(run.name)[:80]} is not taken part in: {why}")
            return
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            agent = Agent(
                config,
                home,
                self._facility,
                self._transport.of(run.run),
                run=run.run,
                scheduler=self._scheduler(run.offer, config),
                site=self,
                name=one_line(run.name)[:80],
            )
            (home / OFFER).write_text(f"{run.offer}\n{run.name}\n{run.owner}\n", encoding="utf-8")
        except (FedQueueError, OSError) as error:
            self._trouble(run.run, f"run {one_line(run.name)[:80]} cannot begin here: {error}")
            return
        self._agents[run.run] = agent
        log.info(f"takes part in run {one_line(run.name)[:80]} ({run.run}) with its offer {run.offer!r}")

    def _scheduler(self, offer: str, config: AgentConfig) -> Scheduler:
        own = self._config.offers[offer].scheduler is not None
        name = offer if own else ""
        if name not in self._schedulers:
            self._schedulers[name] = make_scheduler(config.scheduler, self._home)
        return self._schedulers[name]

    def _leave(self, run: str) -> None:
        agent = self._agents.pop(run)
        with suppress(FedQueueError):
            agent.close()

    # What runs share ------------------------------------------------------------------------------------

    def _by_use(self) -> list[tuple[str, Agent]]:
        """The lowest level comes first: it submits before the others."""
        for run in self._agents:
            self._count(run)
        return sorted(self._agents.items(), key=lambda found: (self._uses[found[0]].level, found[0]))

    def _share(self, run: str) -> ShareSettings:
        """The site's own word, else the server's."""
        told = self._told.get(run)
        if told is None:
            return ShareSettings()
        return share_of(self._config.share, told.name, told.owner) or ShareSettings(weight=told.weight)

    def _count(self, run: str) -> None:
        """What it has used since it was counted last."""
        if self._config.agent.share_by == "jobs":  # which count when they get their places
            self._uses.setdefault(run, Use(level=0.0, used=0.0))
            return
        used = sum(self._agents[run].jobs.node_seconds())
        before = self._uses.get(run, Use(level=0.0, used=0.0))
        self._uses[run] = Use(level=before.level + (used - before.used) / self._share(run).weight, used=used)

    def _keep_uses(self) -> None:
        """For the next start."""
        uses = {run: use for run, use in self._uses.items() if run in self._agents}
        if uses != self._written:
            with suppress(FedQueueError):
                write_json(self._home / USES, uses)
                self._written = uses

    def node_seconds(self) -> tuple[float, float]:
        each = [agent.jobs.node_seconds() for agent in self._agents.values()]
        return sum(used for used, _ in each), sum(asked for _, asked in each)

    def has_place(self, jobs: Jobs) -> bool:
        run = next(run for run, agent in self._agents.items() if agent.jobs is jobs)
        share, most = self._share(run), self._config.agent.jobs_at_once
        if share.jobs_at_once is not None and jobs.at_scheduler() >= share.jobs_at_once:
            return False
        there = {other: agent.jobs.at_scheduler() for other, agent in self._agents.items()}
        # Who was refused in this turn or in the last one wants a place still; who no longer asks is not waited for.
        wanting = [other for other in there if other != run and self._refused.get(other, -2) >= self._turn - 1]
        for other in {run, *wanting}:
            self._count(other)
        if run not in self._refused and not there[run]:
            use = self._uses[run]
            self._uses[run] = replace(use, level=after_rest(use.level, self._highest))
        levels = {other: self._uses[other].level for other in (run, *wanting)}
        if most is not None and run not in next_in_line(levels, most - sum(there.values())):
            self._refused[run] = self._turn
            return False
        self._refused.pop(run, None)
        self._highest = max(self._highest, levels[run])
        if self._config.agent.share_by == "jobs":
            use = self._uses[run]
            self._uses[run] = replace(use, level=use.level + 1 / share.weight)
        return True


def _read_uses(home: Path) -> dict[str, Use]:
    try:
        found = json.loads((home / USES).read_text(encoding="utf-8"))
        return {run: read(Use, use, USES) for run, use in found.items()}
    except (OSError, ValueError, AttributeError, FedQueueError):
        return {}  # it is no more than who comes first


def _answered(found: RunAnswer | None, over: str | None) -> Answer | FedQueueError:
    if over is not None:
        return CoordinatorUnreachableError(f"the run is over: {over}")
    if found is None:
        return CoordinatorUnreachableError("the server said nothing of this run")
    if found.answer is not None:
        return found.answer
    reason = one_line(found.reason)
    if found.busy:
        return CoordinatorBusyError(f"cannot be served now: {reason}", reason)
    return CoordinatorRefusedError(f"refused: {reason}", reason, found.refusal)


def _portions(waiting: Mapping[str, Poll]) -> Iterable[list[str]]:
    """Runs whose polls go together: no more reports than one poll may have. At least one portion, if an empty one."""
    portion: list[str] = []
    reports = 0
    for run, poll in waiting.items():
        if portion and reports + len(poll.reports) > MOST_REPORTS:
            yield portion
            portion, reports = [], 0
        portion.append(run)
        reports += len(poll.reports)
    yield portion
