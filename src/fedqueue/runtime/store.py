"""The files of a real run: models and updates named by their sha256, uploads under way, what was refused."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, TypeVar

from fedqueue.errors import StorageError
from fedqueue.runtime.failpoints import failpoint

T = TypeVar("T")

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
RETRY_SECONDS: Final = 1.0
KEPT_REFUSED: Final = 10
"""Updates of one facility that are kept aside; the oldest go first."""


class Store:
    """Folders under the run folder; made when missing."""

    def __init__(self, folder: Path) -> None:
        self._objects = folder / "objects"
        self._uploads = folder / "uploads"
        self._refused = folder / "refused"
        for place in (self._objects, self._uploads, self._refused):
            place.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        return self._objects / f"{digest}.safetensors"

    def scratch(self, name: str) -> Path:
        """A place for a file that will be named by its digest when it is whole."""
        return self._objects / f".{name}.part"

    def upload(self, facility: str, sequence: int, attempt: int, digest: str) -> Path:
        # No name of a facility has an @, so no one's files look like another's.
        return self._uploads / f"{facility}@{sequence}-{attempt}-{digest}.part"

    def keep(self, made: Path, digest: str) -> Path:
        """Give a file that is on the disk its name, for good."""
        target = self.path(digest)
        failpoint("object.whole")
        made.replace(target)
        sync(target.parent)
        failpoint("object.kept")
        return target

    def refuse(self, upload: Path) -> None:
        """Keep an update that cannot be used aside, for whoever wants to know why; one of each name, the newest of each
        facility."""
        upload.replace(self._refused / upload.name.removesuffix(".part"))
        facility = upload.name.partition("@")[0]
        kept = sorted(self._refused.glob(f"{facility}@*"), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-KEPT_REFUSED]:
            path.unlink(missing_ok=True)
        failpoint("update.refused")

    def drop_uploads(self, facility: str, sequence: int, *, keep: Path | None = None) -> None:
        for left in self._uploads.glob(f"{facility}@{sequence}-*.part"):
            if left != keep:
                left.unlink(missing_ok=True)

    def digests(self) -> set[str]:
        return {path.stem for path in self._objects.glob("*.safetensors")}

    def sweep(self, needed: Collection[str]) -> None:
        """Delete the objects that nothing refers to."""
        for path in self._objects.glob("*.safetensors"):
            if path.stem not in needed:
                path.unlink(missing_ok=True)

    def room(self) -> int:
        """Bytes that are free."""
        return shutil.disk_usage(self._objects).free


def sync(path: Path) -> None:
    """On the disk when this returns; a folder too, so that the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def when_there_is_room(act: Callable[[], T], say: Callable[[str], None], stopped: Callable[[], bool]) -> T:
    """Do it; while the disk is full, wait and do it again. Nothing is lost by waiting."""
    told = False
    while True:
        try:
            return act()
        except (OSError, StorageError) as error:
            if stopped() or (isinstance(error, OSError) and error.errno not in NO_ROOM):
                raise
            if not told:
                say(f"the disk is full ({error}); waiting for room")
                told = True
            time.sleep(RETRY_SECONDS)
