"""Files that are whole or not there, and on the disk when we say so: coordinator and agent write them."""

from __future__ import annotations

import os
from pathlib import Path

from fedqueue.errors import StorageError, what_to_do
from fedqueue.failpoints import failpoint


def sync(path: Path) -> None:
    """On the disk when this returns; a folder too, so that the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_secret(path: Path, text: str) -> None:
    """A file that only its owner may read, from its first byte on; whole or not at all."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        failpoint("secret.whole")
        beside.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; {what_to_do(error)}") from None
