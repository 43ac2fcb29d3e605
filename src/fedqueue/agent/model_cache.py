"""The models and the standing work that lie at a facility, where its jobs can read them without a network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fedqueue.agent.transport import Client
from fedqueue.errors import FedQueueError, StorageError
from fedqueue.failpoints import failpoint
from fedqueue.files import write_json
from fedqueue.filetime import FileClock

GRACE_SECONDS: Final = 60.0
"""A model that was replaced stays for so long."""

DRIFT_SECONDS: Final = 0.25
"""A posted cutoff that has moved by more (the run was paused, the coordinator was down) is written anew."""


class ModelCache:
    def __init__(self, home: Path, client: Client, clock: FileClock, trouble: Callable[[str, str], None]) -> None:
        """`trouble` is told where and what it is."""
        self._trouble = trouble
        self._clock = clock
        self.home = home
        self._models = home / "models"
        self._models.mkdir(exist_ok=True)
        self._look_over()
        self.standing_path = home / "standing.json"
        self._written: dict[str, Any] | None = _lies_there(self.standing_path)
        self.standing_number = int(self._written["number"]) if self._written is not None else 0
        self._wanted: dict[str, Any] | None = None
        self._client = client
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetcher")
        self._fetching: dict[Path, Future[str]] = {}
        self.no_place = False  # the model that was fetched last could not be written

    def close(self) -> None:
        self._fetcher.shutdown(wait=True, cancel_futures=True)

    @property
    def busy(self) -> bool:
        return bool(self._fetching)

    def path(self, model: Mapping[str, Any]) -> Path:
        return self._models / f"v{int(model['version'])}-{str(model['sha256'])[:12]}.safetensors"

    def _look_over(self) -> None:
        """Drop what is not what its name says: the machine may have gone down before it was on the disk."""
        for path in self._models.glob("v*-*.safetensors"):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if not path.stem.endswith(f"-{found[:12]}"):
                path.unlink(missing_ok=True)

    def want(self, standing: Mapping[str, Any] | None, received_at: float) -> None:
        """The newest standing work, with its cutoff by the clock that jobs read; laid out once its model is here."""
        if standing is not None:
            fields = {key: value for key, value in standing.items() if key not in ("next_cutoff_in", "model")}
            path = self.path(standing["model"])
            cutoff = received_at + float(standing["next_cutoff_in"])
            self._wanted = {**fields, "next_cutoff": cutoff, "model": str(path)}
            if self._fetch(standing["model"]):
                self._lay_out()

    def keep(self, models: Sequence[Mapping[str, Any]], taken: Collection[int]) -> None:
        """Fetch the models of these orders; of the others, drop all but the one that standing work names and those of
        versions that open jobs took from it: their scripts may read the file late."""
        for model in models:
            self._fetch(model)
        needed = {self.path(model) for model in models}
        for standing in (self._wanted, self._written):
            if standing is not None:
                needed.add(Path(standing["model"]))
        for path in [path for path, future in self._fetching.items() if future.done() and path not in needed]:
            del self._fetching[path]  # nobody asks for it any more
        in_use = {f"v{version}" for version in taken}
        for path in self._models.glob("v*.safetensors*"):
            whole = path.with_name(path.name.removesuffix(".part"))
            if whole in needed or whole in self._fetching or path.name.partition("-")[0] in in_use:
                continue
            # A job may have read the standing work just before it changed: a model stays for a while.
            if self._clock.now() - path.stat().st_mtime > GRACE_SECONDS:
                path.unlink(missing_ok=True)

    def _lay_out(self) -> None:
        wanted, written = self._wanted, self._written
        assert wanted is not None
        same = written is not None and {**wanted, "next_cutoff": 0.0} == {**written, "next_cutoff": 0.0}
        if same and written is not None and abs(wanted["next_cutoff"] - written["next_cutoff"]) < DRIFT_SECONDS:
            return
        write_json(self.standing_path, wanted)
        failpoint("agent.posted")
        self._written, self.standing_number = wanted, int(wanted["number"])

    def _fetch(self, model: Mapping[str, Any]) -> bool:
        """Whether it is here; begins to fetch it if not."""
        path = self.path(model)
        future = self._fetching.get(path)
        if future is not None:
            if not future.done():
                return False
            del self._fetching[path]
            failpoint("agent.fetched")
            error = future.exception()
            if error is not None and not isinstance(error, FedQueueError):
                raise error
            self.no_place = isinstance(error, StorageError)
            if isinstance(error, StorageError):
                raise error
            if error is not None:
                self._trouble("model", f"model {model['version']} cannot be fetched now: {error}")
        if path.exists():
            return True
        self._fetching[path] = self._fetcher.submit(self._download, model, path)
        return False

    def _download(self, model: Mapping[str, Any], path: Path) -> str:
        with suppress(OSError):  # what cannot be written says why below
            self._models.mkdir(exist_ok=True)  # it may have been tidied away
        return self._client.download(int(model["version"]), path, str(model["sha256"]))


def _lies_there(path: Path) -> dict[str, Any] | None:
    """The standing work that an agent before us laid out."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found
