"""Many simulations at once, whose jobs are trained side by side on one device.

Every run is a thread, and one of them runs at a time: until it needs what a job trained or how a model scores. Then
it waits, and the next one runs. When all wait, the device goes on: jobs of all runs fill its slots, a few steps are
done in all of them, and who was waiting for what came out may run again. The device is always given its next steps
before the results of the last ones are looked at, so it never waits for the simulations.

A run's results do not depend on the others: a job's batches and dropout come from its own key.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedqueue.aggregate import Contribution, aggregate, roles_of
from fedqueue.config import Config
from fedqueue.errors import ConfigError, TaskError
from fedqueue.protocol.contract import Assignment
from fedqueue.protocol.messages import Aggregate
from fedqueue.protocol.roles import buffer_roles, must_match
from fedqueue.sim.learning import Key, Learning, luck_of
from fedqueue.training.tasks import chosen_for_test, first_module, seed_of_job, share_out, workload_of
from fedqueue.training.trainer import batches
from fedqueue_reproduction.lanes import Lanes, rows_of, why_not_in_lanes
from fedqueue_reproduction.recorded import Scorer, SlotJob, put
from fedqueue_reproduction.rows import Rows
from fedqueue_reproduction.slots import Slots, why_not_in_slots
from fedqueue_reproduction.stacked import Stack

T = TypeVar("T")

SLOTS = 64  # jobs side by side: more keep no accelerator busier, and each run waits longer for its own
RUNS_A_SLOT = 3  # so many runs are under way that slots do not stand empty while runs wait for scores
LANES = 8  # the same for networks that cannot be stacked
RUNS_A_LANE = 1  # these train longer than they are scored, and a run that is begun should soon be over
GRAIN = 8  # steps that are done before slots are looked at


@dataclass(eq=False, slots=True)
class _Awaited:
    """What a run may wait for."""

    settled: bool = False
    waiter: _Run[Any] | None = None


@dataclass(eq=False, slots=True)
class _Ticket(_Awaited):
    """A job on its way through the slots."""

    job: SlotJob | None = None
    left: int = 0  # steps
    row: Tensor | None = None  # what it trained
    finite: bool = True


@dataclass(eq=False, slots=True)
class _Score(_Awaited):
    row: Tensor | None = None
    chosen: Tensor | None = None
    value: tuple[float, float] = (0.0, 0.0)  # accuracy, loss


@dataclass(slots=True)
class _Flight:
    """What the device was given in one go, and where its results will be."""

    tickets: list[_Ticket]
    finite: Tensor
    scores: list[_Score]
    values: Tensor
    over: torch.cuda.Event | None


class Bench:
    """One device with its slots, its samples and its scorer, for all runs of one task."""

    def __init__(self, config: Config, device: torch.device, slots: int | None = None) -> None:
        settings = config.task
        self.device = device
        self.workload = workload_of(settings)
        self.batch_size = settings.batch_size
        module = self.workload.make_model()
        first = module.state_dict()
        must_match(config.model.roles, first)
        self.roles = roles_of(first, buffer_roles(module), config.model.roles)
        self.megabytes = sum(tensor.numel() * tensor.element_size() for tensor in first.values()) / 1e6
        train = (self.workload.train[0].to(device), self.workload.train[1].to(device))
        test = (self.workload.test[0].to(device), self.workload.test[1].to(device))
        not_in_slots = why_not_in_slots(self.workload, module, settings)
        not_in_lanes = why_not_in_lanes(self.workload, module, settings)
        self._slots: Slots | Lanes
        if not_in_slots is None:
            stack = Stack(module, self.roles)
            count, self.most_runs = slots or SLOTS, RUNS_A_SLOT * (slots or SLOTS)
            self.rows: Rows = stack
            self._slots = Slots(stack, train, slots=count, batch_size=settings.batch_size)
        elif not_in_lanes is None:
            # Some of the accelerator's quickest convolutions differ in the last bits from call to call.
            torch.backends.cudnn.deterministic = True
            count, self.most_runs = slots or LANES, RUNS_A_LANE * (slots or LANES)
            self.rows = rows_of(module, self.roles)
            self._slots = Lanes(self.workload, self.rows, train, slots=count, batch_size=settings.batch_size)
        else:
            reason = not_in_lanes if self.workload.recordable else not_in_slots
            raise TaskError(f"task {settings.name!r}: its runs cannot share a device: {reason}; use --device cpu")
        self._scorer = Scorer(self.workload, self.rows, test)
        self._free = list(range(count))
        self._busy: dict[int, _Ticket] = {}
        self._jobs: deque[_Ticket] = deque()
        self._scores: list[_Score] = []
        self._flights: deque[_Flight] = deque()

    def train(self, job: SlotJob) -> _Ticket:
        ticket = _Ticket(job=job, left=job.steps)
        self._jobs.append(ticket)
        return ticket

    def score(self, row: Tensor, chosen: Tensor | None) -> _Score:
        score = _Score(row=row, chosen=chosen)
        self._scores.append(score)
        return score

    def go_on(self) -> list[_Awaited]:
        """Give the device its next steps, then settle what it was given before; nothing is left if it gives nothing."""
        if self._jobs or self._busy or self._scores:
            self._flights.append(self._launch())
            if len(self._flights) < 2:
                return []
        return self._land(self._flights.popleft()) if self._flights else []

    @property
    def idle(self) -> bool:
        return not (self._jobs or self._busy or self._scores or self._flights)

    def _launch(self) -> _Flight:
        loaded: dict[int, SlotJob] = {}
        while self._jobs and self._free:
            ticket, number = self._jobs.popleft(), self._free.pop()
            self._busy[number] = ticket
            assert ticket.job is not None
            loaded[number] = ticket.job
            ticket.job = None
        self._slots.load(loaded)
        finished: list[int] = []
        if self._busy:
            shortest = min(ticket.left for ticket in self._busy.values())
            longest = max(ticket.left for ticket in self._busy.values())
            steps = max(shortest, min(GRAIN, longest))
            self._slots.advance(steps)
            for number, ticket in self._busy.items():
                ticket.left -= steps
                if ticket.left <= 0:
                    finished.append(number)
        tickets = [self._busy.pop(number) for number in finished]
        self._free.extend(finished)
        finite = torch.ones(0, dtype=torch.bool)
        if finished:
            rows, finite = self._slots.take(finished)
            for ticket, row in zip(tickets, rows, strict=True):
                ticket.row = row
        scores, self._scores = self._scores, []
        values = [self._scorer.score(score.row, score.chosen) for score in scores if score.row is not None]
        flight = _Flight(
            tickets=tickets,
            finite=_back(finite),
            scores=scores,
            values=_back(torch.stack(values)) if values else torch.empty(0),
            over=None,
        )
        if self.device.type == "cuda":
            flight.over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            flight.over.record()
        return flight

    def _land(self, flight: _Flight) -> list[_Awaited]:
        if flight.over is not None:
            flight.over.synchronize()
        for ticket, finite in zip(flight.tickets, flight.finite.tolist(), strict=True):
            ticket.finite, ticket.settled = finite, True
        for score, (accuracy, loss) in zip(flight.scores, flight.values.tolist(), strict=True):
            score.value, score.settled = (accuracy, loss), True
        return [*flight.tickets, *flight.scores]


def _back(tensor: Tensor) -> Tensor:
    """In the processor's memory, once the device is there."""
    if tensor.device.type != "cuda":
        return tensor
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return room.copy_(tensor, non_blocking=True)


