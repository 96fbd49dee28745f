"""Spectra of weights: the best consensus step size, and how fast differences grow where a momentum is mixed as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .base import MixingManager, knows_period, radius_per_round

Law: TypeAlias = Callable[[Tensor], Tensor]
"""The matrix [..., k m, k m] of one round, from the weights [..., m, m]: for k vectors of m ranks."""

MAX_STATIC_RANKS = 1024
"""The most ranks of a static undirected graph to examine."""
MAX_RANKS = 128
"""Up to so many ranks, all other graphs are."""

_MAX_ROWS = 2**12  # ranks times rounds of a product; so it takes less than half a second
_NUM_SAMPLED, _NUM_VECTORS = 128, 8  # of rounds that do not repeat
_TOLERANCE, _SAMPLED_TOLERANCE = 1e-6, 0.02  # above 1: the rounding, and the error of 64 random rounds
_VANISHED = 1e-150
_MAX_DENSE_RANKS = 4096  # computing the eigenvalues of a dense matrix of this size takes a minute
_ZERO = 1e-9  # eigenvalues below it are zero


def check_growth(
    method: str, rates: Mapping[str, float], mixing: MixingManager, law: Law, *, step: str, remedy: str
) -> None:
    """Raise ValueError if the differences between ranks grow by themselves, see `growth`.

    Args:
        method: its name, for the error.
        rates: the rates in the law, by name.
        mixing: doubly stochastic weights.
        law: one round of the method, without gradients.
        step: the word for a round.
        remedy: a change of the rates that helps.
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

    Without gradients, a method with a momentum m beside each model x follows a linear law. On the differences from the
    mean over ranks, a round is a matrix M(t) made of W(t), and T repeated rounds let them grow by the spectral radius

        rho(M(T-1) ... M(1) M(0)) ^ (1/T)

    per round. A momentum may make this larger than 1 although W(t) alone brings ranks together: on directed graphs,
    because eigenvalues of W are complex, and on changing graphs, because no eigenvalue of one round says anything.

    If the period of a graph cannot be computed, the growth of 128 rounds takes its place. It is known to about 2%: up
    to 1.02 counts as 1. This holds for random graphs, for very long periods, and for your own weights without a period.
    With a schedule of peers, the growth is the largest of all entries with a full period.

    Static weights take the eigenvalues of W, each with a law of k x k numbers; others take a product of matrices. For
    more than `MAX_RANKS` ranks, or `MAX_STATIC_RANKS` of static symmetric weights, nothing is computed.

    Args:
        mixing: doubly stochastic weights; they keep the mean, whatever the differences are.
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
        _rounded(radius_per_round(matrix, cycle)) if 0 < n * len(cycle) <= _MAX_ROWS else _sampled(matrix, cycle)
        for cycle in _cycles(mixing)
    )


def blocks(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """The matrix [..., k m, k m] of k times k blocks [..., m, m]."""
    return torch.cat([torch.cat(list(row), dim=-1) for row in rows], dim=-2)


def identity_like(w: Tensor) -> Tensor:
    """The identity, as large as these matrices [..., m, m]."""
    return torch.eye(w.shape[-1], dtype=w.dtype, device="cpu").expand_as(w)


def _cycles(mixing: MixingManager) -> Sequence[range]:
    """Return the repeated rounds, a range for each entry of a schedule of peers; of 0 rounds without a period."""
    if knows_period(mixing) and (mixing.period or not mixing.graph.period):
        return [range(mixing.period)] if mixing.period else mixing.graph.cycles()
    return [range(0)]


def _differences(n: int) -> Tensor:
    """Return an orthonormal basis [n, n-1] of vectors with sum zero: a reflection takes e_0 to the mean."""
    v = torch.full((n,), -1 / math.sqrt(n), dtype=torch.float64, device="cpu")
    v[0] += 1
    return torch.eye(n, dtype=torch.float64, device="cpu")[:, 1:] - torch.outer(v, v[1:]) * (2 / v.dot(v))


def _of_eigenvalues(w: Tensor, law: Law, *, is_symmetric: bool) -> float:
    """Return the growth for a constant W - J. The blocks of its law commute, so each eigenvalue has its own law."""
    eigenvalues = (torch.linalg.eigvalsh if is_symmetric else torch.linalg.eigvals)(w)
    # The one that subtracting J has made 0.
    is_of_mean = torch.arange(len(w), device="cpu") == eigenvalues.abs().argmin()
    return _rounded(float(torch.linalg.eigvals(law(eigenvalues[~is_of_mean, None, None])).abs().max()))


def _sampled(matrix: Callable[[int], Tensor], rounds: range) -> float:
    """The growth of a few vectors in the second half of so many rounds."""
    generator = torch.Generator().manual_seed(0)
    size = len(matrix(rounds.start))
    x = torch.randn(size, _NUM_VECTORS, generator=generator, dtype=torch.float64, device="cpu")
    log_scales = []
    for t in range(rounds.start, rounds.start + _NUM_SAMPLED):
        x = matrix(t) @ x
        scale = float(torch.linalg.matrix_norm(x))
        if scale < _VANISHED:
            return 0.0
        x /= scale
        log_scales.append(math.log(scale))
    half = log_scales[_NUM_SAMPLED // 2 :]
    return _rounded(math.exp(sum(half) / len(half)), _SAMPLED_TOLERANCE)


def _rounded(factor: float, tolerance: float = _TOLERANCE) -> float:
    return 1.0 if 1 < factor <= 1 + tolerance else factor


def best_step_size(mixing: MixingManager) -> float:
    """2 / (smallest positive + largest eigenvalue of I - W(0)), for symmetric W; 1.308 on a ring of 8.

    Rounded to six decimals, so that all ranks agree.

    Args:
        mixing: the weights; the matrix W(0) must be symmetric.

    Raises:
        ValueError: more than 4096 ranks: their eigenvalues would take minutes.
    """
    n = mixing.graph.world_size
    if n > _MAX_DENSE_RANKS:
        raise ValueError(
            f"got {n} ranks, expected at most {_MAX_DENSE_RANKS} for the best step size, which takes the eigenvalues "
            "of a dense matrix; give a step_size"
        )
    eigenvalues = torch.linalg.eigvalsh(torch.eye(n, dtype=torch.float64, device="cpu") - mixing.matrix(0))
    positive = eigenvalues[eigenvalues > _ZERO].tolist()
    return round(2 / (positive[0] + positive[-1]), 6) if positive else 1.0


def checked_step_size(algorithm: Any) -> float:
    """The `step_size` of an algorithm as a float; raises ValueError where it is not a positive number."""
    step_size = algorithm.step_size
    if not (isinstance(step_size, Real) and 0 < float(step_size) < math.inf):
        raise ValueError(
            f"{type(algorithm).__name__}: got step_size={step_size!r}, expected a positive number; 1 mixes with the "
            "weights as they are, strong compression needs less"
        )
    return float(step_size)


def lowest_eigenvalue(mixing: MixingManager) -> float | None:
    """Return the lowest eigenvalue of symmetric static weights; None for one rank, or above 1,024."""
    if not 1 < mixing.graph.world_size <= MAX_STATIC_RANKS:
        return None
    return float(torch.linalg.eigvalsh(mixing.matrix(0).double())[0])
