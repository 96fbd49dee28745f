"""The consensus step size: its check, and the step size with which the ranks agree fastest in plain gossip."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from .base import MixingManager

_MAX_RANKS = 4096  # computing the eigenvalues of a dense matrix of this size takes a minute
_ZERO = 1e-9  # eigenvalues below it are zero


def best_step_size(mixing: MixingManager) -> float:
    """2 / (smallest positive + largest eigenvalue of I - W(0)), for symmetric W; 1.308 on a ring of 8.

    Rounded to six decimals, so that all ranks agree.

    Args:
        mixing: the weights; the matrix W(0) must be symmetric.

    Raises:
        ValueError: more than 4096 ranks, whose eigenvalues would take minutes.
    """
    n = mixing.graph.world_size
    if n > _MAX_RANKS:
        raise ValueError(
            f"got {n} ranks, expected at most {_MAX_RANKS} for the best step size, which takes the eigenvalues of a "
            "dense matrix; give a step_size"
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
