"""What the agent asks of a batch scheduler, and what it may be told.

An adapter calls the scheduler's own commands and reads their answers; it keeps nothing between calls. Three rules
hold for every one of them, each learnt from a scheduler that broke it:

    missing is never completed      an id that the scheduler does not know is absent from `poll`
    a failed poll is never a        what could not be asked raises SchedulerUnreachableError, and says nothing of
    failed job                      the jobs
    unknown output is a state       a word that we do not know becomes phase "unknown", never an exception

Whether a job did its work is not for the scheduler to say: only the job's own result file is success.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal, Protocol

from fedqueue.errors import FedQueueError
from fedqueue.forecasting.state import Listed

NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,59}")  # what every scheduler takes as it is and none cuts short
OUTPUT = "output.txt"  # in the job's folder: what the job printed, all its incarnations one after the other

Phase = Literal["waiting", "running", "ended", "unknown"]
Outcome = Literal["completed", "failed", "cancelled", "timeout", "preempted", "node_fail", "unknown"]


class SchedulerError(FedQueueError):
    """The scheduler of a facility did not do what was asked."""


class SubmitRefusedError(SchedulerError):
    """The scheduler said no: there is no such job. `transient`: the same request may be taken later."""

    def __init__(self, reason: str, transient: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient


class SchedulerUnreachableError(SchedulerError):
    """It could not be asked, or did not answer in time. After `submit` the job may or may not exist: `find` it."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job. stdout and stderr are appended to `folder`/output.txt."""

    name: str  # unique at this facility: by it a job is found again
    script: Path
    folder: Path  # exists already
    wall_seconds: float  # each scheduler rounds up to what it can keep
    after: str | None = None  # id of a job; this one is eligible when that one has ended, however it ended

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name must be a letter, then letters, digits and '-', 60 at most, found {self.name!r}")
        for name in ("script", "folder"):
            path = str(getattr(self, name))
            if not path.startswith("/") or "\n" in path:
                raise ValueError(f"{name} must be an absolute path on one line, found {path!r}")
        if not (isfinite(self.wall_seconds) and self.wall_seconds > 0):
            raise ValueError(f"wall_seconds must be more than 0, found {self.wall_seconds}")

    @property
    def output(self) -> Path:
        return self.folder / OUTPUT


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A job as its scheduler sees it. Times are epoch seconds of the scheduler's clock, None where it has none.

    `incarnation` counts from 0; a job that was requeued and waits again has the number of the run to come, and its
    times are those of that run. Two incarnations may be alive at once: the scheduler can lose sight of the first.
    """

    phase: Phase
    reason: str = ""  # the scheduler's own words
    never_starts: str | None = None  # why it waits in vain
    bad_luck: bool = False  # it waits in vain, and another like it need not
    held: str | None = None  # who keeps it from starting, and what releases it, if a person does
    name: str | None = None  # of the job with this id; not ours: a scheduler that lost its newest jobs gives ids again
    eligible_at: float | None = None  # when it could first have started: no hold, no dependency
    started_at: float | None = None
    ended_at: float | None = None  # when the scheduler noticed: late after an outage
    incarnation: int = 0
    outcome: Outcome | None = None  # once ended
    exit_code: int | None = None  # 128 + N when signal N ended it

    def __post_init__(self) -> None:
        if (self.outcome is not None) != (self.phase == "ended"):
            raise ValueError(f"outcome belongs to phase ended, found {self.outcome!r} with phase {self.phase!r}")


class Scheduler(Protocol):
    """Every call returns or raises within the time-out of its settings."""

    kind: str

    def submit(self, request: JobRequest) -> str:
        """The scheduler's id of the new job. Raises SubmitRefusedError or SchedulerUnreachableError."""

    def find(self, name: str) -> str | None:
        """The id of our job of this name, waiting, running or recently ended."""

    def poll(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        """Every job of these that the scheduler knows. Raises SchedulerUnreachableError when it could not be asked."""

    def cancel(self, job_id: str) -> None:
        """Ask for its end; no error if it is gone already. The end shows in `poll`, some seconds later."""

    def estimate(self, wall_seconds: float) -> float | None:
        """Seconds until a job of ours would start if it were submitted now, by the scheduler's own plan. None: it has
        none, or plans only jobs that it has."""

    def planned(self, job_id: str) -> float | None:
        """Seconds until this job of ours, which waits, is planned to start. None: there is no plan, or it waits no
        more."""

    def listing(self) -> Mapping[str, Listed] | None:
        """All jobs, of everybody, that wait or run. None: it does not say."""


def last_line(text: str) -> str:
    """What a command said in the end, for messages of one line.

    >>> last_line("sbatch: error: a\\nsbatch: error: b\\n\\n")
    'sbatch: error: b'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
