"""How often each matching is used: the probabilities that keep the expected graph connected best within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from .barrier import Halfspaces, minimize
from .contraction import MAX_WHOLE, NUM_NEW, extended, weighted_laplacian
from .edge_coloring import Edge, Matching, as_matchings, link_costs, world_size

Array = npt.NDArray[np.float64]

_MAX_STEPS = 60
_GAP = 1e-6  # of lambda_2, relative
DIGITS = 6  # of a probability, so that machines which round differently still agree


def activation_probabilities(
    matchings: Iterable[Iterable[Edge]],
    budget: float | None = None,
    *,
    budget_seconds: float | None = None,
    costs: Mapping[Edge, float] | None = None,
) -> Array:
    """argmax_p lambda_2(sum_j p_j L_j) with 0 <= p_j <= 1 and sum_j p_j c_j <= budget * sum_j c_j.

    lambda_2, the algebraic connectivity of the expected graph, is concave in p: s <= lambda_2 says that
    sum_j p_j L_j - s I is positive semidefinite beside the vector 1, and the largest such s is found by an interior
    point method. Of many ranks only some directions matter: the inequality is asked on the eigenvectors that were
    lowest at the previous p, which bounds lambda_2 from above, until the true lambda_2 meets the bound.

    Step 1 of MATCHA, Wang et al., ICC 2019, arXiv:1905.09435. Where several p are optimal the result is one in their
    middle. Deterministic, and rounded to six digits, so the budget holds to the same precision.

    Args:
        matchings: of a connected base graph, see `decompose`.
        budget: share of the cost of the full schedule, which uses every matching in every round; above 0, at most 1.
        budget_seconds: instead of `budget`: expected seconds per round, with `costs` only. More than the full
            schedule takes gives p = 1.
        costs: seconds per link; a matching takes as long as its slowest link (`matching_costs`). None: each matching
            costs one.

    Returns:
        p, float64 [M].

    Raises:
        ValueError: not matchings of a connected graph, or a budget or costs that are not as above.

    >>> activation_probabilities([((0, 1), (2, 3)), ((1, 2),)], budget=0.5).tolist()
    [0.5, 0.5]
    """
    checked = as_matchings(matchings)
    seconds = matching_costs(checked, costs)
    return best_connected(checked, seconds, budget_limit(seconds, budget, budget_seconds, has_costs=costs is not None))


def matching_costs(matchings: Sequence[Matching], costs: Mapping[Edge, float] | None = None) -> Array:
    """What using each matching once costs, float64 [M]: the time of its slowest link, or 1 where `costs` is None.

    Raises:
        ValueError: the costs are not one finite positive number for each link.
    """
    if costs is None:
        return np.ones(len(matchings))
    seconds = link_costs((edge for matching in matchings for edge in matching), costs)
    return np.array([max(seconds[edge] for edge in matching) for matching in matchings])


def budget_limit(seconds: Array, budget: float | None, budget_seconds: float | None, *, has_costs: bool) -> float:
    """The bound on sum_j p_j c_j that a budget means, at most sum_j c_j.

    Raises:
        ValueError: not exactly one budget, one out of range, or seconds where no costs are known.
    """
    if (budget is None) == (budget_seconds is None):
        raise ValueError(
            f"got budget={budget} and budget_seconds={budget_seconds}, expected one of them. Give budget, the share of "
            f"the full schedule, e.g. 0.5; or budget_seconds per round, with the costs of the links."
        )
    total = float(seconds.sum())
    if budget is not None:
        if not 0 < budget <= 1:
            raise ValueError(
                f"got budget={budget}, expected above 0 and at most 1: the share of the time of the full schedule. "
                f"Give e.g. 0.5; for seconds there is budget_seconds."
            )
        return budget * total
    assert budget_seconds is not None
    if not has_costs or not (math.isfinite(budget_seconds) and budget_seconds > 0):
        raise ValueError(
            f"got budget_seconds={budget_seconds} {'with' if has_costs else 'without'} costs, expected finite seconds "
            f"above 0 and the seconds of each link as costs. Measure them with measure_link_times, or give budget."
        )
    return min(budget_seconds, total)


def best_connected(matchings: Sequence[Matching], seconds: Array, limit: float) -> Array:
    """`activation_probabilities` of checked matchings, with sum_j p_j seconds_j <= limit; float64 [M]."""
    total = float(seconds.sum())
    if limit >= total:
        return np.ones(len(matchings))
    n = world_size(matchings)
    p = np.full(len(matchings), limit / total)
    size = n - 1 if n <= MAX_WHOLE else 2 * NUM_NEW
    basis = np.linalg.eigh(weighted_laplacian(matchings, p, n))[1][:, 1 : 1 + size]
    gap = 0.0 if n <= MAX_WHOLE else 0.1  # relative; a bound need not be sharper than the subspace is good
    for _ in range(_MAX_STEPS):
        p, bound = _solve_on(basis, matchings, seconds, limit, gap=max(0.1 * gap, 0.01 * _GAP))
        values, vectors = np.linalg.eigh(weighted_laplacian(matchings, p, n))
        if bound - values[1] <= _GAP * bound:
            return np.round(p, DIGITS)
        gap = (bound - values[1]) / bound
        basis = extended(basis, vectors[:, 1 : 1 + NUM_NEW])
    raise AssertionError(f"lambda_2 = {values[1]} did not meet its bound {bound} in {_MAX_STEPS} steps")


def differences(basis: Array, matching: Matching) -> Array:
    """basis[u] - basis[v] for each link, [links, k]: the Laplacian L on the basis is differences^T differences."""
    u, v = np.array(matching, dtype=np.intp).T
    result: Array = basis[u] - basis[v]
    return result


def _solve_on(
    basis: Array, matchings: Sequence[Matching], seconds: Array, limit: float, *, gap: float
) -> tuple[Array, float]:
    """The optimal p when lambda_2 is the smallest eigenvalue on the subspace of `basis`, and an upper bound on it."""
    rows = [differences(basis, matching) for matching in matchings]
    inequality = _Connectivity(np.stack([row.T @ row for row in rows]))
    num_matchings = len(matchings)
    ones = np.eye(num_matchings)
    normals = np.vstack([-ones, ones, seconds])
    offsets = np.concatenate([np.zeros(num_matchings), np.ones(num_matchings), [limit]])
    p = np.full(num_matchings, 0.9 * limit / seconds.sum())
    s = 0.5 * float(np.linalg.eigvalsh(np.tensordot(p, inequality.laplacians, 1))[0])
    x = minimize(
        np.append(np.zeros(num_matchings), -1.0),
        inequality,
        Halfspaces(np.hstack([normals, np.zeros((len(normals), 1))]), offsets),
        np.append(p, s),
        gap=gap * s,
    )
    dual = np.asarray(np.linalg.inv(inequality.matrix(x)), dtype=np.float64)
    return x[:-1], _upper_bound(dual, inequality.laplacians, seconds, limit)


def _upper_bound(weight: Array, laplacians: Array, seconds: Array, limit: float) -> float:
    """max_p sum_j p_j tr(Z L_j) for Z = weight / tr(weight), which no lambda_2 exceeds: Z mixes unit vectors.

    Budget goes to the matchings that give most per second, as far as it lasts.
    """
    gains = np.einsum("ij,mij->m", weight, laplacians) / np.trace(weight)
    order = np.argsort(-gains / seconds, kind="stable")
    left = limit - np.concatenate([[0.0], np.cumsum(seconds[order])[:-1]])
    return float(np.clip(left / seconds[order], 0, 1) @ gains[order])


class _Connectivity:
    """A(p, s) = sum_j p_j L_j - s I."""

    def __init__(self, laplacians: Array) -> None:
        self.laplacians = laplacians  # [M, k, k]
        self.identity = np.eye(laplacians.shape[1])
        self.slopes = np.concatenate([laplacians, -self.identity[None]])

    def matrix(self, x: Array) -> Array:
        result: Array = np.tensordot(x, self.slopes, 1)
        return result

    def derivatives(self, x: Array) -> Array:
        return self.slopes

    def curvature(self, x: Array, weight: Array) -> Array | None:
        return None
