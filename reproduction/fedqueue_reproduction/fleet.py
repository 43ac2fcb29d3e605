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

from fedqueue.aggregate import (
    Contribution,
    Moments,
    Variates,
    aggregate,
    agreement_of,
    roles_of,
    sums_of_changes,
    take_step,
)
from fedqueue.config import Config
from fedqueue.errors import ConfigError, TaskError
from fedqueue.moments import first_moment, no_moments
from fedqueue.protocol.aggregation import buffer_roles, must_match, statistic_factors
from fedqueue.protocol.contract import UpdateKey, facility_of
from fedqueue.protocol.messages import Aggregate
from fedqueue.protocol.strategies import STRATEGIES
from fedqueue.sim.learning import Learning, Training
from fedqueue.training.tasks import batches, chosen_for_test, first_module, seed_of_job, share_out, workload_of
from fedqueue_reproduction.lanes import Lanes, rows_of, why_not_in_lanes
from fedqueue_reproduction.recorded import BETA1, Scorer, SlotJob, put
from fedqueue_reproduction.rows import Rows
from fedqueue_reproduction.slots import Slots, why_not_in_slots
from fedqueue_reproduction.stacked import Stack

T = TypeVar("T")

SLOTS = 64  # jobs side by side: more keep no accelerator busier, and each run waits longer for its own
RUNS_A_SLOT = 3  # so many runs are under way that slots do not stand empty while runs wait for scores
LANES = 8  # the same for networks that cannot be stacked
RUNS_IN_LANES = 5  # each has several jobs under way, and a run that is begun should soon be over
GRAIN = 4  # steps that are done before slots are looked at


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
    second: Tensor | None = None  # the second moments with which it ended
    finite: bool = True


@dataclass(eq=False, slots=True)
class _Score(_Awaited):
    row: Tensor | None = None
    chosen: Tensor | None = None
    value: tuple[float, float] = (0.0, 0.0)  # accuracy, loss


