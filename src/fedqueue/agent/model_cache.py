"""The models and the standing work that lie at a facility, where its jobs can read them without a network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from fedqueue.agent.transport import Transport
from fedqueue.errors import ConfigError, FedQueueError, StorageError
from fedqueue.failpoints import failpoint
from fedqueue.files import write_json
from fedqueue.filetime import FileClock
from fedqueue.protocol.codec import read
from fedqueue.protocol.contract import ModelFile, PostedWork, StandingFile

GRACE_SECONDS: Final = 60.0
"""A model that was replaced stays for so long."""

DRIFT_SECONDS: Final = 0.25
"""A posted cutoff that has moved by more (the run was paused, the coordinator was down) is written anew."""


class ModelCache:
    def __init__(self, home: Path, transport: Transport, clock: FileClock, trouble: Callable[[str, str], None]) -> None:
        """`trouble` is told where and what it is."""
        self._trouble = trouble
        self._clock = clock
        self.home = home
        self._models = home / "models"
        self._models.mkdir(exist_ok=True)
        self._look_over()
        self.standing_path = home / "standing.json"
        self._written = _lies_there(self.standing_path)
        self._wanted: StandingFile | None = None
        self._transport = transport
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetcher")
        self._fetching: dict[Path, Future[str]] = {}
        self.no_place = False  # the model that was fetched last could not be written

    def close(self) -> None:
        self._fetcher.shutdown(wait=True, cancel_futures=True)

    @property
    def busy(self) -> bool:
        return bool(self._fetching)

    @property
    def standing_number(self) -> int:
        """Of the standing work that lies here; 0: there is none."""
        return self._written.number if self._written is not None else 0

    def path(self, model: ModelFile) -> Path:
        return self._models / f"v{model.version}-{model.sha256[:12]}.safetensors"

    def _look_over(self) -> None:
        """Drop what is not what its name says: the machine may have gone down before it was on the disk."""
        for path in self._models.glob("v*-*.safetensors"):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if not path.stem.endswith(f"-{found[:12]}"):
                path.unlink(missing_ok=True)

    def want(self, posted: PostedWork | None, received_at: float) -> None:
        """The newest standing work, with its cutoff by the clock that jobs read; laid out once its model is here."""
        if posted is not None:
            standing = replace(posted.standing, next_cutoff=received_at + posted.standing.next_cutoff)
            self._wanted = StandingFile(number=posted.number, model=str(self.path(posted.model)), standing=standing)
            if self._fetch(posted.model):
                self._lay_out(self._wanted)

    def keep(self, models: Sequence[ModelFile], taken: Collection[int]) -> None:
        """Fetch the models of these orders; of the others, drop all but the one that standing work names and those of
        versions that open jobs took from it: their scripts may read the file late."""
        for model in models:
            self._fetch(model)
        needed = {self.path(model) for model in models}
        for standing in (self._wanted, self._written):
            if standing is not None:
                needed.add(Path(standing.model))
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

    def _lay_out(self, wanted: StandingFile) -> None:
        if self._written is not None and _says_the_same(wanted, self._written):
            return
        write_json(self.standing_path, wanted)
        failpoint("agent.posted")
        self._written = wanted

    def _fetch(self, model: ModelFile) -> bool:
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
                self._trouble("model", f"model {model.version} cannot be fetched now: {error}")
        if path.exists():
            return True
        self._fetching[path] = self._fetcher.submit(self._download, model, path)
        return False

    def _download(self, model: ModelFile, path: Path) -> str:
        with suppress(OSError):  # what cannot be written says why below
            self._models.mkdir(exist_ok=True)  # it may have been tidied away
        return self._transport.download(model.version, path, model.sha256)


def _says_the_same(one: StandingFile, other: StandingFile) -> bool:
    moved = one.standing.next_cutoff - other.standing.next_cutoff
    unmoved = replace(other.standing, next_cutoff=one.standing.next_cutoff)
    return abs(moved) < DRIFT_SECONDS and one == replace(other, standing=unmoved)


def _lies_there(path: Path) -> StandingFile | None:
    """The standing work that an agent before us laid out."""
    try:
        return read(StandingFile, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError, ConfigError):
        return None
