"""A job of its own making, to try a training script outside a facility: `participate(dry_run={...})`.

Part of the worker: Python 3.9 and the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from fedqueue.errors import ConfigError
from fedqueue.files import FileClock
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import Assignment, AssignmentFile, Order
from fedqueue.worker.job_folder import ParticipateError, Ranks, ThisJob, made_folder

DRY_RUN_FOLDER = "fedqueue-dry-run"
DRY_RUN_KEYS = ("model", "steps", "learning_rate", "seconds")


def dry_run_job(settings: Mapping[str, Any] | None, ranks: Ranks) -> ThisJob:
    if settings is None:
        raise ParticipateError(
            "this is not a FedQueue job (FEDQUEUE_JOB is not set); to try the script here, use "
            'fedqueue.participate(dry_run={"model": "first.safetensors", "steps": 100, "learning_rate": 1e-3})'
        )
    unknown = [key for key in settings if key not in DRY_RUN_KEYS]
    if unknown:
        raise ParticipateError(f"dry_run: there is no {unknown[0]!r}; use {', '.join(DRY_RUN_KEYS)}")
    model = os.path.abspath(os.fspath(settings.get("model", "")))
    if not os.path.isfile(model):
        raise ParticipateError(f"dry_run: model must name a safetensors file, found {settings.get('model')!r}")
    chosen = {key: value for key, value in settings.items() if key in ("steps", "learning_rate")}
    try:
        wanted = {"base_version": 0, "train_budget": settings.get("seconds"), **chosen}
        assignment = read(Assignment, wanted, "dry_run")
    except ConfigError as error:
        raise ParticipateError(str(error)) from None
    home, attempt = Path.cwd() / DRY_RUN_FOLDER, 0
    state_dir = made_folder(home / "state")
    while ranks.first:
        try:
            (home / f"attempt-{attempt}").mkdir()
            break
        except FileExistsError:
            attempt += 1
    clock = FileClock(home)
    return ThisJob(
        order=Order(job_id="dry-run/0", facility="dry-run", round=0, wall_seconds=sys.float_info.max),
        attempt=attempt,
        folder=home / f"attempt-{attempt}",
        state_dir=state_dir,
        nodes=1,
        entered_at=clock.now(),
        started_at=clock.now(),
        wall_seconds=inf,
        stay=None,
        standing=home / "standing.json",
        assigned=AssignmentFile(assignment=assignment, model=model),
        clock=clock,
    )
