"""The safetensors format: what a file holds, checked in full before anything relies on it.

A file is eight bytes with the length of its header, the header in JSON (name -> type, shape, place), then the tensors
without gaps. A header may come from anyone: whatever its bytes are, it is either sound or a `TensorFileError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedqueue.errors import FedQueueError, what_to_do

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
