"""Models as safetensors files, far larger than memory: checked, copied and picked apart as they stream past.

Only numpy is needed, never torch: the coordinator and the agent use this. Files are read with positioned reads into
buffers that are used again, so a model of any size costs a few MiB of memory; the page cache does the rest. How files
are summed is in tensorsum.py.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape as glob_escape
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np

from fedqueue.files import writing
from fedqueue.low_rank import Matrix
from fedqueue.protocol.aggregation import (
    DECLARATIONS,
    STATISTIC,
    declaration,
    declared_roles,
    find_roles,
    first_moments,
    is_moment,
)
from fedqueue.tensorbytes import (
    CODES,
    HEADER_LIMIT,
    REAL,
    Buffer,
    ChangedFileError,
    Content,
    Entry,
    Header,
    Kind,
    Number,
    TensorFileError,
    UnreadableFileError,
    checksum,
    encode_header,
    fill,
    opened,
    parse_header,
    read_header,
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
    "select",
    "verify",
    "write",
]

CHUNK_VALUES = 1 << 18
"""Values summed at a time: 1 MiB of float32."""
CHUNK_BYTES: Final = 1 << 20
DOUBLE: Final = np.dtype("<f8")
PIECE_BYTES: Final = 8 * CHUNK_VALUES
"""The largest piece of a tensor."""
FOLLOW_BYTES: Final = 4 << 20
"""How far behind a reader its file's digest is made."""

OTHER_BYTES: Final = "its sha256 is"
"""Begins the reason for refusing a file that is not the one that was meant."""

_LARGEST: Final = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
"""The largest number of a type."""


Expected = Callable[[Path], Content | None]
"""What the bytes of a file must be; None: nobody asks."""


@dataclass(frozen=True, slots=True)
class Description:
    tensors: int
    parameters: int
    bytes: int


def describe(path: Path) -> Description:
    header = read_header(path)
    return Description(len(header.entries), sum(e.values for e in header.entries.values()), header.bytes)


def misfit_of_kinds(update: Mapping[str, Kind], like: Mapping[str, Kind]) -> str | None:
    """Why tensors of these names, shapes and types cannot stand beside those of `like`; None when they can.

    Real numbers may come in another precision (bfloat16 for a float32 model).
    """
    if missing := [name for name in like if name not in update]:
        return f"tensor {_first(missing)} is missing"
    if unexpected := [name for name in update if name not in like]:
        return f"tensor {_first(unexpected)} is unexpected"
    for name, found in update.items():
        expected = like[name]
        if found.shape != expected.shape:
            return f"tensor {name!r} has shape {found.shape}, expected {expected.shape}"
        if found.type != expected.type and not {found.type, expected.type} <= REAL:
            return f"tensor {name!r} has type {found.type}, expected {expected.type}"
    return None


def not_finite(name: str, bad: int, values: int) -> str:
    return f"tensor {name!r} has {bad:,} of {values:,} values that are not finite"


def check(path: Path, like: Path, *, content: Content | None = None) -> str | None:
    """Why the update in `path` cannot stand beside the model `like`, in one line; None when it can.

    One pass over the file. Another sha256 than that of `content` comes before all else: then the bytes are not those
    that were meant. Of a file that is good, `content` has the checksums thereafter.
    """
    expected = read_header(like)
    with opened(path) as file:
        header: Header | None = None
        try:
            # The same tensors need about as much header; a huge one is not even parsed.
            header = parse_header(path, file, min(HEADER_LIMIT, 4 * expected.length + (64 << 10)))
            reason = misfit_of_kinds(header.kinds(), expected.kinds())
        except TensorFileError as error:
            reason = error.reason
        if reason is not None and content is None:
            return reason
        found, bad = _pass_over(path, file, header if reason is None else None, expected.kinds())
    if content is not None and found.sha256 != content.sha256:
        return f"{OTHER_BYTES} {found.sha256}, expected {content.sha256}"
    if content is not None:
        content.checksums.update(found.checksums)
    return reason or bad


