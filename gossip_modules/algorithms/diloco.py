"""DiLoCo: the average drift of all ranks is the gradient of an outer optimizer, SGD with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..rounds.algorithm import Algorithm
from ..rounds.memory import Memory
from ..rounds.outer_optimizer import step
from ..rounds.requests import Average, Round
from ..rounds.vectors import Vectors


@dataclass(frozen=True)
class DiLoCo(Algorithm):
    """DiLoCo."""

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.9

    averages_exactly: ClassVar[bool] = True
    has_equal_memory: ClassVar[bool] = True

    def is_due(self, k: int) -> bool:
        """See `Algorithm`."""
        return k > 0 and k % self.sync_every == 0

    def begin(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        m.vector("phi", start="x")

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        phi = m.vector("phi", start="x")
        drift = m.scratch().sum_(phi, v.x, alpha=-1)
        yield Average(drift)
        step(m.optimizer("outer", self.make_optimizer, phi), phi, drift)
        v.x.set_(phi)

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """See `OuterMethod`."""
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)
