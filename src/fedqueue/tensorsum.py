"""Sums of models from file to file: each tensor by its role, whole or not at all.

The arithmetic is that of `fedqueue.aggregate`, to the last bit for float32.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from fedqueue.combining import Combiner, most_say, voices
from fedqueue.low_rank import Matrix, weighted_factors
from fedqueue.protocol.aggregation import (
    COUNTER,
    FACTOR,
    MOVING,
    PARAMETER,
    STATISTIC,
    factor_names,
    model_factors,
    statistic_factors,
)
from fedqueue.protocol.messages import Guard, ServerStep
from fedqueue.tensorbytes import (
    CHUNK_VALUES,
    NUMBERS,
    PIECE_BYTES,
    Buffer,
    Content,
    Entry,
    Expected,
    Number,
    Source,
    Target,
    TensorFileError,
    count_not_finite,
    encode_header,
    misfit_of_kinds,
    parts,
    pieces,
    precision_of,
    roles,
    widened,
)
from fedqueue.tensorfile import copy_tensor

LOOK_EVERY: Final = 8
"""Of so many pieces of a tensor, one tells how far updates agree."""


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
        like = Source.open(stack, current, content=content)
        sources: dict[Hashable, Source] = {now: like}
        role_of = roles(like.header, current)
        heard = voices(contributions) if COUNTER in role_of.values() else []
        told = [shares[voice.members[-1][0]][1] for voice in heard]  # of counters, what each said last
        guarded = [key for _, *keys, _ in shares for key in keys] if guard is not None else []
        for key in (*deltas, *means, *told, *guarded):
            if key not in sources:
                sources[key] = Source.open(stack, paths[key], like, content)
        stack.enter_context(_unchanged(sources.values()))
        entries = list(like.header.entries.values())
        target = stack.enter_context(Target.create(out))
        target.put(encode_header(entries, like.header.metadata))
        summing = _Summing(out, target)
        counters = [(sources[key], voice.weight) for key, voice in zip(told, heard, strict=True)]
        combiner = None
        if guard is not None:
            members = [(sources[trained], sources[base]) for _, trained, base, _ in shares]
            combiner = Combiner(contributions, rule, guard, _Pieces(like, members).read, from_first=from_first)
            combiner.look_at(
                ((entry, start, length), precision_of(entry))
                for entry in entries
                if role_of[entry.name] == PARAMETER
                for start, length in pieces(entry)
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
                copy_tensor(like, entry, target)
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
        bases: dict[Hashable, Source] = {}
        for c in contributions:
            if c.base_key not in bases:
                bases[c.base_key] = Source.open(stack, c.base)
        like = bases[contributions[0].base_key]
        terms = [
            (c.weight / total, c.clip, Source.open(stack, c.trained, like), bases[c.base_key]) for c in contributions
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


def to_blame(contributions: Sequence[FileContribution], name: str) -> Hashable | None:
    """Whose updates move this tensor furthest, weights included, where it cannot hold the sum of all; None: nobody's
    moves it at all."""
    far: dict[Hashable, float] = {}
    with ExitStack() as stack, np.errstate(all="ignore"):
        for c in contributions:
            base = Source.open(stack, c.base)
            trained = Source.open(stack, c.trained, base)
            if roles(base.header, c.base)[name] == FACTOR:  # it is their product that counts
                moves = prod(_furthest(trained, None, factor) for factor in factor_names(name))
            else:
                moves = _furthest(trained, base, name)
            if c.weight * c.clip > 0:
                far[c.voice] = far.get(c.voice, 0.0) + c.weight * c.clip * moves
    voice = max(far, key=lambda voice: far[voice], default=None)
    return voice if voice is not None and far[voice] > 0 else None


def _furthest(trained: Source, base: Source | None, name: str) -> float:
    """The largest number of a tensor, or of its change from the base."""
    most = 0.0
    for start, length in pieces(trained.header.entries[name]):
        values = trained.values(name, start, length)
        if base is not None:
            values -= base.values(name, start, length)
        most = max(most, float(np.abs(values).max()))
    return most


def norm_of_change(trained: Path, base: Path) -> float:
    """As `fedqueue.aggregate.norm_of_change`, of a file that has passed `check` against its base."""
    total = 0.0
    with ExitStack() as stack, np.errstate(all="ignore"):
        like = Source.open(stack, base)
        source = Source.open(stack, trained, like)
        role_of = roles(like.header, base)
        for entry in like.header.entries.values():
            if role_of[entry.name] not in MOVING:
                continue
            for start, length in pieces(entry):
                delta = source.values(entry.name, start, length) - like.values(entry.name, start, length)
                total += float(np.square(delta, out=delta).sum())
    return finite_root(total)


def finite_root(total: float) -> float:
    """The square root; of more than a number holds, that of the largest number."""
    return sqrt(min(total, sys.float_info.max))


@contextmanager
def _unchanged(sources: Iterable[Source]) -> Iterator[None]:
    """That a file is not what it was says more than what was odd about its content."""
    try:
        yield
    except TensorFileError:
        for source in sources:
            source.must_be_unchanged()
        raise


@dataclass(frozen=True, slots=True)
class _Stepping:
    """The files of the moments of a server's optimizer: those there are, and those that are made."""

    step: ServerStep
    before: Sequence[Source]
    after: Sequence[Target]

    @classmethod
    def open(cls, stack: ExitStack, files: FileStep, entries: Sequence[Entry], content: Expected) -> Self:
        before = [Source.open(stack, path, content=content) for path in files.moments]
        for source in before:
            if reason := misfit_of_kinds(source.header.kinds(), {entry.name: entry.kind for entry in entries}):
                raise TensorFileError(source.path, reason)
        after = [stack.enter_context(Target.create(path)) for path in files.out]
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
    def _read(source: Source, name: str, like: Buffer, start: int) -> Buffer:
        raw = np.empty(like.nbytes, np.uint8)
        source.read(raw, source.header.entries[name].begin + start * like.itemsize)
        return raw.view(like.dtype)


