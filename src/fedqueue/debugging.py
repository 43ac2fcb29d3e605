"""`fedqueue run --debug`: coordinator, agents and jobs in this one process, so that breakpoints work in all of them.

The coordinator and each agent have a thread of their own. The user's code (jobs, scores, the first model) is run by the
main thread, one thing after the other: only there are signals heard, and only one debugger asks at a time. So a job
that stays would keep the others from running: here each hands in once, and ends.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO, cast

from fedqueue.agent.agent import Agent
from fedqueue.agent.enrolment import Enrolment
from fedqueue.agent.jobs import JobFolder
from fedqueue.agent.schedulers.base import JobRequest, JobStatus, LocalSettings, Outcome, Scheduler
from fedqueue.agent.settings import AgentConfig
from fedqueue.config import Config, FacilitySettings
from fedqueue.coordinator.access import Access
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.run_folder import ensure_ledger
from fedqueue.coordinator.scoring import TASK, Scorer, ScoringThread, is_scored_here, read_metrics
from fedqueue.coordinator.serve import coordinate
from fedqueue.errors import ConfigError, FedQueueError
from fedqueue.in_process import PythonCommand, shown
from fedqueue.one_machine import agent_settings, end_left_behind, enrol, extra_waits, task_job
from fedqueue.protocol.codec import Json
from fedqueue.protocol.contract import Address
from fedqueue.protocol.state import View

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.02
WALL_SECONDS: Final = 86_400.0  # a job has at least: whoever looks at it takes their time


class _Cancelled(BaseException):
    """The end of a job that nobody wants any more."""


def debug(config: Config, folder: Path, *, views: Sequence[View]) -> Json | None:
    """From the main thread: the summary when the run is over; None: interrupted, and can go on."""
    config = replace(config, folder=str(Path(config.folder).absolute()))  # jobs may change where we are
    command = config.worker.command if config.worker.command is not None else shlex.join(task_job(folder))
    job = PythonCommand.of(command, config.folder, "worker.command")
    main = MainThread()
    make_scorer = _scorer(config, folder, main)
    ensure_ledger(config, folder, _first_model)
    stopping = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="coordinator") as pool:
        coordinated = pool.submit(
            coordinate,
            config,
            folder,
            plain=True,
            beside=_Agents(config, folder, main, job, stopping).beside,
            make_scorer=lambda *_: make_scorer,
            views=views,
            until=stopping.is_set,
        )
        try:
            main.work(until=coordinated.done)
        except KeyboardInterrupt:
            log.info("stopping")
        finally:
            stopping.set()
        return coordinated.result()


def _first_model(config: Config, folder: Path, target: Path) -> Sequence[int]:
    from fedqueue.training.scorer import load_task, write_first_model

    try:
        return shown(lambda: write_first_model(load_task(folder / TASK), target))
    except Exception as error:
        raise ConfigError(f"the task {config.task.name!r} could not make the first model: {error}") from None


@dataclass
class _Job:
    folder: Path
    after: str | None
    wait: float  # seconds longer than for what it comes after
    submitted_at: float
    run: Callable[[Path], int]
    status: JobStatus = field(default_factory=lambda: JobStatus(phase="waiting"))
    unwanted: bool = False

    def end(self, outcome: Outcome, exit_code: int | None = None) -> None:
        self.status = replace(self.status, phase="ended", outcome=outcome, exit_code=exit_code, ended_at=time.time())


class MainThread:
    """Does what other threads ask for, one thing at a time."""

    def __init__(self) -> None:
        self.jobs: dict[str, _Job] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._running: _Job | None = None

    def work(self, until: Callable[[], bool]) -> None:
        before = signal.signal(signal.SIGUSR1, self._heed)
        try:
            while not until():
                if not self._calls.empty():
                    self._answer(*self._calls.get())
                elif (job := self._next()) is not None:
                    self._run(job)
                else:
                    time.sleep(LOOK_SECONDS)
        finally:
            signal.signal(signal.SIGUSR1, before)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._calls.put((function, answer))
        return answer

    def cancel(self, job: _Job) -> None:
        """One that waits ends. One that runs is told by a signal, as schedulers do, and nobody kills it: it is us."""
        job.unwanted = True
        if job.status.phase == "waiting":
            job.end("cancelled")
        elif job.status.phase == "running":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _heed(self, *_: object) -> None:
        """Where `participate` does not listen, the signal ends the job."""
        if self._running is not None and self._running.unwanted:
            raise _Cancelled

    @staticmethod
    def _answer(function: Callable[[], Any], answer: Future[Any]) -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)
            except BaseException:
                answer.set_exception(CancelledError())
                raise

    def _next(self) -> _Job | None:
        """The job that could have started first, if that is not to come."""
        first = None
        for job in [job for job in list(self.jobs.values()) if job.status.phase == "waiting"]:
            before = self.jobs.get(job.after or "")
            if job.status.eligible_at is None and (before is None or before.status.phase == "ended"):
                ended = before.status.ended_at if before is not None else None
                job.status = replace(job.status, eligible_at=max(job.submitted_at, ended or 0.0))
            if job.status.eligible_at is not None:
                at = job.status.eligible_at + job.wait
                first = min(first or (at, job), (at, job), key=lambda pair: pair[0])
        return first[1] if first is not None and first[0] <= time.time() else None

    def _run(self, job: _Job) -> None:
        job.status = replace(job.status, phase="running", started_at=time.time())
        try:
            self._running = job
            code = job.run(job.folder)
            self._running = None
            job.end("completed" if code == 0 else "failed", code)
        except BaseException as error:
            self._running = None
            job.end("cancelled")
            if not isinstance(error, _Cancelled):
                raise


class DebugScheduler(Scheduler):
    """A facility's queue, of jobs that the main thread runs. It keeps nothing: what is cut off is ordered again."""

    kind = "debug"

    def __init__(self, main: MainThread, waits: Sequence[float], command: PythonCommand) -> None:
        self._main, self._command = main, command
        self._waits = itertools.cycle(waits or [0.0])

    def submit(self, request: JobRequest) -> str:
        job = _Job(request.folder, request.after, next(self._waits), time.time(), self._run)
        self._main.jobs[request.name] = job
        return request.name

    def find(self, name: str) -> str | None:
        return name if name in self._main.jobs else None

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        return {job_id: self._main.jobs[job_id].status for job_id in ids if job_id in self._main.jobs}

    def cancel(self, job_id: str) -> None:
        if job_id in self._main.jobs:
            self._main.cancel(self._main.jobs[job_id])

    def _run(self, path: Path) -> int:
        """What the batch script does elsewhere (`agent.jobs.script`)."""
        folder = JobFolder(path.parent.parent, path.name)
        attempt = folder.attempts()
        folder.attempt(attempt).mkdir()
        (folder.attempt(attempt) / "started").write_text(os.uname().nodename)
        named = {"FEDQUEUE_JOB": str(path), "FEDQUEUE_ATTEMPT": str(attempt), "FEDQUEUE_STAY": "no"}
        try:
            return shown(lambda: self._command.run(**named), folder.output)
        except Exception:
            return 1


