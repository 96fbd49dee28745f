"""min <c, x> subject to A(x) positive definite and G x < h: Newton's method on a logarithmic barrier."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_SHRINK = 0.1  # the factor of the barrier's weight from one centre to the next
_MAX_NEWTON_STEPS = 2_000  # per centre; a handful is usual, a hundred or more from a start far from the path
_NEAR, _AT = 1e-2, 1e-9  # squared Newton decrements at which a centre on the way, and the last one, are reached
_QUADRATIC = 1e-5  # below it full steps square the squared decrement, and the barrier changes by rounding only


class Halfspaces(NamedTuple):
    """G x < h."""

    normals: Array  # G, [num_constraints, m]
    offsets: Array  # h, [num_constraints]


class MatrixInequality(Protocol):
    """A(x) > 0 for a symmetric matrix A of size k whose entries are polynomials of x [m]."""

    def matrix(self, x: Array) -> Array:
        """A(x), [k, k]."""

    def derivatives(self, x: Array) -> Array:
        """dA/dx_i, [m, k, k]."""

    def curvature(self, x: Array, weight: Array) -> Array | None:
        """tr(weight d2A/dx_i dx_j), [m, m], for a symmetric weight [k, k]; None where A is linear in x."""


def minimize(objective: Array, inequality: MatrixInequality, halfspaces: Halfspaces, x: Array, *, gap: float) -> Array:
    """The minimiser of <objective, x> where A(x) > 0 and G x < h, by an interior point method.

    It computes centres for smaller and smaller weights w: the centre minimises
    <c, x> / w - log det A(x) - sum log(h - G x). On a convex problem the centre is unique and its objective is within
    w (k + num_constraints) of the minimum; if several points are optimal, the result is in the middle of them. On other
    problems the result is a stationary point that depends on the start: negative eigenvalues in the Newton system are
    replaced by their absolute values, so every step decreases the barrier function.

    Args:
        objective: the vector c, [m].
        inequality: the inequality A(x) > 0, with matrices of size k.
        halfspaces: the linear constraints G x < h.
        x: a strictly feasible start, [m]; not changed.
        gap: the distance from the minimum at which to stop, on convex problems.

    Returns:
        x, strictly feasible, [m].
    """
    slack = halfspaces.offsets - halfspaces.normals @ x
    assert (slack > 0).all(), "the start must be strictly inside the halfspaces"
    assert _factor(inequality, x) is not None, "A(x) must be positive definite at the start"
    num_barriers = len(slack) + len(inequality.matrix(x))
    weight = max(abs(float(objective @ x)), num_barriers * gap) / num_barriers
    while weight * num_barriers > gap:
        x = _center(objective / weight, inequality, halfspaces, x, decrement=_NEAR)
        weight *= _SHRINK
    return _center(objective * num_barriers / gap, inequality, halfspaces, x, decrement=_AT)


def _center(
    objective: Array, inequality: MatrixInequality, halfspaces: Halfspaces, x: Array, *, decrement: float
) -> Array:
    last = np.inf
    for _ in range(_MAX_NEWTON_STEPS):
        factor = _factor(inequality, x)
        assert factor is not None, "the line search keeps x feasible"
        root = np.linalg.inv(factor)
        scaled = (root @ inequality.derivatives(x) @ root.T).reshape(len(x), -1)
        normals = halfspaces.normals / (halfspaces.offsets - halfspaces.normals @ x)[:, None]
        trace = scaled[:, :: len(factor) + 1].sum(axis=1)
        gradient = objective - trace + normals.sum(axis=0)
        hessian = scaled @ scaled.T + normals.T @ normals
        curvature = inequality.curvature(x, root.T @ root)
        direction = -_solve(hessian if curvature is None else hessian - curvature, gradient)
        slope = float(gradient @ direction)
        if last < _QUADRATIC and -slope > last / 2:
            return x  # Newton's method would have squared the decrement, so only rounding errors are left
        step = _line_search(objective, inequality, halfspaces, x, factor, direction, slope)
        x = x + step * direction
        if step == 0 or -slope < decrement:
            return x
        last = -slope
    raise AssertionError(f"no centre within {_MAX_NEWTON_STEPS} Newton steps, squared decrement {-slope}")


def _solve(hessian: Array, gradient: Array) -> Array:
    """|H|^-1 g, with the absolute eigenvalues of H: its inverse where H is positive definite."""
    scale = 1 / np.sqrt(np.abs(np.diag(hessian)))  # near a boundary the entries differ by many orders of magnitude
    values, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
    absolute = np.maximum(np.abs(values), 1e-14 * np.abs(values).max())
    result: Array = scale * (vectors @ ((vectors.T @ (scale * gradient)) / absolute))
    return result


def _line_search(
    objective: Array,
    inequality: MatrixInequality,
    halfspaces: Halfspaces,
    x: Array,
    factor: Array,
    direction: Array,
    slope: float,
) -> float:
    """The first of 1, 1/2, 1/4, ... (scaled to stay inside) that decreases the barrier enough; 0 if none does."""
    rates = (halfspaces.normals @ direction) / (halfspaces.offsets - halfspaces.normals @ x)
    step = min(1.0, 0.99 / max(float(rates.max()), 1e-300))
    log_det = np.log(np.diag(factor)).sum()
    while step > 1e-10:
        trial = _factor(inequality, x + step * direction)
        if trial is not None:
            # The change is computed directly: as a difference of two large values it would be lost in rounding.
            change = step * float(objective @ direction) - float(np.log1p(-step * rates).sum())
            change -= 2 * float(np.log(np.diag(trial)).sum() - log_det)
            if change <= 0.1 * step * slope or -slope < _QUADRATIC:
                return step
        step /= 2
    return 0.0


def _factor(inequality: MatrixInequality, x: Array) -> Array | None:
    """The Cholesky factor of A(x), lower; None where A is not positive definite."""
    try:
        return np.asarray(np.linalg.cholesky(inequality.matrix(x)), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None
