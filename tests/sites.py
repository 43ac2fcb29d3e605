"""A scheduler as the tests meet it: what they ask of it, and what they do to it from outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedqueue.agent.schedulers import (
    JobRequest,
    JobStatus,
    LocalScheduler,
    LocalSettings,
    Scheduler,
    SchedulerSettings,
    make_scheduler,
)
from tests.waiting import wait_for


@dataclass
class Site:
    """A scheduler and what a test does to it from outside."""

    kind: str
    folder: Path
    settings: Callable[..., SchedulerSettings]
    requeue: Callable[[str], object]
    outage: Callable[[], AbstractContextManager[None]]
    slots: int = 2
    names: list[str] = field(default_factory=list)

    @property
    def scheduler(self) -> Scheduler:
        return self.scheduler_with()

    def scheduler_with(self, **changes: Any) -> Scheduler:
        return make_scheduler(self.settings(**changes), self.folder)

    def request(self, script: str, wall: float = 60.0, after: str | None = None) -> JobRequest:
        name = f"{self.kind}-{os.getpid()}-{self.folder.name[-20:].replace('_', '-')}-{len(self.names)}"
        folder = self.folder / name
        folder.mkdir()
        path = folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        self.names.append(name)
        return JobRequest(name=name, script=path, folder=folder, wall_seconds=wall, after=after)

    def submit(self, script: str, wall: float = 60.0, after: str | None = None) -> str:
        return self.scheduler.submit(self.request(script, wall, after))

    def fill(self, seconds: float) -> list[str]:
        """Jobs in all slots, all running."""
        ids = [self.submit(f"sleep {seconds}") for _ in range(self.slots)]
        for job_id in ids:
            self.wait(job_id, "running")
        return ids

    def wait(self, job_id: str, *phases: str) -> JobStatus:
        """Its status once it is in one of these phases."""
        seen: list[JobStatus | None] = [None]

        def there() -> bool:
            seen[0] = self.scheduler.poll([job_id]).get(job_id)
            return seen[0] is not None and seen[0].phase in phases

        wait_for(there, f"{job_id} {' or '.join(phases)}", lambda: f"last seen: {seen[0]}")
        assert seen[0] is not None
        return seen[0]

    def printed(self, number: int) -> str:
        path = self.folder / self.names[number] / "output.txt"
        return path.read_text() if path.exists() else ""


@contextmanager
def local_site(folder: Path, **changes: Any) -> Iterator[Site]:
    def settings(**more: Any) -> LocalSettings:
        return LocalSettings(**{"slots": 2, **changes, **more})

    @contextmanager
    def outage() -> Iterator[None]:
        (folder / "scheduler").rename(folder / "away")
        (folder / "scheduler").write_text("not a folder")
        try:
            yield
        finally:
            (folder / "scheduler").unlink()
            (folder / "away").rename(folder / "scheduler")

    def requeue(job_id: str) -> None:
        LocalScheduler(settings(), folder).requeue(job_id)

    made = Site("local", folder, settings, requeue, outage)
    yield made
    for name in made.names:
        made.scheduler.cancel(name)
    wait_for(lambda: all(s.phase == "ended" for s in made.scheduler.poll(made.names).values()), "the end of all jobs")


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
