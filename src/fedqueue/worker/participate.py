"""What a training script calls to take part: take the work, train until told to stop, hand in.

    with fedqueue.participate() as work:
        model.load_state_dict(work.model(), strict=False)
        for step in work.steps():
            ...
        work.submit(model.state_dict())

The worker runs in whatever Python the site offers, from 3.9, and talks to the agent through files alone. torch is
loaded only for what needs it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fedqueue.protocol.codec import message
from fedqueue.protocol.contract import Assignment, AssignmentFile, Result
from fedqueue.worker.binding import Job, await_assignment, dry_run_job, take_work, this_job
from fedqueue.worker.distributed import Ranks, await_device, broadcast_model, device_in_use
from fedqueue.worker.handin import (
    FILE_PATIENCE,
    Header,
    ParticipateError,
    check_libraries,
    choose,
    describe,
    numbers,
    read_file,
    read_header,
    say,
    write_file,
    write_update,
)

__all__ = ["ParticipateError", "Work", "participate"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send before they end a job."""

RESERVE_SECONDS = 5.0
"""Kept free before the wall end for handing in, until it is known how long that takes."""

RECENT_STEPS = 8
"""A step is begun if the longest of so many before it would still fit."""

SIGN_SECONDS = 5.0
"""Between two signs of life: should the scheduler take the job back unseen, they tell how long it ran."""

STEPS, DEADLINE = 1, 2  # what the first rank tells the others; 0: go on


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
        try:
            work._take()
            yield work
            ranks.wait_for_all()  # nobody leaves, and ends the job, while the first still writes
        except BaseException as error:
            if not work.submitted:
                say(f"nothing was handed in, so {work.job_id} counts as failed: the script raised {describe(error)}")
            raise
    if not work.submitted and ranks.first:
        say(f"nothing was handed in, so {work.job_id} counts as failed: the script never called work.submit()")


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

    def __init__(self, job: Job, ranks: Ranks) -> None:
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
        self.submitted = False
        self._job = job
        self._ranks = ranks
        self._memory = job.state_dir / ".fedqueue.json"
        self._wall_end = time.perf_counter() + job.wall_left - self._reserve()
        self._told_to_stop = False
        self._taken: AssignmentFile
        self._header: Header = {}
        self._began_at: float | None = None  # by the job's clock, when the first step began
        self._first: float | None = None  # the same by perf_counter, as all below
        self._last: float | None = None  # when the last step was over
        self._open: float | None = None  # when the step under way began
        self._next_sign = time.perf_counter()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps_done = 0
        self._samples = 0  # of this process
        self._samples_of_all = 0  # of all processes, as of the last step they agreed on
        self._stopped_by: str | None = None

    def _take(self) -> None:
        check_libraries()
        job = self._job
        if not self._ranks.first:
            self._taken = job.assigned or await_assignment(job)
        else:
            self._taken = take_work(job, hurried=lambda: self._told_to_stop or time.perf_counter() > self._wall_end)
        # Kept, because the agent may clear away the file of a superseded model while we train.
        self._header = read_header(self.model_path, time.monotonic() + FILE_PATIENCE)

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
        return self._taken.assignment

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
        return Path(self._taken.model)

    def model(self) -> dict[str, Any]:
        """The declared tensors as a torch state dict in processor memory; several ranks call it together."""
        if self._ranks.connected:
            return broadcast_model(self._ranks, self.model_path, self._header)
        from safetensors.torch import load_file

        return load_file(str(self.model_path))

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
            decision, told_ranks, self._samples_of_all = self._ranks.total(mine, int(told), self._samples)
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
            if self._ranks.first and self._open >= self._next_sign:
                self._next_sign = self._open + SIGN_SECONDS
                with suppress(OSError):
                    (self._job.folder / "alive").write_bytes(b".")  # its stamp counts
            return True
        self._end_training()
        return False

    def drop_step(self) -> None:
        """The step that `go_on` or `steps` began is not done after all: do not count it."""
        self._open = None

    def _decide(self) -> int:
        if self.purpose == "evaluate" or self._steps_done >= self.assigned_steps:
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
        if self._last is not None and await_device():
            self._last = time.perf_counter()  # what was queued on it belongs to the steps

    # Handing in -----------------------------------------------------------------------------------------

    def submit(self, tensors: Mapping[str, Any] | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Hand in: exactly the declared tensors, picked by name from `tensors`, and some numbers.

        Torch tensors on any device or numpy arrays. A job that only evaluates hands in metrics alone. With several
        ranks the first hands in, so what the others give is not looked at.
        """
        if self.submitted:
            raise ParticipateError("submit: this job has handed in already; submit once, at the end")
        if self._open is not None:
            self._end_training()
        if self._ranks.first:
            self._hand_in(tensors, metrics)
        self.submitted = True

    def _hand_in(self, tensors: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None) -> None:
        began = time.perf_counter()
        size, digest = 0, ""
        if self.purpose != "evaluate":
            if self._steps_done < 1:
                if self._stopped_by == "deadline":  # the agent will have more wall time asked for
                    with suppress(ParticipateError):
                        write_file(self._job.folder / "out_of_time.json", {"stopped_by": "deadline"})
                why = f"stopped by {self._stopped_by}" if self._stopped_by else "take them from work.steps()"
                raise ParticipateError(f"submit: no step was done ({why}), so nothing is handed in")
            if tensors is None:
                raise ParticipateError("submit: give the trained tensors, as in work.submit(model.state_dict())")
            chosen = choose(tensors, {name: shape for name, (_, shape) in self._header.items()})
            plain = numbers(metrics)
            size, digest = write_update(self._job.folder / "update.safetensors", chosen)
        else:
            plain = numbers(metrics)
        finished_at = self._job.clock.now()
        try:
            result = Result(
                base_version=self.base_version,
                steps_done=self._steps_done,
                train_seconds=0.0 if self._first is None or self._last is None else self._last - self._first,
                samples=max(self._samples, self._samples_of_all),
                nodes=self._job.nodes,
                device=device_in_use(),
                metrics=plain,
                began_at=finished_at if self._began_at is None else self._began_at,
                finished_at=finished_at,
                stopped_by=self._stopped_by or ("signal" if self._told_to_stop else "script"),
                bytes=size,
                sha256=digest,
            )
        except ValueError as error:
            raise ParticipateError(f"submit: {error}") from None
        write_file(self._job.folder / "result.json", result)
        with suppress(ParticipateError):  # the result is in; next time we reserve what we reserved now
            write_file(self._memory, _Memory(hand_in_seconds=time.perf_counter() - began))
