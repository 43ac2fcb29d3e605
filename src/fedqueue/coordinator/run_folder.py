"""A real run's folder: begun, or gone on with."""

from __future__ import annotations

import dataclasses
import json
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedqueue import tensorfile
from fedqueue.config import Config, FacilitySettings, parse
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.learned import Learned, read_learned
from fedqueue.coordinator.scoring import STORED, TASK, first_model
from fedqueue.coordinator.store import Store
from fedqueue.errors import ConfigError, RunFolderError
from fedqueue.files import write_json
from fedqueue.ledger import FILE, Ledger, storage_error
from fedqueue.metrics import Summary
from fedqueue.protocol.aggregation import FACTOR, must_match, special
from fedqueue.protocol.plan import FacilityProfile, Plan
from fedqueue.runs import SUMMARY, describe
from fedqueue.training.job import StoredTask

FINAL: Final = "model.safetensors"
"""The newest model of a run that is over."""
BEST: Final = "best.safetensors"
"""The best one, unless that is the newest."""

SETTINGS: Final = "federation.toml"
RUNS: Final = "runs"
"""In a federation's folder: the folders of its runs."""
LOG: Final = "run.log"
"""In the folder of such a run: what its coordinator said."""


def is_federation(folder: Path) -> bool:
    """Whether `fedqueue serve` is to make this folder a federation, or go on with it as one."""
    if (folder / STORED).exists():
        return False
    if not folder.exists():
        return folder.suffix != ".toml"
    return folder.is_dir() and ((folder / SETTINGS).exists() or (folder / RUNS).is_dir() or not any(folder.iterdir()))


def store_config(folder: Path, tree: Mapping[str, Any], config_folder: Path) -> None:
    write_json(folder / STORED, {"tree": tree, "folder": str(config_folder.absolute())})


def stored_config(folder: Path) -> Config:
    try:
        stored = json.loads((folder / STORED).read_text(encoding="utf-8"))
        tree, beside = dict(stored["tree"]), Path(stored["folder"])
    except FileNotFoundError:
        raise RunFolderError(f"{folder}: is not the folder of a real run: it has no {STORED}") from None
    except (ValueError, KeyError, TypeError):
        raise RunFolderError(f"{folder / STORED}: is damaged; put back the one that was there") from None
    return parse(tree, where=str(folder / STORED), folder=beside)


def store_task(config: Config, folder: Path) -> None:
    """For jobs and scorers, which need not know the rest. Once: a run's config does not change."""
    if (folder / TASK).exists():
        return
    stored = StoredTask(
        task=config.task,
        seed=config.run.seed,
        facilities=[facility.name for facility in config.facility],
        steps_per_second={f.name: f.steps_per_second for f in config.facility if f.steps_per_second is not None},
        folder=config.folder,
    )
    write_json(folder / TASK, dataclasses.asdict(stored))


MakeModel = Callable[[Config, Path, Path], Sequence[int]]
"""Has the task of the run in a folder make its first model in a file; the sizes of the facilities' data."""


def ensure_ledger(config: Config, folder: Path, make_model: MakeModel = first_model, *, owner: str = "") -> None:
    """A ledger with the first model, unless there is one: a start that was killed half way begins again. `owner`: who
    submitted it to a federation."""
    from fedqueue.coordinator.server import ADDRESS  # needs an extra, of which `stored_config` must be able to tell

    store_task(config, folder)
    if has_ledger(folder):
        return
    path = folder / FILE
    if (folder / ADDRESS).exists():  # it was served: what is in the folder belongs to a ledger
        raise RunFolderError(
            f"{folder}: its ledger is gone; put {FILE} back (and {FILE}-wal, if there was one), or begin another run"
        )
    for left in (path, *folder.glob(f"{FILE}-*")):
        left.unlink(missing_ok=True)
    digest, sizes = _first(config, folder, make_model)
    plan = make_plan(config, sizes, read_learned(folder))
    meta = describe(config, plan, seed=config.run.seed, driver="coordinator")
    if owner:
        meta["owner"] = owner
    first = Store(folder).path(digest)
    roles = special(tensorfile.roles(tensorfile.read_header(first), first))
    if config.trust.masked and FACTOR in roles.values():
        raise ConfigError("trust.masked: the model has factors, of whose products nobody could make the sum")
    Ledger(path, {**meta, "run": secrets.token_hex(8), "first_model": digest, "roles": roles}).close()


