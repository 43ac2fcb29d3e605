"""Models as safetensors files, far larger than memory: checked, summed and picked apart as they stream past.

Only numpy is needed, never torch: the coordinator and the agent use this. Files are read with positioned reads into
buffers that are used again, so a model of any size costs a few MiB of memory; the page cache does the rest.
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape as glob_escape
from math import prod, sqrt
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np

from fedqueue.combining import Combiner, most_say, voices
from fedqueue.files import writing
from fedqueue.low_rank import Matrix, weighted_factors
from fedqueue.protocol.aggregation import (
    COUNTER,
    DECLARATIONS,
    FACTOR,
    MOVING,
    PARAMETER,
    STATISTIC,
    declaration,
    declared_roles,
    find_roles,
    first_moments,
    is_moment,
    model_factors,
    statistic_factors,
)
from fedqueue.protocol.messages import Guard, ServerStep
from fedqueue.tensorbytes import (
    CODES,
    HEADER_LIMIT,
    NUMBERS,
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
    "FileContribution",
    "FileStep",
    "Header",
    "Kind",
    "TensorFileError",
    "UnreadableFileError",
    "aggregate",
    "agreement",
    "check",
    "copy",
    "describe",
    "misfit_of_kinds",
    "norm_of_change",
    "not_finite",
    "read_header",
    "select",
    "take_step",
    "verify",
    "write",
]

CHUNK_VALUES = 1 << 18
"""Values summed at a time: 1 MiB of float32."""
CHUNK_BYTES: Final = 1 << 20
DOUBLE: Final = np.dtype("<f8")
PIECE_BYTES: Final = 8 * CHUNK_VALUES
"""The largest piece of a tensor."""
LOOK_EVERY: Final = 8
"""Of so many pieces of a tensor, one tells how far updates agree."""
FOLLOW_BYTES: Final = 4 << 20
"""How far behind a reader its file's digest is made."""

OTHER_BYTES: Final = "its sha256 is"
"""Begins the reason for refusing a file that is not the one that was meant."""

_LARGEST: Final = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
"""The largest number of a type."""


