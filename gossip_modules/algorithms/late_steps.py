"""The rule of arrival="adaptive": whether ranks keep the steps of a delay, by the agreement of their drifts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rounds import Memory, Vector, Vectors

AGREE, DISAGREE = 0.6, 0.4
"""The mean cosine from which the steps are kept, and the one below which they are dropped."""


def keeps_steps(m: Memory) -> bool:
    """Whether late models keep their steps, by the last decision."""
    return m.numbers.get("carries", 1.0) > 0


def decide(v: Vectors, m: Memory, mean: Vector, norms: Tensor) -> None:
    """Store the decision of this round in the memory. It is the same in all processes that hold one model together.

    Args:
        v: the argument of `Algorithm.round`.
        m: the memory, which has the last decision.
        mean: the mean of the drifts.
        norms: the norm of each drift, float64 [n].
    """
    squares = torch.cat([norms, norms.new_tensor([len(norms) * mean.norm()])]).square()
    v.sum_over_shards(squares)
    *_, norm = (sizes := squares.sqrt()).tolist()
    cosine = mean_cosine(norm, sizes[:-1])
    if not DISAGREE <= cosine < AGREE:
        m.numbers["carries"] = float(cosine >= AGREE)
    else:
        m.numbers.setdefault("carries", 1.0)


def mean_cosine(norm: float, norms: Tensor) -> float:
    """The mean cosine of all pairs of drifts, weighted by their norms; 1 if there are no two drifts.

    Args:
        norm: the norm of the sum of the drifts.
        norms: the norm of each drift, float64 [n].
    """
    own, pairs = float(norms.square().sum()), float(norms.sum() ** 2 - norms.square().sum())
    return (norm**2 - own) / pairs if pairs > 0 else 1.0
