"""Splits the training samples over the facilities: evenly at random, or skewed by label.

Each function returns one sorted array of sample numbers a part; the parts are disjoint and cover all samples,
and the same seed gives the same parts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def iid(n: int, parts: int, seed: int) -> list[Indices]:
    """Evenly at random; sizes differ by one at most. Example: `iid(10, 3, seed=0)` has sizes 4, 3, 3."""
    _check_enough(n, parts)
    order = np.random.default_rng(seed).permutation(n)
    return [np.sort(part) for part in np.array_split(order, parts)]


def dirichlet(
    labels: npt.NDArray[np.integer], parts: int, alpha: float, seed: int, *, least: int | None = None
) -> list[Indices]:
    """Skewed by label: each class is split by its own draw from a symmetric Dirichlet distribution.

    A small `alpha` gives each class to few parts. A part with fewer than `least` samples is filled up from
    the then largest part. `least` is by default a fiftieth of an even share, one at least; it is never more
    than an even share.
    """
    n = len(labels)
    _check_enough(n, parts)
    generator = np.random.default_rng(seed)
    pieces: list[list[Indices]] = [[] for _ in range(parts)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(parts, alpha))
        cuts = np.floor(np.cumsum(shares[:-1]) * len(members)).astype(np.int64)
        for part, piece in enumerate(np.split(members, cuts)):
            pieces[part].append(piece)
    # Shuffled, so that what is handed over below is a fair sample of the giver's classes.
    split = [generator.permutation(np.concatenate(piece)) for piece in pieces]
    _fill_up(split, min(n // parts, max(1, n // (50 * parts)) if least is None else least))
    return [np.sort(part) for part in split]


def _fill_up(split: list[Indices], least: int) -> None:
    for receiver in range(len(split)):
        while (need := least - len(split[receiver])) > 0:
            # The largest part has more than `least` as long as another has less: all together have enough.
            giver = max(range(len(split)), key=lambda part: len(split[part]))
            given = min(need, len(split[giver]) - least)
            split[receiver] = np.concatenate([split[receiver], split[giver][-given:]])
            split[giver] = split[giver][:-given]


def _check_enough(n: int, parts: int) -> None:
    if parts < 1:
        raise ValueError(f"parts must be 1 or more, found {parts}")
    if n < parts:
        raise ValueError(f"{n} samples cannot be split into {parts} parts")