Expected = Callable[[Path], Content | None]
"""What the bytes of a file must be; None: nobody asks."""


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
    clip: float = 1.0
    """Of the change from base to trained, the part that counts."""
    voice: Hashable = None
    """Whose it is: all of one facility have one voice. None: it has a voice of its own."""


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
        for begin, end in _spans(entry):
            piece = read(begin, end)
            bad += _count_not_finite(piece, entry.number, scratch) if like is not None else 0
            if most is not None and not bad:  # finite in its own type, and not in the narrower one of the model
                wide = _widened(piece, entry.code, np.empty(len(piece) // entry.number.size, np.float64))
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
            for begin, end in _all_spans(header):
                fill(path, file, piece := buffer[: end - begin], begin)
                content.must_have(path, begin, piece)
            return
        found, _ = _pass_over(path, file, header)
    if found.sha256 != content.sha256:
        raise ChangedFileError(path)
    content.checksums.update(found.checksums)


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
    guard: Guard | None = None,
    content: Expected = lambda path: None,
) -> Content:
    """Writes the next model to `out`, whole or not at all.

    `contributions` are ordered oldest to newest and have passed `check`. What becomes of a tensor depends on its role
    (`roles`), and the arithmetic is that of `fedqueue.aggregate`, to the last bit for float32. Real tensors keep the
    current model's type and are summed in single precision (double for float64). `from_first`: the current model is the
    first of its run. A file that has not the `content` it must have is a `ChangedFileError`, and nothing is written.
    """
    return _make(current, contributions, rule, out, from_first=from_first, guard=guard, content=content)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStep:
    """A step of the server's optimizer, from file to file."""

    step: ServerStep
    moments: Sequence[Path]
    """Those of the current model; none if there are none yet."""
    out: Sequence[Path]
    """Where those of the next model go, `step.moments` of them."""


def take_step(
    current: Path,
    contributions: Sequence[FileContribution],
    rule: str,
    out: Path,
    step: FileStep,
    *,
    from_first: bool = False,
    guard: Guard | None = None,
    content: Expected = lambda path: None,
) -> list[Content]:
    """As `aggregate`, but parameters take a step of the server's optimizer. Returns the content of the next model, and
    of each of its moments, which have the parameters' names."""
    return _make(current, contributions, rule, out, step, from_first=from_first, guard=guard, content=content)


def _make(
    current: Path,
    contributions: Sequence[FileContribution],
    rule: str,
    out: Path,
    step: FileStep | None = None,
    *,
    from_first: bool,
    guard: Guard | None,
    content: Expected,
) -> list[Content]:
    # A base that is the current model joins its term; several updates from one base share one pass over it.
    now = ("current",)
    fresh = {c.base_key for c in contributions if c.base.resolve() == current.resolve()}
    paths: dict[Hashable, Path] = {now: current}
    shares: list[tuple[float, Hashable, Hashable, float]] = []
    for c in contributions:
        base: Hashable = now if c.base_key in fresh else ("base", c.base_key)
        trained: Hashable = ("trained", c.trained)
        paths |= {base: c.base, trained: c.trained}
        shares.append((c.weight, trained, base, c.clip))
    deltas = model_factors(now, shares, rule, of_change=step is not None)
    trained_by = [(weight * part, key) for weight, key, _, part in shares]
    means = statistic_factors(now, trained_by, rule, from_first=from_first)
    with ExitStack() as stack:
        like = _Source.open(stack, current, content=content)
        sources: dict[Hashable, _Source] = {now: like}
        role_of = roles(like.header, current)
        heard = voices(contributions) if COUNTER in role_of.values() else []
        told = [shares[voice.members[-1][0]][1] for voice in heard]  # of counters, what each said last
        guarded = [key for _, *keys, _ in shares for key in keys] if guard is not None else []
        for key in (*deltas, *means, *told, *guarded):
            if key not in sources:
                sources[key] = _Source.open(stack, paths[key], like, content)
        stack.enter_context(_unchanged(sources.values()))
        entries = list(like.header.entries.values())
        target = stack.enter_context(_Target.create(out))
        target.put(encode_header(entries, like.header.metadata))
        summing = _Summing(out, target)
        counters = [(sources[key], voice.weight) for key, voice in zip(told, heard, strict=True)]
        combiner = None
        if guard is not None:
            members = [(sources[trained], sources[base]) for _, trained, base, _ in shares]
            pieces = _Pieces(like, members)
            combiner = Combiner(contributions, rule, guard, pieces.read, from_first=from_first)
            combiner.look_at(
                ((entry, start, length), _precision(entry))
                for entry in entries
                if role_of[entry.name] == PARAMETER
                for start, length in _pieces(entry)
            )
        stepping = None
        if step is not None:
            moving = [_moment_of(entry) for entry in entries if role_of[entry.name] == PARAMETER]
            stepping = _Stepping.open(stack, step, moving, content)
            sources |= {("moment", number): source for number, source in enumerate(stepping.before)}
        products = [(sources[key].matrix, factor) for key, factor in deltas.items()]
        kept: dict[str, Matrix] = {}
        for entry in entries:
            role = role_of[entry.name]
            if role == FACTOR and (stepping is not None or combiner is not None):
                raise TensorFileError(current, f"tensor {entry.name!r} is a factor, which can only be added up")
            if role == FACTOR:
                summing.put_values(entry, weighted_factors(entry.name, products, kept).reshape(-1))
            elif role == COUNTER and counters:
                summing.most_say(entry, counters)
            elif role == COUNTER:
                summing.copy(like, entry)
            elif role == PARAMETER and stepping is not None:
                terms = [(sources[key], f) for key, f in deltas.items()]
                summing.take_step(entry, like, terms, stepping, combiner)
            elif combiner is not None:
                summing.combine(entry, like, combiner, is_statistic=role == STATISTIC)
            else:
                factors = means if role == STATISTIC else deltas
                summing.add_up(entry, [(sources[key], f) for key, f in factors.items()], within=role == STATISTIC)
        for source in sources.values():
            source.must_be_unchanged()
        moments = [kept.finish() for kept in stepping.after] if stepping is not None else []
        return [target.finish(), *moments]


def _moment_of(entry: Entry) -> Entry:
    """How a moment of this parameter is written: in the precision of the sum, a complex number as its two parts."""
    code = "F64" if entry.code == "F64" else "F32"
    shape = (*entry.shape, 2) if entry.code == "C64" else entry.shape
    return Entry(entry.name, code, shape, 0, prod(shape) * NUMBERS[code].size)


def agreement(contributions: Sequence[FileContribution]) -> float | None:
    """As `fedqueue.aggregate.agreement`, from files; of large tensors one piece of eight is looked at."""
    total = sum(c.weight for c in contributions)
    if len(contributions) < 2 or total <= 0:
        return None
    together = apart = 0.0
    with ExitStack() as stack:
        bases: dict[Hashable, _Source] = {}
        for c in contributions:
            if c.base_key not in bases:
                bases[c.base_key] = _Source.open(stack, c.base)
        like = bases[contributions[0].base_key]
        terms = [
            (c.weight / total, c.clip, _Source.open(stack, c.trained, like), bases[c.base_key]) for c in contributions
        ]
        role_of = roles(like.header, contributions[0].base)
        for entry in like.header.entries.values():
            if role_of[entry.name] not in MOVING or not entry.number.bits or entry.code == "C64":
                continue
            for start in range(0, entry.values, LOOK_EVERY * CHUNK_VALUES):
                mean = np.zeros(min(CHUNK_VALUES, entry.values - start))
                for share, part, trained, base in terms:
                    delta = trained.values(entry.name, start, len(mean)) - base.values(entry.name, start, len(mean))
                    delta *= part
                    mean += share * delta
                    apart += share * float(delta @ delta)
                together += float(mean @ mean)
    return together / apart if apart > 0 else None


def norm_of_change(trained: Path, base: Path) -> float:
    """As `fedqueue.aggregate.norm_of_change`, of a file that has passed `check` against its base."""
    total = 0.0
    with ExitStack() as stack, np.errstate(all="ignore"):
        like = _Source.open(stack, base)
        source = _Source.open(stack, trained, like)
        role_of = roles(like.header, base)
        for entry in like.header.entries.values():
            if role_of[entry.name] not in MOVING:
                continue
            for start, length in _pieces(entry):
                delta = source.values(entry.name, start, length) - like.values(entry.name, start, length)
                total += float(np.square(delta, out=delta).sum())
    return finite_root(total)


def finite_root(total: float) -> float:
    """The square root; of more than a number holds, that of the largest number."""
    return sqrt(min(total, sys.float_info.max))


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
        source = _Source.open(stack, path)
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
        target = stack.enter_context(_Target.create(out))
        # Beside tensors of narrow types the moments come first, so that they lie at multiples of their own size.
        every = [*beside, *entries]
        target.put(encode_header(every, {**metadata, **declaration({e.name: role_of[e.name] for e in every})}))
        for entry in beside:
            target.put(bytes(entry.bytes))
        copying = _Summing(out, target)
        for entry in entries:
            copying.copy(source, entry)
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


def write(path: Path, tensors: Mapping[str, Buffer], *, metadata: Mapping[str, str] | None = None) -> Content:
    """Writes numpy arrays as a model, whole or not at all."""
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
            for begin, end in _spans(entry):
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
            for begin, end in _all_spans(self._header):
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
class _Source:
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
        size = place.number.size // _parts(place)
        raw = np.empty(count * size, np.uint8)
        self.read(raw, place.begin + start * size)
        return _widened(raw, place.code, np.empty(count, precision))

    def matrix(self, name: str) -> Matrix:
        """The whole of a tensor, in double precision."""
        entry = self.header.entries[name]
        made = np.empty(entry.values)
        for start, count in _pieces(entry):
            made[start : start + count] = self.values(name, start, count)
        return made.reshape(entry.shape)

    def must_be_unchanged(self) -> None:
        if self.digest is None or self.content is None:
            return  # nobody asks, or every piece was looked at when it was read
        found = self.digest.finish()
        if found.sha256 != self.content.sha256:
            raise ChangedFileError(self.path)
        self.content.checksums.update(found.checksums)


class _Target:
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


@dataclass(frozen=True, slots=True)
class _Stepping:
    """The files of the moments of a server's optimizer: those there are, and those that are made."""

    step: ServerStep
    before: Sequence[_Source]
    after: Sequence[_Target]

    @classmethod
    def open(cls, stack: ExitStack, files: FileStep, entries: Sequence[Entry], content: Expected) -> Self:
        before = [_Source.open(stack, path, content=content) for path in files.moments]
        for source in before:
            if reason := misfit_of_kinds(source.header.kinds(), {entry.name: entry.kind for entry in entries}):
                raise TensorFileError(source.path, reason)
        after = [stack.enter_context(_Target.create(path)) for path in files.out]
        for target in after:
            target.put(encode_header(entries, {}))
        return cls(files.step, before, after)

    def way(self, entry: Entry, change: Buffer, start: int) -> tuple[Buffer, list[Buffer]]:
        """What is added to these values of a parameter, and their moments; `start` is the place of the first. Each
        operation is rounded by itself, in the order of `fedqueue.aggregate`."""
        step, number = self.step, change.dtype.type
        first, second = np.zeros_like(change), np.full_like(change, step.epsilon * step.epsilon)
        largest = [second] if step.largest else []
        if self.before:
            first, second, *largest = (self._read(source, entry.name, change, start) for source in self.before)
        first = first * number(step.beta1) + change * number(1 - step.beta1)
        second = second * number(step.beta2) + change * change * number(1 - step.beta2)
        largest = [np.where(second > most, second, most) for most in largest]
        divisor = np.sqrt(largest[0] if largest else second) + number(step.epsilon)
        return first * number(step.rate) / divisor, [first, second, *largest]

    @staticmethod
    def _read(source: _Source, name: str, like: Buffer, start: int) -> Buffer:
        raw = np.empty(like.nbytes, np.uint8)
        source.read(raw, source.header.entries[name].begin + start * like.itemsize)
        return raw.view(like.dtype)


class TooLargeSumError(TensorFileError):
    """Every term is finite, and their sum is not: no file is at fault."""

    def __init__(self, path: Path, entry: Entry) -> None:
        super().__init__(
            path,
            f"tensor {entry.name!r} is not finite once summed as {entry.number.name}, though all that is summed is: "
            "its values are too large together",
        )


class _Pieces:
    """Reads a piece of a tensor from every file that has a part in it, each once."""

    def __init__(self, current: _Source, members: Sequence[tuple[_Source, _Source]]) -> None:
        self._current, self._members = current, members
        self._piece: object = None
        self._read: dict[int, Buffer] = {}

    def read(self, place: int, which: str, piece: tuple[Entry, int, int], precision: np.dtype[Any]) -> Buffer:
        if piece != self._piece:
            self._piece, self._read = piece, {}
        trained, base = self._members[place]
        source = {"trained": trained, "base": base, "current": self._current}[which]
        if id(source) not in self._read:
            entry, start, length = piece
            self._read[id(source)] = source.values(entry.name, start, length, precision)
        return self._read[id(source)]


class _Summing:
    """The buffers of one aggregation, and what is done in them."""

    def __init__(self, path: Path, target: _Target) -> None:
        self._path, self._target = path, target
        self._raw = np.empty(PIECE_BYTES, np.uint8)
        self._total, self._share = np.empty_like(self._raw), np.empty_like(self._raw)

    def copy(self, source: _Source, entry: Entry) -> None:
        for begin, end in _spans(entry):
            piece = self._raw[: end - begin]
            source.read(piece, begin)
            self._target.put(piece.data)

    def add_up(self, entry: Entry, terms: Sequence[tuple[_Source, float]], *, within: bool = False) -> None:
        """Writes the sum of tensor * factor in the type of `entry`; `within` the range of the tensors."""
        for start, length in _pieces(entry):
            with np.errstate(all="ignore"):  # what overflows is found when it is put
                self._put(entry, self._sum(entry, terms, start, length, within=within))

    def put_values(self, entry: Entry, values: Matrix) -> None:
        """Writes these in the type of `entry`."""
        precision = np.dtype("<f8" if entry.code == "F64" else "<f4")
        for start, length in _pieces(entry):
            total = self._total[: length * precision.itemsize].view(precision)
            with np.errstate(all="ignore"):
                total[:] = values[start : start + length]
                self._put(entry, total)

    def most_say(self, entry: Entry, said: Sequence[tuple[_Source, float]]) -> None:
        """Writes the value that most of the weight has."""
        weights = [weight for _, weight in said]
        for start, length in _pieces(entry):
            if entry.number.bits:
                values = [source.values(entry.name, start, length, _precision(entry)) for source, _ in said]
                self._put(entry, most_say(np.stack(values), weights))
            else:
                raw = [source.whole_numbers(entry.name, start, length) for source, _ in said]
                self._target.put(most_say(np.stack(raw), weights).view(np.uint8).data)

    def combine(self, entry: Entry, now: _Source, combiner: Combiner, *, is_statistic: bool) -> None:
        """Writes what a guard's rule makes of a tensor."""
        precision = _precision(entry)
        for start, length in _pieces(entry):
            with np.errstate(all="ignore"):
                current, piece = now.values(entry.name, start, length, precision), (entry, start, length)
                if is_statistic:
                    total = combiner.statistic(piece, precision, current)
                else:
                    change = combiner.change(piece, precision)
                    total = current if change is None else current + change
                self._put(entry, total)

    def take_step(
        self,
        entry: Entry,
        now: _Source,
        terms: Sequence[tuple[_Source, float]],
        stepping: _Stepping,
        combiner: Combiner | None,
    ) -> None:
        """Writes what a step of the server's optimizer makes of a parameter, with the sum as its gradient, or what a
        guard's rule makes of the changes."""
        for start, length in _pieces(entry):
            with np.errstate(all="ignore"):
                if combiner is None:
                    change = self._sum(entry, terms, start, length).copy()
                else:
                    precision = _precision(entry)
                    found = combiner.change((entry, start, length), precision)
                    change = np.zeros(length, precision) if found is None else found
                way, moments = stepping.way(entry, change, start)
                for target, moment in zip(stepping.after, moments, strict=True):
                    self._must_be_finite(entry, moment, NUMBERS["F64" if entry.code == "F64" else "F32"])
                    target.put(moment.view(np.uint8).data)
                total = self._sum(entry, [(now, 1.0)], start, length)
                total += way
                self._put(entry, total)

    def _sum(
        self,
        entry: Entry,
        terms: Sequence[tuple[_Source, float]],
        start: int,
        length: int,
        *,
        within: bool = False,
    ) -> Buffer:
        """So many values of the sum, from that place on, in the buffer for it."""
        precision = np.dtype("<f8" if entry.code == "F64" else "<f4")
        parts = _parts(entry)
        total = self._total[: length * precision.itemsize].view(precision)
        share = self._share[: length * precision.itemsize].view(precision)
        if not terms:
            total[:] = 0
        least = most = total
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
        return total

    def _put(self, entry: Entry, total: Buffer) -> None:
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
            raise TooLargeSumError(self._path, entry)


def _precision(entry: Entry) -> np.dtype[Any]:
    """In which a tensor is summed."""
    return np.dtype("<f8" if entry.code == "F64" else "<f4")


def _parts(entry: Entry) -> int:
    return 2 if entry.code == "C64" else 1  # a complex number is two real ones


def _pieces(entry: Entry) -> Iterator[tuple[int, int]]:
    """The place of the first of each so many real numbers that are summed at a time, and how many they are."""
    count = entry.values * _parts(entry)
    return ((start, min(CHUNK_VALUES, count - start)) for start in range(0, count, CHUNK_VALUES))


def _spans(entry: Entry) -> Iterator[tuple[int, int]]:
    """The bytes of these pieces: where each begins and where it ends, from the start of the file."""
    size = entry.number.size // _parts(entry)
    for start, length in _pieces(entry):
        yield entry.begin + start * size, entry.begin + (start + length) * size


def _all_spans(header: Header) -> Iterator[tuple[int, int]]:
    """Of a whole file, the header with them."""
    yield 0, header.length
    for entry in header.entries.values():
        yield from _spans(entry)


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
