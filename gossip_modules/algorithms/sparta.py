"""SPARTA: in each step ranks average a small random share of their parameters."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ..compression.sparsifier import RandomK
from ..graph_manager import CompleteGraph
from ..graph_manager.base import GraphManager
from ..registry import Paper
from ..rounds import Algorithm, Memory, Round, Share, Vectors


@dataclass(frozen=True)
class Sparta(Algorithm):
    """SPARTA: ranks average a random share of their parameters, the same parameters on all ranks.

    A round on rank i with the neighbours j; M is drawn from the seed and the number of the round:

        M   = a share `ratio` of the parameters, equal on all ranks
        q_i = x_i on M
        send q_i to all neighbours, receive their q_j
        x_i = x_i + sum_j W_ij (q_j - q_i), on M

    So a round is a round of D-PSGD for the parameters in M, without an error of compression and without state. The mean
    over ranks is kept. After t rounds a share (1 - ratio)^t of the parameters was never averaged. As published, all
    ranks average with all: the default is the `CompleteGraph`, on which a rank sends n - 1 messages. On another
    undirected graph ranks send fewer messages and agree more slowly.

    Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025,
    https://openreview.net/forum?id=stFPf3gzq1.

    Args:
        ratio: the share of the parameters that is averaged in a round, in (0, 1]; 0.0005 to 0.005 are published.
        seed: the seed of the choice of M, equal on all ranks.

    Raises:
        ValueError: ratio or seed is out of range.

    Example:
        >>> model = GossipDataParallel(model, algorithm=Sparta())
    """

    ratio: float = 0.005
    _: KW_ONLY
    seed: int = 0

    title: ClassVar[str] = "SPARTA"
    summary: ClassVar[str] = "averages a small random share of the parameters in each step"
    paper: ClassVar[Paper | None] = Paper(
        "Beton et al.", "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", "2025"
    )
    takes_wire_dtype: ClassVar[bool] = False
    needs_symmetric_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compressor", RandomK(self.ratio, seed=self.seed))

    @property
    def compressor(self) -> RandomK:
        """The compressor that selects the parameters in M."""
        return self._compressor  # type: ignore[attr-defined]

    def default_graph(self, world_size: int) -> GraphManager:
        """See `Algorithm`."""
        return CompleteGraph(world_size, peers_per_itr=max(world_size - 1, 1))

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        received = yield Share(v.encode(self.compressor, v.x))
        received.add_to(v.x)
