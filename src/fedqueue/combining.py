"""Rules that combine the changes of several facilities when some of them may lie: median, trimmed mean, Krum.

`fedqueue.aggregate` and `fedqueue.tensorsum` bring the numbers, piece by piece, in the same order and precision; what
is done with them is written once, here, so that both get the same bits. Each facility has one voice: what it handed in
several times is averaged first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np

from fedqueue.protocol.messages import Guard
from fedqueue.tensorbytes import Buffer

SORTED_AT_ONCE = 1 << 15
"""Values of each voice that are sorted at a time, in the processor's cache."""
SAME = 1e-9  # as a share of all weights: less is rounding


class Share(Protocol):
    """One update, in memory or in a file."""

    @property
    def weight(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def voice(self) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class Voice:
    """What one facility brings to an aggregation."""

    weight: float
    members: tuple[tuple[int, float], ...]  # place of an update among the contributions, oldest first; its share


def voices(shares: Sequence[Share]) -> list[Voice]:
    """By facility, in the order in which each was first heard; who has no weight has no voice."""
    places: dict[Hashable, list[int]] = {}
    for place, share in enumerate(shares):
        if share.weight > 0:
            places.setdefault(("alone", place) if share.voice is None else share.voice, []).append(place)
    found = []
    for members in places.values():
        total = sum(shares[place].weight for place in members)
        found.append(Voice(total, tuple((place, shares[place].weight / total) for place in members)))
    return found


def tolerated(count: int, hostile: float) -> int:
    """Of so many voices, how many may lie: always fewer than half.

    >>> [tolerated(count, 0.25) for count in (1, 2, 3, 4, 8)]
    [0, 0, 1, 1, 2]
    """
    return min(ceil(hostile * count), (count - 1) // 2)


def combined(values: Buffer, weights: Sequence[float], guard: Guard) -> Buffer:
    """Of (voices, numbers): for each number what the rule makes of the voices. Never outside their range.

    >>> combined(np.array([[1.0], [2.0], [3.0], [1e9]]), [0.25] * 4, Guard(rule="median"))
    array([2.5])
    >>> combined(np.array([[1.0], [2.0], [1e9]]), [0.4, 0.4, 0.2], Guard(rule="trimmed"))
    array([2.])
    """
    made = np.empty(values.shape[1], values.dtype)
    for start in range(0, len(made), SORTED_AT_ONCE):
        piece = values[:, start : start + SORTED_AT_ONCE]
        order = np.argsort(piece, axis=0, kind="stable")
        ranked = np.take_along_axis(piece, order, axis=0)
        heavy = np.asarray(weights)[order]
        if guard.rule == "median":
            found = _median(ranked, heavy)
        else:
            cut = tolerated(len(values), guard.hostile) if guard.rule == "trimmed" else 0
            found = _mean(ranked[cut : len(values) - cut], heavy[cut : len(values) - cut])
        made[start : start + SORTED_AT_ONCE] = found
    return made


def most_say(values: Buffer, weights: Sequence[float]) -> Buffer:
    """For each number the value that more than half of the weight has; if none has that, the one in the middle.

    >>> most_say(np.array([[7], [3], [7]]), [0.4, 0.2, 0.4])
    array([7])
    """
    order = np.argsort(values, axis=0, kind="stable")
    return _at(np.take_along_axis(values, order, axis=0), _first(np.asarray(weights)[order], 1 - SAME))


def _first(heavy: Buffer, share: float) -> Buffer:
    """By rank: the first with which so much of half of the weight is reached."""
    reached = np.cumsum(heavy, axis=0)
    return np.asarray(np.argmax(reached >= share * reached[-1] / 2, axis=0))


def _at(ranked: Buffer, place: Buffer) -> Buffer:
    return np.asarray(np.take_along_axis(ranked, place[None], axis=0)[0])


def _median(ranked: Buffer, heavy: Buffer) -> Buffer:
    low, high = (_at(ranked, _first(heavy, share)) for share in (1 - SAME, 1 + SAME))
    half = ranked.dtype.type(0.5)
    middle = np.minimum(np.maximum(low * half + high * half, low), high)
    return np.asarray(np.where(low == high, low, middle))


def _mean(ranked: Buffer, heavy: Buffer) -> Buffer:
    total = np.zeros(ranked.shape[1], ranked.dtype)
    for values, parts in zip(ranked, heavy / heavy.sum(axis=0), strict=True):  # one after the other: the same bits
        total += values * parts.astype(ranked.dtype)
    return np.asarray(np.minimum(np.maximum(total, ranked[0]), ranked[-1]))


class Distances:
    """Told pieces of (voices, numbers), says which voices stand together: those with the least distance to those next
    to them. The others are left out (Krum, keeping all but the tolerated number)."""

    def __init__(self, count: int) -> None:
        self._squares = np.zeros((count, count))

    def add(self, values: Buffer) -> None:
        with np.errstate(all="ignore"):
            for i in range(len(values)):
                for j in range(i):
                    far = np.square(values[i].astype("<f8") - values[j]).sum()
                    self._squares[i, j] += far
                    self._squares[j, i] += far

    def together(self, hostile: float) -> list[int]:
        """The voices that are kept, in their order."""
        count = len(self._squares)
        out = tolerated(count, hostile)
        near = max(1, count - out - 2)
        # The first of each row is its own place, at no distance.
        scores = np.sort(self._squares, axis=1)[:, 1 : near + 1].sum(axis=1)
        return sorted(np.argsort(scores, kind="stable")[: count - out].tolist())


def chosen(heard: Sequence[Voice], guard: Guard, pieces: Callable[[], Iterable[Buffer]]) -> list[Voice]:
    """The voices that the rule goes on with, after a first pass over all parameters where it needs one."""
    if guard.rule != "krum" or len(heard) < 2:
        return list(heard)
    distances = Distances(len(heard))
    for values in pieces():
        distances.add(values)
    return [heard[place] for place in distances.together(guard.hostile)]


Read = Callable[[int, str, Any, np.dtype[Any]], Buffer]
"""Numbers of an update (by its place): "trained", "base" or "current", of this piece of a tensor, in this precision."""


class Combiner:
    """One aggregation by a rule. `read` brings a piece of a tensor of one of the updates; pieces are its caller's."""

    def __init__(self, shares: Sequence[Share], rule: str, guard: Guard, read: Read, *, from_first: bool) -> None:
        self._shares, self._rule, self._guard, self._read = shares, rule, guard, read
        self._heard = self._kept = voices(shares)
        self._total = sum(voice.weight for voice in self._heard)
        self._rest = max(0.0, 1.0 - self._total) if rule == "mix_models" and not from_first else 0.0

    def look_at(self, pieces: Iterable[tuple[Any, np.dtype[Any]]]) -> None:
        """First of all, at every piece of every parameter."""
        self._kept = chosen(self._heard, self._guard, lambda: (self._changes(*piece) for piece in pieces))

    def change(self, piece: Any, precision: np.dtype[Any]) -> Buffer | None:
        """What is added to this piece of a parameter; None: nothing."""
        if not self._kept:
            return None
        made = combined(self._changes(piece, precision), [voice.weight for voice in self._kept], self._guard)
        return np.asarray(made * precision.type(self._total))

    def statistic(self, piece: Any, precision: np.dtype[Any], current: Buffer) -> Buffer:
        """What becomes of this piece of a statistic: within the range of what was handed in, and of what there was."""
        if not self._kept:
            return current
        handed_in = self._of_voices(lambda place: self._read(place, "trained", piece, precision))
        made = combined(handed_in, [voice.weight for voice in self._kept], self._guard)
        if not self._rest:
            return made
        whole, number = self._rest + self._total, precision.type
        mixed = current * number(self._rest / whole) + made * number(self._total / whole)
        return np.asarray(np.minimum(np.maximum(mixed, np.minimum(current, made)), np.maximum(current, made)))

    def _changes(self, piece: Any, precision: np.dtype[Any]) -> Buffer:
        return self._of_voices(lambda place: self._change(place, piece, precision))

    def _of_voices(self, values: Callable[[int], Buffer]) -> Buffer:
        """Each voice's mean of its updates."""
        made = []
        for voice in self._kept:
            (first, share), *others = voice.members
            total = values(first)
            if others:
                total = total * total.dtype.type(share)
                for place, more in others:
                    total = total + values(place) * total.dtype.type(more)
            made.append(total)
        return np.stack(made)

    def _change(self, place: int, piece: Any, precision: np.dtype[Any]) -> Buffer:
        """Each operation is rounded by itself."""
        clip = self._shares[place].clip
        trained = self._read(place, "trained", piece, precision)
        if self._rule == "mix_models" and clip == 1:
            return trained - self._read(place, "current", piece, precision)
        base = self._read(place, "base", piece, precision)
        change = trained - base
        if clip != 1:
            change = change * precision.type(clip)
        return change if self._rule == "add_deltas" else base + change - self._read(place, "current", piece, precision)