def _pass_over(
    path: Path, file: int, header: Header | None, like: Mapping[str, Kind] | None = None
) -> tuple[Content, str | None]:
    """What the bytes of the whole file are, and the first of its tensors (in file order) that is not finite in the
    model `like`. Without a header nobody knows its pieces, and there are no checksums."""
    if header is None:
        return Content(_sha256(path, file)), None
    content, reason, digest = Content(""), None, hashlib.sha256()
    buffer = np.empty(max(header.length, PIECE_BYTES), np.uint8)
    scratch = np.empty_like(buffer)

    def read(begin: int, end: int) -> Buffer:
        piece = buffer[: end - begin]
        fill(path, file, piece, begin)
        digest.update(piece.data)
        content.checksums[begin] = checksum(piece)
        return piece

    read(0, header.length)
    for entry in header.entries.values():
        kind = like[entry.name] if like is not None else entry.kind
        most = _LARGEST.get(kind.type) if kind.type != entry.number.name else None
        bad = 0
        for begin, end in spans(entry):
            piece = read(begin, end)
            bad += count_not_finite(piece, entry.number, scratch) if like is not None else 0
            if most is not None and not bad:  # finite in its own type, and not in the narrower one of the model
                wide = widened(piece, entry.code, np.empty(len(piece) // entry.number.size, np.float64))
                bad += int(np.count_nonzero(np.abs(wide) > most))
        if bad and reason is None:
            reason = not_finite(entry.name, bad, entry.values)
    return replace(content, sha256=digest.hexdigest()), reason


def _sha256(path: Path, file: int) -> str:
    digest, buffer, size = hashlib.sha256(), np.empty(CHUNK_BYTES, np.uint8), os.fstat(file).st_size
    for place in range(0, size, CHUNK_BYTES):
        piece = buffer[: min(CHUNK_BYTES, size - place)]
        fill(path, file, piece, place)
        digest.update(piece.data)
    return digest.hexdigest()


def verify(path: Path, content: Content) -> None:
    """Raises a `ChangedFileError` unless these are the bytes that were meant. What was found by its sha256 has its
    checksums thereafter, and they are enough the next time."""
    with opened(path) as file:
        try:
            header = parse_header(path, file, HEADER_LIMIT)
        except UnreadableFileError:
            raise
        except TensorFileError:
            if _sha256(path, file) == content.sha256:
                raise  # it was so from the beginning
            raise ChangedFileError(path) from None
        if content.checksums:
            buffer = np.empty(max(header.length, PIECE_BYTES), np.uint8)
            for begin, end in all_spans(header):
                fill(path, file, piece := buffer[: end - begin], begin)
                content.must_have(path, begin, piece)
            return
        found, _ = _pass_over(path, file, header)
    if found.sha256 != content.sha256:
        raise ChangedFileError(path)
    content.checksums.update(found.checksums)


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


def count_not_finite(piece: Buffer, number: Number, scratch: Buffer) -> int:
    """How many values in these bytes are NaN or infinite."""
    if not number.bits or not len(piece):
        return 0
    bits = piece.view(number.bits)
    exponent = np.bitwise_and(bits, bits.dtype.type(number.exponent), out=scratch[: piece.nbytes].view(number.bits))
    if int(exponent.max()) != number.exponent:
        return 0
    bad = exponent == number.exponent
    return int(np.count_nonzero(bad.reshape(-1, number.size // bits.itemsize).any(axis=1)))


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def roles(header: Header, path: Path, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
    """What each tensor of this file is: by `chosen` patterns, by what the file declares, by the usual names."""
    try:
        return find_roles(
            {name: kind.type for name, kind in header.kinds().items()}, declared_roles(header.metadata), chosen
        )
    except ValueError as error:
        raise TensorFileError(path, str(error)) from None


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
    """Copies a model for those who use it: as `copy`, but without the moments of Adam, if there are any beside it."""
    header = read_header(path)
    names = [name for name in header.entries if not is_moment(name)]
    if len(names) == len(header.entries):
        copy(path, out, sha256)
    else:
        verify(path, Content(sha256))
        select(path, out, [glob_escape(name) for name in names], roles(header, path))


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


class _Digest:
    """The sha256 of a file that somebody reads, and its checksums, made in a thread beside that reads the same bytes
    once more.

    It follows the reader and so finds them in the page cache: a file larger than memory is still read from its disk
    once. What the reader leaves out is read at the end.
    """

    def __init__(self, path: Path, file: int, header: Header) -> None:
        self._path, self._file, self._header = path, file, header
        self._digest, self._checksums = hashlib.sha256(), dict[int, int]()
        self._said = 0  # how far the thread may go, in bytes
        self._ways: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: TensorFileError | None = None
        self._thread = threading.Thread(target=self._follow, name="digest", daemon=True)
        self._thread.start()

    def was_read(self, end: int) -> None:
        """The reader has come so far."""
        if end >= self._said + FOLLOW_BYTES:
            self._said = end
            self._ways.put(end)

    def stop(self) -> None:
        self._ways.put(None)
        self._thread.join()

    def finish(self) -> Content:
        self._ways.put(self._header.bytes)
        self.stop()
        if self._failure is not None:
            raise self._failure
        return Content(self._digest.hexdigest(), self._checksums)

    def _follow(self) -> None:
        buffer, far = np.empty(max(self._header.length, PIECE_BYTES), np.uint8), 0
        try:
            for begin, end in all_spans(self._header):
                while far < end:
                    way = self._ways.get()
                    if way is None:
                        return
                    far = way
                piece = buffer[: end - begin]
                fill(self._path, self._file, piece, begin)
                self._digest.update(piece.data)
                self._checksums[begin] = checksum(piece)
        except TensorFileError as error:
            self._failure = error


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    file: int
    header: Header
    content: Content | None = None  # that it must have
    digest: _Digest | None = None  # if that is not known by its checksums

    @classmethod
    def open(
        cls,
        stack: ExitStack,
        path: Path,
        like: Self | None = None,
        content: Expected = lambda path: None,
    ) -> Self:
        """`stack` closes it. It must have the tensors of `like`."""
        wanted = content(path)
        file = stack.enter_context(opened(path))
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        try:
            header = parse_header(path, file, HEADER_LIMIT)
            if like is not None and (reason := misfit_of_kinds(header.kinds(), like.header.kinds())):
                raise TensorFileError(path, reason)
        except TensorFileError:
            if wanted is not None:
                verify(path, wanted)  # that it is another file says more than what is odd about it
            raise
        if wanted is None:
            return cls(path, file, header)
        if wanted.checksums:
            source = cls(path, file, header, wanted)
            source.read(np.empty(header.length, np.uint8), 0)
            return source
        digest = _Digest(path, file, header)
        stack.callback(digest.stop)  # before the file is closed
        return cls(path, file, header, wanted, digest)

    def read(self, piece: Buffer, place: int) -> None:
        """Fill it from byte `place` on; it is a piece of a tensor, or the header."""
        fill(self.path, self.file, piece, place)
        if self.digest is not None:
            self.digest.was_read(place + piece.nbytes)
        elif self.content is not None:
            self.content.must_have(self.path, place, piece)

    def whole_numbers(self, name: str, start: int, count: int) -> Buffer:
        """So many numbers of a tensor that is not of real ones, from this one on."""
        place = self.header.entries[name]
        raw = np.empty(count * place.number.size, np.uint8)
        self.read(raw, place.begin + start * place.number.size)
        return raw.view(np.dtype(place.number.name).newbyteorder("<"))

    def values(self, name: str, start: int, count: int, precision: np.dtype[Any] = DOUBLE) -> Buffer:
        """So many real numbers of a tensor, from this one on."""
        place = self.header.entries[name]
        size = place.number.size // parts(place)
        raw = np.empty(count * size, np.uint8)
        self.read(raw, place.begin + start * size)
        return widened(raw, place.code, np.empty(count, precision))

    def matrix(self, name: str) -> Matrix:
        """The whole of a tensor, in double precision."""
        entry = self.header.entries[name]
        made = np.empty(entry.values)
        for start, count in pieces(entry):
            made[start : start + count] = self.values(name, start, count)
        return made.reshape(entry.shape)

    def must_be_unchanged(self) -> None:
        if self.digest is None or self.content is None:
            return  # nobody asks, or every piece was looked at when it was read
        found = self.digest.finish()
        if found.sha256 != self.content.sha256:
            raise ChangedFileError(self.path)
        self.content.checksums.update(found.checksums)


class Target:
    """A file that appears under its name only when it is whole and on disk."""

    def __init__(self, path: Path, beside: Path, file: BinaryIO) -> None:
        self._path, self._beside, self._file = path, beside, file
        self._digest, self._checksums, self._size = hashlib.sha256(), dict[int, int](), 0

    @classmethod
    @contextmanager
    def create(cls, path: Path) -> Iterator[Self]:
        beside = path.with_name(path.name + ".part")
        try:
            with writing(path), beside.open("wb", buffering=CHUNK_BYTES) as file:
                yield cls(path, beside, file)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)

    def put(self, data: bytes | memoryview) -> None:
        """The next piece."""
        self._digest.update(data)
        self._checksums[self._size] = checksum(data)
        self._size += len(data)
        self._file.write(data)

    def finish(self) -> Content:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._beside.replace(self._path)
        with opened(self._path.parent) as folder:
            os.fsync(folder)
        return Content(self.sha256, self._checksums)

    @property
    def sha256(self) -> str:
        """Of what was put so far."""
        return self._digest.hexdigest()


def precision_of(entry: Entry) -> np.dtype[Any]:
    """In which a tensor is summed."""
    return np.dtype("<f8" if entry.code == "F64" else "<f4")


def parts(entry: Entry) -> int:
    return 2 if entry.code == "C64" else 1  # a complex number is two real ones


def pieces(entry: Entry) -> Iterator[tuple[int, int]]:
    """The place of the first of each so many real numbers that are summed at a time, and how many they are."""
    count = entry.values * parts(entry)
    return ((start, min(CHUNK_VALUES, count - start)) for start in range(0, count, CHUNK_VALUES))


def spans(entry: Entry) -> Iterator[tuple[int, int]]:
    """The bytes of these pieces: where each begins and where it ends, from the start of the file."""
    size = entry.number.size // parts(entry)
    for start, length in pieces(entry):
        yield entry.begin + start * size, entry.begin + (start + length) * size


def all_spans(header: Header) -> Iterator[tuple[int, int]]:
    """Of a whole file, the header with them."""
    yield 0, header.length
    for entry in header.entries.values():
        yield from spans(entry)


def widened(raw: Buffer, code: str, out: Buffer) -> Buffer:
    """These bytes as numbers of `out`'s type, in `out` unless they are so already."""
    if code == "BF16":
        wide = out.view("<u4") if out.itemsize == 4 else np.empty(len(raw) // 2, "<u4")
        np.left_shift(raw.view("<u2"), 16, out=wide, dtype="<u4")
        if out.itemsize != 4:
            out[:] = wide.view("<f4")
        return out
    values = raw.view({"F16": "<f2", "F64": "<f8"}.get(code, "<f4"))
    if values.dtype == out.dtype:
        return values
    out[:] = values
    return out
