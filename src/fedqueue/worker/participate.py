"""What a training script calls to take part: take the work, train until told to stop, hand in, and go on.

    with fedqueue.participate() as work:
        for part in work.parts():
            model.load_state_dict(part.model(), strict=False)
            for step in part.steps():
                ...
            part.submit(model.state_dict())

A script without `parts` hands in once, and its job ends. The worker runs in whatever Python the site offers, from 3.9,
and talks to the agent through files alone. torch is loaded only for what needs it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from fedqueue.errors import describe
from fedqueue.files import failpoint
from fedqueue.moments import Moments, change_of
from fedqueue.protocol.aggregation import is_moment, split_moments
from fedqueue.protocol.codec import message
from fedqueue.protocol.contract import Assignment, AssignmentFile, Mechanism, Privacy, Result, Trained
from fedqueue.worker.ahead import Ahead
from fedqueue.worker.distributed import broadcast_model, sum_over_ranks, wait_for_all
from fedqueue.worker.dry_run import dry_run_job
from fedqueue.worker.find_work import WorkFinder, await_assignment
from fedqueue.worker.job_folder import (
    FILE_PATIENCE,
    Header,
    ParticipateError,
    Ranks,
    Tensors,
    ThisJob,
    check_libraries,
    choose,
    in_the_scripts_library,
    numbers,
    read_file,
    read_header,
    say,
    this_job,
    without_prefix,
    write_file,
    write_update,
)
from fedqueue.worker.privacy import made_private

__all__ = ["ParticipateError", "Work", "participate"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send before they end a job."""

RESERVE_SECONDS = 5.0
"""Kept free before the wall end for handing in, until it is known how long that takes."""

RECENT_STEPS = 8
"""A step is begun if the longest of so many before it would still fit."""

MOST_AHEAD = 10**9
"""Steps ahead of the next model: it ends them."""

STEPS, DEADLINE = 1, 2  # what the first rank tells the others; 0: go on
WAIT, TAKE, LEAVE, AHEAD = 0, 1, 2, 3  # the same between two parts


@message
class _Memory:
    """What the jobs of a facility remember from one to the next."""

    hand_in_seconds: float


@contextmanager
def participate(dry_run: Mapping[str, Any] | None = None) -> Iterator[Work]:
    """Take part as the job that this process runs in.

    Outside a job, `dry_run={"model": "first.safetensors", "steps": 100, "learning_rate": 1e-3}` tries the same
    script, with results in ./fedqueue-dry-run/; inside a job it is ignored. "seconds" adds a time limit.
    """
    ranks = Ranks.here()
    job = this_job(os.environ) or dry_run_job(dry_run, ranks)
    work = Work(job, ranks)
    with _listening(work):
        if not work._take():
            say("no work came, so the job ends")
            raise SystemExit(0)
        try:
            yield work
            if ranks.connected:
                wait_for_all()  # nobody leaves, and ends the job, while the first still writes
        except BaseException as error:
            if not work.submitted:
                say(f"{work._missing()}, so {work.job_id} counts as failed: the script raised {describe(error)}")
            raise
        if work.submitted or work.part > 0:
            work._leave()
    if not work.submitted and work.part == 0 and ranks.first:
        say(f"{work._missing()}, so {work.job_id} counts as failed: the script never called work.submit()")


