"""The driver of a real run: one thread that owns the strategy, the ledger and the run clock.

Everything enters through `ask`, which hands a function to that thread and gives its answer back: a facility's poll,
an operator's word, a model that was made. Before each, timers that are due fire; so which cutoff an update meets is
decided by the order of the ledger. What has to be done is read from the run's state, not remembered: a coordinator that
is killed at any moment reads its ledger and goes on, and its run clock stood still meanwhile.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from fedqueue import masks, tensorsum
from fedqueue.config import Config
from fedqueue.coordinator.masking import Masking
from fedqueue.coordinator.scoring import Scorer, Scores
from fedqueue.coordinator.store import Store, what_is_wrong
from fedqueue.engine import Engine, Listener
from fedqueue.errors import FedQueueError, StorageError
from fedqueue.files import failpoint
from fedqueue.ledger import FILE, Ledger, LedgerReader
from fedqueue.metrics import Tally
from fedqueue.protocol.codec import encode
from fedqueue.protocol.contract import REASON_LENGTH, facility_of, job_id
from fedqueue.protocol.messages import (
    Aggregate,
    Command,
    CoordinatorResumed,
    Event,
    FacilityDrained,
    FacilityJoined,
    FacilityLeft,
    JobFailed,
    ModelReady,
    ModelScored,
    PostWork,
    Record,
    RolledBack,
    RunPaused,
    RunResumed,
    RunStarted,
    StopRequested,
    TimerFired,
    UpdateArrived,
    UpdatesUnusable,
    UpdatesWithdrawn,
    parse,
)
from fedqueue.protocol.reports import Trouble
from fedqueue.protocol.state import Outcomes, RunState, View
from fedqueue.protocol.strategies import Strategy
from fedqueue.runs import rebuild_strategy

log = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEAT_SECONDS: Final = 1.0
"""How much of the run clock a killed coordinator may lose."""

KEPT_BEHIND: Final = 2
"""Of the models before the newest, those that are kept in any case while the run goes on: to go back to."""

GOODBYE_SECONDS: Final = 60.0
"""How long an agent that knows of the run's end may take to end its jobs."""

SHORTEST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 60.0
"""Between two tries of what is in vain until somebody mends it: a file that is gone, changed or locked, a full disk."""


