"""How often each matching is used: the best probabilities within a budget, alone or together with alpha."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_FLOOR, Context
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..graph_manager.matchings import Edge, Matching, as_matchings, link_costs, world_size
from ..mixing_manager.laplacians import (
    MAX_WHOLE,
    NUM_NEW,
    extended,
    mixing_weight,
    second_moment,
    top_vectors,
    weighted_laplacian,
)
from .barrier import Halfspaces, MatrixInequality, minimize

Array = npt.NDArray[np.float64]

_GAP = 1e-6  # between lambda_2 and its upper bound, relative
_SHARPEST = 1e-7  # the smallest relative gap asked for on a subspace
_MAX_GAP = 1e-4  # the largest relative gap that is accepted where rounding errors prevent a smaller one
_SINGULAR = 1e-13  # a smaller ratio of the smallest to the largest eigenvalue is rounding error
_NEGLIGIBLE = 1e-6  # a smaller share of an even split of the budget is dropped
_DIGITS = 6  # significant digits of a probability, so that machines which round differently get equal results

_SHARES = (1.0, 0.8, 0.6)  # shares of the budget that the starting points of the joint plan spend
_RHO_GAP = 1e-8  # of rho, at which the interior point method stops
_BOUND_GAP = 1e-6  # between rho on the subspace and the true one
_MAX_STEPS = 30
_MARGIN = 1e-3  # distance of a starting point from the bounds of p


class ActivationPlan(NamedTuple):
    """The result of a plan.

    Attributes:
        probabilities: the probability of each matching, float64 [M].
        alpha: the weight of a link.
        rho: the factor of the squared distance from the average per round.
    """

    probabilities: Array
    alpha: float
    rho: float


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
    those whose 1 - rho agrees to six digits; to these digits rho is never larger than in the two-stage solution.
    The result is deterministic, and p is rounded to six significant digits. It takes about a second for 64 ranks, and
    many times as long as the two-stage solution for more.

    See `activation_probabilities` for the errors and for `matchings`, `budget`, `budget_seconds` and `costs`.

    Returns:
        p, alpha and rho.

    >>> joint_probabilities([((0, 1),)], budget=0.25).rho
    0.75
    """
    checked = as_matchings(matchings)
    seconds = matching_costs(checked, costs)
    limit = budget_limit(seconds, budget, budget_seconds, has_costs=costs is not None)
    return smallest_rho(checked, seconds, limit)