@dataclass(eq=False, slots=True)
class _Pair(_Awaited):
    """Two numbers that the device works out."""

    tensor: Tensor | None = None
    value: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class _Flight:
    """What the device was given in one go, and where its results will be."""

    tickets: list[_Ticket]
    finite: Tensor
    scores: list[_Score]
    values: Tensor
    pairs: list[_Pair]
    found: Tensor  # of the pairs
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
        self.megabytes_of_moments = 4 * sum(t.numel() for t in no_moments(first, self.roles).values()) / 1e6
        train = (self.workload.train[0].to(device), self.workload.train[1].to(device))
        test = (self.workload.test[0].to(device), self.workload.test[1].to(device))
        not_in_slots = why_not_in_slots(self.workload, module, settings)
        not_in_lanes = why_not_in_lanes(self.workload, module, settings)
        self._slots: Slots | Lanes
        self.is_stacked = not_in_slots is None
        if not_in_slots is None:
            stack = Stack(module, self.roles)
            count, self.most_runs = slots or SLOTS, RUNS_A_SLOT * (slots or SLOTS)
            self.rows: Rows = stack
            self._slots = Slots(stack, train, slots=count, batch_size=settings.batch_size)
        elif not_in_lanes is None:
            # Some of the accelerator's quickest convolutions differ in the last bits from call to call.
            torch.backends.cudnn.deterministic = True
            count, self.most_runs = slots or LANES, RUNS_IN_LANES
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
        self._pairs: list[_Pair] = []
        self._flights: deque[_Flight] = deque()

    def train(self, job: SlotJob) -> _Ticket:
        ticket = _Ticket(job=job, left=job.steps)
        self._jobs.append(ticket)
        return ticket

    def score(self, row: Tensor, chosen: Tensor | None) -> _Score:
        score = _Score(row=row, chosen=chosen)
        self._scores.append(score)
        return score

    def read(self, tensor: Tensor) -> _Pair:
        """Two numbers of this tensor, once the device has worked them out."""
        pair = _Pair(tensor=tensor)
        self._pairs.append(pair)
        return pair

    def go_on(self) -> list[_Awaited]:
        """Give the device its next steps, then settle what it was given before; nothing is left if it gives nothing."""
        if self._jobs or self._busy or self._scores or self._pairs:
            self._flights.append(self._launch())
            if len(self._flights) < 2:
                return []
        return self._land(self._flights.popleft()) if self._flights else []

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
            for ticket, second in zip(tickets, self._slots.second_moments(finished), strict=True):
                ticket.second = second
        scores, self._scores = self._scores, []
        values = [self._scorer.score(score.row, score.chosen) for score in scores if score.row is not None]
        pairs, self._pairs = self._pairs, []
        found = [pair.tensor for pair in pairs if pair.tensor is not None]
        flight = _Flight(
            tickets=tickets,
            finite=_back(finite),
            scores=scores,
            values=_back(torch.stack(values)) if values else torch.empty(0),
            pairs=pairs,
            found=_back(torch.stack(found)) if found else torch.empty(0),
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
        for pair, (one, other) in zip(flight.pairs, flight.found.tolist(), strict=True):
            pair.value, pair.settled = (one, other), True
        return [*flight.tickets, *flight.scores, *flight.pairs]


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
        keeps_variates = STRATEGIES[config.run.strategy].keeps_variates
        shares_moments = config.model.moments == "shared"
        if (keeps_variates or config.task.proximal) and not bench.is_stacked:
            has = "its jobs have control variates" if keeps_variates else "its loss has a proximal term"
            why = f"{has}, and its network cannot be stacked"
            raise TaskError(f"task {config.task.name!r}: its runs cannot share a device: {why}; use --device cpu")
        super().__init__(bench.megabytes + (bench.megabytes_of_moments if shares_moments else 0.0))
        settings, seed = config.task, config.run.seed
        self._seed = seed
        self._bench = bench
        self._wait = wait
        self._parts = share_out(bench.workload, settings, len(config.facility), seed)
        chosen = chosen_for_test(bench.workload, settings, seed)
        self._chosen = None if chosen is None else put(chosen, bench.device)
        first = bench.rows.flatten(dict(first_module(bench.workload, settings, seed).state_dict()))
        self._models: dict[int, _Model] = {0: _Model(bench.rows, put(first, bench.device))}
        self._moments: Moments = ()  # of the server's optimizer, with the newest model
        self._variates = Variates(self._models[0].parts, bench.rows.roles) if keeps_variates else None
        self._proximal = settings.proximal
        self._shares_moments = shares_moments
        self._second: dict[int, Tensor] = {}  # by version: the second moments of Adam, if they are shared
        self._began_with: dict[tuple[str, int], tuple[int, Tensor]] = {}  # jobs that stay, their part before
        self._updates: dict[UpdateKey, tuple[_Ticket, Training]] = {}
        self._went_on: dict[UpdateKey, tuple[_Ticket, Tensor]] = {}  # from these own weights, while a model travels
        self._handed_in: dict[tuple[str, int], _Ticket] = {}  # by jobs that stay, last
        self._used: set[UpdateKey] = set()  # of the updates, those that were in a model and are kept
        self.roles = bench.roles
        self.data_sizes = [len(part) for part in self._parts]

    def foresee(self, training: Training) -> None:
        model = self._models[training.work.base_version].row
        if training.ahead:  # first from the own weights; what comes of it is added to the model when that is needed
            job, attempt, _ = training.key
            own = self._row_of(self._handed_in[job, attempt])
            second = None
            if self._shares_moments and (known := self._handed_in[job, attempt].second) is not None:
                second = self._bench.rows.factored(known)
            ticket = self._steps(training, own, training.ahead, -training.luck, second)
            self._went_on[training.key] = (ticket, own)
        else:
            ticket = self._steps(training, model, training.steps, training.luck, *self._moments_for(training))
        self._updates[training.key] = (ticket, training)

    def _moments_for(self, training: Training) -> tuple[Tensor | None, Tensor | None]:
        """The second and the first moments that this part begins with."""
        version = training.work.base_version
        if version not in self._second:
            return None, None
        before, row = self._began_with.get(training.key[:2], (version, self._models[version].row))
        first = None
        if version > before:
            change = (self._models[version].row - row) / (version - before)
            first = first_moment(self._second[version], change, BETA1, training.work.learning_rate)
        return self._second[version], first

    def _steps(
        self,
        training: Training,
        row: Tensor,
        steps: int,
        luck: int,
        second: Tensor | None = None,
        first: Tensor | None = None,
    ) -> _Ticket:
        seed = seed_of_job(self._seed, training.facility, luck)
        part = self._parts[training.facility]
        order = batches(part, self._bench.batch_size, steps, torch.Generator().manual_seed(seed))
        rate = training.work.learning_rate
        drift = None if self._variates is None else self._bench.rows.join(self._variates.drift(training.facility))
        return self._bench.train(
            SlotJob(
                row=row,
                batches=torch.stack(list(order)),
                learning_rate=rate,
                key=seed,
                proximal=self._proximal,
                drift=drift,
                second=second,
                first=first,
            )
        )

    def _row_of(self, ticket: _Ticket) -> Tensor:
        self._wait(ticket)
        assert ticket.row is not None
        return ticket.row

    def train(self, training: Training) -> int:
        if self._updates.get(training.key, (None, None))[1] != training:
            self.foresee(training)
        ticket, _ = self._updates[training.key]
        if training.ahead:
            rows = self._bench.rows
            ahead, own = self._went_on.pop(training.key)
            carried = Contribution(weight=1.0, trained=rows.parts(self._row_of(ahead)), base=rows.parts(own))
            model = self._models[training.work.base_version].parts
            begun = rows.join(aggregate(model, [carried], "add_deltas", rows.roles))
            steps, moments = training.steps - training.ahead, self._moments_for(training)
            ticket = self._steps(training, begun, steps, training.luck, *moments)
            self._updates[training.key] = (ticket, training)
        if self._variates is not None:
            # They move when a model is made, and an update that began before its round's model is in none: so the
            # server's variate is the one that this job began with.
            base, trained = self._models[training.work.base_version].parts, self._bench.rows.parts(self._row_of(ticket))
            length = training.steps * training.work.learning_rate
            self._variates.trained(training.key, training.facility, base, trained, length)
        if training.stays:
            job, attempt, _ = training.key
            self._handed_in[job, attempt] = ticket
            if self._shares_moments:
                version = training.work.base_version
                self._began_with[job, attempt] = (version, self._models[version].row)
        return training.steps * min(self._bench.batch_size, len(self._parts[training.facility]))

    def end(self, job: UpdateKey) -> None:
        self._handed_in.pop(job[:2], None)
        self._began_with.pop(job[:2], None)
        self._went_on.pop(job, None)

    def misfit(self, key: UpdateKey) -> str | None:
        ticket = self._updates[key][0]
        self._wait(ticket)
        return None if ticket.finite and key not in self._corrupt else "it has values that are not finite"

    def aggregate(self, command: Aggregate) -> float | None:
        rows, contributions = self._bench.rows, []
        for share in command.weights:
            ticket, training = self._updates[share.key]
            assert ticket.row is not None  # it arrived, so it was waited for
            base = self._models[training.work.base_version].parts
            parts = rows.parts(ticket.row)
            voice = facility_of(share.job_id)
            contributions.append(
                Contribution(weight=share.weight, trained=parts, base=base, clip=share.clip, voice=voice)
            )
        current = self._models[command.from_version].parts
        is_first = command.from_version == 0
        if command.step is None:
            made = aggregate(current, contributions, command.rule, rows.roles, from_first=is_first, guard=command.guard)
        else:
            made, self._moments = take_step(
                current,
                contributions,
                command.rule,
                command.step,
                self._moments,
                rows.roles,
                from_first=is_first,
                guard=command.guard,
            )
        if self._variates is not None and command.variates is not None:
            self._variates.move([(share.key, command.variates * share.weight) for share in command.weights])
        self._models[command.to_version] = _Model(rows, rows.join(made))
        if self._shares_moments:
            self._share_moments(command)
        self._used.update(share.key for share in command.weights)
        for key in self._used.difference(command.keep):
            self._updates.pop(key, None)
        self._used.intersection_update(command.keep)
        fresh = [c for c, share in zip(contributions, command.weights, strict=True) if not share.again]
        sums = sums_of_changes(fresh, rows.roles) if command.agreement else None
        if sums is None:
            return None
        pair = self._bench.read(sums)
        self._wait(pair)
        return agreement_of(*pair.value)

    def _share_moments(self, command: Aggregate) -> None:
        """Those of the next version: statistics, which are averaged as in `aggregate`."""
        version = command.from_version
        found: dict[UpdateKey | None, Tensor] = {None: self._second[version]} if version in self._second else {}
        for share in command.weights:
            second = self._updates[share.key][0].second
            assert second is not None
            found[share.key] = second
        shares = [(share.weight * share.clip, share.key) for share in command.weights]
        factors = statistic_factors(None, shares, command.rule, from_first=None not in found)
        if found and factors != {None: 1.0}:
            mean = torch.stack([found[key] * factor for key, factor in factors.items()]).sum(0)
            self._second[command.to_version] = self._bench.rows.factored(mean)
        elif version in self._second:
            self._second[command.to_version] = self._second[version]

    def forget(self, key: UpdateKey) -> None:
        super().forget(key)
        self._updates.pop(key, None)
        self._went_on.pop(key, None)
        if self._variates is not None:
            self._variates.forget(key)

    def keep(self, ready: int, versions: Collection[int]) -> None:
        held = {training.work.base_version for _, training in self._updates.values()}
        for version in [v for v in self._models if v < ready and v not in versions and v not in held]:
            del self._models[version]
            self._second.pop(version, None)

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
                alike = (settings.options, settings.batch_size, settings.optimizer)
                place = repr((settings.name, *alike, roles))
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
