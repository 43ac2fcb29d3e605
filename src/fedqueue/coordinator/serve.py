"""A coordinator's whole life: open the run, serve it, and begin again when its ledger could not be written."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fedqueue import plugins
from fedqueue.config import Config
from fedqueue.coordinator.access import Access, settle
from fedqueue.coordinator.coordinator import Coordinator
from fedqueue.coordinator.run_folder import ensure_ledger, finish
from fedqueue.coordinator.scoring import Scorer, make_scorer
from fedqueue.coordinator.server import excusing, listen, serving
from fedqueue.errors import RunFolderError, StorageError
from fedqueue.files import failpoint, is_locked, lock_file, only_ours
from fedqueue.metrics import Summary
from fedqueue.protocol.contract import Address
from fedqueue.protocol.state import View
from fedqueue.tensorfile import TensorFileError

log = logging.getLogger(__name__)

LOCK: Final = ".coordinator.lock"
LOCK_TRIES: Final = 10
RETRY_SECONDS: Final = 2.0
"""Between two looks whether the run's folder can be used again."""
PROBE_BYTES: Final = 1 << 20
"""That must fit then. Less would be full again at once: a ledger that is closed leaves a little room behind."""

Beside = Callable[[Coordinator, Access, Address], AbstractContextManager[object]]
"""What runs beside a coordinator while it serves at an address."""


def coordinate(
    config: Config,
    folder: Path,
    *,
    plain: bool,
    beside: Beside,
    make_scorer: Callable[[Config, Path], Callable[[Coordinator], Scorer] | None] = make_scorer,
    views: Sequence[View] = (),
    until: Callable[[], bool] = lambda: False,
) -> Summary | None:
    """The summary when the run is over; None: it was told to leave off, and can go on later."""
    with ExitStack() as stack:
        only_ours(folder, group="" if config.server.group_may_write else "server.group_may_write")
        stack.enter_context(alone(folder))
        listener = listen(config.server)
        stack.callback(listener.close)
        place = _OwnServer(config, folder, listener, plain, beside)
        return go_on(config, folder, place, make_scorer=make_scorer, views=views, until=until)


class Place(Protocol):
    """Where a coordinator is reached."""

    def open(self, coordinator: Coordinator) -> AbstractContextManager[object]:
        """While it works."""

    def closed(self, reason: str) -> AbstractContextManager[object]:
        """While it cannot."""


@dataclass
class _OwnServer:
    config: Config
    folder: Path
    listener: socket.socket
    plain: bool
    beside: Beside

    @contextmanager
    def open(self, coordinator: Coordinator) -> Iterator[None]:
        access = Access(self.folder, self.config.server.credential_days)
        settle(coordinator, access)
        with (
            serving(coordinator, access, self.listener, plain=self.plain) as address,
            self.beside(coordinator, access, address),
        ):
            yield

    def closed(self, reason: str) -> AbstractContextManager[None]:
        return excusing(self.config, self.folder, self.listener, reason, plain=self.plain)


def go_on(
    config: Config,
    folder: Path,
    place: Place,
    *,
    make_scorer: Callable[[Config, Path], Callable[[Coordinator], Scorer] | None] = make_scorer,
    views: Sequence[View] = (),
    until: Callable[[], bool] = lambda: False,
) -> Summary | None:
    """From what the folder holds; as `coordinate`."""
    told, said = False, ""
    listeners = plugins.listeners(config, folder)
    while True:
        try:
            ensure_ledger(config, folder)
            began = time.monotonic()
            scorer = make_scorer(config, folder)
            coordinator = Coordinator(config, folder, listeners=listeners, views=views, scorer=scorer, told=told)
            told = True
            if said and coordinator.state.stopped is None:
                log.info("there is room again; the run goes on" if "room" in said else "the run goes on")
                said = ""
            try:
                with place.open(coordinator):
                    coordinator.run(until)
                if coordinator.state.stopped is None:
                    return None
                failpoint("run.over")
                summary = finish(coordinator, time.monotonic() - began)
                failpoint("run.finished")
                return summary
            finally:
                coordinator.close()
        except (StorageError, TensorFileError, OSError, sqlite3.OperationalError) as error:
            # What the ledger has is whole. Whatever came after it is asked for again.
            if until() or (not told and not isinstance(error, StorageError)):
                raise  # a start that cannot be is for whoever starts it to mend
            why = f"{error}; {'waiting for room' if 'make room' in str(error) else 'it is tried again by itself'}"
            if why != said:
                log.warning(why)
            said = why
            with place.closed(f"the coordinator's disk: {why}; nothing is lost"):
                _wait_for_room(folder, until)


def _wait_for_room(folder: Path, until: Callable[[], bool]) -> None:
    """Until something can be written again, or it is time to leave."""
    while not until():
        time.sleep(RETRY_SECONDS)
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
            return
        except OSError:
            continue


def is_at_work(folder: Path) -> bool:
    """Whether a coordinator of this run lives."""
    try:
        return is_locked(folder / LOCK)
    except OSError:
        return False


class alone:  # it reads as a word
    """One coordinator a run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._file = lock_file(self._folder / LOCK)
        for _ in range(LOCK_TRIES):  # whoever looks whether one is at work has it for a moment
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.1)
        self._file.close()
        raise RunFolderError(f"{self._folder}: a coordinator of this run is at work already")

    def __exit__(self, *_: object) -> None:
        self._file.close()
