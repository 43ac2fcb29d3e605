"""Whole models as safetensors files: described, copied, picked apart and written. What a file holds and how it is
checked is in tensorbytes.py, how files are summed in tensorsum.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape as glob_escape
from math import prod
from pathlib import Path

import numpy as np

from fedqueue.protocol.aggregation import DECLARATIONS, STATISTIC, declaration, first_moments, is_moment
from fedqueue.tensorbytes import (
    CHUNK_BYTES,
    CODES,
    PIECE_BYTES,
    Buffer,
    ChangedFileError,
    Content,
    Entry,
    Header,
    Kind,
    Source,
    Target,
    TensorFileError,
    UnreadableFileError,
    check,
    encode_header,
    fill,
    misfit_of_kinds,
    not_finite,
    opened,
    read_header,
    roles,
    spans,
    verify,
)

__all__ = [
    "ChangedFileError",
    "Content",
    "Description",
    "Header",
    "Kind",
    "TensorFileError",
    "UnreadableFileError",
    "check",
    "copy",
    "describe",
    "misfit_of_kinds",
    "not_finite",
    "read_header",
    "roles",
    "select",
    "verify",
    "write",
]


@dataclass(frozen=True, slots=True)
class Description:
    tensors: int
    parameters: int
    bytes: int


def describe(path: Path) -> Description:
    header = read_header(path)
    return Description(len(header.entries), sum(e.values for e in header.entries.values()), header.bytes)


def copy(path: Path, out: Path, sha256: str) -> None:
    """Copies a file, whole or not at all; a `ChangedFileError` unless these are the bytes that were meant."""
    with opened(path) as file, Target.create(out) as target:
        buffer, size = np.empty(CHUNK_BYTES, np.uint8), os.fstat(file).st_size
        for place in range(0, size, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, size - place)]
            fill(path, file, piece, place)
            target.put(piece.data)
        if target.sha256 != sha256:
            raise ChangedFileError(path)
        target.finish()


def select(
    path: Path,
    out: Path,
    patterns: Sequence[str],
    chosen_roles: Mapping[str, str] | None = None,
    *,
    moments: bool = False,
) -> Content:
    """Writes only the tensors whose names match one of the shell patterns (adapters, say), and with `moments` those of
    Adam, of which nobody knows any yet. The file declares the roles of its tensors, so that every model made from it is
    aggregated alike."""
    with ExitStack() as stack:
        source = Source.open(stack, path)
        entries = [e for e in source.header.entries.values() if any(fnmatchcase(e.name, p) for p in patterns)]
        if not entries:
            raise TensorFileError(path, f"no tensor's name matches {' or '.join(map(repr, patterns))}")
        role_of = roles(source.header, path, chosen_roles)
        metadata = {key: text for key, text in source.header.metadata.items() if key not in DECLARATIONS}
        beside: list[Entry] = []
        if moments:
            types = {entry.name: entry.kind.type for entry in entries}
            chosen = {entry.name: role_of[entry.name] for entry in entries}
            found = first_moments({entry.name: entry.shape for entry in entries}, types, chosen)
            beside = [Entry(name, "F32", shape, 0, 4 * prod(shape)) for name, shape in found.items()]
            role_of |= dict.fromkeys(found, STATISTIC)
        target = stack.enter_context(Target.create(out))
        # Beside tensors of narrow types the moments come first, so that they lie at multiples of their own size.
        every = [*beside, *entries]
        target.put(encode_header(every, {**metadata, **declaration({e.name: role_of[e.name] for e in every})}))
        for entry in beside:
            target.put(bytes(entry.bytes))
        for entry in entries:
            copy_tensor(source, entry, target)
        return target.finish()


def export(path: Path, out: Path, sha256: str) -> None:
    """Copies a model for those who use it: as `copy`, but without the moments of Adam, if there are any beside it. Also
    onto itself."""
    header = read_header(path)
    names = [name for name in header.entries if not is_moment(name)]
    if len(names) < len(header.entries):
        verify(path, Content(sha256))
        select(path, out, [glob_escape(name) for name in names], roles(header, path))
    elif out != path:
        copy(path, out, sha256)


def copy_tensor(source: Source, entry: Entry, target: Target) -> None:
    buffer = np.empty(PIECE_BYTES, np.uint8)
    for begin, end in spans(entry):
        source.read(piece := buffer[: end - begin], begin)
        target.put(piece.data)


def write(path: Path, tensors: Mapping[str, Buffer], *, metadata: Mapping[str, str] | None = None) -> Content:
    """Writes numpy arrays as a model, whole or not at all."""
    entries = []
    for name, array in tensors.items():
        if (code := CODES.get(array.dtype.name)) is None:
            raise TensorFileError(path, f"tensor {name!r} has type {array.dtype.name}, which the format does not know")
        entries.append(Entry(name, code, array.shape, 0, array.nbytes))
    # The widest first, so that every tensor lies at a multiple of its own size.
    entries.sort(key=lambda entry: (-entry.number.size, entry.name))
    with Target.create(path) as target:
        target.put(encode_header(entries, metadata or {}))
        for entry in entries:
            array = tensors[entry.name]
            flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
            for begin, end in spans(entry):
                target.put(flat[begin:end].data)
        return target.finish()
