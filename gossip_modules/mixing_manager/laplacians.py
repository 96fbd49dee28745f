"""How fast ranks agree on a randomly activated graph, W(t) = I - alpha sum_j B_j(t) L_j, and the best alpha for it.

L_j is the Laplacian of matching j and B_j(t) its activation in round t, 1 with probability p_j. The squared distance
from the average is multiplied in each round, in expectation, by at most rho = || E[W^T W] - J ||_2, J = 1 1^T / n.
Formulas from Wang, Sahu, Yang, Joshi, Kar, "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition
Sampling", ICC 2019, arXiv:1905.09435.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..graph_manager.matchings import Edge, Matching, as_matchings, world_size

Array = npt.NDArray[np.float64]

MAX_WHOLE = 64  # up to this many ranks a spectral problem is solved on the whole space, above on a growing subspace
NUM_NEW = 16  # eigenvectors that a subspace gains per step
_GAP = 1e-10  # between rho and its lower bound
_MAX_STEPS = 60
_NUM_HALVINGS = 60  # of the interval that contains alpha
_DIGITS = 9  # significant digits of alpha, so that machines which round differently get equal results


class MixingWeight(NamedTuple):
    """The best weight of a link.

    Attributes:
        alpha: the weight of a link.
        rho: the factor of the squared distance from the average per round.
    """

    alpha: float
    rho: float


def laplacian(edges: Iterable[Edge], num_ranks: int) -> Array:
    """Return degree matrix - adjacency matrix, float64 [num_ranks, num_ranks].

    Args:
        edges: the links, pairs of ranks.
        num_ranks: the number of ranks; ranks without a link have zero rows.

    >>> laplacian([(0, 2)], 3).tolist()
    [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 1.0]]
    """
    return weighted_laplacian([tuple(edges)], np.ones(1), num_ranks)


def weighted_laplacian(matchings: Sequence[Sequence[Edge]], weights: Array, num_ranks: int) -> Array:
    """sum_j weights_j L_j, float64 [num_ranks, num_ranks]."""
    u, v = np.array([edge for matching in matchings for edge in matching], dtype=np.intp).reshape(-1, 2).T
    weight = np.repeat(np.asarray(weights, dtype=np.float64), [len(matching) for matching in matchings])
    matrix = np.zeros((num_ranks, num_ranks))
    for rows, columns, sign in ((u, u, 1), (v, v, 1), (u, v, -1), (v, u, -1)):
        np.add.at(matrix, (rows, columns), sign * weight)
    return matrix


def as_probabilities(probabilities: Sequence[float] | Array, num_matchings: int) -> Array:
    """`probabilities` as float64 [num_matchings].

    Raises:
        ValueError: the number is another, or one is outside 0 to 1.
    """
    p = np.array(probabilities, dtype=np.float64)
    if p.shape != (num_matchings,) or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"got the probabilities {p.tolist()}, expected {num_matchings} numbers from 0 to 1, one per matching. Take "
            f"the result of activation_probabilities(matchings, budget)."
        )
    return p


def second_moment(matchings: Sequence[Matching], probabilities: Array) -> tuple[Array, Array]:
    """Lbar and Q of E[W^T W] = I - 2 alpha Lbar + alpha^2 Q; both float64 [n, n].

    With independent activations Lbar = sum_j p_j L_j and, since L_j^2 = 2 L_j, Q = Lbar^2 + 2 sum_j p_j (1 - p_j) L_j.
    """
    n = world_size(matchings)
    mean = weighted_laplacian(matchings, probabilities, n)
    return mean, mean @ mean + 2 * weighted_laplacian(matchings, probabilities * (1 - probabilities), n)


def mixing_weight(matchings: Iterable[Iterable[Edge]], probabilities: Sequence[float] | Array) -> MixingWeight:
    """The alpha that minimises rho = || E[W^T W] - J ||_2 when matchings are activated independently.

    rho is the maximum of 1 - 2 alpha v^T Lbar v + alpha^2 v^T Q v over unit vectors v orthogonal to 1, and so convex in
    alpha, which is found by bisection. With many ranks only some directions matter: v is searched among the
    eigenvectors with the largest eigenvalues at the previous alphas, which gives a lower bound on rho. The subspace
    grows until the true rho reaches the bound.

    Args:
        matchings: the matchings of a connected base graph, see `as_matchings`.
        probabilities: the probability of each matching, [M].

    Raises:
        ValueError: the matchings or the probabilities are not as above, or the links with a probability above 0 do not
            connect all ranks.

    >>> mixing_weight([((0, 1),)], [1.0])
    MixingWeight(alpha=0.5, rho=0.0)
    """
    checked = as_matchings(matchings)
    p = as_probabilities(probabilities, len(checked))
    if not checked:
        return MixingWeight(1.0, 0.0)  # a world of one always agrees
    mean, square = second_moment(checked, p)
    spectrum = np.linalg.eigvalsh(mean)
    if spectrum[1] <= 1e-12 * spectrum[-1]:
        raise ValueError(
            f"got the probabilities {p.tolist()}, expected those above 0 to belong to matchings that connect all "
            f"ranks: the others could never agree. Take activation_probabilities(matchings, budget)."
        )
    alpha = 2 / float(spectrum[1] + spectrum[-1])
    basis = top_vectors(mean, square, alpha)[1] if len(mean) > MAX_WHOLE else np.linalg.eigh(mean)[1][:, 1:]
    for _ in range(_MAX_STEPS):
        alpha, bound = _lowest_point(basis.T @ mean @ basis, basis.T @ square @ basis)
        rho, vectors = top_vectors(mean, square, alpha)
        if rho - bound < _GAP:
            return MixingWeight(float(f"{alpha:.{_DIGITS}g}"), max(rho, 0.0))
        basis = extended(basis, vectors)
    raise AssertionError(f"rho = {rho} did not meet its bound {bound} in {_MAX_STEPS} steps")


def dpsgd_weight(matchings: Iterable[Iterable[Edge]]) -> MixingWeight:
    """D-PSGD, all matchings in every round: alpha = 2 / (l_2 + l_n), rho = ((l_n - l_2) / (l_n + l_2))^2.

    l_2 and l_n are the second smallest and the largest eigenvalue of the Laplacian of the base graph. From Lian et
    al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv:1705.09056, with the
    weight of Xiao and Boyd, "Fast linear iterations for distributed averaging", 2004.

    Raises:
        ValueError: the matchings do not connect all ranks.

    >>> dpsgd_weight([((0, 1),), ((1, 2),)])
    MixingWeight(alpha=0.5, rho=0.25)
    """
    checked = as_matchings(matchings)
    if not checked:
        return MixingWeight(1.0, 0.0)  # a world of one always agrees
    spectrum = np.linalg.eigvalsh(weighted_laplacian(checked, np.ones(len(checked)), world_size(checked)))
    low, high = float(spectrum[1]), float(spectrum[-1])
    return MixingWeight(float(f"{2 / (low + high):.{_DIGITS}g}"), ((high - low) / (high + low)) ** 2)


def periodic_dpsgd_weight(matchings: Iterable[Iterable[Edge]], probability: float) -> MixingWeight:
    """Periodic D-PSGD, all matchings or none: the alpha of D-PSGD, and rho = 1 - probability (1 - rho of D-PSGD).

    Args:
        matchings: the matchings of a connected base graph.
        probability: the probability that a round uses the whole graph, above 0 and at most 1.

    Raises:
        ValueError: the matchings do not connect all ranks, or the probability is outside (0, 1].
    """
    if not 0 < probability <= 1:
        raise ValueError(f"got probability={probability}, expected above 0 and at most 1. Give e.g. 0.5.")
    alpha, rho = dpsgd_weight(matchings)
    return MixingWeight(alpha, 1 - probability * (1 - rho))


def contraction(matchings: Iterable[Iterable[Edge]], probabilities: Sequence[float] | Array, *, alpha: float) -> float:
    """rho = || E[W^T W] - J ||_2 for a given alpha; the ranks may never agree if it is 1 or more.

    Raises:
        ValueError: the matchings or the probabilities are not as in `mixing_weight`.
    """
    checked = as_matchings(matchings)
    mean, square = second_moment(checked, as_probabilities(probabilities, len(checked)))
    return max(float(np.linalg.eigvalsh(_moment_beside_average(mean, square, alpha))[-1]), 0.0)


def _moment_beside_average(mean: Array, square: Array, alpha: float) -> Array:
    """E[W^T W] - 2 J. Its largest eigenvalue is rho: the vector 1 has eigenvalue -1, the others are not negative."""
    n = len(mean)
    return np.asarray(np.eye(n) - 2 / n - 2 * alpha * mean + alpha**2 * square)


def top_vectors(mean: Array, square: Array, alpha: float) -> tuple[float, Array]:
    """rho, and the eigenvectors of the largest eigenvalues, [n, NUM_NEW] or the n - 1 that are orthogonal to 1."""
    values, vectors = np.linalg.eigh(_moment_beside_average(mean, square, alpha))
    return float(values[-1]), vectors[:, 1:][:, -NUM_NEW:]


def _lowest_point(mean: Array, square: Array) -> tuple[float, float]:
    """The alpha with the smallest largest eigenvalue of I - 2 alpha mean + alpha^2 square, and that; by bisection."""

    def value_and_slope(alpha: float) -> tuple[float, float]:
        values, vectors = np.linalg.eigh(alpha * (alpha * square - 2 * mean))
        top = vectors[:, -1]
        return 1 + float(values[-1]), float(top @ ((alpha * square - mean) @ top))

    low, high = 0.0, 1.0
    while value_and_slope(high)[1] < 0:
        low, high = high, 2 * high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if value_and_slope(middle)[1] < 0 else (low, middle)
    return high, value_and_slope(high)[0]


def extended(basis: Array, vectors: Array) -> Array:
    """An orthonormal basis of the span of `basis`, which is orthonormal, and `vectors`; [n, at most both sizes]."""
    left, sizes, _ = np.linalg.svd(vectors - basis @ (basis.T @ vectors), full_matrices=False)
    return np.asarray(np.linalg.qr(np.hstack([basis, left[:, sizes > 1e-6]]))[0], dtype=np.float64)