class Refused(FedQueueError):  # it is an answer
    """What was asked cannot be done; `status` says so in the words of HTTP."""

    def __init__(self, status: int, reason: str, *, received: int | None = None, offset: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.received, self.offset = received, offset  # as in `RefusalBody`


class RunClock:
    """Seconds that the run was going, without those in which it was paused or down. Stands still until `start`."""

    def __init__(self, at: float = 0.0) -> None:
        self._at = at  # where it stands, or stood when it was started
        self._since: float | None = None  # monotonic; None: it stands

    def now(self) -> float:
        return self._at if self._since is None else self._at + (time.monotonic() - self._since)

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        self._at, self._since = self.now(), None

    @property
    def running(self) -> bool:
        return self._since is not None


class Patience:
    """When to try again: after a second, then after twice as long each time, a minute at most."""

    def __init__(self) -> None:
        self._seconds = SHORTEST_SECONDS
        self._next: float | None = None  # monotonic; None: nothing is waited for

    @property
    def waits(self) -> bool:
        """It was in vain, and it is not yet time to try again."""
        return self._next is not None and time.monotonic() < self._next

    @property
    def is_over(self) -> bool:
        """It was in vain, and it is time to try again."""
        return self._next is not None and time.monotonic() >= self._next

    def in_vain(self) -> None:
        self._next = time.monotonic() + self._seconds
        self._seconds = min(2 * self._seconds, LONGEST_SECONDS)

    def try_now(self) -> None:
        self._seconds, self._next = SHORTEST_SECONDS, time.monotonic()

    def done(self) -> None:
        self._seconds, self._next = SHORTEST_SECONDS, None


@dataclass(slots=True)
class Presence:
    """When a facility was last heard of; not in the ledger, since only the time since then counts."""

    heard: float  # monotonic
    poll_seconds: float = 0.0  # until its next poll, as it says
    longest_gap: float = 0.0  # between two that came
    session: str = ""
    generation: int = -1
    host: str = ""
    journal: str = ""
    post: int | None = None  # the newest standing work that it was told of; None: not known
    told_end: float | None = None  # monotonic, of when it was first told that the run is over
    left: bool = False  # it said goodbye: nobody waits for it
    ever: bool = False  # heard of since this coordinator started
    troubles: list[Trouble] = field(default_factory=list)  # that its agent spoke of last
    spoke: float = 0.0  # monotonic, of then


class Made(NamedTuple):
    """The digests of a new version's files."""

    model: str
    moments: tuple[str, ...] = ()  # of the server's optimizer


NOTHING: Final = Made("")


class Coordinator:
    """Open it with `open_run` of runs on a folder that has a ledger; then `run` in the thread that shall own it."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        listeners: Sequence[Listener] = (),
        views: Sequence[View] = (),
        scorer: Callable[[Coordinator], Scorer] | None = None,
        told: bool = False,
    ) -> None:
        """`told`: the listeners and views know what the ledger holds."""
        self.config = config
        self.folder = folder
        self.store = Store(folder)
        self._found = self.store.digests()  # when we started
        self.names = [facility.name for facility in config.facility]
        self.presence = {name: Presence(time.monotonic()) for name in self.names}
        self._listeners = listeners
        self._views = views
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._beat = 0.0  # monotonic, of the newest heartbeat; 0: there was none yet
        self._closing = False
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="maker")  # models, one after the other
        self._at_work = False  # the maker is
        self._patience = Patience()  # with what hinders the run
        self._suspects: dict[str, str] = {}  # files that could not be used, by digest, with what for
        self._said = ""  # of this when the run is over, or of the ledger
        self.scores = Scores(self)
        self.masking: Masking | None = None  # None: updates come as they are
        self._open(told=told)
        self.scores.scorer = scorer(self) if scorer is not None else None

    # Opening and recovery -------------------------------------------------------------------------------

    def _open(self, *, told: bool) -> None:
        """Read the ledger from its beginning: what it holds is what happened, whatever this process remembers."""
        ledger_path = self.folder / FILE
        self.state = RunState(self.names)
        self.received: dict[tuple[str, str], int] = {}  # facility, journal -> newest report
        with LedgerReader(ledger_path) as reader:
            self.strategy: Strategy = rebuild_strategy(reader.meta)
            self.outcomes = Outcomes(self.state, reader.meta["first_model"])
            self.tally = Tally.of(self.config, self.state)
            self.state.views += () if told else self._views
            self.run_id: str = reader.meta["run"]
            if self.config.trust.masked and self.masking is None:
                self.masking = Masking(self.folder, self.run_id, self.config.trust)
            self.left_as = reader.meta.get("stopped")  # by a coordinator before us
            for name in reader.meta.get("left", []):
                self.presence[name].left = True
            heartbeat = reader.meta.get("heartbeat") or {"clock": 0.0, "wall": time.time()}
            differs = 0
            for event, recorded in reader.steps():
                given = [(type(c).__name__, encode(c)) for c in self.strategy.handle(event)]
                differs += given != recorded
                # The journal is what counts: another build may decide otherwise from here on, not about the past.
                commands: Any = [parse(kind, json.loads(text)) for kind, text in recorded]
                self.state(event, commands)
                for listener in () if told else self._listeners:
                    listener(event, commands)
            for row in reader.rows("SELECT origin FROM events WHERE origin IS NOT NULL ORDER BY seq"):
                facility, _, rest = row["origin"].partition("/")
                journal, _, n = rest.rpartition("/")
                if facility in self.presence and n.isdigit():
                    key = (facility, journal)
                    self.received[key] = max(self.received.get(key, 0), int(n))
                    self.presence[facility].journal = journal
        self._ledger = Ledger(ledger_path, None)
        if differs:
            self._ledger.note("replay_differences", differs)
        self.state.views += self._views if told else ()
        clock_at = max(self.state.at, heartbeat["clock"])
        self.clock = RunClock(clock_at)
        self._down_seconds = max(0.0, time.time() - heartbeat["wall"])
        self._engine = Engine(self.strategy, self, [self._write, self._happened, *self._listeners])
        if self.state.events and self.state.stopped is None:
            if not self.state.held:
                self.clock.start()
            self.tell(CoordinatorResumed(at=clock_at, down_seconds=self._down_seconds))
        elif self.state.stopped is None:
            self.clock.stop()

    def _write(self, event: Event, commands: Any) -> None:
        failpoint("ledger.before")
        self._ledger(event, commands)
        failpoint("ledger.after")

    def _happened(self, event: Event, _: Sequence[Command]) -> None:
        self.state.happened(event)

    def act(self, command: Command) -> None:
        """A command is carried out by being part of the state: facilities, timers and models are served from there."""
        self.state.wanted(command)
        if isinstance(command, PostWork):
            heard = self.presence[command.facility].post
            facility = self.state.facilities[command.facility]
            if heard is not None:  # nobody there has heard of those between
                facility.forget_posts(lambda number: heard < number < facility.posted)
        elif isinstance(command, Record) and command.kind == "overdue":
            log.warning(f"{command.facts['facility']} is not waited for in this round: {command.facts['reason']}")

    # The thread -----------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until the run is over and everybody who should know knows, or `until` says so."""
        if self.state.hindrance and self.state.stopped is None:
            log.warning(f"still paused: {self.state.hindrance}")
            if not self.state.making:
                self._suspects[self.outcomes.models[self.state.newest]] = "the run cannot go on"
            self._patience.try_now()
        self.pump()
        for version in sorted(set(self.outcomes.models) - set(self.outcomes.scores)):
            self.scores.begin(version)
        try:
            while not self._finished() and not until():
                self._turn()
            self._ledger.note("stopped", self.state.stopped or "interrupted; it can go on")
        finally:
            self._closing = True
            self._send_away()

    def close(self) -> None:
        """Let go of everything; what is in the ledger stays."""
        self._closing = True
        self.scores.close()
        self._maker.shutdown(wait=True, cancel_futures=True)
        self._send_away()
        self._look_after_ledger()
        if self.state.stopped is not None:
            self._ledger.seal()
        else:
            self._ledger.abandon()

    def together(self) -> AbstractContextManager[None]:
        """What is told inside is one transaction: a facility's reports come several at a time."""
        return self._ledger.together()

    def _send_away(self) -> None:
        """Whoever still waits for an answer is told to come again."""
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Have the owning thread do this; its answer, or what it raised, comes with the future."""
        answer: Future[T] = Future()

        def act() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # who asked has gone
            if self._closing:
                answer.set_exception(Refused(503, "the coordinator is stopping; try again"))
                return
            try:
                answer.set_result(question())
            except StorageError as error:
                answer.set_exception(Refused(507, str(error)))
                raise
            except OSError as error:
                answer.set_exception(Refused(507, f"the coordinator's disk: {self._reason(error)}"))
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(act)
        if self._closing:  # nobody may look at the inbox any more
            self._send_away()
        return answer

    def _turn(self) -> None:
        """One thing that happened, or a second without any."""
        due = self.state.due() if self.clock.running else None
        wait = HEARTBEAT_SECONDS if due is None else min(HEARTBEAT_SECONDS, max(0.0, due[0] - self.clock.now()))
        try:
            act: Callable[[], None] | None = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
        except queue.Empty:
            act = None
        self._fire_timers()
        if act is not None:
            act()
        if self._patience.is_over:
            self.pump()
        if time.monotonic() - self._beat >= HEARTBEAT_SECONDS:
            if self._beat:
                self._forgive(time.monotonic() - self._beat - HEARTBEAT_SECONDS)
            self._beat = time.monotonic()
            self._ledger.note("heartbeat", {"clock": self.clock.now(), "wall": time.time()})
            failpoint("heartbeat.noted")
            self._look_after_ledger()
            self._look_around()
            if self.state.stopped is None:
                self._look_after_groups()

    def _fire_timers(self) -> None:
        while self.clock.running and self.state.stopped is None:
            due = self.state.due()
            if due is None or due[0] > self.clock.now():
                return
            self.tell(TimerFired(at=max(due[0], self.state.at), key=due[1]))

    def tell(self, event: Event, origin: str | None = None) -> None:
        """Something happened. Only the owning thread calls this."""
        self._ledger.origin = origin
        try:
            self._engine.advance(event)
        except StorageError:
            raise
        except Exception as error:
            # The strategy may be half way through: what is on record is whole, so begin from there.
            log.error(f"event {type(event).__name__} cannot be handled: {type(error).__name__}: {error}")
            self._ledger.abandon()
            self._open(told=True)
            raise Refused(422, f"{type(event).__name__} cannot be handled: {error}") from error
        if isinstance(event, ModelScored):
            self.scores.came(event)
        self.pump()

    @property
    def now(self) -> float:
        """On the run clock, and never before what was written last."""
        return max(self.clock.now(), self.state.at)

    def _forgive(self, late: float) -> None:
        """We did not listen for so many seconds, because this process was stopped or its machine stood still: who could
        not be heard was not silent."""
        if late > HEARTBEAT_SECONDS:
            for presence in self.presence.values():
                presence.heard = min(presence.heard + late, time.monotonic())

    def _look_after_ledger(self) -> None:
        if self._ledger.is_in_place:
            return
        try:
            self._ledger.put_back()
            why = f"{FILE} was gone from the run's folder, or another was there; it is back, and nothing is lost"
        except StorageError as error:  # what we hold is all there is: hold on to it
            why = f"{error}; it is tried again by itself; until then do not end this process"
        if why != self._said:
            log.warning(why)
        self._said = why

    def _look_around(self) -> None:
        """Who is away? Facilities do not say goodbye."""
        if not self.state.started or self.state.stopped is not None:
            return
        for name, presence in self.presence.items():
            silent = time.monotonic() - presence.heard
            patience = max(self.config.server.away_seconds, 3 * self._polls_after(presence))
            if not self.state.facilities[name].away and silent > patience:
                log.warning(f"{name} has not been heard of for {silent:.0f} s")
                self.tell(FacilityLeft(at=self.now, facility=name))

    def _polls_after(self, presence: Presence) -> float:
        """Seconds. Nobody is waited for longer because it says that it polls once an hour, and never did."""
        return min(presence.poll_seconds, max(presence.longest_gap, self.config.server.away_seconds))

    def _finished(self) -> bool:
        """The run is over, its last model is scored, and who is in reach knows and has ended its jobs."""
        if self.state.stopped is None or self._at_work or self.scores.are_awaited():
            return False
        for name, presence in self.presence.items():
            silent = time.monotonic() - presence.heard  # or since this coordinator started
            patience = 3 * max(self._polls_after(presence) or 10.0, 3.0)
            in_reach = not self.state.facilities[name].away and silent < patience
            given_up = presence.told_end is not None and time.monotonic() - presence.told_end > GOODBYE_SECONDS
            if in_reach and not presence.left and not given_up:
                return False
        return True

    # What facilities and operators bring ----------------------------------------------------------------

    def heard(self, name: str) -> None:
        """A facility that may speak for itself did."""
        presence = self.presence[name]
        if presence.ever:
            presence.longest_gap = max(presence.longest_gap, time.monotonic() - presence.heard)
        presence.heard, presence.ever = time.monotonic(), True
        if not self.state.started and self.state.stopped is None:
            there = [other for other, p in self.presence.items() if p.ever]
            if len(there) >= (self.config.server.wait_for or len(self.names)):
                self.tell(RunStarted(at=self.now))
                if not self.state.held:
                    self.clock.start()
                for other in self.names:
                    if other not in there:
                        self.tell(FacilityLeft(at=self.now, facility=other))
        elif self.state.facilities[name].away and self.state.stopped is None:
            log.info(f"{name} is back")
            self.tell(FacilityJoined(at=self.now, facility=name))

    def leaves(self, name: str) -> None:
        """Its agent ends, for now or because the run is over."""
        self.presence[name].session, self.presence[name].left = "", True
        if self.state.stopped is not None:
            self._ledger.note("left", [other for other, presence in self.presence.items() if presence.left])

    def give_up_all_but(self, name: str, known: Collection[int]) -> list[int]:
        """Jobs that we believe this facility has, and that its agent does not know, have failed; their numbers."""
        unknown = [job for job in self.state.facilities[name].jobs.values() if job.taken and job.sequence not in known]
        reason = (
            "the facility's agent lost its journal, or had it restored from an older copy, and does not know this job"
        )
        for job in unknown:
            self.tell(
                JobFailed(at=self.now, job_id=job.order.job_id, attempt=job.attempt, reason=reason, transient=True)
            )
        return [job.sequence for job in unknown]

    def arrived(self, event: UpdateArrived) -> None:
        job, attempt, part = event.receipt.key
        self.tell(event, origin=f"update/{job}/{attempt}/{part}/arrived")

    def pause(self) -> None:
        self._must_run()
        if not self.state.paused:
            self.tell(RunPaused(at=self.now))
            self.clock.stop()

    def resume(self) -> None:
        self._must_run()
        if self.state.paused:
            if not self.state.hindrance:
                self.clock.start()
            self.tell(RunResumed(at=self.now))
        if self.state.hindrance:
            self._patience.try_now()
            self.pump()

    def stop(self) -> None:
        """End the run; a model that is being made is waited for."""
        self._must_run()
        if not self.clock.running:
            self.clock.start()
        self.tell(StopRequested(at=self.now))

    def roll_back(self, version: int) -> None:
        """Take back every model after this one."""
        self._must_run()
        newest = self.state.newest
        if version >= newest:
            raise Refused(409, f"model {newest} is the newest, so there is nothing after model {version} to take back")
        there = [v for v, digest in self.outcomes.models.items() if self.store.path(digest).exists()]
        if version not in there:
            older = ", ".join(str(v) for v in there if v < newest) or "none"
            gone = f"the file of model {version} is no longer kept; of those before {newest} there are: {older}"
            raise Refused(409, f'{gone}; [model] keep = "all" keeps every one')
        self.tell(RolledBack(at=self.now, version=version))

    def shut_out(self, name: str, *, keep: bool) -> None:
        """Its credential was revoked: nobody waits for it, and what it handed in counts only if the operator says so
        or it is in a model already, or in one that is being made."""
        self.presence[name].session = ""
        if not self.state.started or self.state.stopped is not None:
            return
        if not self.state.facilities[name].away:
            self.tell(FacilityLeft(at=self.now, facility=name))
        command = self.next_wanted()
        shares = command.weights if command is not None and self.masking is not None else ()
        if command is not None and any(facility_of(share.job_id) == name for share in shares):
            self.void(command, f"{name} was revoked")
        if not keep and any(facility_of(job) == name for job, _, _ in self.state.held_updates()):
            self.tell(UpdatesWithdrawn(at=self.now, facility=name, reason=f"{name} was revoked"))

    def drain(self, name: str) -> None:
        self._must_run()
        self.tell(FacilityDrained(at=self.now, facility=name))

    def join(self, name: str) -> None:
        """Undo a drain, or give a facility that failed for good another chance."""
        self._must_run()
        facility = self.state.facilities[name]
        if facility.away and facility.status == "drained":
            raise Refused(409, f"{name} is drained and away; say it again when it is back")
        self.tell(FacilityJoined(at=self.now, facility=name))

    def _must_run(self) -> None:
        if self.state.stopped is not None:
            raise Refused(409, f"the run is over: {self.state.stopped}")
        if not self.state.started:
            raise Refused(409, "the run has not started: it waits for its facilities")

    # Models ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Begin with the next model that can be made, and look again at files that could not be used."""
        if self._at_work or self._closing or self._patience.waits:
            return
        command, masked = self.next_wanted(), list[Path]()
        if command is not None and command.weights and self.masking is not None:
            found = self.masking.given(command)
            command, masked = (None, []) if found is None else (command, found)
        if command is not None or self._suspects:
            self._at_work = True
            contributions = [] if masked else self._ingredients(command)
            self._maker.submit(self._work, command, contributions, dict(self._suspects), masked)
        else:
            self._sweep()

    def next_wanted(self) -> Aggregate | None:
        """The model that is to be made next."""
        return self.state.making[min(self.state.making)] if self.state.making else None

    def _ingredients(self, command: Aggregate | None) -> list[tensorsum.FileContribution]:
        return [
            tensorsum.FileContribution(
                weight=share.weight,
                trained=self.store.path(receipt.digest),
                base=self.store.path(self.outcomes.models[receipt.base_version]),
                base_key=self.outcomes.models[receipt.base_version],
                clip=share.clip,
                voice=facility_of(share.job_id),
            )
            for share in (command.weights if command is not None else ())
            for receipt in [self.state.held_updates()[share.key]]
        ]

    def _work(
        self,
        command: Aggregate | None,
        contributions: list[tensorsum.FileContribution],
        suspects: Mapping[str, str],
        masked: Sequence[Path],
    ) -> None:
        """In the maker's thread: the file of a new version, once all that was in the way is well."""
        made, agreement, doing = NOTHING, None, ""
        try:
            for digest, doing in suspects.items():  # noqa: B007  # what it was at is told below
                self.store.verify(digest)
            if command is not None:
                doing = f"model {command.to_version} cannot be made"
                if masked:
                    contributions = [self._unmasked(command, masked)]
                made = self._make(command, contributions)
                if command.agreement:
                    fresh = [c for c, share in zip(contributions, command.weights, strict=True) if not share.again]
                    agreement = tensorsum.agreement(fresh)
        except tensorsum.TooLargeSumError as error:
            too_large = error  # which Python forgets at the end of this block
            voice = tensorsum.to_blame(contributions, error.tensor) if not masked else None
            self.ask(lambda: self._overflowed(command, too_large, voice))
        except Exception as error:
            failure = error
            self.ask(lambda: self._failed(doing, failure))
        else:
            self.ask(lambda: self._worked(command, made, agreement, suspects))

    def _unmasked(self, command: Aggregate, masked: Sequence[Path]) -> tensorsum.FileContribution:
        """The sum of a whole group, as one update."""
        digest = self.outcomes.models[command.from_version]
        scratch, current = self.store.scratch(f"v{command.to_version}-sum"), self.store.path(digest)
        content = masks.unmask(current, masked, scratch)
        return tensorsum.FileContribution(
            weight=1.0, trained=self.store.keep(scratch, content), base=current, base_key=digest
        )

    def _make(self, command: Aggregate, contributions: list[tensorsum.FileContribution]) -> Made:
        current = self.outcomes.models[command.from_version]
        moments = self.outcomes.moments.get(command.from_version, ())
        if command.to_version > command.from_version + 1:  # models were taken back, maybe because of their files
            self.store.verify(current)
            moments = moments if all(self.store.path(digest).exists() for digest in moments) else ()
        if not contributions:
            return Made(current, moments)
        scratch, is_first = self.store.scratch(f"v{command.to_version}"), command.from_version == 0
        path, rule, guard = self.store.path(current), command.rule, command.guard
        with self.store.checking() as expected:
            if command.step is None:
                kept: list[Path] = []
                contents = [
                    tensorsum.aggregate(
                        path, contributions, rule, scratch, from_first=is_first, guard=guard, content=expected
                    )
                ]
            else:
                kept = [self.store.scratch(f"v{command.to_version}-moment{n}") for n in range(command.step.moments)]
                step = tensorsum.FileStep(step=command.step, moments=[*map(self.store.path, moments)], out=kept)
                contents = tensorsum.take_step(
                    path, contributions, rule, scratch, step, from_first=is_first, guard=guard, content=expected
                )
        for made, content in zip([scratch, *kept], contents, strict=True):
            self.store.keep(made, content)
        model, *others = [content.sha256 for content in contents]
        return Made(model, tuple(others))

    def _worked(
        self, command: Aggregate | None, made: Made, agreement: float | None, looked_at: Mapping[str, str]
    ) -> None:
        self._at_work = False
        for suspect in looked_at:
            self._suspects.pop(suspect, None)
        self._patience.done()
        if command is not None and self.state.stopped is None:  # otherwise nobody waits for it any more
            ready = ModelReady(
                at=self.now,
                version=command.to_version,
                digest=made.model,
                moments=made.moments,
                agreement=agreement,
            )
            self.tell(ready)
            self.scores.begin(command.to_version)
        if not self._suspects:
            self._mended()
        self.pump()

    def _overflowed(self, command: Aggregate | None, error: tensorsum.TooLargeSumError, voice: Hashable) -> None:
        """The sum is more than its type holds: whoever moves the tensor furthest has no part in this model."""
        self._at_work = False
        if command is not None and self.masking is not None and self.state.stopped is None:
            self.void(command, "what they gave is no sum of masked updates")
            return
        if command is None or voice is None or self.state.stopped is not None:
            self._failed("the model cannot be made", error)
            return
        facility, reason = str(voice), f"{error.reason}; its facility moves that furthest"
        log.warning(f"model {command.to_version} is made without {facility}: {reason}")
        self._make_without(command.to_version, facility, reason)

    def _make_without(self, version: int, facility: str, reason: str, *, blamed: bool = False) -> None:
        short = reason[:REASON_LENGTH]
        self.tell(UpdatesUnusable(at=self.now, version=version, facility=facility, reason=short, blamed=blamed))

    def void(self, command: Aggregate, why: str, missing: Collection[str] = ()) -> None:
        """A group of masked updates is of no use but whole: none of them counts. `missing`: because of these."""
        names = sorted({facility_of(share.job_id) for share in command.weights})
        reason = f"the group of {', '.join(names)} for model {command.to_version} is void: {why}"
        log.warning(reason)
        for name in names:
            self._make_without(command.to_version, name, reason, blamed=name in missing)

    def _look_after_groups(self) -> None:
        command = self.next_wanted()
        if self.masking is None or command is None or not command.weights:
            return
        if self.masking.too_few(command):
            self.void(command, "it has too few members")
        elif self.masking.is_overdue(command) and (missing := self.masking.missing(command)):
            self.void(command, f"{', '.join(missing)} did not give its part in time", missing)
        else:
            self.pump()  # after a start all may be there, and only their keys came since

    # Faults that somebody must mend ---------------------------------------------------------------------

    def _failed(self, doing: str, error: Exception) -> None:
        self._at_work = False
        self._hinder(f"{doing}: {self._reason(error)}")

    def _hinder(self, why: str) -> None:
        """The run stands still, with its reason on record, and is tried again by itself."""
        self._patience.in_vain()
        if self.state.stopped is not None:
            if why != self._said:
                log.warning(why)
            self._said = why
        elif why != self.state.hindrance:
            self.tell(RunPaused(at=self.now, reason=why))
            self.clock.stop()

    def _mended(self) -> None:
        if self.state.hindrance and self.state.stopped is None:
            if self.state.started and not self.state.paused:
                self.clock.start()
            self.tell(RunResumed(at=self.now, mended=True))
        self.scores.begin_again()

    def cannot_use(self, digest: str, doing: str, error: Exception) -> Refused:
        """A file of ours is not as it should be; what to answer who needs it."""
        why = f"{doing}: {self._reason(error)}"
        self._suspects[digest] = doing
        if not self._patience.waits:
            self._hinder(why)
        return Refused(503, why)

    def suspects(self, digest: str) -> bool:
        """Whether this file could not be used, and is not known to be well again."""
        return digest in self._suspects

    def counts_on(self, digest: str) -> bool:
        """Whether the file of this model must be there."""
        return digest == self.outcomes.models[self.state.newest] or self.store.counts_on(digest)

    def _reason(self, error: Exception) -> str:
        names = {receipt.digest: f"the update of {receipt.job_id}" for receipt in self.state.held_updates().values()}
        for version, digests in self.outcomes.moments.items():
            names |= dict.fromkeys(digests, f"the optimizer's moments of model {version}")
        names |= {digest: f"model {version}" for version, digest in self.outcomes.models.items()}
        return what_is_wrong(error, self.folder, names)

    def _sweep(self) -> None:
        state, models = self.state, self.outcomes.models
        unheard = state.started and not all(p.ever for name, p in self.presence.items() if state.facilities[name].jobs)
        versions = set(models) if self.config.model.keep == "all" else state.versions_needed()
        recent = {state.newest - back for back in range(1 if state.stopped is not None else 1 + KEPT_BEHIND)}
        needed = {models[version] for version in versions | recent | self.scores.needed() if version in models}
        for version in recent:
            needed.update(self.outcomes.moments.get(version, ()))
        needed.update(receipt.digest for receipt in state.held_updates().values())
        if unheard:  # a job may have taken an older version before we were there to hear of it
            needed |= self._found
        self.store.sweep(needed)
        if self.masking is not None:
            self.masking.sweep(state.making)
        self.store.sweep_uploads(lambda name, sequence: state.open_or_cancelled(job_id(name, sequence)) is not None)