class _Model:
    def __init__(self, rows: Rows, row: Tensor) -> None:
        self.row, self.parts = row, rows.parts(row)


class FleetLearning(Learning):
    """The learning of one run among many. A model is one flat row on the device, in parts that are averaged alike."""

    def __init__(self, config: Config, bench: Bench, wait: Callable[[_Awaited], None]) -> None:
        super().__init__(bench.megabytes)
        settings, seed = config.task, config.run.seed
        self._seed = seed
        self._bench = bench
        self._wait = wait
        self._parts = share_out(bench.workload, settings, len(config.facility), seed)
        chosen = chosen_for_test(bench.workload, settings, seed)
        self._chosen = None if chosen is None else put(chosen, bench.device)
        first = bench.rows.flatten(dict(first_module(bench.workload, settings, seed).state_dict()))
        self._models: dict[int, _Model] = {0: _Model(bench.rows, put(first, bench.device))}
        self._updates: dict[Key, tuple[_Ticket, int, int]] = {}  # ticket, base version, steps
        self.roles = bench.roles
        self.data_sizes = [len(part) for part in self._parts]

    def foresee(self, key: Key, facility: int, number: int, work: Assignment, steps: int) -> None:
        part = self._parts[facility]
        seed = seed_of_job(self._seed, facility, luck_of(facility, number))
        order = batches(part, self._bench.batch_size, steps, torch.Generator().manual_seed(seed))
        job = SlotJob(
            row=self._models[work.base_version].row,
            batches=torch.stack(list(order)),
            learning_rate=work.learning_rate,
            key=seed,
        )
        self._updates[key] = (self._bench.train(job), work.base_version, steps)

    def train(self, key: Key, facility: int, number: int, work: Assignment, steps: int) -> int:
        if self._updates.get(key, (None, None, None))[1:] != (work.base_version, steps):
            self.foresee(key, facility, number, work, steps)
        return steps * min(self._bench.batch_size, len(self._parts[facility]))

    def misfit(self, key: Key) -> str | None:
        ticket = self._updates[key][0]
        self._wait(ticket)
        return None if ticket.finite and key not in self._corrupt else "it has values that are not finite"

    def aggregate(self, command: Aggregate) -> None:
        rows, contributions = self._bench.rows, []
        for share in command.weights:
            ticket, base, _ = self._updates.pop((share.job_id, share.attempt))
            assert ticket.row is not None  # it arrived, so it was waited for
            trained = rows.parts(ticket.row)
            contributions.append(Contribution(weight=share.weight, trained=trained, base=self._models[base].parts))
        current = self._models[command.from_version].parts
        made = aggregate(current, contributions, command.rule, rows.roles, from_first=command.from_version == 0)
        self._models[command.to_version] = _Model(rows, rows.join(made))

    def forget(self, key: Key) -> None:
        super().forget(key)
        self._updates.pop(key, None)

    def keep(self, ready: int, versions: Collection[int]) -> None:
        held = {base for _, base, _ in self._updates.values()}
        for version in [v for v in self._models if v < ready and v not in versions and v not in held]:
            del self._models[version]

    def score(self, version: int) -> dict[str, float] | None:
        score = self._bench.score(self._models[version].row, self._chosen)
        self._wait(score)
        accuracy, loss = score.value
        return {"score": accuracy, "loss": loss}