def has_ledger(folder: Path) -> bool:
    """Whether the run has begun. A ledger that cannot be read now (a full disk is enough) is not one that is missing:
    it must never be made anew."""
    path = folder / FILE
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            found = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
            return found is not None
    except sqlite3.OperationalError as error:
        raise storage_error(path, error, "read") from None
    except sqlite3.DatabaseError as error:
        raise RunFolderError(f"{path}: is not a ledger: {error}; put back the one that was there") from None


def make_plan(config: Config, sizes: Sequence[int] | None, learned: Mapping[str, Learned]) -> Plan:
    """What the strategy is told of a real run: speed and delays are measured, whatever the config says of them, or were
    by the runs before it. What the config says of the start-up counts until that has been measured too."""
    run = config.run
    before = {facility.name: learned.get(facility.name, Learned()) for facility in config.facility}
    n = len(config.facility)
    by_size = run.data_weights == "size" and sizes is not None
    weights = [size / sum(sizes) for size in sizes] if by_size and sizes is not None else [1 / n] * n
    return Plan(
        facilities=tuple(
            FacilityProfile(
                name=facility.name,
                data_weight=weight,
                max_jobs=facility.max_jobs,
                nodes=facility.nodes,
                most_wall_seconds=facility.max_wall_seconds,
                steps_per_second=before[facility.name].steps_per_second,
                first_delay=before[facility.name].first_delay,
                known_waits=(*facility.known_waits, *before[facility.name].waits),
                **_startup(config, facility, before[facility.name]),
            )
            for facility, weight in zip(config.facility, weights, strict=True)
        ),
        round_length=run.round_length,
        rounds=run.rounds,
        seconds=run.seconds,
        learning_rate=run.learning_rate,
        stop_at_score=run.stop_at_score,
        failures=config.failures,
        trust=config.trust,
        overdue_seconds=config.server.overdue_seconds,
    )


def _startup(config: Config, facility: FacilitySettings, before: Learned) -> dict[str, float]:
    if facility.startup_seconds > 0:
        return {"overhead": facility.startup_seconds, "startup_allowance": 0.0}
    if before.overhead is not None:
        return {"overhead": before.overhead, "startup_allowance": 0.0}
    return {"overhead": 0.0, "startup_allowance": config.server.startup_allowance_seconds}


def _first(config: Config, folder: Path, make_model: MakeModel) -> tuple[str, Sequence[int] | None]:
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
        try:
            tensorfile.write(raw, {"weight": np.zeros(values, np.float32)})
        except (MemoryError, OverflowError, ValueError):
            raise ConfigError("simulator.model_megabytes: is more than this machine has memory for") from None
    elif config.worker.command is not None:
        raise ConfigError("model.initial: is missing; with a worker.command of your own, name a safetensors file")
    else:
        sizes = make_model(config, folder, raw)
    must_match(config.model.roles, tensorfile.read_header(raw).entries)
    shares_moments = config.model.moments == "shared"
    content = tensorfile.select(raw, chosen, config.model.include, config.model.roles, moments=shares_moments)
    store.keep(chosen, content)
    store.scratch("first").unlink(missing_ok=True)
    return content.sha256, sizes


def finish(coordinator: Coordinator, wall_seconds: float) -> Summary:
    """What a run leaves when it is over: the figures, and the last model and the best under plain names. What is there
    stays: who serves a run that is over, so that the last agents hear of it, adds nothing to it."""
    config, folder, newest = coordinator.config, coordinator.folder, coordinator.state.newest
    names = {coordinator.scores.best: BEST, newest: FINAL}
    # The models first: if one of them is gone, the next try must not describe it and lay out another.
    for version, name in names.items():
        if version is not None and not (folder / name).exists():
            digest = coordinator.outcomes.models[version]
            tensorfile.export(coordinator.store.path(digest), folder / name, digest)
    if (folder / SUMMARY).exists():
        found: Summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return found
    summary = coordinator.tally.summary(
        strategy=config.run.strategy, seed=config.run.seed, wall_seconds=round(wall_seconds, 3)
    )
    scores = coordinator.outcomes.scores
    summary["models"] = {
        which: None if at is None else {"version": at, "score": scores.get(at), "file": str(folder / names[at])}
        for which, at in (("newest", newest), ("best", coordinator.scores.best))
    }
    write_json(folder / SUMMARY, summary)
    return summary