def matching_costs(matchings: Sequence[Matching], costs: Mapping[Edge, float] | None = None) -> Array:
    """Return the cost of using each matching once, float64 [M]: the time of its slowest link, or 1 without costs.

    Args:
        matchings: the matchings, each a sequence of links.
        costs: the time of each link, in seconds; None: each matching costs 1.

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
    even = _even_split(seconds, limit)
    best, connectivity, bound = even, 0.0, np.inf
    basis = _first_basis(matchings, even)
    gap = 0.0 if n <= MAX_WHOLE else 0.1  # relative; a bound on a poor subspace need not be sharp
    while True:
        is_sharpest = 0.1 * gap <= _SHARPEST
        start = (best + even) / 2
        p, upper = _most_connected_on(basis, matchings, seconds, limit, start=start, gap=max(0.1 * gap, _SHARPEST))
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
    return _rounded(best, matchings, seconds, limit)


def _even_split(seconds: Array, limit: float) -> Array:
    """p that spends nine tenths of the budget, the same on each matching as long as p_j <= 0.9; float64 [M].

    Each p_j is more than 0.9 / M of the best one, so this is a good start for costs of any ratio.
    """
    return np.asarray(np.minimum(0.9, 0.9 * limit / (len(seconds) * seconds)))


def _rounded(p: Array, matchings: Sequence[Matching], seconds: Array, limit: float) -> Array:
    """p rounded to six significant digits, down where the budget would be exceeded; float64 [M].

    Matchings with a negligible probability get 0, except those that the connectivity depends on.
    """
    n = world_size(matchings)
    tiny = [int(j) for j in np.argsort(p, kind="stable") if p[j] < _NEGLIGIBLE * _even_split(seconds, limit)[j]]
    least = (1 - _GAP) * np.linalg.eigvalsh(weighted_laplacian(matchings, p, n))[1] if tiny else 0.0
    while tiny:
        without = p.copy()
        without[tiny] = 0
        if np.linalg.eigvalsh(weighted_laplacian(matchings, without, n))[1] >= least:
            p = without
            break
        tiny.pop()
    nearest = np.array([float(f"{x:.{_DIGITS}g}") for x in p])
    down = np.array([float(Context(_DIGITS, ROUND_FLOOR).create_decimal(float(x))) for x in p])
    for j in np.argsort((p - nearest) * seconds, kind="stable"):
        if nearest @ seconds <= limit * (1 + 1e-12):
            break
        nearest[j] = min(nearest[j], down[j])
    return nearest


def _first_basis(matchings: Sequence[Matching], p: Array) -> Array:
    """An orthonormal basis of vectors orthogonal to 1: all of them, or for many ranks the least connected ones at p."""
    n = world_size(matchings)
    if n <= MAX_WHOLE:
        basis = np.eye(n, n - 1)
    else:
        basis = np.linalg.eigh(weighted_laplacian(matchings, p, n))[1][:, 1 : 1 + 2 * NUM_NEW]
    return np.asarray(np.linalg.qr(basis - basis.mean(axis=0))[0], dtype=np.float64)


def _most_connected_on(
    basis: Array, matchings: Sequence[Matching], seconds: Array, limit: float, *, start: Array, gap: float
) -> tuple[Array, float]:
    """The optimal p when lambda_2 is the smallest eigenvalue on the subspace of `basis`, and an upper bound on it.

    It is solved for x_j = p_j / start_j in a basis in which sum_j start_j L_j is I, since costs and eigenvalues of very
    different size would cause large rounding errors. `start` must be strictly feasible; `gap` is relative.
    """
    rows = [np.sqrt(p) * _differences(basis, matching) for p, matching in zip(start, matchings, strict=True)]
    stacked = np.vstack(rows)
    values, vectors = np.linalg.eigh(stacked.T @ stacked)
    if values[0] <= _SINGULAR * values[-1]:
        raise _too_extreme(seconds, limit)
    to_identity = vectors * np.sqrt(1 / values)
    laplacians = np.stack([row.T @ row for row in (row @ to_identity for row in rows)])
    metric = np.diag(values[0] / values)
    # A(x, s) = sum_j x_j L_j - s metric.
    inequality = MatrixInequality(np.zeros_like(metric), np.concatenate([laplacians, -metric[None]]))
    m = len(matchings)
    ones, zeros = np.eye(m), np.zeros(m)
    normals = np.vstack([-ones, ones, seconds * start / limit])
    halfspaces = Halfspaces(np.pad(normals, ((0, 0), (0, 1))), np.concatenate([zeros, 1 / start, [1.0]]))
    x = minimize(np.append(zeros, -1.0), inequality, halfspaces, np.append(np.ones(m), 0.5), gap=gap)
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


def smallest_rho(matchings: Sequence[Matching], seconds: Array, limit: float) -> ActivationPlan:
    """`joint_probabilities` of checked matchings, with sum_j p_j seconds_j <= limit."""
    if not matchings:
        return ActivationPlan(np.empty(0), alpha=1.0, rho=0.0)  # a world of one always agrees
    candidates: list[ActivationPlan] = []
    for share in _SHARES:
        start = best_connected(matchings, seconds, share * limit)
        plan = ActivationPlan(start, *mixing_weight(matchings, start))
        candidates += [plan, _improved(plan, matchings, seconds, limit)]
    # If more matchings do not lower rho, take the cheapest plan.
    return min(
        candidates,
        key=lambda best: (-float(f"{1 - best.rho:.{_DIGITS}g}"), float(best.probabilities @ seconds), best.rho),
    )


def _improved(start: ActivationPlan, matchings: Sequence[Matching], seconds: Array, limit: float) -> ActivationPlan:
    """A stationary point reached from `start`, on a subspace that grows until it has the true rho."""
    n = world_size(matchings)
    p, alpha = start.probabilities, start.alpha
    basis = (
        top_vectors(*second_moment(matchings, p), alpha)[1]
        if n > MAX_WHOLE
        else np.linalg.eigh(np.eye(n) + 1 / n)[1][:, :-1]
    )
    gap = 0.0 if n <= MAX_WHOLE else 0.1
    for _ in range(_MAX_STEPS):
        p, alpha, bound = _smallest_rho_on(basis, start, matchings, seconds, limit, gap=max(0.1 * gap, _RHO_GAP))
        rho, vectors = top_vectors(*second_moment(matchings, p), alpha)
        gap = rho - bound
        if gap < _BOUND_GAP:
            break
        basis = extended(basis, vectors)
    p = _rounded(p, matchings, seconds, limit)
    return ActivationPlan(p, *mixing_weight(matchings, p))


def _smallest_rho_on(
    basis: Array, start: ActivationPlan, matchings: Sequence[Matching], seconds: Array, limit: float, *, gap: float
) -> tuple[Array, float, float]:
    """p, alpha and rho, when rho is the largest eigenvalue on the subspace of `basis`."""
    inequality = _second_moment_on(basis, matchings)
    p = np.clip(start.probabilities, _MARGIN * _even_split(seconds, limit), 1 - _MARGIN)
    p *= min(1.0, (1 - _MARGIN) * limit / float(p @ seconds))
    x = np.concatenate([start.alpha * p, [start.alpha, 0.0]])
    x[-1] = 1.01 * float(np.linalg.eigvalsh(-inequality.matrix(x))[-1]) + 1e-3
    # y >= 0, y <= alpha, c . y <= alpha * limit, alpha <= 1, in the variables y, alpha, s. For alpha >= 1 is rho >= 1,
    # since W^2 has the trace n + sum_i d_i (d_i - 1) with the degrees d. Without this bound alpha could diverge.
    *ys, by_alpha, by_s = np.eye(len(x))
    normals = np.vstack([np.negative(ys), ys - by_alpha, seconds @ ys - limit * by_alpha, by_alpha])
    offsets = np.append(np.zeros(len(normals) - 1), 1.0)
    x = minimize(by_s, inequality, Halfspaces(normals, offsets), x, gap=gap)
    return np.clip(x[:-2] / x[-2], 0.0, 1.0), float(x[-2]), float(x[-1])


def _second_moment_on(basis: Array, matchings: Sequence[Matching]) -> MatrixInequality:
    """A(y, alpha, s) = s I - E[W^T W] on a subspace, where y = alpha p."""
    m, size = len(matchings), basis.shape[1]
    images = np.zeros((m, *basis.shape))  # L_j basis
    linear = np.zeros((m + 2, size, size))
    quadratic = np.zeros((m + 2, m + 2, size, size))
    for j, matching in enumerate(matchings):
        u, v = np.array(matching, dtype=np.intp).T
        row = _differences(basis, matching)
        images[j, u], images[j, v] = row, -row
        linear[j] = 2 * (row.T @ row)
        quadratic[j, m] = quadratic[m, j] = -linear[j]
    linear[-1] = np.eye(size)
    products = np.tensordot(images, images, axes=([1], [1])).transpose(0, 2, 1, 3)  # L_j L_k, [M, M, k, k]
    quadratic[:m, :m] = -(products + products.transpose(0, 1, 3, 2))  # L_j L_k + L_k L_j, both ways on the subspace
    quadratic[np.arange(m), np.arange(m)] = 0
    return MatrixInequality(-np.eye(size), linear, quadratic)


def _differences(basis: Array, matching: Matching) -> Array:
    """basis[u] - basis[v] for each link, [links, k]. In the basis the Laplacian is differences^T differences."""
    u, v = np.array(matching, dtype=np.intp).T
    return np.asarray(basis[u] - basis[v])