@dataclass(eq=False)
class _Run(Generic[T]):
    """A simulation in a thread of its own, which runs only while it is told to."""

    number: int
    config: Config
    bench: Bench
    work: Callable[[int, tuple[Learning, Sequence[int] | None]], T]
    _told: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    result: T | None = None
    error: BaseException | None = None
    over: bool = False
    ended: bool = False  # told to go away

    def begin(self) -> None:
        threading.Thread(target=self._main, daemon=True).start()

    def resume(self) -> None:
        """Let it run until it waits or is over."""
        self._told.release()
        self._stopped.acquire()

    def wait(self, awaited: _Awaited) -> None:
        if not awaited.settled:
            awaited.waiter = self
            self._stopped.release()
            self._told.acquire()
            if self.ended:
                raise SystemExit

    def _main(self) -> None:
        self._told.acquire()
        try:
            if not self.ended:
                learning = FleetLearning(self.config, self.bench, self.wait)
                self.result = self.work(self.number, (learning, learning.data_sizes))
        except BaseException as error:
            self.error = error
        self.over = True
        self._stopped.release()


def run_many(
    configs: Sequence[Config],
    work: Callable[[int, tuple[Learning, Sequence[int] | None]], T],
    *,
    device: str = "cuda",
    slots: int | None = None,
) -> Iterator[tuple[int, T]]:
    """`work(i, learned)` for every config, many at once; (i, what it returned) as they finish.

    `work` runs a simulation with what it is given to learn with. An error in one of them is raised here, and ends all.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch finds no CUDA device; use 'cpu'")
    torch.set_float32_matmul_precision("high")  # products of matrices as cuDNN's convolutions have them by default
    benches: dict[str, Bench] = {}
    waiting = deque(range(len(configs)))
    alive: set[_Run[T]] = set()
    ready: deque[_Run[T]] = deque()
    try:
        while waiting or alive:
            while waiting:
                number = waiting[0]
                config = configs[number]
                settings, roles = config.task, config.model.roles
                place = repr((settings.name, settings.options, settings.batch_size, settings.optimizer, roles))
                if place not in benches:
                    benches[place] = Bench(config, torch.device(device), slots)
                if len(alive) >= benches[place].most_runs:
                    break
                waiting.popleft()
                run: _Run[T] = _Run(number, config, benches[place], work)
                run.begin()
                alive.add(run)
                ready.append(run)
            while ready:
                run = ready.popleft()
                run.resume()
                if run.over:
                    alive.discard(run)
                    if run.error is not None:
                        raise run.error
                    yield run.number, run.result  # type: ignore[misc]
            for bench in benches.values():
                ready.extend(a.waiter for a in bench.go_on() if a.waiter is not None)
    finally:
        for run in alive:  # after an error, or when nobody wants the rest
            if not run.over:
                run.ended = True
                run.resume()
