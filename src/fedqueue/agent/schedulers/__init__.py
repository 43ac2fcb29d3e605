"""Batch schedulers behind one protocol (base.py); one adapter a file."""

from __future__ import annotations

from pathlib import Path

from fedqueue.agent.schedulers.base import (
    JobRequest,
    JobStatus,
    LocalSettings,
    PbsSettings,
    Scheduler,
    SchedulerError,
    SchedulerSettings,
    SchedulerUnreachableError,
    SgeSettings,
    SlurmSettings,
    SubmitRefusedError,
    clamp_wall,
    longest_wall,
)
from fedqueue.agent.schedulers.local import LocalScheduler
from fedqueue.agent.schedulers.pbs import PbsScheduler
from fedqueue.agent.schedulers.sge import SgeScheduler
from fedqueue.agent.schedulers.slurm import SlurmScheduler
from fedqueue.plugins import plugins

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
    "longest_wall",
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