@dataclass
class _Agents:
    """One thread each. An agent that dies of an error stops the run, which can go on when that is mended."""

    config: Config
    folder: Path
    main: MainThread
    command: PythonCommand
    stopping: threading.Event

    @contextmanager
    def beside(self, coordinator: Coordinator, access: Access, address: Address) -> Iterator[None]:
        over, threads = threading.Event(), []
        for facility in self.config.facility:
            home = enrol(self.folder, facility.name, access, address)
            end_left_behind(home)
            name = f"agent of {facility.name}"
            threads.append(threading.Thread(target=self._live, args=(facility, home, over.is_set), name=name))
            threads[-1].start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _live(self, facility: FacilitySettings, home: Path, stopping: Callable[[], bool]) -> None:
        settings = agent_settings(self.config, self.folder, facility)
        config = AgentConfig(agent=settings, scheduler=LocalSettings(min_wall_seconds=WALL_SECONDS))
        scheduler = DebugScheduler(self.main, extra_waits(self.config, facility), self.command)

        try:
            enrolment = Enrolment.load(home)
            transport = enrolment.client(home, None)
            agent = Agent(config, home, facility.name, transport, run=enrolment.run, scheduler=scheduler)
            try:
                agent.run(once=False, stopping=stopping)
            finally:
                agent.close()
        except Exception as error:
            if not isinstance(error, FedQueueError):
                traceback.print_exception(error)
            log.error(f"{facility.name}: the agent died: {error}")
            self.stopping.set()


def _scorer(config: Config, folder: Path, main: MainThread) -> Callable[[Coordinator], Scorer] | None:
    if not is_scored_here(config):
        return None
    own = config.evaluation.command
    command = PythonCommand.of(own, config.folder, "evaluation.command") if own is not None else None
    way = _Scores(folder, command, main)
    return lambda coordinator: ScoringThread(coordinator, way, config.evaluation.timeout_seconds)


class _Scores:
    """By the main thread, between two jobs; there is no time-out, since somebody may be looking at it."""

    def __init__(self, folder: Path, command: PythonCommand | None, main: MainThread) -> None:
        self._folder, self._command, self._main = folder, command, main
        self._asked: Future[Any] | None = None
        self._task: Any = None

    def ask(self, version: int, model: Path, timeout: float) -> dict[str, float | None]:
        self._asked = self._main.call(lambda: shown(lambda: self._score(version, model)))
        try:
            return read_metrics(self._asked.result())
        except Exception as error:
            raise ValueError(str(error) or type(error).__name__) from error

    def stop(self) -> None:
        if self._asked is not None:
            self._asked.cancel()

    def _score(self, version: int, model: Path) -> Any:
        if self._command is None:
            from safetensors.torch import load_file

            from fedqueue.training.scorer import load_task

            self._task = self._task or load_task(self._folder / TASK)
            return self._task.score(load_file(model))
        said = _Heard(sys.stdout)
        with redirect_stdout(cast(TextIO, said)):
            code = self._command.run(FEDQUEUE_MODEL=str(model), FEDQUEUE_VERSION=str(version))
        lines = said.text.strip().splitlines()
        if code != 0 or not lines:
            raise ValueError(f"the evaluation command ended with exit code {code}")
        return json.loads(lines[-1])


class _Heard:
    """A stream that also keeps what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
