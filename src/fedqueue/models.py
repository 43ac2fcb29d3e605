"""The models of a run as its ledger and its folder have them, while it goes on and afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedqueue import tensorfile
from fedqueue.coordinator.store import object_path
from fedqueue.errors import ReplayError, RunFolderError
from fedqueue.ledger import FILE, LedgerReader
from fedqueue.metrics import best_of


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
    keep: str  # of the config's [model]
    best: Model | None  # None: none has a score

    @property
    def newest(self) -> Model:
        return self.made[-1]

    @property
    def there(self) -> list[Model]:
        return [model for model in self.made if model.file.exists()]

    @property
    def kept(self) -> list[Model]:
        if self.keep == "all":
            return self.made
        best = self.best if self.keep == "best" else None
        return [model for model in self.made if model in (self.newest, best)]


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
        where = ledger.meta["config"]["evaluation"]["where"]
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
    # A file that is gone makes no other model the best. Only a facility may score one that is no longer kept.
    rated = made if where == "coordinator" else [model for model in made if model.file.exists()]
    best = best_of({model.version: model.score for model in rated})
    return Models(made=made, keep=keep, best=next((model for model in made if model.version == best), None))


def find(folder: Path, which: str) -> Model:
    """The model that is meant by "best", "newest" or its number."""
    models = read_models(folder)
    if which in ("best", "newest"):
        found = models.best if which == "best" else models.newest
    else:
        found = next((model for model in models.made if str(model.version) == which), None)
    if found is None or not (found.file.exists() or found in models.kept):
        kept = ", ".join(str(model.version) for model in models.there) or "none"
        what = f"model {which} is not kept"
        if which == "best":
            what = "no model has a score" if found is None else f"the best, model {found.version}, is not kept"
        raise RunFolderError(f'{folder}: {what}; kept are {kept}; [model] keep = "all" keeps every one')
    return found


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
            tensorfile.verify(waiting[0].file, tensorfile.Content(waiting[0].digest))
        except tensorfile.TensorFileError as error:
            if waiting[0] in read_models(folder).kept:  # otherwise a newer one has taken its place meanwhile
                path = error.path.relative_to(folder)
                raise ReplayError(f"{folder}: model {waiting[0].version}, {path}, {error.reason}") from None
        checked.add(waiting[0].digest)
    return len(checked)