class TooLargeSumError(TensorFileError):
    """Every term is finite, and their sum is not: no file is at fault."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self.tensor = entry.name
        super().__init__(
            path,
            f"tensor {entry.name!r} is not finite once summed as {entry.number.name}, though all that is summed is: "
            "its values are too large together",
        )


class _Pieces:
    """Reads a piece of a tensor from every file that has a part in it, each once."""

    def __init__(self, current: Source, members: Sequence[tuple[Source, Source]]) -> None:
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

    def __init__(self, path: Path, target: Target) -> None:
        self._path, self._target = path, target
        self._raw = np.empty(PIECE_BYTES, np.uint8)
        self._total, self._share = np.empty_like(self._raw), np.empty_like(self._raw)

    def add_up(self, entry: Entry, terms: Sequence[tuple[Source, float]], *, within: bool = False) -> None:
        """Writes the sum of tensor * factor in the type of `entry`; `within` the range of the tensors."""
        for start, length in pieces(entry):
            with np.errstate(all="ignore"):  # what overflows is found when it is put
                self._put(entry, self._sum(entry, terms, start, length, within=within))

    def put_values(self, entry: Entry, values: Matrix) -> None:
        """Writes these in the type of `entry`."""
        precision = np.dtype("<f8" if entry.code == "F64" else "<f4")
        for start, length in pieces(entry):
            total = self._total[: length * precision.itemsize].view(precision)
            with np.errstate(all="ignore"):
                total[:] = values[start : start + length]
                self._put(entry, total)

    def most_say(self, entry: Entry, said: Sequence[tuple[Source, float]]) -> None:
        """Writes the value that most of the weight has."""
        weights = [weight for _, weight in said]
        for start, length in pieces(entry):
            if entry.number.bits:
                values = [source.values(entry.name, start, length, precision_of(entry)) for source, _ in said]
                self._put(entry, most_say(np.stack(values), weights))
            else:
                raw = [source.whole_numbers(entry.name, start, length) for source, _ in said]
                self._target.put(most_say(np.stack(raw), weights).view(np.uint8).data)

    def combine(self, entry: Entry, now: Source, combiner: Combiner, *, is_statistic: bool) -> None:
        """Writes what a guard's rule makes of a tensor."""
        precision = precision_of(entry)
        for start, length in pieces(entry):
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
        now: Source,
        terms: Sequence[tuple[Source, float]],
        stepping: _Stepping,
        combiner: Combiner | None,
    ) -> None:
        """Writes what a step of the server's optimizer makes of a parameter, with the sum as its gradient, or what a
        guard's rule makes of the changes."""
        for start, length in pieces(entry):
            with np.errstate(all="ignore"):
                if combiner is None:
                    change = self._sum(entry, terms, start, length).copy()
                else:
                    precision = precision_of(entry)
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
        terms: Sequence[tuple[Source, float]],
        start: int,
        length: int,
        *,
        within: bool = False,
    ) -> Buffer:
        """So many values of the sum, from that place on, in the buffer for it."""
        precision = np.dtype("<f8" if entry.code == "F64" else "<f4")
        of_each = parts(entry)
        total = self._total[: length * precision.itemsize].view(precision)
        share = self._share[: length * precision.itemsize].view(precision)
        if not terms:
            total[:] = 0
        least = most = total
        for number, (source, factor) in enumerate(terms):
            place = source.header.entries[entry.name]
            size = place.number.size // of_each
            raw = self._raw[: length * size]
            source.read(raw, place.begin + start * size)
            values = widened(raw, place.code, share)
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
        if count_not_finite(values.view(np.uint8), number, self._share):
            raise TooLargeSumError(self._path, entry)
