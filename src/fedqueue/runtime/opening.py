"""A real run's folder: begun, or gone on with."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedqueue import tensorfile
from fedqueue.config import Config, parse
from fedqueue.errors import ConfigError, RunFolderError
from fedqueue.ledger import FILE, Ledger
from fedqueue.plan import FacilityProfile, Plan
from fedqueue.runs import SUMMARY, describe, write_json
from fedqueue.runtime.coordinator import Coordinator
from fedqueue.runtime.scoring import STORED, first_model
from fedqueue.runtime.store import Store

FINAL: Final = "model.safetensors"


def store_config(folder: Path, tree: dict[str, Any], config_folder: Path) -> None:
    write_json(folder / STORED, {"tree": tree, "folder": str(config_folder.absolute())})


def stored_config(folder: Path) -> Config:
    try:
        stored = json.loads((folder / STORED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{folder}: is not the folder of a real run: it has no {STORED}") from None
    return parse(stored["tree"], where=str(folder / STORED), folder=Path(stored["folder"]))


def ensure_ledger(config: Config, folder: Path) -> None:
    """A ledger with the first model, unless there is one: a start that was killed half way begins again."""
    path = folder / FILE
    if path.exists():
        if _has_meta(path):
            return
        for left in (path, *folder.glob(f"{FILE}-*")):
            left.unlink(missing_ok=True)
    digest, sizes = _first(config, folder)
    plan = make_plan(config, sizes)
    meta = describe(config, plan, seed=config.run.seed, driver="coordinator")
    Ledger(path, {**meta, "first_model": digest}).close()


def _has_meta(path: Path) -> bool:
    with suppress(sqlite3.DatabaseError):
        database = sqlite3.connect(path)
        try:
            return database.execute("SELECT 1 FROM meta WHERE key = 'first_model'").fetchone() is not None
        finally:
            database.close()
    return False


def make_plan(config: Config, sizes: Sequence[int] | None) -> Plan:
    """What the strategy is told of a real run: speed and delays are measured, whatever the config says of them."""
    run = config.run
    n = len(config.facility)
    by_size = run.data_weights == "size" and sizes is not None
    weights = [size / sum(sizes) for size in sizes] if by_size and sizes is not None else [1 / n] * n
    return Plan(
        facilities=tuple(
            FacilityProfile(name=facility.name, data_weight=weight, max_jobs=facility.max_jobs, nodes=facility.nodes)
            for facility, weight in zip(config.facility, weights, strict=True)
        ),
        round_length=run.round_length,
        rounds=run.rounds,
        seconds=run.seconds,
        learning_rate=run.learning_rate,
        stop_at_score=run.stop_at_score,
        failures=config.failures,
    )


def _first(config: Config, folder: Path) -> tuple[str, Sequence[int] | None]:
    """The digest of version 0, which is in the store then, and the sizes of the facilities' data where known."""
    store = Store(folder)
    raw, chosen = store.scratch("first"), store.scratch("chosen")
    sizes: Sequence[int] | None = None
    if config.model.initial is not None:
        given = Path(config.folder) / config.model.initial
        if not given.is_file():
            raise ConfigError(f"model.initial: {given} is not a file")
        raw = given
    elif config.task.name == "timing":
        values = max(1, int(config.simulator.model_megabytes * 1e6 / 4))
        tensorfile.write(raw, {"weight": np.zeros(values, np.float32)})
    elif config.worker.command is not None:
        raise ConfigError("model.initial: is missing; with a worker.command of your own, name a safetensors file")
    else:
        sizes = first_model(config, folder, raw)
    digest = tensorfile.select(raw, chosen, config.model.include)
    store.keep(chosen, digest)
    store.scratch("first").unlink(missing_ok=True)
    return digest, sizes


def finish(coordinator: Coordinator, wall_seconds: float) -> dict[str, Any]:
    """What a run leaves when it is over: the figures, and the last model under a plain name."""
    config, folder = coordinator.config, coordinator.folder
    summary = coordinator.tally.summary(
        strategy=config.run.strategy, seed=config.run.seed, wall_seconds=round(wall_seconds, 3)
    )
    write_json(folder / SUMMARY, summary)
    newest = coordinator.store.path(coordinator.books.models[coordinator.books.newest])
    beside = folder / f"{FINAL}.part"
    shutil.copyfile(newest, beside)
    beside.replace(folder / FINAL)
    return summary
