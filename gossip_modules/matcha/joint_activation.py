"""Activation probabilities and alpha together, chosen for the smallest rho within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..graph_manager.matchings import Edge, Matching, as_matchings, world_size
from .activation import DIGITS, best_connected, budget_limit, differences, even_split, matching_costs, rounded
from .barrier import Halfspaces, minimize
from .laplacians import MAX_WHOLE, extended, mixing_weight, second_moment, top_vectors

Array = npt.NDArray[np.float64]

_SHARES = (1.0, 0.8, 0.6)  # shares of the budget that the starting points spend; less is often better
_GAP = 1e-8  # of rho, at which the interior point method stops
_BOUND_GAP = 1e-6  # between rho on the subspace and the true one
_MAX_STEPS = 30
_MARGIN = 1e-3  # distance of a starting point from the bounds of p


class ActivationPlan(NamedTuple):
    """The probabilities [M], the weight of a link, and the factor of the squared distance from the average."""

    probabilities: Array
    alpha: float
    rho: float


def joint_probabilities(
    matchings: Iterable[Iterable[Edge]],
    budget: float | None = None,
    *,
    budget_seconds: float | None = None,
    costs: Mapping[Edge, float] | None = None,
) -> ActivationPlan:
    """argmin over p and alpha of rho = || E[W^T W] - J ||_2, with 0 <= p_j <= 1 and sum_j p_j c_j <= the budget.

    MATCHA (Wang et al., ICC 2019, arXiv:1905.09435) chooses p for the expected graph and alpha afterwards, which
    ignores the variance of the random graph. With y = alpha p and L_j^2 = 2 L_j,

        E[W^T W] = I - 2 (1 - alpha) sum_j y_j L_j + sum_{j != k} y_j y_k L_j L_k,    c . y <= alpha * budget:

    so the constraints are linear, apart from one matrix inequality that is linear in each variable. The problem is not
    convex: an interior point method finds a stationary point from each of a few starting points, the two-stage
    solutions that spend 1, 0.8 and 0.6 of the budget. The result is the best of all these points, and the cheapest of
    those whose 1 - rho agrees to six digits; to these digits rho is never larger than that of the two-stage solution.
    The result is deterministic, and p is rounded to six significant digits. It takes about a second for 64 ranks, and
    many times as long as the two-stage solution for more.

    Args and Raises: as `activation_probabilities`.

    Returns:
        p, alpha and rho.

    >>> joint_probabilities([((0, 1),)], budget=0.25).rho
    0.75
    """
    checked = as_matchings(matchings)
    seconds = matching_costs(checked, costs)
    limit = budget_limit(seconds, budget, budget_seconds, has_costs=costs is not None)
    return smallest_rho(checked, seconds, limit)


def smallest_rho(matchings: Sequence[Matching], seconds: Array, limit: float) -> ActivationPlan:
    """`joint_probabilities` of checked matchings, with sum_j p_j seconds_j <= limit."""
    if not matchings:
        return ActivationPlan(np.empty(0), alpha=1.0, rho=0.0)  # a world of one always agrees
    candidates = []
    for share in _SHARES:
        start = best_connected(matchings, seconds, share * limit)
        alpha, rho = mixing_weight(matchings, start)
        candidates.append(ActivationPlan(start, alpha, rho))
        candidates.append(_improved(candidates[-1], matchings, seconds, limit))
    # If more matchings do not lower rho, take the cheapest plan.
    return min(
        candidates,
        key=lambda best: (-float(f"{1 - best.rho:.{DIGITS}g}"), float(best.probabilities @ seconds), best.rho),
    )


def _improved(start: ActivationPlan, matchings: Sequence[Matching], seconds: Array, limit: float) -> ActivationPlan:
    """A stationary point reached from `start`, on a subspace that grows until it has the true rho."""
    n = world_size(matchings)
    p, alpha = start.probabilities, start.alpha
    basis = _top(matchings, p, alpha)[1] if n > MAX_WHOLE else np.linalg.eigh(np.eye(n) + 1 / n)[1][:, :-1]
    gap = 0.0 if n <= MAX_WHOLE else 0.1
    for _ in range(_MAX_STEPS):
        p, alpha, bound = _solve_on(basis, start, matchings, seconds, limit, gap=max(0.1 * gap, _GAP))
        rho, vectors = _top(matchings, p, alpha)
        gap = rho - bound
        if gap < _BOUND_GAP:
            break
        basis = extended(basis, vectors)
    p = rounded(p, matchings, seconds, limit)
    return ActivationPlan(p, *mixing_weight(matchings, p))


def _top(matchings: Sequence[Matching], p: Array, alpha: float) -> tuple[float, Array]:
    return top_vectors(*second_moment(matchings, p), alpha)


def _solve_on(
    basis: Array, start: ActivationPlan, matchings: Sequence[Matching], seconds: Array, limit: float, *, gap: float
) -> tuple[Array, float, float]:
    """p, alpha and rho, when rho is the largest eigenvalue on the subspace of `basis`."""
    num_matchings = len(matchings)
    inequality = _Moment(basis, matchings)
    p = np.clip(start.probabilities, _MARGIN * even_split(seconds, limit), 1 - _MARGIN)
    p *= min(1.0, (1 - _MARGIN) * limit / float(p @ seconds))
    x = np.concatenate([start.alpha * p, [start.alpha, 0.0]])
    x[-1] = 1.01 * float(np.linalg.eigvalsh(-inequality.matrix(x))[-1]) + 1e-3
    # y >= 0, y <= alpha, c . y <= alpha * limit, alpha <= 1, in the variables y, alpha, s. For alpha >= 1 is rho >= 1,
    # since W^2 has the trace n + sum_i d_i (d_i - 1) with the degrees d. Without this bound alpha could diverge.
    ones, zeros = np.eye(num_matchings), np.zeros((num_matchings, 1))
    below = np.hstack([-ones, zeros, zeros])
    above = np.hstack([ones, zeros - 1, zeros])
    normals = np.vstack([below, above, [*seconds, -limit, 0.0], [*zeros[:, 0], 1.0, 0.0]])
    offsets = np.append(np.zeros(len(normals) - 1), 1.0)
    objective = np.zeros(num_matchings + 2)
    objective[-1] = 1.0
    x = minimize(objective, inequality, Halfspaces(normals, offsets), x, gap=gap)
    return np.clip(x[:-2] / x[-2], 0.0, 1.0), float(x[-2]), float(x[-1])


class _Moment:
    """A(y, alpha, s) = s I - E[W^T W] on a subspace, where y = alpha p."""

    def __init__(self, basis: Array, matchings: Sequence[Matching]) -> None:
        size = basis.shape[1]
        self.num_matchings = len(matchings)
        self.identity = np.eye(size)
        self.laplacians = np.empty((self.num_matchings, size, size))
        images = np.zeros((self.num_matchings, *basis.shape))  # L_j basis
        for image, matching, laplacian in zip(images, matchings, self.laplacians):
            u, v = np.array(matching, dtype=np.intp).T
            row = differences(basis, matching)
            image[u], image[v] = row, -row
            laplacian[:] = row.T @ row
        products = np.tensordot(images, images, axes=([1], [1])).transpose(0, 2, 1, 3)  # L_j L_k, [M, M, k, k]
        self.pairs = products + products.transpose(0, 1, 3, 2)  # L_j L_k + L_k L_j, both ways on the subspace
        self.pairs[np.arange(self.num_matchings), np.arange(self.num_matchings)] = 0

    def matrix(self, x: Array) -> Array:
        y, alpha, s = x[:-2], x[-2], x[-1]
        linear = np.tensordot(2 * (1 - alpha) * y, self.laplacians, 1)
        result: Array = (s - 1) * self.identity + linear - 0.5 * np.tensordot(np.outer(y, y), self.pairs, 2)
        return result

    def derivatives(self, x: Array) -> Array:
        y, alpha = x[:-2], x[-2]
        by_y = 2 * (1 - alpha) * self.laplacians - np.tensordot(y, self.pairs, 1)
        by_alpha = -2 * np.tensordot(y, self.laplacians, 1)
        return np.concatenate([by_y, by_alpha[None], self.identity[None]])

    def curvature(self, x: Array, weight: Array) -> Array:
        m = self.num_matchings
        result = np.zeros((m + 2, m + 2))
        result[:m, :m] = -np.tensordot(self.pairs, weight, 2)
        result[:m, m] = result[m, :m] = -2 * np.tensordot(self.laplacians, weight, 2)
        return result
