"""Models as safetensors files, far larger than memory: checked, summed and picked apart as they stream past.

Only numpy is needed, never torch: the coordinator and the agent use this. Files are read with positioned reads into
buffers that are used again, so a model of any size costs a few MiB of memory; the page cache does the rest.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Final, Self

import numpy as np

from fedqueue.files import writing
from fedqueue.protocol.roles import COUNTER, DECLARATION, STATISTIC, declaration, declared_roles, find_roles
from fedqueue.protocol.weigh import model_factors, statistic_factors
from fedqueue.tensorheader import (
    CODES,
    HEADER_LIMIT,
    NUMBERS,
    REAL,
    Buffer,
    ChangedFileError,
    Entry,
    Header,
    Kind,
    Number,
    TensorFileError,
    UnreadableFileError,
    encode_header,
    fill,
    opened,
    parse_header,
    read_header,
)

__all__ = [
    "ChangedFileError",
    "Description",
    "FileContribution",
    "Header",
    "Kind",
    "TensorFileError",
    "UnreadableFileError",
    "aggregate",
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
FOLLOW_BYTES: Final = 4 << 20
"""How far behind a reader its file's digest is made."""

OTHER_BYTES: Final = "its sha256 is"
"""Begins the reason for refusing a file that is not the one that was meant."""

_LARGEST: Final = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
"""The largest number of a type."""


Expected = Callable[[Path], str | None]
"""The sha256 that a file must have; None: there is no need to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContribution:
    """One update as it enters an aggregation."""

    weight: float
    """What the strategy gave it, discount and normalisation included (no unit)."""
    trained: Path
    """The model after the facility's steps."""
    base: Path
    """The model those steps started from."""
    base_key: Hashable
    """The same for all updates from the same base, such as its version: it is then read once."""


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


