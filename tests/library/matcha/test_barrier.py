"""The interior point method against problems whose solution is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from gossip_modules.matcha.barrier import Halfspaces, MatrixInequality, minimize

Array = npt.NDArray[np.float64]


# A(x) = (x_0 x_1 - 1): a hyperbola, curved but with a convex inside.
PRODUCT = MatrixInequality(
    constant=-np.ones((1, 1)),
    linear=np.zeros((2, 1, 1)),
    quadratic=np.array([[0.0, 1.0], [1.0, 0.0]]).reshape(2, 2, 1, 1),
)


def test_smallest_eigenvalue() -> None:
    generator = np.random.default_rng(0)
    root = generator.normal(size=(12, 12))
    matrix = root @ root.T
    inequality = MatrixInequality(matrix, -np.eye(12)[None])  # A = matrix - s I
    unbounded = Halfspaces(np.ones((1, 1)), np.array([1e3]))
    s = minimize(np.array([-1.0]), inequality, unbounded, np.array([-1.0]), gap=1e-9)
    assert s[0] == pytest.approx(np.linalg.eigvalsh(matrix)[0], abs=1e-9)


def test_linear_programme_ends_in_its_vertex_and_in_the_middle_of_an_optimal_face() -> None:
    always = MatrixInequality(np.eye(1), np.zeros((3, 1, 1)))
    box = Halfspaces(np.vstack([-np.eye(3), np.eye(3)]), np.array([0.0, 0, 0, 1, 2, 3]))
    x = minimize(np.array([1.0, -1.0, 0.0]), always, box, np.array([0.3, 0.3, 0.3]), gap=1e-9)
    np.testing.assert_allclose(x, [0.0, 2.0, 1.5], atol=1e-8)


def test_a_start_far_from_the_path_is_followed_to_the_end() -> None:
    # More than a hundred damped steps: each can only shorten a slack of 1e30 or so by a factor.
    always = MatrixInequality(np.eye(1), np.zeros((2, 1, 1)))
    box = Halfspaces(np.vstack([-np.eye(2), [[1.0, 1.0]]]), np.array([0.0, 0.0, 1.0]))
    x = minimize(np.array([-1.0, -2.0]), always, box, np.array([1e-30, 1e-30]), gap=1e-9)
    np.testing.assert_allclose(x, [0.0, 1.0], atol=1e-8)


def test_a_gap_below_rounding_ends_where_rounding_allows() -> None:
    generator = np.random.default_rng(1)
    root = generator.normal(size=(12, 12)) * np.logspace(0, -5, 12)
    matrix = root.T @ root
    unbounded = Halfspaces(np.ones((1, 1)), np.array([1e3]))
    s = minimize(np.array([-1.0]), MatrixInequality(matrix, -np.eye(12)[None]), unbounded, np.array([-1.0]), gap=1e-15)
    assert s[0] == pytest.approx(np.linalg.eigvalsh(matrix)[0], abs=1e-13)


def test_curved_inequality() -> None:
    positive = Halfspaces(-np.eye(2), np.zeros(2))
    x = minimize(np.array([4.0, 1.0]), PRODUCT, positive, np.array([3.0, 3.0]), gap=1e-9)  # 4 a + b with a b >= 1
    np.testing.assert_allclose(x, [0.5, 2.0], atol=1e-4)
    assert 4 * x[0] + x[1] == pytest.approx(4.0, abs=1e-8)


def test_a_start_outside_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="inside the halfspaces"):
        minimize(np.ones(2), PRODUCT, Halfspaces(-np.eye(2), np.zeros(2)), np.array([-1.0, -2.0]), gap=1e-9)
    with pytest.raises(AssertionError, match="positive definite at the start"):
        minimize(np.ones(2), PRODUCT, Halfspaces(-np.eye(2), np.zeros(2)), np.array([0.5, 0.5]), gap=1e-9)
