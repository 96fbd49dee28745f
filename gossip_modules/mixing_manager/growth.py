"""How fast differences between ranks grow where a momentum is mixed along with the models, or made of how they move."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .base import MixingManager
from .period import knows_period

Law: TypeAlias = Callable[[Tensor], Tensor]
"""The matrix [..., k m, k m] of one round, from the weights [..., m, m]: what k vectors of m ranks become."""

MAX_STATIC_RANKS = 1024
"""Up to so many ranks, undirected graphs that never change are looked at."""
MAX_RANKS = 128
"""Up to so many ranks, all other graphs are."""

_MAX_ROWS = 2**12  # ranks times rounds of a product; so it takes less than half a second
_NUM_SAMPLED, _NUM_VECTORS = 128, 8  # of rounds that do not repeat
_TOLERANCE, _SAMPLED_TOLERANCE = 1e-6, 0.02  # above 1: rounding; what 64 random rounds may be off by
_VANISHED = 1e-150


def check_growth(
    method: str, rates: Mapping[str, float], mixing: MixingManager, law: Law, *, step: str, remedy: str
) -> None:
    """Raise ValueError where the differences between ranks grow by themselves, see `growth`.

    Args:
        method: its name, for the error.
        rates: that the law has, by name.
        mixing: doubly stochastic weights.
        law: one round of the method, without gradients.
        step: what a round is called.
        remedy: which change of the rates helps.
    """
    factor = growth(mixing, law)
    if factor is not None and factor > 1:
        given = " and ".join(f"{name}={value:g}" for name, value in rates.items())
        raise ValueError(
            f"{method}: got {given} on {mixing}, where the differences between ranks grow {factor:.4f} times from one "
            f"{step} to the next, expected a factor of at most 1; take {remedy}, an undirected graph that never "
            "changes, such as RingGraph(n, peers_per_itr=min(2, n - 1)), or RandomMatchingGraph(n)"
        )


def growth(mixing: MixingManager, law: Law) -> float | None:
    """The factor per round by which differences from the mean grow in the long run; None: the world is too large.

    A method whose models x have a momentum m follows a linear law where there are no gradients. On the differences from
    the mean over ranks, a round is a matrix M(t) made of W(t), and T rounds that repeat let them grow by the spectral
    radius

        rho(M(T-1) ... M(1) M(0)) ^ (1/T)

    per round. A momentum may make this larger than 1 although W(t) alone brings ranks together: on directed graphs,
    where eigenvalues of W are complex, and on those that change, where no eigenvalue of one round says anything.

    Graphs of which no period can be computed (random ones, those with a very long period, and weights of a user's own
    class that says none) have the growth of 128
    rounds of theirs in place of it, which is known to about 2%: up to 1.02 counts as 1. With a schedule of peers, it is
    the largest of all entries that last a period.

    Weights that never change take the eigenvalues of W, each with a law of k x k numbers; others a product of matrices.
    For more than `MAX_RANKS` ranks, or `MAX_STATIC_RANKS` of symmetric weights that never change, nothing is computed.

    Args:
        mixing: doubly stochastic weights, under which the mean is kept whatever the differences are.
        law: M(t) from W(t).
    """
    if (n := mixing.graph.world_size) == 1:
        return 0.0
    is_static = mixing.period == 1 and knows_period(mixing)
    if n > (MAX_STATIC_RANKS if is_static and mixing.is_symmetric else MAX_RANKS):
        return None
    if is_static:
        return _of_eigenvalues(mixing.matrix(0).double() - 1 / n, law, is_symmetric=mixing.is_symmetric)
    basis = _differences(n)

    def matrix(t: int) -> Tensor:
        return law(basis.T @ mixing.matrix(t).double() @ basis)

    return max(
        _of_period(matrix, cycle) if 0 < n * len(cycle) <= _MAX_ROWS else _sampled(matrix, cycle)
        for cycle in _cycles(mixing)
    )


def blocks(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """The matrix [..., k m, k m] of k times k blocks [..., m, m]."""
    return torch.cat([torch.cat(list(row), dim=-1) for row in rows], dim=-2)


def identity_like(w: Tensor) -> Tensor:
    """The identity, as large as these matrices [..., m, m]."""
    return torch.eye(w.shape[-1], dtype=w.dtype, device="cpu").expand_as(w)


def _cycles(mixing: MixingManager) -> Sequence[range]:
    """Rounds that repeat, a range for each entry of a schedule of peers; of 0 rounds where nobody knows a period."""
    if knows_period(mixing) and (mixing.period or not mixing.graph.period):
        return [range(mixing.period)] if mixing.period else mixing.graph.cycles()
    return [range(0)]


def _differences(n: int) -> Tensor:
    """An orthonormal basis [n, n-1] of vectors that sum to zero: a reflection takes e_0 to the mean."""
    v = torch.full((n,), -1 / math.sqrt(n), dtype=torch.float64, device="cpu")
    v[0] += 1
    return torch.eye(n, dtype=torch.float64, device="cpu")[:, 1:] - torch.outer(v, v[1:]) * (2 / v.dot(v))


def _of_eigenvalues(w: Tensor, law: Law, *, is_symmetric: bool) -> float:
    """Of a W - J that never changes: the blocks of its law commute, so that each eigenvalue has a law of its own."""
    eigenvalues = (torch.linalg.eigvalsh if is_symmetric else torch.linalg.eigvals)(w)
    # The one that subtracting J has made 0.
    is_of_mean = torch.arange(len(w), device="cpu") == eigenvalues.abs().argmin()
    return _rounded(float(torch.linalg.eigvals(law(eigenvalues[~is_of_mean, None, None])).abs().max()))


def _of_period(matrix: Callable[[int], Tensor], rounds: range) -> float:
    """The spectral radius of the product of these rounds, per round; its scale is kept apart against overflow."""
    product, log_scale = matrix(rounds[0]), 0.0
    for t in rounds[1:]:
        product = matrix(t) @ product
        scale = float(torch.linalg.matrix_norm(product))
        if scale < _VANISHED:
            return 0.0
        product /= scale
        log_scale += math.log(scale)
    radius = float(torch.linalg.eigvals(product).abs().max())
    return _rounded(math.exp((log_scale + math.log(max(radius, _VANISHED))) / len(rounds)))


def _sampled(matrix: Callable[[int], Tensor], rounds: range) -> float:
    """The growth of a few vectors in the second half of so many rounds."""
    x, log_scale = None, 0.0
    for k in range(_NUM_SAMPLED):
        step = matrix(rounds.start + k)
        if x is None:
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(len(step), _NUM_VECTORS, generator=generator, dtype=torch.float64, device="cpu")
        x = step @ x
        scale = float(torch.linalg.matrix_norm(x))
        if scale < _VANISHED:
            return 0.0
        x /= scale
        if k >= _NUM_SAMPLED // 2:
            log_scale += math.log(scale)
    factor = math.exp(log_scale / (_NUM_SAMPLED - _NUM_SAMPLED // 2))
    return 1.0 if 1 < factor <= 1 + _SAMPLED_TOLERANCE else factor


def _rounded(factor: float) -> float:
    return 1.0 if 1 < factor <= 1 + _TOLERANCE else factor
