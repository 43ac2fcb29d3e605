"""How far a facility is trusted with the model: its say is bounded, however much it sends and whatever it says.

Three bounds, each by itself. A facility's say: of what counts, no more than its data weight. Clipping: no update moves
the model much further than updates usually do. And rules by which updates are combined when some may lie; they are in
fedqueue/combining.py, since they work on tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, Literal

from fedqueue.protocol.codec import at_least, message, one_of

KEPT_NORMS: Final = 5
"""Of each facility; who sends many has no more than that."""


@message
class Trust:
    """How far facilities are trusted with the model."""

    say: Literal["bounded", "unbounded"] = "bounded"
    clip: float = 5.0  # what is clipped is so many times larger than updates usually are; 0: nothing is

    rule: Literal["mean", "median", "trimmed", "krum"] = "mean"  # by which updates are combined
    hostile: float = 0.25  # share of the facilities that may mean harm, for "trimmed" and "krum"

    def __post_init__(self) -> None:
        one_of(self, "rule", ("mean", "median", "trimmed", "krum"))
        if not 0 <= self.hostile < 0.5:
            raise ValueError(f"hostile must be from 0 to below 0.5, found {self.hostile}: no rule outvotes a majority")
        at_least(self, 0, "clip")
        if 0 < self.clip < 1:
            raise ValueError(f"clip must be 1 or more, or 0 for none, found {self.clip}")


AS_PUBLISHED: Final = Trust(say="unbounded", clip=0.0)
"""Every update counts in full, as the papers have it; so did every run before there were bounds."""


def at_most_one(facilities: Sequence[str], worth: Sequence[float]) -> list[float]:
    """What updates are worth that meet at a cutoff: those of one facility together no more than a fresh one.

    >>> at_most_one(["a", "b", "a", "a"], [1.0, 1.0, 0.5, 0.5])
    [0.5, 1.0, 0.25, 0.25]
    """
    total: dict[str, float] = {}
    for facility, value in zip(facilities, worth, strict=True):
        total[facility] = total.get(facility, 0.0) + value
    return [value / max(1.0, total[facility]) for facility, value in zip(facilities, worth, strict=True)]


class Say:
    """Where updates count as they come: of what counted within a round length, a facility has its data weight at the
    most, and one update more. (Without that one nobody could begin.)

    >>> say = Say({"a": 0.5, "b": 0.5}, 10.0)
    >>> [say.allow(1.0, "a", 0.5, full=0.5), say.allow(2.0, "a", 0.5, full=0.5)]
    [0.5, 0.0]
    >>> say.allow(3.0, "b", 0.25, full=0.5), say.allow(4.0, "a", 0.5, full=0.5), say.allow(12.0, "a", 0.5, full=0.5)
    (0.25, 0.25, 0.5)
    """

    def __init__(self, data_weights: Mapping[str, float], seconds: float) -> None:
        total = sum(data_weights.values())
        self._share = {name: weight / total if total > 0 else 0.0 for name, weight in data_weights.items()}
        self._seconds = seconds
        self._counted: deque[tuple[float, str, float]] = deque()  # when, whose, how much

    def allow(self, at: float, facility: str, weight: float, *, full: float) -> float:
        """How much of its weight an update has that arrived then. `full`: that of one that is fresh."""
        while self._counted and self._counted[0][0] <= at - self._seconds:
            self._counted.popleft()
        own = sum(counted for _, name, counted in self._counted if name == facility)
        others = sum(counted for _, name, counted in self._counted if name != facility)
        mine = self._share[facility]
        if mine < 1:
            weight = max(0.0, min(weight, full + others * mine / (1 - mine) - own))
        if weight > 0:
            self._counted.append((at, facility, weight))
        return weight


class Norms:
    """How far updates usually move the model: medians, in which each facility has one voice.

    Longer training moves it further, though not in proportion. So a norm is compared with the usual norm, and with the
    usual norm for its length (steps times learning rate); what is clipped is too large for both.

    >>> norms = Norms(10.0)
    >>> for name, norm in (("a", 1.0), ("b", 1.5), ("c", 2.0), ("d", 500.0)): norms.seen(name, norm, length=1.0)
    >>> norms.part(500.0, length=1.0), norms.part(17.0, length=1.0), norms.part(175.0, length=10.0)
    (0.035, 1.0, 1.0)
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor  # 0: nothing is clipped
        self._norms: dict[str, deque[float]] = {}
        self._by_length: dict[str, deque[float]] = {}

    def seen(self, facility: str, norm: float, length: float) -> None:
        self._norms.setdefault(facility, deque(maxlen=KEPT_NORMS)).append(norm)
        if length > 0:
            self._by_length.setdefault(facility, deque(maxlen=KEPT_NORMS)).append(norm / length)

    def part(self, norm: float | None, length: float) -> float:
        """Of the change that an update makes, the part that counts. None: its norm is not known."""
        if norm is None or not self._factor or not self._norms:
            return 1.0
        usual = max(_typical(self._norms), length * _typical(self._by_length))
        limit = self._factor * usual
        return 1.0 if norm <= limit or usual == 0 else limit / norm


def _typical(seen: Mapping[str, Sequence[float]]) -> float:
    return median([median(values) for values in seen.values()]) if seen else 0.0
