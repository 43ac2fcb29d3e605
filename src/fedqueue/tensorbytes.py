"""Files of tensors in the safetensors format: what they hold, checked in full before anything relies on it, and read
and written in pieces, so that a model of any size costs a few MiB of memory.

A file is eight bytes with the length of its header, the header in JSON (name -> type, shape, place), then the tensors
without gaps. A header may come from anyone: whatever its bytes are, it is either sound or a `TensorFileError`. Only
numpy is needed, never torch: the coordinator and the agent use this.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np
from numpy.typing import NDArray

from fedqueue.errors import FedQueueError, what_to_do
from fedqueue.files import writing
from fedqueue.low_rank import Matrix
from fedqueue.protocol.aggregation import declared_roles, find_roles

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

HEADER_LIMIT: Final = 64 << 20
"""Bytes of header that are read at most; large models have a few MiB."""
NAME_LIMIT: Final = 512
SIZE_LIMIT: Final = (1 << 63) - 1  # of a shape's product

Buffer = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Number:
    """A kind of number that a file may hold."""

    name: str  # as torch and numpy call it
    size: int  # bytes
    bits: str = ""  # numpy type to look at its bits with; "": not a floating-point number
    exponent: int = 0  # bits that are all set in infinities and NaN, and in nothing else


NUMBERS: Final = {
    "BOOL": Number("bool", 1),
    "U8": Number("uint8", 1),
    "I8": Number("int8", 1),
    "U16": Number("uint16", 2),
    "I16": Number("int16", 2),
    "U32": Number("uint32", 4),
    "I32": Number("int32", 4),
    "U64": Number("uint64", 8),
    "I64": Number("int64", 8),
    "F16": Number("float16", 2, "<u2", 0x7C00),
    "BF16": Number("bfloat16", 2, "<u2", 0x7F80),
    "F32": Number("float32", 4, "<u4", 0x7F800000),
    "F64": Number("float64", 8, "<u8", 0x7FF0000000000000),
    "C64": Number("complex64", 8, "<u4", 0x7F800000),
}
CODES: Final = {number.name: code for code, number in NUMBERS.items()}
REAL: Final = frozenset({"float16", "bfloat16", "float32", "float64"})


class TensorFileError(FedQueueError):
    """A model file that is damaged, does not fit, or cannot be made; `reason` is the message without the path."""

    exit_code = 11

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class UnreadableFileError(TensorFileError):
    """The file is not there or cannot be read now: nothing is known of its content."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(path, f"cannot be read: {error.strerror}: {what_to_do(error)}")


