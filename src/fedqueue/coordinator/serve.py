"""A coordinator's whole life: open the run, serve it, and begin again when its ledger could not be written."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final

from fedqueue import plugins
from fedqueue.config import Config
from fedqueue.coordinator.access import Access
from fedqueue.coordinator.coordinator import Coordinator, Scorer
from fedqueue.coordinator.run_folder import ensure_ledger, finish
from fedqueue.coordinator.scoring import make_scorer
from fedqueue.coordinator.server import excusing, listen, serving
from fedqueue.errors import RunFolderError, StorageError
from fedqueue.failpoints import failpoint
from fedqueue.protocol.codec import Json
from fedqueue.protocol.contract import Address
from fedqueue.protocol.state import View
from fedqueue.tensorfile import TensorFileError

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
    say: Callable[[str], None] = lambda line: None,
    until: Callable[[], bool] = lambda: False,
) -> Json | None:
    """The summary when the run is over; None: it was told to leave off, and can go on later."""
    with ExitStack() as stack:
        stack.enter_context(_alone(folder))
        listener = listen(config)
        stack.callback(listener.close)
        told, said = False, ""
        listeners = plugins.listeners(config, folder)
        while True:
            try:
                ensure_ledger(config, folder)
                began = time.monotonic()
                coordinator = Coordinator(
                    config,
                    folder,
                    listeners=listeners,
                    views=views,
                    scorer=make_scorer(config, folder),
                    say=say,
                    told=told,
                )
                told = True
                if said and coordinator.state.stopped is None:
                    say("there is room again; the run goes on" if "room" in said else "the run goes on")
                    said = ""
                try:
                    access = Access(folder)
                    with (
                        serving(coordinator, access, listener, plain=plain) as address,
                        beside(coordinator, access, address),
                    ):
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
                    say(why)
                said = why
                with excusing(config, folder, listener, f"the coordinator's disk: {why}; nothing is lost", plain=plain):
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
        with (folder / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


class _alone:  # it reads as a word
    """One coordinator a run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._file = (self._folder / LOCK).open("a")
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
