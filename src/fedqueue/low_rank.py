"""Products of two small matrices, B·A: adapters of low rank, and their weighted sum as one such product again.

The mean of products is not the product of means. numpy alone, and Python 3.9: jobs import this file too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from fedqueue.protocol.aggregation import factor_names

Matrix = npt.NDArray[np.float64]

LEAST_SCALE = 0.3
"""Of the singular values of a new A, against its largest one: B has to make up for what is small in A, and with 0.01 it
became so large that training diverged."""


def weighted_factors(
    name: str, terms: Iterable[tuple[Callable[[str], Matrix], float]], kept: dict[str, Matrix]
) -> Matrix:
    """One factor of the sum of products; `terms` give each model's tensors by name, and its weight.

    Both factors are made at once: the other one waits in `kept` until it is asked for.
    """
    if name not in kept:
        b_name, a_name = factor_names(name)
        pairs = [(model(b_name), model(a_name), factor) for model, factor in terms]
        shapes = pairs[0][0].shape, pairs[0][1].shape
        flat = [(b.reshape(len(b), -1), a.reshape(len(a), -1), factor) for b, a, factor in pairs]
        made = sum_of_products(flat)
        kept[b_name], kept[a_name] = (factor.reshape(shape) for factor, shape in zip(made, shapes))  # noqa: B905
    return kept.pop(name)


def sum_of_products(terms: Iterable[tuple[Matrix, Matrix, float]]) -> tuple[Matrix, Matrix]:
    """B and A of their rank whose product is as near as can be to the sum of weight * B·A, in the squared error.

    All is done with thin matrices: for n terms of rank r, (rows + columns)·n·r numbers and their QR. Of the many pairs
    with that product it takes the one whose A is nearest to the sum of weight * A, so that training goes on as from
    there: terms that are all the same give themselves.

    >>> b, a = np.array([[2.0]]), np.array([[3.0, 0.0]])
    >>> [factor.round(6).tolist() for factor in sum_of_products([(b, a, 0.25), (b, a, 0.75)])]
    [[[2.0]], [[3.0, 0.0]]]
    """
    terms = list(terms)
    left = np.hstack([b * factor for b, _, factor in terms])
    right = np.vstack([a for _, a, _ in terms])
    mean = sum((a * factor for _, a, factor in terms[1:]), terms[0][1] * terms[0][2])
    rank = len(mean)
    # left·right = Q1·(R1·R2^T)·Q2^T: the singular vectors of the large product from those of a small one.
    q_left, r_left = np.linalg.qr(left)
    q_right, r_right = np.linalg.qr(right.T)
    u, sizes, vt = np.linalg.svd(r_left @ r_right.T)
    floor = max(left.shape + right.shape) * np.finfo(np.float64).eps * np.linalg.norm(left) * np.linalg.norm(right)
    count = min(rank, int(np.count_nonzero(sizes > floor)))
    rows = vt[:count] @ q_right.T
    # Directions that no product has are those of the mean A: there B is zero, and learns.
    rest = mean - (mean @ rows.T) @ rows
    more = np.linalg.svd(rest, full_matrices=False)[2][: min(rank, right.shape[1]) - count]
    basis = np.vstack([rows, more])
    turn_left, scale, turn_right = np.linalg.svd(mean @ basis.T, full_matrices=False)
    scale = np.maximum(scale, LEAST_SCALE * scale.max()) if scale.max() > 0 else np.ones_like(scale)
    a = (turn_left * scale) @ turn_right @ basis
    strength = np.zeros((left.shape[0], len(basis)))
    strength[:, :count] = (q_left @ u[:, :count]) * sizes[:count]
    b = (strength @ turn_right.T / scale) @ turn_left.T
    return b, a