class ChangedFileError(TensorFileError):
    """The bytes are not those that the sha256 in the file's name was made of."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "has changed on its disk: put the right file back; its name is its sha256")


@dataclass(frozen=True, slots=True)
class Kind:
    """What two tensors must share to be summed."""

    shape: tuple[int, ...]
    type: str  # "float32", "bfloat16", ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in a file."""

    name: str
    code: str  # "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int

    @property
    def number(self) -> Number:
        return NUMBERS[self.code]

    @property
    def kind(self) -> Kind:
        return Kind(self.shape, self.number.name)

    @property
    def values(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds, in the order of its bytes."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    length: int  # bytes before the first tensor
    bytes: int  # of the whole file

    def kinds(self) -> dict[str, Kind]:
        return {name: entry.kind for name, entry in self.entries.items()}


def read_header(path: Path, *, limit: int = HEADER_LIMIT) -> Header:
    """The header, checked in full: what it says can be relied on, and it covers the file exactly."""
    with opened(path) as file:
        return parse_header(path, file, limit)


def parse_header(path: Path, file: int, limit: int) -> Header:
    size = os.fstat(file).st_size
    length = int.from_bytes(_read_small(path, file, 8, 0), "little") if size >= 8 else 0
    if size < 8 or length > size - 8:
        raise TensorFileError(path, f"is no safetensors file, or not a whole one ({size:,} bytes)")
    if length > limit:
        raise TensorFileError(path, f"has a header of {length:,} bytes, more than the {limit:,} allowed")
    try:
        content = json.loads(_read_small(path, file, length, 8).decode("utf-8"), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise TensorFileError(path, "its header is nested too deeply") from None
    except ValueError as error:  # of UTF-8, of JSON, of a number too long, or a duplicate
        raise TensorFileError(path, f"its header cannot be read: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(content, dict):
        raise TensorFileError(path, "its header is no JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorFileError(path, "its __metadata__ is no object of strings")
    if not all(_is_text(text) for item in metadata.items() for text in item):
        raise TensorFileError(path, "its __metadata__ is no valid text")
    entries = [_entry(path, name, info, 8 + length) for name, info in content.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    place = 8 + length
    for entry in entries:
        if entry.begin != place:
            raise TensorFileError(path, f"tensor {entry.name!r} does not begin where the one before it ends")
        place = entry.end
    if place != size:
        raise TensorFileError(path, f"has {size:,} bytes, but its header speaks of {place:,}")
    return Header({entry.name: entry for entry in entries}, metadata, 8 + length, size)


def _entry(path: Path, name: str, info: object, start: int) -> Entry:
    if len(name) > NAME_LIMIT or not _is_text(name):
        raise TensorFileError(path, f"a tensor's name is no valid text of {NAME_LIMIT} characters: {name[:40]!r}...")
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(path, f"tensor {name!r} must have dtype, shape and data_offsets, and nothing else")
    code, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(code, str) or code not in NUMBERS:
        raise TensorFileError(
            path, f"tensor {name!r} has dtype {str(code)[:40]!r}, expected one of {', '.join(NUMBERS)}"
        )
    if not _naturals(shape) or len(shape) > 64:
        raise TensorFileError(path, f"tensor {name!r} has a shape that is no list of at most 64 whole numbers")
    values = 1
    for length in shape:  # step by step: a product past the limit is no size, even if a later length is zero
        values *= length
        if values > SIZE_LIMIT:
            raise TensorFileError(path, f"tensor {name!r} has a shape too large to exist")
    if not _naturals(offsets) or len(offsets) != 2:
        raise TensorFileError(path, f"tensor {name!r} has data_offsets that are not two whole numbers")
    begin, end = offsets
    if end - begin != values * NUMBERS[code].size:
        raise TensorFileError(path, f"tensor {name!r} has {end - begin:,} bytes, which is not what its shape needs")
    return Entry(name, code, tuple(shape), start + begin, start + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= SIZE_LIMIT for item in value)


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8; JSON can name halves of characters, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def opened(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableFileError(path, error) from None
    try:
        yield file
    finally:
        os.close(file)


def _read_small(path: Path, file: int, length: int, place: int) -> bytes:
    buffer = np.empty(length, np.uint8)
    fill(path, file, buffer, place)
    return buffer.tobytes()


def fill(path: Path, file: int, buffer: Buffer, place: int) -> None:
    """The whole `buffer` from the file, beginning at byte `place`."""
    view = buffer.view(np.uint8).data
    while view:
        try:
            count = os.preadv(file, [view], place)
        except OSError as error:
            raise UnreadableFileError(path, error) from None
        if count == 0:
            raise TensorFileError(path, "became shorter while it was read")
        view, place = view[count:], place + count


def encode_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor, for a file that holds these tensors in this order."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for entry in entries:
        end = place + entry.bytes
        content[entry.name] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


# What the bytes must be -------------------------------------------------------------------------------------
# A disk, a controller or a memory may give back other bytes than were written, and say nothing. Checksums are made in
# the pass that makes the sha256, and live as long as the process; whoever reads a piece thereafter compares it at once.

ROW_BYTES: Final = 4096
"""Added up to one number: what disks and page caches lose or mistake for another is such a block, or bits of it."""


@dataclass(frozen=True, slots=True)
class Content:
    sha256: str
    checksums: dict[int, int] = field(default_factory=dict)
    """By the byte at which a piece begins. Empty until a pass over the file has found it to have this sha256."""

    def must_have(self, path: Path, place: int, piece: Buffer | memoryview) -> None:
        """Raises a `ChangedFileError` unless these bytes of the file `path`, a piece, are what they were."""
        if self.checksums.get(place) != checksum(piece):
            raise ChangedFileError(path)


def checksum(piece: Buffer | memoryview | bytes) -> int:
    """Of any number of bytes; it differs from process to process.

    Whatever happens to a block of 4096 bytes is found if it changes the sum of its 64-bit words, as any change of one
    word does; blocks that change places are found too.
    """
    data: Any = np.frombuffer(piece, np.uint8)
    whole = len(data) - len(data) % ROW_BYTES
    sums = data[:whole].view("<u8").reshape(-1, ROW_BYTES // 8).sum(axis=1, dtype="<u8")
    return hash((sums.tobytes(), data[whole:].tobytes()))


Expected = Callable[[Path], Content | None]
"""What the bytes of a file must be; None: nobody asks."""


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