@contextmanager
def _listening(work: Work) -> Iterator[None]:
    """Signals reach `work` inside; afterwards those who listened before do again."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    work.listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            # Not from another thread, and not what C code had installed.
            if handler is not None:
                with suppress(ValueError):
                    signal.signal(number, handler)


class Work:
    """One job's work. Made by `participate`; times are seconds."""

    def __init__(self, job: ThisJob, ranks: Ranks) -> None:
        self.job_id = job.order.job_id
        """Facility and number, as in "north/3"."""
        self.facility = job.order.facility
        self.round = job.order.round
        self.attempt = job.attempt
        """How often the scheduler started the job before."""
        self.purpose = job.order.purpose
        """"train", "warm_up" or "evaluate"."""
        self.state_dir = job.state_dir
        """A folder that stays between the jobs of a facility."""
        self.part = job.parts()
        """Which part of what it hands in this is, from 0 on."""
        self.is_ahead = False
        """Whether it trains on from its own weights, because the next model is not there yet."""
        self.submitted = False
        """Whether this part was handed in."""
        self._job = job
        self._ranks = ranks
        self._memory = job.state_dir / ".fedqueue.json"
        self._ends = time.perf_counter() + job.wall_left
        self._wall_end = self._ends - self._reserve()
        self._told_to_stop = False
        self._several = False  # the script goes from part to part
        self._has_left = False
        self._handed_in_at = 0.0  # by the job's clock, the part before
        self._ahead: Ahead | None = None  # None: it does not train on from its own weights
        self._waited: float | None = None  # seconds between the two parts before
        self._reads_file = False  # the script takes the model from its file: it cannot train on from its own
        self._turn_seconds = 0.0  # of a part: from its beginning to its first step, and from its last to its end
        self._next_look = 0.0  # for more work, while it trains on
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._taken: AssignmentFile
        self._header: Header = {}
        self._roles: dict[str, str] = {}
        self._moments: Tensors | None = None  # that came with the model; None: they have not been read
        self._adam: Moments | None = None  # that goes on from them
        self._before: AssignmentFile | None = None  # of the part before
        self._models: dict[int, Any] = {}  # by version: files that stay open, so that nobody clears them away

    def _take(self) -> bool:
        """The work that it begins with; False: there is none."""
        check_libraries()
        taken = self._job.assigned if self.part == 0 else None
        if self._ranks.first:
            taken = self._job.share(0, taken, self._is_hurried) if taken else self._finder.first(self.part)
        elif taken is None:
            taken = await_assignment(self._job, self.part)
        if taken is None:
            self._leave()
            return False
        self._begin(taken)
        return True

    @cached_property
    def _finder(self) -> WorkFinder:
        return WorkFinder(self._job, self._is_hurried, lambda: self._wall_end - time.perf_counter())

    def _begin(self, taken: AssignmentFile) -> None:
        self._taken = taken
        # Kept, because the agent may clear away the file of a superseded model while we train.
        self._header, self._roles = read_header(Path(taken.model), time.monotonic() + FILE_PATIENCE)
        if any(map(is_moment, self._header)):
            self._keep_open(taken)
        self.is_ahead = False
        self._count_anew()

    def _count_anew(self) -> None:
        self.submitted = False
        self._moments = self._adam = None
        self._begun = time.perf_counter()
        self._began_at: float | None = None  # by the job's clock, when the first step began
        self._first: float | None = None  # the same by perf_counter, as all below
        self._last: float | None = None  # when the last step was over
        self._open: float | None = None  # when the step under way began
        self._steps_done = 0
        self._samples = 0  # of this process
        self._samples_of_all = 0  # of all processes, as of the last step they agreed on
        self._stopped_by: str | None = None
        self._mechanisms: list[Mechanism] = []

    def _keep_open(self, taken: AssignmentFile) -> None:
        from safetensors import safe_open

        before = None if self._before is None else self._before.assignment.base_version
        self._models = {version: file for version, file in self._models.items() if version == before}
        self._models[taken.assignment.base_version] = safe_open(taken.model, "pt" if "torch" in sys.modules else "np")

    def _is_hurried(self) -> bool:
        return self._told_to_stop or time.perf_counter() > self._wall_end

    def _missing(self) -> str:
        return f"part {self.part} was not handed in" if self.part else "nothing was handed in"

    def _reserve(self) -> float:
        """Seconds before the wall end at which training stops. Half the time at most: a file system that was slow
        once must not keep every later job from training."""
        wall = self._job.wall_seconds
        try:
            last = read_file(_Memory, self._memory).hand_in_seconds
        except ParticipateError:
            last = 0.0  # nothing was handed in yet
        return min(max(min(RESERVE_SECONDS, wall / 4), last), wall / 2)

    # What to do -----------------------------------------------------------------------------------------

    @property
    def _work(self) -> Assignment:
        work = self._taken.assignment
        return replace(work, steps=MOST_AHEAD, train_budget=None) if self.is_ahead else work

    @property
    def base_version(self) -> int:
        """The version of the model that training starts from."""
        return self._work.base_version

    @property
    def assigned_steps(self) -> int:
        """The step budget; time or a signal may end the job before."""
        return self._work.steps

    @property
    def learning_rate(self) -> float:
        return self._work.learning_rate

    @property
    def model_path(self) -> Path:
        """The safetensors file of the base model: the tensors that the run declares."""
        self._reads_file = True
        return Path(self._taken.model)

    @property
    def privacy(self) -> Privacy | None:
        """What the site asks for the sake of its data (`[privacy]` of its agent.toml); None: nothing."""
        return self._job.privacy

    def account(self, noise: float, rate: float, steps: int) -> None:
        """Note that so many steps protected each record: its gradient was clipped, and their sum got noise of `noise`
        times the clip; each record was in a batch with the chance `rate`."""
        self._mechanisms.append(Mechanism(noise=noise, rate=rate, count=steps))

    def model(self) -> Tensors:
        """The declared tensors as a torch state dict in processor memory; several ranks call it together."""
        found = broadcast_model(self._ranks, self._load, self._header) if self._ranks.connected else self._load()
        model, self._moments = split_moments(found)
        return model

    def moments(self) -> Tensors:
        """What travels beside the model of second moments of Adam, by name; nothing, unless the run shares them."""
        if self._moments is None:
            self.model()
        return {} if self._moments is None else self._moments

    def prepare(self, optimizer: Any, model: Any) -> None:
        """Have an Adam of torch go on from what those of all facilities learned, where the run shares that; else this
        does nothing. Every rank calls it, before the first step of a part; `submit` hands in what the optimizer learns.

        `model`: the module whose parameters it trains, by the names that the run declares.
        """
        if not self.moments():
            return
        named = [(without_prefix(name), parameter) for name, parameter in model.named_parameters()]
        self._adam = Moments(optimizer, named, self.moments(), self.change(), self.learning_rate)

    def change(self) -> Tensors | None:
        """How the model moved in one version since the part before, where the run shares moments; None: unknown."""
        if self._before is None or self.is_ahead or not any(map(is_moment, self._header)):
            return None
        version, earlier = self.base_version, self._before.assignment.base_version
        now, then = _OnDemand(self._models[version]), _OnDemand(self._models[earlier])
        return change_of(now, then, version - earlier, self._roles)

    def _chosen(self, tensors: Mapping[str, Any]) -> Tensors:
        """The declared tensors of those that the script gives; of its optimizer it need not give any."""
        chosen, beside = choose(tensors, self._shapes), [name for name in self._header if is_moment(name)]
        if beside:
            given = tensors if all(name in tensors for name in beside) else self._learned()
            chosen.update(choose(given, {name: self._header[name][1] for name in beside}))
        return chosen

    def _learned(self) -> Tensors:
        """The moments as its optimizer left them, or else as they came."""
        if self._adam is not None:
            return self._adam.end()
        if self._moments is not None:
            return self._moments
        return {
            name: in_the_scripts_library(self._models[self.base_version].get_tensor(name))
            for name in self._header
            if is_moment(name)
        }

    def _load(self) -> Tensors:
        if self.is_ahead and self._ahead is not None:
            return self._ahead.weights(self._header)
        from safetensors.torch import load_file

        model: Tensors = load_file(self._taken.model)
        return model if self._ahead is None else self._ahead.carry(model, self._roles)

    # From part to part ----------------------------------------------------------------------------------

    def parts(self) -> Iterator[Work]:
        """This work, once for each part to hand in: once, unless the job stays. Every rank goes through the same.

        Each time its model, steps and rate are those of the newest work. Whatever else the script holds (data, an
        optimizer, a compiled graph) lives on from one to the next. While the next model is not there, it may come in
        between with the script's own weights as its model (`is_ahead`): what is submitted then is not handed in, but
        what changed is carried over to the next model.
        """
        self._several = True
        while True:
            yield self
            if not self.submitted:
                raise ParticipateError(f"{self._missing()}: call submit() before the next part")
            if not self._go_further():
                self._leave()
                return

    def _go_further(self) -> bool:
        """Whether there is a further part, which is begun then. Waits for its work."""
        if self._job.stay is None or self.purpose == "evaluate" or not (self._steps_in_all() or self.is_ahead):
            return False
        self.part += not self.is_ahead
        found = self._await_further()
        if found == AHEAD:
            self.is_ahead = True
            self._count_anew()
            return True
        taken: AssignmentFile | None = None
        if found == TAKE and self._ranks.first:
            self._waited = self._job.clock.now() - self._handed_in_at
            ahead_seconds = 0.0 if self._ahead is None else self._ahead.seconds
            taken = self._finder.take(self.part, self._handed_in_at, self._steps_ahead, ahead_seconds)
        elif found == TAKE:
            taken = await_assignment(self._job, self.part)
        if taken is not None:
            self._before = self._taken
            self._begin(taken)
        return taken is not None

    def _await_further(self) -> int:
        while True:
            found = self._look() if self._ranks.first else WAIT
            told = self._told_to_stop
            if self._ranks.connected:  # again and again: no rank may wait for another for longer than torch allows
                found, told_ranks = sum_over_ranks(found, int(told))
                told = told_ranks > 0
            if told or found != WAIT:
                return LEAVE if told else found
            if self._ranks.first:
                time.sleep(self._finder.pause_seconds(self._handed_in_at))

    def _look(self) -> int:
        found = self._finder.look(self.part, self.base_version, self._handed_in_at)
        if (
            found == "wait" and self._ahead is not None and self._finder.wants_ahead()
        ):  # if more is done than to turn to it and back
            needs = self._turn_seconds + max(self._recent, default=0.0)
            return AHEAD if self._waited is None or self._waited > needs else WAIT
        return {"wait": WAIT, "take": TAKE, "leave": LEAVE}[found]

    def _leave(self) -> None:
        """Its own word that nothing more comes of it."""
        if not self._has_left and self._ranks.first and self._job.order.stay is not None:
            write_file(self._job.folder / "left.json", {"parts": self._job.parts()})
        self._has_left = True

    # Until when -----------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Numbers from 0, one for each step to do. A `break` counts the step it leaves as done."""
        try:
            while self.go_on():
                yield self._steps_done
        finally:
            self._end_training()

    def go_on(self) -> bool:
        """For a loop of your own: call it before each step, on every rank; False: stop and hand in."""
        if self._ranks.size > 1 and not self._ranks.connected:
            raise ParticipateError(
                f"there are {self._ranks.size} processes but no process group: "
                "call torch.distributed.init_process_group() before the first step"
            )
        self._end_step()
        decision = self._decide()
        told = self._told_to_stop
        if self._ranks.connected:
            mine = decision if self._ranks.first else 0
            decision, told_ranks, self._samples_of_all = sum_over_ranks(mine, int(told), self._samples)
            told = told_ranks > 0
        if decision == STEPS:
            self._stopped_by = "steps"
        elif told:
            self._stopped_by = "signal"
        elif decision == DEADLINE:
            self._stopped_by = "deadline"
        else:
            self._open = time.perf_counter()
            if self._first is None:
                self._first, self._began_at = self._open, self._job.clock.now()
                self._turn_seconds = self._first - self._begun
            return True
        self._end_training()
        return False

    def drop_step(self) -> None:
        """The step that `go_on` or `steps` began is not done after all: do not count it."""
        self._open = None

    def _decide(self) -> int:
        if self.purpose == "evaluate" or self._steps_done >= self.assigned_steps:
            return STEPS
        if self.is_ahead and self._ranks.first and time.perf_counter() >= self._next_look:
            self._next_look = time.perf_counter() + self._finder.pause_seconds(self._handed_in_at)
            if self._look() in (TAKE, LEAVE):
                return STEPS
        left = self.seconds_left()
        return DEADLINE if left <= 0 or left < max(self._recent, default=0.0) else 0

    def seconds_left(self) -> float:
        """Until training has to stop so that there is time to hand in; infinite when only steps are limited."""
        now = time.perf_counter()
        budget = self._work.train_budget
        ends = self._wall_end
        if budget is not None:
            ends = min(ends, (now if self._first is None else self._first) + budget)
        return ends - now

    @property
    def should_stop(self) -> bool:
        """Whether this process sees a reason to stop: steps done, no time left, or a signal."""
        return self._told_to_stop or self._decide() != 0

    def count(self, samples: int) -> None:
        """Note that so many samples were trained on; each rank counts its own."""
        self._samples += int(samples)

    def listen(self) -> None:
        """Hear the scheduler's signals; again, after something else took them."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._heed)
        else:
            say("participate() runs outside the main thread, so signals do not reach it")

    def _heed(self, number: int, frame: FrameType | None) -> None:
        self._told_to_stop = True

    def _end_step(self) -> None:
        if self._open is not None:
            self._last = time.perf_counter()
            if self._steps_done == 1:
                self._recent.clear()  # the first step also warms up what the others find warm
            self._recent.append(self._last - self._open)
            self._steps_done += 1
            self._open = None

    def _end_training(self) -> None:
        self._end_step()
        if self._last is not None and _await_device():
            self._last = time.perf_counter()  # what was queued on it belongs to the steps

    # Handing in -----------------------------------------------------------------------------------------

    def submit(self, tensors: Mapping[str, Any] | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Hand in: exactly the declared tensors, picked by name from `tensors`, and some numbers.

        Torch tensors on any device or numpy arrays. A job that only evaluates hands in metrics alone. With several
        ranks the first hands in, so what the others give is not looked at.
        """
        if self.submitted:
            again = "submit once for each part" if self._several else "submit once, at the end"
            raise ParticipateError(f"submit: this job has handed in already; {again}")
        if self._open is not None:
            self._end_training()
        if self._last is not None:
            self._turn_seconds += time.perf_counter() - self._last
        if self.is_ahead:
            self._remember(tensors)
        elif self.part > 0 and not self._steps_in_all() and self._stopped_by is not None:
            say(f"no time was left for part {self.part} (stopped by {self._stopped_by}), so the job ends")
        else:
            self._ahead = self._hand_in(tensors, metrics) if self._ranks.first else Ahead(None)
        self.submitted = True
        if not self._several:
            self._leave()

    def _remember(self, tensors: Mapping[str, Any] | None) -> None:
        if self._steps_done < 1:
            return
        chosen = self._chosen(tensors or {}) if self._ranks.first else None
        assert self._ahead is not None
        self._ahead.went_on(chosen, self._steps_done, self._train_seconds, self._samples_in_all)

    def _steps_in_all(self) -> int:
        return self._steps_done + self._steps_ahead

    @property
    def _steps_ahead(self) -> int:
        return 0 if self._ahead is None else self._ahead.steps

    @property
    def _train_seconds(self) -> float:
        return 0.0 if self._first is None or self._last is None else self._last - self._first

    @property
    def _samples_in_all(self) -> int:
        """Of all processes."""
        return max(self._samples, self._samples_of_all)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what a script has to give."""
        return {name: shape for name, (_, shape) in self._header.items() if not is_moment(name)}

    def _hand_in(self, tensors: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None) -> Ahead | None:
        """What it trains on from, if it does."""
        began = time.perf_counter()
        place = self._job.place(self.part)
        size, digest, chosen = 0, "", None  # type: int, str, Tensors | None
        if self.purpose != "evaluate":
            if self._steps_in_all() < 1:
                if self._stopped_by == "deadline":  # the agent will have more wall time asked for
                    with suppress(ParticipateError):
                        write_file(self._job.folder / "out_of_time.json", {"stopped_by": "deadline"})
                why = f"stopped by {self._stopped_by}" if self._stopped_by else "take them from work.steps()"
                raise ParticipateError(f"submit: no step was done ({why}), so nothing is handed in")
            if tensors is None:
                raise ParticipateError("submit: give the trained tensors, as in work.submit(model.state_dict())")
            chosen = self._chosen(tensors)
            plain = numbers(metrics if self.privacy is None else None)  # they are of the data too
            size, digest = write_update(place / "update.safetensors", self._as_asked(chosen))
        else:
            plain = numbers(metrics)
        finished_at, ahead = self._job.clock.now(), self._ahead
        try:
            result = Result(
                trained=Trained(
                    base_version=self.base_version,
                    steps_done=self._steps_in_all(),
                    ahead=self._steps_ahead,
                    train_seconds=self._train_seconds + (ahead.seconds if ahead is not None else 0.0),
                    samples=self._samples_in_all + (ahead.samples if ahead is not None else 0),
                    nodes=self._job.nodes,
                    device=_device_in_use(),
                    metrics=plain,
                ),
                began_at=finished_at if self._began_at is None else self._began_at,
                finished_at=finished_at,
                stopped_by=self._stopped_by or ("signal" if self._told_to_stop else "script"),
                bytes=size,
                sha256=digest,
                mechanisms=self._mechanisms or None,
            )
        except ValueError as error:
            raise ParticipateError(f"submit: {error}") from None
        write_file(place / "result.json", result)
        failpoint("worker.handed_in")
        self._handed_in_at = self._job.clock.now()
        with suppress(ParticipateError):  # the result is in; next time we reserve what we reserved now
            write_file(self._memory, _Memory(hand_in_seconds=time.perf_counter() - began))
        self._wall_end = self._ends - self._reserve()
        if self._job.stay is None or self._reads_file or chosen is None:
            return None
        # After the first part nobody knows yet, where it is what standing work is made from.
        may_be = self._finder.wants_ahead() or (self.part == 0 and not self._job.standing.exists())
        return Ahead(chosen) if may_be else None

    def _as_asked(self, chosen: Tensors) -> Tensors:
        """As the site lets it leave."""
        privacy = self.privacy
        if privacy is None:
            return chosen
        if privacy.unit == "update":
            self._mechanisms = [Mechanism(noise=privacy.noise / 2)]  # the data may move it by twice the clip
            return made_private(chosen, Path(self._taken.model), self._roles, privacy)
        if not self._mechanisms:
            raise ParticipateError("submit: this site wants each record protected: say how by work.account()")
        return chosen


class _OnDemand(Mapping[str, Any]):
    """The tensors of an open file, each read when it is asked for."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Any:
        return in_the_scripts_library(self._file.get_tensor(name)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


def _accelerator() -> Any:
    """The part of torch that drives the accelerator this process has used; None: it has used none."""
    torch = sys.modules.get("torch")
    found = (getattr(torch, kind, None) for kind in ("cuda", "xpu"))
    return next((part for part in found if part is not None and part.is_initialized()), None)


def _await_device() -> bool:
    """Returns when the accelerator has done all it was given; False: there is none."""
    accelerator = _accelerator()
    if accelerator is not None:
        accelerator.synchronize()
    return accelerator is not None


def _device_in_use() -> str:
    """The accelerator's name, or "cpu"."""
    accelerator = _accelerator()
    return "cpu" if accelerator is None else str(accelerator.get_device_name())
