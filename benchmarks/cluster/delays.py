"""How much longer than planned a step computes: fixed, random, heavy-tailed; the same for every method."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Delays:
    """The factor of a step's compute time as a pure function of (seed, rank, step).

    Args:
        spread: sigma of a lognormal factor of mean 1, of every rank and step on its own; 0: all alike.
        straggle_chance: how often a rank is a straggler in a step,
        slow_factor: and how much longer it computes then.
        slow_host: how much longer the last rank computes in every step; 1: it is like the others.
        seed: of all draws.

    Raises:
        ValueError: out of range.
    """

    spread: float = 0.0
    straggle_chance: float = 0.0
    slow_factor: float = 10.0
    slow_host: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        is_spread = 0 <= self.spread < math.inf
        are_factors = 1 <= self.slow_factor < math.inf and 1 <= self.slow_host < math.inf
        if not (is_spread and are_factors and 0 <= self.straggle_chance <= 1):
            raise ValueError(
                f"got {self}, expected spread >= 0, a straggle_chance from 0 to 1, slow_factor and slow_host >= 1"
            )

    def factor(self, rank: int, step: int, *, num_hosts: int) -> float:
        """Of the compute time of `rank` in `step`."""
        draws = np.random.default_rng([self.seed, rank, step])
        factor = float(np.exp(self.spread * draws.standard_normal() - self.spread**2 / 2))
        if draws.random() < self.straggle_chance:
            factor *= self.slow_factor
        return factor * (self.slow_host if rank == num_hosts - 1 else 1.0)