def check(path: Path, like: Path, *, sha256: str | None = None) -> str | None:
    """Why the update in `path` cannot stand beside the model `like`, in one line; None when it can.

    One pass over the file. A wrong sha256 comes before all else: then the bytes are not those that were meant.
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
        if reason is not None and sha256 is None:
            return reason
        entries = list(header.entries.values()) if header is not None and reason is None else []
        digest, bad = _pass_over(path, file, entries, expected.kinds())
    if sha256 is not None and digest != sha256:
        return f"{OTHER_BYTES} {digest}, expected {sha256}"
    return reason or bad


def _pass_over(path: Path, file: int, entries: Sequence[Entry], like: Mapping[str, Kind]) -> tuple[str, str | None]:
    """The sha256 of the whole file, and the first of these tensors (in file order) that is not finite in the model."""
    digest, size, reason = hashlib.sha256(), os.fstat(file).st_size, None
    buffer, scratch = np.empty(CHUNK_BYTES, np.uint8), np.empty(CHUNK_BYTES, np.uint8)

    def pieces(begin: int, end: int) -> Iterator[Buffer]:
        for place in range(begin, end, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, end - place)]
            fill(path, file, piece, place)
            digest.update(piece.data)
            yield piece

    place = 0
    for entry in entries:
        for _ in pieces(place, entry.begin):
            pass
        most = _LARGEST.get(like[entry.name].type) if like[entry.name].type != entry.number.name else None
        bad = 0
        for piece in pieces(entry.begin, entry.end):
            bad += _count_not_finite(piece, entry.number, scratch)
            if most is not None and not bad:  # finite in its own type, and not in the narrower one of the model
                wide = _widened(piece, entry.code, np.empty(len(piece) // entry.number.size, np.float64))
                bad += int(np.count_nonzero(np.abs(wide) > most))
        if bad and reason is None:
            reason = not_finite(entry.name, bad, entry.values)
        place = entry.end
    for _ in pieces(place, size):
        pass
    return digest.hexdigest(), reason


def verify(path: Path, sha256: str) -> None:
    """Raises a `ChangedFileError` unless these are the bytes that were meant."""
    with opened(path) as file:
        digest, _ = _pass_over(path, file, [], {})
    if digest != sha256:
        raise ChangedFileError(path)


def copy(path: Path, out: Path, sha256: str) -> None:
    """Copies a file, whole or not at all; a `ChangedFileError` unless these are the bytes that were meant."""
    with opened(path) as file, _Target.create(out) as target:
        buffer, size = np.empty(CHUNK_BYTES, np.uint8), os.fstat(file).st_size
        for place in range(0, size, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, size - place)]
            fill(path, file, piece, place)
            target.put(piece.data)
        if target.sha256 != sha256:
            raise ChangedFileError(path)
        target.finish()


def _count_not_finite(piece: Buffer, number: Number, scratch: Buffer) -> int:
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


# Summing -------------------------------------------------------------------------------------------------------------


def aggregate(
    current: Path,
    contributions: Sequence[FileContribution],
    rule: str,
    out: Path,
    *,
    from_first: bool = False,
    sha256: Expected = lambda path: None,
) -> str:
    """Writes the next model to `out`, whole or not at all, and returns its sha256.

    `contributions` are ordered oldest to newest and have passed `check`. What becomes of a tensor depends on its role
    (`roles`), and the arithmetic is that of `fedqueue.aggregate`, to the last bit for float32. Real tensors keep the
    current model's type and are summed in single precision (double for float64). `from_first`: the current model is the
    first of its run. A file that has not the `sha256` it must have is a `ChangedFileError`, and nothing is written.
    """
    # A base that is the current model joins its term; several updates from one base share one pass over it.
    now = ("current",)
    fresh = {c.base_key for c in contributions if c.base.resolve() == current.resolve()}
    paths: dict[Hashable, Path] = {now: current}
    shares: list[tuple[float, Hashable, Hashable]] = []
    for c in contributions:
        base: Hashable = now if c.base_key in fresh else ("base", c.base_key)
        trained: Hashable = ("trained", c.trained)
        paths |= {base: c.base, trained: c.trained}
        shares.append((c.weight, trained, base))
    deltas = model_factors(now, shares, rule)
    means = statistic_factors(now, [(weight, key) for weight, key, _ in shares], rule, from_first=from_first)
    with ExitStack() as stack:
        like = _Source.open(stack, current, sha256=sha256)
        sources: dict[Hashable, _Source] = {now: like}
        for key in (*deltas, *means, *([shares[-1][1]] if shares else [])):
            if key not in sources:
                sources[key] = _Source.open(stack, paths[key], like, sha256)
        newest = sources[shares[-1][1]] if shares else like
        stack.enter_context(_unchanged(sources.values()))
        role_of = roles(like.header, current)
        entries = list(like.header.entries.values())
        target = stack.enter_context(_Target.create(out))
        target.put(encode_header(entries, like.header.metadata))
        summing = _Summing(out, target)
        for entry in entries:
            role = role_of[entry.name]
            if not entry.number.bits:
                summing.copy(newest, newest.header.entries[entry.name])
            elif role == COUNTER:
                summing.add_up(entry, [(newest, 1.0)])
            else:
                factors = means if role == STATISTIC else deltas
                summing.add_up(entry, [(sources[key], f) for key, f in factors.items()], within=role == STATISTIC)
        for source in sources.values():
            source.must_be_unchanged()
        return target.finish()


@contextmanager
def _unchanged(sources: Iterable[_Source]) -> Iterator[None]:
    """That a file is not what it was says more than what was odd about its content."""
    try:
        yield
    except TensorFileError:
        for source in sources:
            source.must_be_unchanged()
        raise


def roles(header: Header, path: Path, chosen: Mapping[str, str] | None = None) -> dict[str, str]:
    """What each tensor of this file is: by `chosen` patterns, by what the file declares, by the usual names."""
    try:
        return find_roles(
            {name: kind.type for name, kind in header.kinds().items()}, declared_roles(header.metadata), chosen
        )
    except ValueError as error:
        raise TensorFileError(path, str(error)) from None


def select(path: Path, out: Path, patterns: Sequence[str], chosen_roles: Mapping[str, str] | None = None) -> str:
    """Writes only the tensors whose names match one of the shell patterns (adapters, say); returns the sha256. The file
    declares the roles of its tensors, so that every model made from it is aggregated alike."""
    with ExitStack() as stack:
        source = _Source.open(stack, path)
        entries = [e for e in source.header.entries.values() if any(fnmatchcase(e.name, p) for p in patterns)]
        if not entries:
            raise TensorFileError(path, f"no tensor's name matches {' or '.join(map(repr, patterns))}")
        role_of = roles(source.header, path, chosen_roles)
        metadata = {key: text for key, text in source.header.metadata.items() if key != DECLARATION}
        target = stack.enter_context(_Target.create(out))
        target.put(encode_header(entries, {**metadata, **declaration({e.name: role_of[e.name] for e in entries})}))
        copying = _Summing(out, target)
        for entry in entries:
            copying.copy(source, entry)
        return target.finish()


def write(path: Path, tensors: Mapping[str, Buffer], *, metadata: Mapping[str, str] | None = None) -> str:
    """Writes numpy arrays as a model, whole or not at all; returns the sha256."""
    entries = []
    for name, array in tensors.items():
        if (code := CODES.get(array.dtype.name)) is None:
            raise TensorFileError(path, f"tensor {name!r} has type {array.dtype.name}, which the format does not know")
        entries.append(Entry(name, code, array.shape, 0, array.nbytes))
    # The widest first, so that every tensor lies at a multiple of its own size.
    entries.sort(key=lambda entry: (-entry.number.size, entry.name))
    with _Target.create(path) as target:
        target.put(encode_header(entries, metadata or {}))
        for entry in entries:
            array = tensors[entry.name]
            flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
            target.put(flat.data)
        return target.finish()


class _Digest:
    """The sha256 of a file that somebody reads, made in a thread beside that reads the same bytes once more.

    It follows the reader and so finds them in the page cache: a file larger than memory is still read from its disk
    once. What the reader leaves out is read at the end.
    """

    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file
        self._digest = hashlib.sha256()
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

    def finish(self) -> str:
        """The sha256 of the whole file."""
        self._ways.put(os.fstat(self._file).st_size)
        self.stop()
        if self._failure is not None:
            raise self._failure
        return self._digest.hexdigest()

    def _follow(self) -> None:
        buffer, place = np.empty(CHUNK_BYTES, np.uint8), 0
        while (end := self._ways.get()) is not None:
            while place < end and self._failure is None:
                piece = buffer[: min(CHUNK_BYTES, end - place)]
                try:
                    fill(self._path, self._file, piece, place)
                except TensorFileError as error:
                    self._failure = error
                self._digest.update(piece.data)
                place += len(piece)


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    file: int
    header: Header
    digest: _Digest | None = None
    sha256: str = ""  # that it must have, if it has a digest

    @classmethod
    def open(
        cls,
        stack: ExitStack,
        path: Path,
        like: Self | None = None,
        sha256: Expected = lambda path: None,
    ) -> Self:
        """`stack` closes it. It must have the tensors of `like`."""
        wanted = sha256(path)
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
        digest = _Digest(path, file)
        stack.callback(digest.stop)  # before the file is closed
        return cls(path, file, header, digest, wanted)

    def read(self, buffer: Buffer, place: int) -> None:
        """Fill the buffer from byte `place` on."""
        fill(self.path, self.file, buffer, place)
        if self.digest is not None:
            self.digest.was_read(place + buffer.nbytes)

    def must_be_unchanged(self) -> None:
        if self.digest is not None and self.digest.finish() != self.sha256:
            raise ChangedFileError(self.path)


class _Target:
    """A file that appears under its name only when it is whole and on disk."""

    def __init__(self, path: Path, beside: Path, file: BinaryIO) -> None:
        self._path, self._beside, self._file = path, beside, file
        self._digest = hashlib.sha256()

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
        self._digest.update(data)
        self._file.write(data)

    def finish(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._beside.replace(self._path)
        with opened(self._path.parent) as folder:
            os.fsync(folder)
        return self.sha256

    @property
    def sha256(self) -> str:
        """Of what was put so far."""
        return self._digest.hexdigest()


class _Summing:
    """The buffers of one aggregation, and what is done in them."""

    def __init__(self, path: Path, target: _Target) -> None:
        self._path, self._target = path, target
        self._raw = np.empty(max(CHUNK_BYTES, CHUNK_VALUES * 8), np.uint8)
        self._total, self._share = np.empty_like(self._raw), np.empty_like(self._raw)

    def copy(self, source: _Source, entry: Entry) -> None:
        for place in range(entry.begin, entry.end, CHUNK_BYTES):
            piece = self._raw[: min(CHUNK_BYTES, entry.end - place)]
            source.read(piece, place)
            self._target.put(piece.data)

    def add_up(self, entry: Entry, terms: Sequence[tuple[_Source, float]], *, within: bool = False) -> None:
        """Writes the sum of tensor * factor in the type of `entry`; `within` the range of the tensors."""
        precision = np.dtype("<f8" if entry.code == "F64" else "<f4")
        parts = 2 if entry.code == "C64" else 1  # a complex number is two real ones
        count = entry.values * parts
        for start in range(0, count, CHUNK_VALUES):
            length = min(CHUNK_VALUES, count - start)
            total = self._total[: length * precision.itemsize].view(precision)
            share = self._share[: length * precision.itemsize].view(precision)
            least = most = total
            with np.errstate(all="ignore"):  # what overflows is found below
                for number, (source, factor) in enumerate(terms):
                    place = source.header.entries[entry.name]
                    size = place.number.size // parts
                    raw = self._raw[: length * size]
                    source.read(raw, place.begin + start * size)
                    values = _widened(raw, place.code, share)
                    if within:
                        least = values.copy() if number == 0 else np.where(values < least, values, least)
                        most = values.copy() if number == 0 else np.where(values > most, values, most)
                    # Product and sum are rounded one by one, as torch does it in `fedqueue.aggregate`.
                    np.multiply(values, precision.type(factor), out=share)
                    if number == 0:
                        total[:] = share
                    else:
                        total += share
                if within:
                    total[:] = np.where(total < least, least, np.where(total > most, most, total))
                rounded = self._rounded(total, entry.code)
            self._must_be_finite(entry, total, NUMBERS["F64" if entry.code == "F64" else "F32"])
            if rounded is not total:
                self._must_be_finite(entry, rounded, entry.number)
            self._target.put(rounded.view(np.uint8).data)

    def _rounded(self, total: Buffer, code: str) -> Buffer:
        """`total` to the nearest number of that type, the even one of two; in the buffer of the terms read."""
        if code == "F16":
            half = self._raw[: 2 * len(total)].view("<f2")
            half[:] = total
            return half
        if code == "BF16":
            bits, step = total.view("<u4"), self._share[: total.nbytes].view("<u4")
            np.right_shift(bits, 16, out=step)
            step &= 1
            step += 0x7FFF
            step += bits
            step >>= 16
            half = self._raw[: 2 * len(total)].view("<u2")
            half[:] = step
            return half
        return total

    def _must_be_finite(self, entry: Entry, values: Buffer, number: Number) -> None:
        if _count_not_finite(values.view(np.uint8), number, self._share):
            raise TensorFileError(self._path, f"tensor {entry.name!r} is not finite once summed as {entry.number.name}")


def _widened(raw: Buffer, code: str, out: Buffer) -> Buffer:
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
