"""The files of a real run: models and updates named by their sha256, uploads under way, what was refused."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fedqueue import tensorfile
from fedqueue.failpoints import failpoint
from fedqueue.files import sync

OBJECTS: Final = "objects"
"""The folder of a real run's models and updates: each file is named by its sha256."""
KEPT_REFUSED: Final = 10
"""Updates of one facility that are kept aside; the oldest go first."""


def object_path(folder: Path, digest: str) -> Path:
    return folder / OBJECTS / f"{digest}.safetensors"


class Store:
    """Folders under the run folder; made when missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects = folder / OBJECTS
        self._uploads = folder / "uploads"
        self._refused = folder / "refused"
        for place in (self._objects, self._uploads, self._refused):
            place.mkdir(parents=True, exist_ok=True)
        self._there = self.digests()
        self._checked: dict[str, Traces | None] = {}  # what the file system said of each object when it was looked at

    def path(self, digest: str) -> Path:
        return object_path(self._folder, digest)

    @contextmanager
    def checking(self) -> Iterator[tensorfile.Expected]:
        """For whoever reads objects: says which digest each must have; what ends well has looked at them.

        An object that nobody has touched since we wrote it or looked at it is what it was: to make its digest again
        costs more than to aggregate it (docs/decisions/0013-checked-once.md).
        """
        looked_at: dict[str, Traces | None] = {}

        def expected(path: Path) -> str | None:
            looked_at[path.stem] = traces(path)  # before it is read
            return None if self.is_untouched(path) else path.stem

        yield expected
        self._checked.update(looked_at)

    def is_untouched(self, path: Path) -> bool:
        """Since this object was looked at."""
        found = traces(path)
        return found is not None and self._checked.get(path.stem) == found

    def verify(self, digest: str) -> None:
        """Raises a `TensorFileError` unless the object is there, can be read, and is what its name says."""
        with self.checking() as expected:
            if expected(self.path(digest)) is not None:
                tensorfile.verify(self.path(digest), digest)

    def counts_on(self, digest: str) -> bool:
        """Whether this object must be there: it was when we started, or came since, and we did not delete it."""
        return digest in self._there

    def scratch(self, name: str) -> Path:
        """A place for a file that will be named by its digest when it is whole."""
        return self._objects / f".{name}.part"

    def upload(self, facility: str, sequence: int, attempt: int, digest: str) -> Path:
        self._uploads.mkdir(exist_ok=True)  # it may have been tidied away; nothing that is on record lies in it
        # No name of a facility has an @, so no one's files look like another's.
        return self._uploads / f"{facility}@{sequence}-{attempt}-{digest}.part"

    def keep(self, made: Path, digest: str) -> Path:
        """Give a file that is on the disk its name, for good."""
        target = self.path(digest)
        failpoint("object.whole")
        made.replace(target)
        sync(target.parent)
        self._there.add(digest)
        self._checked[digest] = traces(target)
        failpoint("object.kept")
        return target

    def refuse(self, upload: Path) -> None:
        """Keep an update that cannot be used aside, for whoever wants to know why; one of each name, the newest of each
        facility."""
        self._refused.mkdir(exist_ok=True)
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
        """Delete the objects that nothing refers to; what cannot be deleted now is tried again the next time."""
        self._there.intersection_update(needed)
        for path in self._objects.glob("*.safetensors"):
            if path.stem not in needed:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def room(self) -> int:
        """Bytes that are free."""
        return shutil.disk_usage(self._objects).free


Traces = tuple[int, int, int, int]
"""What of a file changes when somebody writes to it or puts another in its place."""


def traces(path: Path) -> Traces | None:
    """None: there is no such file, or nobody may look."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
