"""How often each matching is used: the probabilities with the best connected expected graph within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_FLOOR, Context

import numpy as np
import numpy.typing as npt

from ..graph_manager.matchings import Edge, Matching, as_matchings, link_costs, world_size
from .barrier import Halfspaces, minimize
from .laplacians import MAX_WHOLE, NUM_NEW, extended, weighted_laplacian

Array = npt.NDArray[np.float64]

_GAP = 1e-6  # between lambda_2 and its upper bound, relative
_SHARPEST = 1e-7  # the smallest relative gap asked for on a subspace
_MAX_GAP = 1e-4  # the largest relative gap that is accepted where rounding errors prevent a smaller one
_SINGULAR = 1e-13  # a smaller ratio of the smallest to the largest eigenvalue is rounding error
_NEGLIGIBLE = 1e-6  # a smaller share of an even split of the budget is dropped
DIGITS = 6  # significant digits of a probability, so that machines which round differently get equal results


def activation_probabilities(
    matchings: Iterable[Iterable[Edge]],
    budget: float | None = None,
    *,
    budget_seconds: float | None = None,
    costs: Mapping[Edge, float] | None = None,
) -> Array:
    """argmax_p lambda_2(sum_j p_j L_j) with 0 <= p_j <= 1 and sum_j p_j c_j <= budget * sum_j c_j.

    lambda_2, the algebraic connectivity of the expected graph, is concave in p. s <= lambda_2 means that
    sum_j p_j L_j - s I is positive semidefinite on the vectors orthogonal to 1; an interior point method finds the
    largest such s. With many ranks only some directions matter: the inequality is required on the eigenvectors with the
    smallest eigenvalues at the previous p, which gives an upper bound on lambda_2. The subspace grows until the true
    lambda_2 reaches the bound.

    Step 1 of MATCHA, Wang et al., ICC 2019, arXiv:1905.09435. If several p are optimal, the result is one in the middle
    of them. It is deterministic and rounded to six significant digits within the budget.

    Args:
        matchings: the matchings of a connected base graph, see `decompose`.
        budget: the share of the cost of using every matching in every round; above 0, at most 1.
        budget_seconds: instead of `budget`, the expected seconds per round; needs `costs`. A limit that is enough for
            all matchings gives p = 1.
        costs: the seconds of each link; a matching takes as long as its slowest link (`matching_costs`). None: each
            matching costs 1.

    Returns:
        p, float64 [M].

    Raises:
        ValueError: the matchings, the budget or the costs are not as above, or so extreme that double precision cannot
            determine the best plan to 1e-4.

    >>> activation_probabilities([((0, 1), (2, 3)), ((1, 2),)], budget=0.5).tolist()
    [0.5, 0.5]
    """
    checked = as_matchings(matchings)
    seconds = matching_costs(checked, costs)
    return best_connected(checked, seconds, budget_limit(seconds, budget, budget_seconds, has_costs=costs is not None))


def matching_costs(matchings: Sequence[Matching], costs: Mapping[Edge, float] | None = None) -> Array:
    """The cost of using each matching once, float64 [M]: the time of its slowest link, or 1 if `costs` is None.

    Raises:
        ValueError: the costs are not one finite positive number for each link.
    """
    if costs is None:
        return np.ones(len(matchings))
    seconds = link_costs((edge for matching in matchings for edge in matching), costs)
    return np.array([max(seconds[edge] for edge in matching) for matching in matchings])


def budget_limit(seconds: Array, budget: float | None, budget_seconds: float | None, *, has_costs: bool) -> float:
    """The bound on sum_j p_j c_j that a budget stands for, at most sum_j c_j.

    Raises:
        ValueError: none or both of the budgets are given, the budget is out of range, or seconds come without costs.
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
    if limit >= float(seconds.sum()):
        return np.ones(len(matchings))
    n = world_size(matchings)
    even = even_split(seconds, limit)
    best, connectivity, bound = even, 0.0, np.inf
    basis = _first_basis(matchings, even)
    gap = 0.0 if n <= MAX_WHOLE else 0.1  # relative; a bound on a poor subspace need not be sharp
    while True:
        is_sharpest = 0.1 * gap <= _SHARPEST
        start = (best + even) / 2
        p, upper = _solve_on(basis, matchings, seconds, limit, start=start, gap=max(0.1 * gap, _SHARPEST))
        values, vectors = np.linalg.eigh(weighted_laplacian(matchings, p, n))
        if values[1] > connectivity:
            best, connectivity = p, float(values[1])
        bound = min(bound, upper)
        gap = (bound - connectivity) / bound
        wider = extended(basis, vectors[:, 1 : 1 + NUM_NEW])
        if gap <= _GAP or (is_sharpest and wider.shape == basis.shape):
            break
        basis = wider
    if gap > _MAX_GAP:
        raise _too_extreme(seconds, limit)
    return rounded(best, matchings, seconds, limit)


def even_split(seconds: Array, limit: float) -> Array:
    """p that spends nine tenths of the budget, the same on each matching as long as p_j <= 0.9; float64 [M].

    Each p_j is more than 0.9 / M of the best one, so this is a good start for costs of any ratio.
    """
    result: Array = np.minimum(0.9, 0.9 * limit / (len(seconds) * seconds))
    return result


