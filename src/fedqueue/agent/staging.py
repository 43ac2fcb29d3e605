"""Lays the worker's own files on a facility's shared file system, for its jobs to import."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

from fedqueue.errors import StorageError, what_to_do

WORKER_FILES: Final = (
    "__init__.py",
    "errors.py",
    "files.py",
    "integrations/__init__.py",
    "integrations/huggingface.py",
    "integrations/lightning.py",
    "low_rank.py",
    "moments.py",
    "protocol/__init__.py",
    "protocol/aggregation.py",
    "protocol/budget.py",
    "protocol/codec.py",
    "protocol/contract.py",
    "py.typed",
    "worker/__init__.py",
    "worker/ahead.py",
    "worker/distributed.py",
    "worker/dry_run.py",
    "worker/find_work.py",
    "worker/job_folder.py",
    "worker/participate.py",
    "worker/privacy.py",
)
"""All that `fedqueue.participate` needs, relative to the package. They work with Python 3.9."""

PACKAGE: Final = Path(__file__).parent.parent


def stage_worker(home: Path, package: Path = PACKAGE) -> Path:
    """Put the worker into HOME/worker/fedqueue and return HOME/worker, for the PYTHONPATH of jobs.

    HOME/worker/fedqueue is a link to a folder named by its content, which never changes; a new version is another
    folder, and the link moves over at once. Jobs that began with the older one go on with it.
    """
    worker = home / "worker"
    try:
        contents = {name: (package / name).read_bytes() for name in WORKER_FILES}
        digest = hashlib.sha256()
        for name, content in contents.items():
            digest.update(f"{name} {len(content)}\n".encode() + content)
        version = f".fedqueue-{digest.hexdigest()[:16]}"
        worker.mkdir(parents=True, exist_ok=True)
        if not (worker / version).is_dir():
            _write_tree(worker / version, contents)
        _point(worker / "fedqueue", version)
    except OSError as error:
        raise StorageError(
            f"{worker}: cannot stage the worker: {error.strerror}; {what_to_do(error)}, or change `home`"
        ) from error
    return worker


def _write_tree(folder: Path, contents: dict[str, bytes]) -> None:
    part = folder.with_name(f"{folder.name}.{os.uname().nodename}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    for name, content in contents.items():
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        if not folder.is_dir():  # else somebody else was quicker, with the same content
            raise


def _point(link: Path, target: str) -> None:
    if link.is_symlink() and os.readlink(link) == target:
        return
    part = link.with_name(f".{link.name}.link-{os.uname().nodename}-{os.getpid()}")
    part.unlink(missing_ok=True)
    part.symlink_to(target, target_is_directory=True)
    if link.is_dir() and not link.is_symlink():  # a plain copy, which a link cannot replace in one go
        link.rename(link.with_name(f".{link.name}-before-{part.name.lstrip('.')}"))
    part.replace(link)
