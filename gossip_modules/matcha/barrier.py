"""min <c, x> subject to A(x) positive definite and G x < h: Newton's method on a logarithmic barrier."""

from __future__ import annotations

from typing import NamedTuple

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

    def slack(self, x: Array) -> Array:
        """h - G x."""
        return np.asarray(self.offsets - self.normals @ x)


class MatrixInequality(NamedTuple):
    """A(x) > 0 for the symmetric matrix A(x) = constant + sum_i x_i linear_i + 1/2 sum_ij x_i x_j quadratic_ij."""

    constant: Array  # [k, k]
    linear: Array  # [m, k, k]
    quadratic: Array | None = None  # [m, m, k, k], symmetric in both pairs of indices; None: zero

    def factor(self, x: Array) -> Array | None:
        """The Cholesky factor of A(x), lower; None where A is not positive definite."""
        try:
            return np.asarray(np.linalg.cholesky(self.matrix(x)), dtype=np.float64)
        except np.linalg.LinAlgError:
            return None

    def matrix(self, x: Array) -> Array:
        """A(x), [k, k]."""
        result: Array = self.constant + np.tensordot(x, self.linear, 1)
        if self.quadratic is not None:
            result += 0.5 * np.tensordot(np.outer(x, x), self.quadratic, 2)
        return result

    def derivatives(self, x: Array) -> Array:
        """dA/dx_i, [m, k, k]."""
        return self.linear if self.quadratic is None else self.linear + np.tensordot(x, self.quadratic, 1)


def minimize(objective: Array, inequality: MatrixInequality, halfspaces: Halfspaces, x: Array, *, gap: float) -> Array:
    """The minimiser of <objective, x> where A(x) > 0 and G x < h, by an interior point method.

    It computes centres for smaller and smaller weights w: the centre minimises
    <c, x> / w - log det A(x) - sum log(h - G x). On a convex problem the centre is unique and its objective is within
    w (k + num_constraints) of the minimum; if several points are optimal, the result is in the middle of them. On other
    problems the result is a stationary point that depends on the start: negative eigenvalues in the Newton system are
    replaced by their absolute values, so every step decreases the barrier function; the number of steps is limited.

    Args:
        objective: the vector c, [m].
        inequality: the inequality A(x) > 0, with matrices of size k.
        halfspaces: the linear constraints G x < h.
        x: a strictly feasible start, [m]; not changed.
        gap: the distance from the minimum at which to stop, on convex problems.

    Returns:
        x, strictly feasible, [m].
    """
    assert (halfspaces.slack(x) > 0).all(), "the start must be strictly inside the halfspaces"
    assert inequality.factor(x) is not None, "A(x) must be positive definite at the start"
    num_barriers = len(halfspaces.offsets) + inequality.linear.shape[-1]
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
        factor = inequality.factor(x)
        assert factor is not None, "the line search keeps x feasible"
        root = np.linalg.inv(factor)
        scaled = (root @ inequality.derivatives(x) @ root.T).reshape(len(x), -1)
        normals = halfspaces.normals / halfspaces.slack(x)[:, None]
        gradient = objective - scaled[:, :: len(factor) + 1].sum(axis=1) + normals.sum(axis=0)
        hessian = scaled @ scaled.T + normals.T @ normals
        if inequality.quadratic is not None:
            hessian -= np.tensordot(inequality.quadratic, root.T @ root, 2)
        direction = -_solve(hessian, gradient)
        slope = float(gradient @ direction)
        if last < _QUADRATIC and -slope > last / 2:
            return x  # Newton's method would have squared the decrement, so only rounding errors are left
        step = _line_search(objective, inequality, halfspaces, x, factor, direction, slope)
        before, x = x, x + step * direction
        if -slope < decrement or np.array_equal(x, before):  # a step below rounding leads nowhere
            return x
        last = -slope
    # Where the problem is not convex, a flat valley may take longer: x is feasible, and better than the start.
    assert inequality.quadratic is not None, f"no centre in {_MAX_NEWTON_STEPS} steps, squared decrement {-slope}"
    return x


def _solve(hessian: Array, gradient: Array) -> Array:
    """|H|^-1 g, with the absolute eigenvalues of H: its inverse where H is positive definite."""
    scale = 1 / np.sqrt(np.abs(np.diag(hessian)))  # near a boundary the entries differ by many orders of magnitude
    values, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
    absolute = np.maximum(np.abs(values), 1e-14 * np.abs(values).max())
    return np.asarray(scale * (vectors @ ((vectors.T @ (scale * gradient)) / absolute)))


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
    rates = (halfspaces.normals @ direction) / halfspaces.slack(x)
    step = min(1.0, 0.99 / max(float(rates.max()), 1e-300))
    log_det = np.log(np.diag(factor)).sum()
    while step > 1e-10:
        trial = inequality.factor(x + step * direction)
        if trial is not None:
            # The change is computed directly: as a difference of two large values it would be lost in rounding.
            change = step * float(objective @ direction) - float(np.log1p(-step * rates).sum())
            change -= 2 * float(np.log(np.diag(trial)).sum() - log_det)
            if change <= 0.1 * step * slope or -slope < _QUADRATIC:
                return step
        step /= 2
    return 0.0
