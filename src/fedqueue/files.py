"""Files that are whole or not there, and on the disk when we say so: coordinator and agent write them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedqueue.errors import StorageError, what_to_do
from fedqueue.failpoints import failpoint


def sync(path: Path) -> None:
    """On the disk when this returns; a folder too, so that the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with the disk inside is told with what helps."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; {what_to_do(error)}") from None


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_secret(path: Path, text: str) -> None:
    """A file that only its owner may read, from its first byte on; whole or not at all."""
    write_text(path, text, secret=True)


def write_text(path: Path, text: str, *, secret: bool = False) -> None:
    """Whole or not at all: written beside, then renamed."""
    beside = path.with_name(path.name + ".part")
    with writing(path):
        try:
            if secret:
                beside.unlink(missing_ok=True)
            with open(beside, "w", encoding="utf-8", opener=_open_secret if secret else None) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if secret:
                failpoint("secret.whole")
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


def _open_secret(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_EXCL, 0o600)
