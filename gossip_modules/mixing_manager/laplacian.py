"""W(t) = I - alpha L(t), with the same weight on every link: the weights of MATCHA and of the fastest D-PSGD."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from ..graph_manager.base import GraphManager
from ..graph_manager.matchings import Edge
from ..matcha.graph import MatchaGraph
from ..matcha.laplacians import contraction, dpsgd_weight, laplacian
from .base import MixingWeights, SymmetricMixing, refuse_weighted


class LaplacianMixing(SymmetricMixing):
    """W[i, j] = alpha for each peer j, W[i, i] = 1 - alpha * degree: doubly stochastic on every undirected graph.

    W[i, i] may be negative, and at the best alpha of an irregular graph it often is; this is intended. On a static
    graph alpha = 2 / (l_2 + l_n), from the second smallest and the largest eigenvalue of the Laplacian, gives the
    fastest consensus of all alpha (Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and
    Control Letters, 2004). On a `MatchaGraph` it is the alpha planned with its probabilities (Wang et al., ICC 2019,
    arXiv:1905.09435).

    Args:
        graph: a graph that is symmetric in every round.
        alpha: the weight of every link, above 0 and small enough for the ranks to agree: below 2 / l_n on a static
            graph, with `contraction` below 1 on a `MatchaGraph`; not checked on others. None: the planned alpha of a
            `MatchaGraph`, the best alpha of a static graph.

    Raises:
        ValueError: the graph is not symmetric or has weights of its own, alpha is out of range, or it is None and the
            graph has no known alpha.

    >>> from gossip_modules.graph_manager import RingGraph
    >>> LaplacianMixing(RingGraph(4, peers_per_itr=2), alpha=0.25).weights(rank=0, t=0)
    MixingWeights(own=0.5, inp={3: 0.25, 1: 0.25})
    """

    def __init__(self, graph: GraphManager, alpha: float | None = None) -> None:
        refuse_weighted(graph, type(self).__name__)
        super().__init__(graph)
        if not graph.is_symmetric:
            raise ValueError(
                f"LaplacianMixing: got {graph!r}, expected a graph whose peers answer each other in every round. Take "
                f"UniformMixing with push-sum, or a symmetric graph: MatchaGraph, hypercube, or a ring with "
                f"peers_per_itr=2."
            )
        self.alpha = _default_alpha(graph) if alpha is None else float(alpha)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(
                f"LaplacianMixing: got alpha={alpha}, expected a finite weight above 0. Leave it out to have the best."
            )
        if alpha is not None:
            _check_contracts(graph, self.alpha)

    def weights(self, rank: int, t: int) -> MixingWeights:
        peers = self.graph.in_peers(rank, t)
        return MixingWeights(own=1 - self.alpha * len(peers), inp=dict.fromkeys(peers, self.alpha))

    def buffer_weights(self, rank: int, t: int) -> MixingWeights:
        """See `MixingManager`: a smaller alpha, the same on all ranks, for which no W[i, i] is below zero."""
        own, inp = self.weights(rank, t)
        if self.alpha <= self._largest_convex_alpha:
            return MixingWeights(own, inp)
        return MixingWeights(1 - self._largest_convex_alpha * len(inp), dict.fromkeys(inp, self._largest_convex_alpha))

    @cached_property
    def _largest_convex_alpha(self) -> float:
        return 1 / max(1, *(len(self.graph.phone_book(rank)) for rank in range(self.graph.world_size)))

    def __repr__(self) -> str:
        """Complete: with the same repr, two mixings have the same weights on all ranks in all rounds."""
        return f"{super().__repr__()[:-1]}, alpha={self.alpha})"


def _default_alpha(graph: GraphManager) -> float:
    if isinstance(graph, MatchaGraph):
        return graph.alpha
    if graph.is_dynamic:
        raise ValueError(
            f"LaplacianMixing: got {graph!r}, whose links change, without alpha; expected a MatchaGraph or a static "
            f"graph, whose best alpha is known. Give alpha, e.g. 0.5 where a round is one matching."
        )
    if graph.world_size == 1:
        return 1.0
    # Each link is passed as a matching of its own, since only the union matters for a static graph.
    return dpsgd_weight((link,) for link in _links(graph)).alpha


def _links(graph: GraphManager) -> list[Edge]:
    """All links that are ever used by a static graph or a `MatchaGraph`."""
    if isinstance(graph, MatchaGraph):
        used = (m for m, p in zip(graph.matchings, graph.probabilities, strict=True) if p > 0)
        return [link for matching in used for link in matching]
    return [(i, j) for i in range(graph.world_size) for j in graph.out_peers(i, 0) if i < j]


def _check_contracts(graph: GraphManager, alpha: float) -> None:
    is_matcha = isinstance(graph, MatchaGraph)
    if graph.world_size == 1 or (graph.is_dynamic and not is_matcha):
        return
    if isinstance(graph, MatchaGraph) and graph.is_dynamic and not graph.is_periodic:
        rho = contraction(graph.matchings, graph.probabilities, alpha=alpha)
        if rho >= 1:
            raise ValueError(
                f"LaplacianMixing: got alpha={alpha} on {graph!r}, where the distance from the average grows by the "
                f"factor rho={rho:.6g}, expected a factor below 1. Leave alpha out to have the best, {graph.alpha}."
            )
        return
    most = 2 / float(np.linalg.eigvalsh(laplacian(_links(graph), graph.world_size))[-1])
    if alpha >= most * (1 - 1e-12):
        raise ValueError(
            f"LaplacianMixing: got alpha={alpha} on {graph!r}, expected below {most:.6g} = 2 / l_n of its Laplacian: "
            f"from there on the distance from the average does not shrink. Leave it out to have the best."
        )
