"""The files of a job: reading what it is told, and handing in so that a half-written result is never seen.

Part of the worker: Python 3.9, the standard library, and numpy or torch only when their tensors come along.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fedqueue.errors import ConfigError, FedQueueError
from fedqueue.protocol.codec import Json, encode, read

T = TypeVar("T")

POLL_SECONDS = 0.05
FILE_PATIENCE = 60.0
"""Seconds: a shared file system may show a file this late."""

PREFIXES = ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
"""What DDP and torch.compile put before every name."""

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor of a file."""

_BLOCK_BYTES = 1 << 20
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit


class ParticipateError(FedQueueError):
    """A job cannot take part, or its result cannot be handed in. One line says why."""


# Reading ------------------------------------------------------------------------------------------------


def read_text(path: Path, wait_until: float = 0.0) -> str:
    """A small file; waits for it until `wait_until`, by `time.monotonic`."""
    while True:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            # Not there yet, or a stale handle of a network file system while it is replaced.
            if time.monotonic() >= wait_until:
                raise ParticipateError(f"{path}: cannot be read: {describe(error)}") from error
        time.sleep(POLL_SECONDS)


def read_object(path: Path, wait_until: float = 0.0) -> Json:
    """The JSON object in a file that is replaced by atomic rename, so it is whole once it is there."""
    text = read_text(path, wait_until)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ParticipateError(f"{path}: is not JSON: {describe(error)}") from error
    if not isinstance(found, dict):
        raise ParticipateError(f"{path}: must hold one JSON object, found {type(found).__name__}")
    return found


def read_file(kind: type[T], path: Path, wait_until: float = 0.0) -> T:
    """What the object in a file is."""
    try:
        return read(kind, read_object(path, wait_until), "")
    except ConfigError as error:
        raise ParticipateError(f"{path}: {error}") from None


def read_header(path: Path, wait_until: float) -> Header:
    """Of a safetensors file, without reading the tensors; waits for the file until `wait_until`."""
    while not path.exists() and time.monotonic() < wait_until:
        time.sleep(POLL_SECONDS)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size).decode("utf-8"))
        return {
            name: (str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParticipateError(f"{path}: is not a readable safetensors file: {describe(error)}") from error


def check_libraries() -> None:
    """What handing in will need is there; found out before training, not after."""
    try:
        import safetensors

        if "torch" in sys.modules:
            import safetensors.torch
        elif "numpy" in sys.modules:
            import safetensors.numpy  # noqa: F401
    except ImportError as error:
        raise ParticipateError(f"{describe(error)}; install safetensors and packaging for {sys.executable}") from error


def load_declared(module: Any, state: Mapping[str, Any]) -> None:
    """Put the declared tensors into a torch module, all of them; the rest of it stays."""
    try:
        unknown = module.load_state_dict(state, strict=False).unexpected_keys
    except RuntimeError as error:
        raise ParticipateError(f"the run's model does not fit this one: {' '.join(str(error).split())}") from error
    if unknown:
        raise ParticipateError(f"the run declares {unknown[0]!r}, which this model does not have")


# Choosing what to hand in -------------------------------------------------------------------------------


def choose(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Exactly the declared tensors, checked; the rest of `tensors` is not looked at.

    >>> import numpy
    >>> list(choose({"module.w": numpy.zeros(2), "module.frozen": numpy.zeros(9)}, {"w": (2,)}))
    ['w']
    """
    prefix = _prefix(tensors, shapes)
    chosen = {}
    for name, shape in shapes.items():
        value = tensors[prefix + name]
        found = getattr(value, "shape", None)
        if found is None:
            raise ParticipateError(f"submit: {name!r} must be a torch tensor or a numpy array, found {type(value)}")
        if tuple(found) != shape:
            raise ParticipateError(f"submit: {name!r} has shape {tuple(found)}, the run declares {shape}")
        if not _is_finite(value):
            raise ParticipateError(f"submit: {name!r} is not finite (NaN or infinity), so nothing is handed in")
        chosen[name] = value
    return chosen


def _prefix(tensors: Mapping[str, Any], shapes: Mapping[str, object]) -> str:
    for prefix in ("", *PREFIXES):
        if all(prefix + name in tensors for name in shapes):
            return prefix
    missing = [name for name in shapes if name not in tensors]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise ParticipateError(f"submit: the run declares {missing[0]!r}{more}, not found among the {len(tensors)} given")


def is_torch(value: object) -> bool:
    """Whether it is a torch tensor, without loading torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_finite(value: Any) -> bool:
    if is_torch(value):
        import torch

        if not (value.is_floating_point() or value.is_complex()):
            return True
        if value.element_size() == 1:  # the 8-bit floats have no isfinite
            value = value.to(torch.float32)
        return bool(torch.isfinite(value.detach()).all())
    import numpy

    return value.dtype.kind not in "fc" or bool(numpy.isfinite(value).all())


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics as plain numbers. One that is not finite is None: it must not cost the job its update."""
    found: dict[str, float | None] = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ParticipateError(f"submit: metric {name!r} must be a number, found {type(value).__name__}") from error
        found[str(name)] = number if math.isfinite(number) else None
        if found[str(name)] is None:
            say(f"metric {name!r} is {number}")
    return found


# Writing ------------------------------------------------------------------------------------------------


def write_update(path: Path, chosen: Mapping[str, Any]) -> tuple[int, str]:
    """Write a safetensors file under a temporary name, sync it, rename it; its bytes and sha256."""
    with replacing(path) as part:
        if any(is_torch(value) for value in chosen.values()):
            from safetensors.torch import save_file as save_torch

            save_torch(_on_cpu(chosen), str(part))
        else:
            import numpy
            from safetensors.numpy import save_file as save_numpy

            save_numpy({name: numpy.asarray(value, order="C") for name, value in chosen.items()}, str(part))
        digest, size = hashlib.sha256(), 0
        with part.open("rb") as file:
            for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
                digest.update(block)
                size += len(block)
    if os.environ.get("FEDQUEUE_FAILPOINT", "").startswith("worker.written"):  # a test's wish: failpoints.py
        os.kill(os.getpid(), signal.SIGKILL)
    return size, digest.hexdigest()


def _on_cpu(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Contiguous, in processor memory, no two in the same: the format has no tied tensors."""
    import torch

    ready, seen = {}, set()
    for name, value in chosen.items():
        tensor = value if is_torch(value) else torch.as_tensor(value)
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    return ready


def write_file(path: Path, content: Any) -> None:
    """As JSON."""
    with replacing(path) as part:
        part.write_text(encode(content) + "\n", encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; on leaving, what was written there is on disk and becomes `path` at once."""
    # The host too: other nodes write to the same folders.
    part = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        yield part
        _sync(part)
        os.replace(str(part), str(path))
    except FedQueueError:
        raise
    except Exception as error:
        raise ParticipateError(f"{path}: cannot be written: {describe(error)}") from error
    finally:
        with suppress(OSError):
            part.unlink()
    with suppress(OSError):  # some file systems refuse this for folders
        _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe(error: BaseException) -> str:
    """The error's type and the first line of its text."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def say(text: str) -> None:
    print(f"fedqueue: {text}", file=sys.stderr, flush=True)
