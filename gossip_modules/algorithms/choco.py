"""CHOCO-SGD: gossip of compressed differences between each model and a public copy of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..compression.compressor import Compressor
from ..mixing_manager.base import MixingManager
from ..rounds.algorithm import Algorithm
from ..rounds.memory import Memory
from ..rounds.requests import Round, Share
from ..rounds.vectors import Vectors


@dataclass(frozen=True)
class Choco(Algorithm):
    """CHOCO-SGD: each rank sends the compressed difference between its model x_i and a public copy x̂_i of it.

    Args:
        compressor: the compressor C; a contraction.
        step_size: the consensus step size, gamma in the paper.
    """

    compressor: Compressor
    _: KW_ONLY
    step_size: float

    is_skippable: ClassVar[bool] = False
    needs_static_graph: ClassVar[bool] = True

    def step_size_on(self, mixing: MixingManager) -> float:
        """See `Algorithm`."""
        return self.step_size

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        public, drift = m.vector("public", average="on_request"), m.vector("drift", average="on_request")
        q = v.encode(self.compressor, m.scratch("difference").sum_(v.x, public, alpha=-1))  # q_i = C(x_i - x̂_i)
        received = yield Share(q)
        q.add_to(public)
        received.add_to(drift)  # drift_i + sum_j W_ij (q_j - q_i)
        v.x.add_(drift, alpha=self.step_size)
