"""The files of a real run: models and updates named by their sha256, uploads under way, what was refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fedqueue import tensorfile
from fedqueue.errors import FedQueueError, what_to_do
from fedqueue.files import failpoint, sync
from fedqueue.tensorbytes import Content

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
        self._known: dict[str, tuple[Traces, Content]] = {}  # of each object: what was found, and its traces before

    def path(self, digest: str) -> Path:
        return object_path(self._folder, digest)

    @contextmanager
    def checking(self) -> Iterator[Callable[[Path], Content]]:
        """For whoever reads objects: says what each must be; what ends well has looked at them.

        An object that nobody has touched since we wrote it or looked at it is compared by its checksums, any other by
        its sha256 (docs/decisions/0013-checked-at-every-use.md).
        """
        looked_at: dict[str, tuple[Traces | None, Content]] = {}

        def expected(path: Path) -> Content:
            found = traces(path)  # before it is read
            content = self._content(path.stem, found) or Content(path.stem)
            looked_at[path.stem] = found, content
            return content

        yield expected
        for digest, (found, content) in looked_at.items():
            self._remember(digest, found, content)

    def _remember(self, digest: str, found: Traces | None, content: Content) -> None:
        if found is not None and content.checksums:
            self._known[digest] = found, content

    def verify(self, digest: str) -> Content:
        """Raises a `TensorFileError` unless the object is there, can be read, and is what its name says."""
        with self.checking() as expected:
            tensorfile.verify(self.path(digest), content := expected(self.path(digest)))
        return content

    def known(self, digest: str) -> Content | None:
        """What this object must be by its checksums; None: it is to be verified first."""
        return self._content(digest, traces(self.path(digest)))

    def _content(self, digest: str, found: Traces | None) -> Content | None:
        traces_then, content = self._known.get(digest, (None, None))
        return content if found is not None and traces_then == found else None

    def counts_on(self, digest: str) -> bool:
        """Whether this object must be there: it was when we started, or came since, and we did not delete it."""
        return digest in self._there

    def scratch(self, name: str) -> Path:
        """A place for a file that will be named by its digest when it is whole."""
        return self._objects / f".{name}.part"

    def upload(self, facility: str, sequence: int, attempt: int, part: int, digest: str) -> Path:
        self._uploads.mkdir(exist_ok=True)  # it may have been tidied away; nothing that is on record lies in it
        # No name of a facility has an @, so no one's files look like another's.
        return self._uploads / f"{facility}@{sequence}-{attempt}-{part}-{digest}.part"

    def keep(self, made: Path, content: Content) -> Path:
        """Give a file that is on the disk its name, for good."""
        digest = content.sha256
        target = self.path(digest)
        failpoint("object.whole")
        made.replace(target)
        sync(target.parent)
        self._there.add(digest)
        self._remember(digest, traces(target), content)
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

    def drop_uploads(self, facility: str, sequence: int, *, keep: Collection[Path] = ()) -> None:
        for left in self._uploads.glob(f"{facility}@{sequence}-*.part"):
            if left not in keep:
                left.unlink(missing_ok=True)

    def sweep_uploads(self, is_open: Callable[[str, int], bool]) -> None:
        """Delete what was begun of updates that no job of this facility and number may bring any more."""
        for left in self._uploads.glob("*@*-*.part"):
            facility, _, rest = left.name.partition("@")
            sequence = rest.partition("-")[0]
            if sequence.isdigit() and not is_open(facility, int(sequence)):
                with suppress(OSError):
                    left.unlink(missing_ok=True)

    def digests(self) -> set[str]:
        return {path.stem for path in self._objects.glob("*.safetensors")}

    def sweep(self, needed: Collection[str]) -> None:
        """Delete the objects that nothing refers to; what cannot be deleted now is tried again the next time."""
        self._there.intersection_update(needed)
        for path in self._objects.glob("*.safetensors"):
            if path.stem not in needed:
                self._known.pop(path.stem, None)
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


def what_is_wrong(error: Exception, folder: Path, names: Mapping[str, str]) -> str:
    """What is wrong, with which file, and what to do, in one line. `names`: what is called how, by its sha256."""
    if isinstance(error, tensorfile.TensorFileError):
        name = names.get(error.path.stem)
        if name is None:
            return str(error)
        return f"the coordinator's own copy of {name}, {error.path.relative_to(folder)}, {error.reason}"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}; {what_to_do(error)}"
    if isinstance(error, FedQueueError):
        return str(error)
    return f"ours: {type(error).__name__}: {error}; please report it"
