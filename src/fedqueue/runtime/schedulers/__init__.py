"""Batch schedulers behind one protocol (base.py); one adapter a file."""

from __future__ import annotations

from pathlib import Path

from fedqueue.plugins import plugins
from fedqueue.runtime.schedulers.base import (
    JobRequest,
    JobStatus,
    Scheduler,
    SchedulerError,
    SchedulerUnreachableError,
    SubmitRefusedError,
)
from fedqueue.runtime.schedulers.local import LocalScheduler
from fedqueue.runtime.schedulers.pbs import PbsScheduler
from fedqueue.runtime.schedulers.settings import (
    LocalSettings,
    PbsSettings,
    SchedulerSettings,
    SgeSettings,
    SlurmSettings,
    clamp_wall,
)
from fedqueue.runtime.schedulers.sge import SgeScheduler
from fedqueue.runtime.schedulers.slurm import SlurmScheduler

__all__ = [
    "JobRequest",
    "JobStatus",
    "LocalScheduler",
    "LocalSettings",
    "PbsScheduler",
    "PbsSettings",
    "Scheduler",
    "SchedulerError",
    "SchedulerSettings",
    "SchedulerUnreachableError",
    "SgeScheduler",
    "SgeSettings",
    "SlurmScheduler",
    "SlurmSettings",
    "SubmitRefusedError",
    "clamp_wall",
    "make_scheduler",
]


def make_scheduler(settings: SchedulerSettings, home: Path) -> Scheduler:
    """The adapter for these settings; `home` is the agent's folder."""
    for outside in plugins("schedulers").values():
        if type(settings) is outside.Settings:
            made: Scheduler = outside(settings, home)
            return made
    if isinstance(settings, SlurmSettings):
        return SlurmScheduler(settings)
    if isinstance(settings, PbsSettings):
        return PbsScheduler(settings)
    if isinstance(settings, SgeSettings):
        return SgeScheduler(settings)
    return LocalScheduler(settings, home)