def rounded(p: Array, matchings: Sequence[Matching], seconds: Array, limit: float) -> Array:
    """p rounded to six significant digits, down where the budget would be exceeded; float64 [M].

    Matchings with a negligible probability get 0, except those that the connectivity depends on.
    """
    n = world_size(matchings)
    tiny = [int(j) for j in np.argsort(p, kind="stable") if p[j] < _NEGLIGIBLE * even_split(seconds, limit)[j]]
    least = (1 - _GAP) * np.linalg.eigvalsh(weighted_laplacian(matchings, p, n))[1] if tiny else 0.0
    while tiny:
        without = p.copy()
        without[tiny] = 0
        if np.linalg.eigvalsh(weighted_laplacian(matchings, without, n))[1] >= least:
            p = without
            break
        tiny.pop()
    nearest = np.array([float(f"{x:.{DIGITS}g}") for x in p])
    down = np.array([float(Context(DIGITS, ROUND_FLOOR).create_decimal(float(x))) for x in p])
    for j in np.argsort((p - nearest) * seconds, kind="stable"):
        if nearest @ seconds <= limit * (1 + 1e-12):
            break
        nearest[j] = min(nearest[j], down[j])
    return nearest


def differences(basis: Array, matching: Matching) -> Array:
    """basis[u] - basis[v] for each link, [links, k]. In the basis the Laplacian is differences^T differences."""
    u, v = np.array(matching, dtype=np.intp).T
    result: Array = basis[u] - basis[v]
    return result


def _first_basis(matchings: Sequence[Matching], p: Array) -> Array:
    """An orthonormal basis of vectors orthogonal to 1: all of them, or for many ranks the least connected ones at p."""
    n = world_size(matchings)
    if n <= MAX_WHOLE:
        basis = np.eye(n, n - 1)
    else:
        basis = np.linalg.eigh(weighted_laplacian(matchings, p, n))[1][:, 1 : 1 + 2 * NUM_NEW]
    return np.asarray(np.linalg.qr(basis - basis.mean(axis=0))[0], dtype=np.float64)


def _solve_on(
    basis: Array, matchings: Sequence[Matching], seconds: Array, limit: float, *, start: Array, gap: float
) -> tuple[Array, float]:
    """The optimal p when lambda_2 is the smallest eigenvalue on the subspace of `basis`, and an upper bound on it.

    It is solved for x_j = p_j / start_j in a basis in which sum_j start_j L_j is I, since costs and eigenvalues of very
    different size would cause large rounding errors. `start` must be strictly feasible; `gap` is relative.
    """
    rows = [np.sqrt(p) * differences(basis, matching) for p, matching in zip(start, matchings, strict=True)]
    stacked = np.vstack(rows)
    values, vectors = np.linalg.eigh(stacked.T @ stacked)
    if values[0] <= _SINGULAR * values[-1]:
        raise _too_extreme(seconds, limit)
    to_identity = vectors * np.sqrt(1 / values)
    laplacians = np.stack([row.T @ row for row in (row @ to_identity for row in rows)])
    metric = np.diag(values[0] / values)
    inequality = _Connectivity(laplacians, metric)
    num_matchings = len(matchings)
    ones = np.eye(num_matchings)
    normals = np.vstack([-ones, ones, seconds * start / limit])
    x = minimize(
        np.append(np.zeros(num_matchings), -1.0),
        inequality,
        Halfspaces(
            np.hstack([normals, np.zeros((len(normals), 1))]),
            np.concatenate([np.zeros(num_matchings), 1 / start, [1.0]]),
        ),
        np.append(np.ones(num_matchings), 0.5),
        gap=gap,
    )
    dual = np.asarray(np.linalg.inv(inequality.matrix(x)), dtype=np.float64)
    gains = np.einsum("ij,mij->m", dual, laplacians) / np.einsum("ij,ij", dual, metric)
    return x[:-1] * start, float(values[0]) * _upper_bound(gains, seconds * start, 1 / start, limit)


def _upper_bound(gains: Array, seconds: Array, most: Array, limit: float) -> float:
    """max_x <gains, x> with 0 <= x <= most, <seconds, x> <= limit: an upper bound on every lambda_2.

    gains_j = tr(Z L_j), where Z is an average of v v^T over unit vectors v orthogonal to 1. The budget is spent on the
    matchings that gain most per second, as long as it lasts.
    """
    order = np.argsort(-gains / seconds, kind="stable")
    costs = (seconds * most)[order]
    left = limit - np.concatenate([[0.0], np.cumsum(costs)[:-1]])
    return float(np.clip(left / costs, 0, 1) @ (gains * most)[order])


def _too_extreme(seconds: Array, limit: float) -> ValueError:
    return ValueError(
        f"got a budget of {limit:g} for matchings that cost {seconds.min():g} to {seconds.max():g}, expected numbers "
        f"whose best plan can be told in double precision. Give a larger budget, or leave out the slowest links."
    )


class _Connectivity:
    """A(x, s) = sum_j x_j L_j - s metric."""

    def __init__(self, laplacians: Array, metric: Array) -> None:
        self.laplacians = laplacians  # [M, k, k]
        self.slopes = np.concatenate([laplacians, -metric[None]])

    def matrix(self, x: Array) -> Array:
        result: Array = np.tensordot(x, self.slopes, 1)
        return result

    def derivatives(self, x: Array) -> Array:
        return self.slopes

    def curvature(self, x: Array, weight: Array) -> Array | None:
        return None
