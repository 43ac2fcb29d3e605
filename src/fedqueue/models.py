"""The models of a run as its ledger and its folder have them, while it goes on and afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedqueue import tensorfile
from fedqueue.errors import ReplayError, RunFolderError
from fedqueue.ledger import FILE, LedgerReader

OBJECTS: Final = "objects"
"""The folder of a real run's models and updates: each file is named by its sha256."""


def object_path(folder: Path, digest: str) -> Path:
    return folder / OBJECTS / f"{digest}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    version: int
    ready_at: float  # seconds on the run clock
    score: float | None  # None: it has none
    digest: str
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """All that a real run made, newest last, and which of them its folder must have."""

    made: list[Model]
    kept: list[Model]

    @property
    def newest(self) -> Model:
        return self.made[-1]

    @property
    def best(self) -> Model | None:
        """The one with the highest score, the oldest of equals; None: no model has a score that is a number."""
        scored = [model for model in self.made if model.score is not None and math.isfinite(model.score)]
        return max(scored, key=lambda model: model.score or 0.0, default=None)


def read_models(folder: Path) -> Models:
    """Raises a `RunFolderError` where models are not kept in files: in simulations."""
    with LedgerReader(folder / FILE) as ledger:
        first = ledger.meta.get("first_model")
        if first is None:
            raise RunFolderError(f"{folder}: is a simulation, which keeps no models; only real runs do")
        scores = {row["version"]: row["score"] for row in ledger.rows("SELECT version, score FROM scores")}
        digests = {0: (0.0, first)}
        for row in ledger.rows(
            "SELECT at, json_extract(body, '$.version') AS version, json_extract(body, '$.digest') AS digest "
            "FROM events WHERE kind = 'ModelReady' ORDER BY seq"
        ):
            digests[row["version"]] = (row["at"], row["digest"])
        keep = ledger.meta["config"]["model"]["keep"]
    made = [
        Model(
            version=version,
            ready_at=at,
            score=scores.get(version),
            digest=digest,
            file=object_path(folder, digest),
        )
        for version, (at, digest) in sorted(digests.items())
    ]
    models = Models(made=made, kept=made)
    if keep != "all":
        models = Models(made=made, kept=[models.newest])
    return models


def check_models(folder: Path) -> int:
    """That every update that is on record as part of a model is in one that exists, and that the files of the models
    that a real run keeps are there and are what they were. How many files; a `ReplayError` at the first that is not."""
    with LedgerReader(folder / FILE) as ledger:
        for row in ledger.rows(
            "SELECT job, attempt, version FROM updates WHERE fate = 'aggregated' "
            "AND version NOT IN (SELECT version FROM models) LIMIT 1"
        ):
            raise ReplayError(
                f"{folder}: the update of {row['job']} (attempt {row['attempt']}) is on record as part of model "
                f"{row['version']}, which the ledger does not have"
            )
        if "first_model" not in ledger.meta:
            return 0
    checked: set[str] = set()
    while waiting := [model for model in read_models(folder).kept if model.digest not in checked]:
        try:
            tensorfile.verify(waiting[0].file, waiting[0].digest)
        except tensorfile.TensorFileError as error:
            if waiting[0] in read_models(folder).kept:  # otherwise a newer one has taken its place meanwhile
                path = error.path.relative_to(folder)
                raise ReplayError(f"{folder}: model {waiting[0].version}, {path}, {error.reason}") from None
        checked.add(waiting[0].digest)
    return len(checked)
