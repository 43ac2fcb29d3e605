"""Parts cover all samples once, are the same for the same seed, and none is too small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedqueue.training.tasks import Indices, dirichlet, iid


def assert_covers(parts: list[Indices], n: int) -> None:
    together = np.concatenate(parts)
    assert together.dtype == np.int64
    assert np.array_equal(np.sort(together), np.arange(n))


@given(n=st.integers(1, 300), parts=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_iid_parts_cover_all_samples_and_differ_by_one_at_most(n: int, parts: int, seed: int) -> None:
    if n < parts:
        with pytest.raises(ValueError, match="cannot be split"):
            iid(n, parts, seed)
        return
    split = iid(n, parts, seed)
    assert len(split) == parts
    assert_covers(split, n)
    sizes = [len(part) for part in split]
    assert max(sizes) - min(sizes) <= 1
    assert all(np.array_equal(a, b) for a, b in zip(split, iid(n, parts, seed), strict=True))


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(-3, 9), min_size=12, max_size=400),
    parts=st.integers(1, 12),
    alpha=st.sampled_from([1e-4, 0.01, 0.1, 0.5, 1.0, 10.0, 1e4]),
    seed=st.integers(0, 2**31),
    least=st.none() | st.integers(0, 100),
)
def test_dirichlet_parts_cover_all_samples_and_none_is_below_the_least(
    labels: list[int], parts: int, alpha: float, seed: int, least: int | None
) -> None:
    array = np.array(labels)
    split = dirichlet(array, parts, alpha, seed, least=least)
    assert len(split) == parts
    assert_covers(split, len(labels))
    floor = 1 if least is None else min(least, len(labels) // parts)
    assert min(len(part) for part in split) >= floor
    again = dirichlet(array, parts, alpha, seed, least=least)
    assert all(np.array_equal(a, b) for a, b in zip(split, again, strict=True))


def skew(alpha: float) -> float:
    """Mean share of the most common label in a part, over a few seeds."""
    labels = np.repeat(np.arange(10), 200)
    return float(
        np.mean(
            [
                np.bincount(labels[part], minlength=10).max() / len(part)
                for seed in range(5)
                for part in dirichlet(labels, 4, alpha, seed)
            ]
        )
    )


def test_a_smaller_alpha_is_more_skewed() -> None:
    assert skew(0.1) > skew(1.0) + 0.05 > skew(10.0) + 0.1


def test_another_seed_gives_other_parts() -> None:
    labels = np.repeat(np.arange(10), 20)
    assert not np.array_equal(dirichlet(labels, 3, 0.5, 1)[0], dirichlet(labels, 3, 0.5, 2)[0])
    assert not np.array_equal(iid(200, 3, 1)[0], iid(200, 3, 2)[0])
