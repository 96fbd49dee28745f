"""D-PSGD: the models of peers are mixed with the weights of a graph. SGP is in algorithms/sgp.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..mixing_manager.base import MixingManager
from ..rounds import Algorithm, Memory, Mix, Round, Vectors


@dataclass(frozen=True)
class DPSGD(Algorithm):
    """D-PSGD: x_i <- sum_j W_ij x_j, after the local step of each rank.

    `Mix(v.x)` is `PushPull` (rounds/push_pull.py): `start` sends x_i to the out-peers, and `_decode` forms the sum.
    With push-sum, the default of `GossipDataParallel`, it is `PushSum` (algorithms/sgp.py), and the same round is SGP:
    the weight w is one more entry of the vector, and the module computes with x / w.

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv 1705.09056,
    Algorithm 1.

    Example:
        >>> model = GossipDataParallel(model, algorithm=DPSGD(), push_sum=False)
    """

    is_plain: ClassVar[bool] = True
    is_whole: ClassVar[bool] = True
    takes_push_sum: ClassVar[bool] = True

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`; any weights will do, since push-sum weights correct the mean."""

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        yield Mix(v.x)
