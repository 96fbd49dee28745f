"""The own weights of a graph, one weight for all links, and the default weights of a graph."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from ..graph_manager import GraphManager, WeightedGraph
from ..graph_manager.matchings import Edge
from ..graph_manager.random_graphs import ActivatedGraph
from .base import (
    DoublyStochasticMixing,
    MetropolisHastingsMixing,
    MixingManager,
    MixingWeights,
    SymmetricMixing,
    UniformMixing,
)
from .laplacians import contraction, dpsgd_weight, laplacian


class GraphMixing(DoublyStochasticMixing):
    """The own weights of a graph such as `BaseGraph`: doubly stochastic.

    On an undirected graph they are symmetric.

    Args:
        graph: a `WeightedGraph`.

    Raises:
        ValueError: the graph has no weights of its own.

    >>> from gossip_modules.graph_manager.base_graph import BaseGraph
    >>> GraphMixing(BaseGraph(3)).weights(rank=0, t=0)
    MixingWeights(own=0.5, inp={1: 0.5})
    """

    def __init__(self, graph: GraphManager) -> None:
        super().__init__(graph)
        if not isinstance(graph, WeightedGraph):
            raise ValueError(
                f"GraphMixing: got {graph!r}, expected a graph that has weights of its own, such as BaseGraph. Take "
                f"UniformMixing, or leave mixing out."
            )
        self._link_weights = graph.link_weights
        self.is_symmetric = graph.is_symmetric

    def weights(self, rank: int, t: int) -> MixingWeights:
        inp = self._link_weights(rank, t)
        return MixingWeights(own=1 - math.fsum(inp.values()), inp=inp)


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
        super().__init__(graph)
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
        """See `MixingManager`: a smaller alpha, the same on all ranks, so that no W[i, i] is below zero."""
        alpha, inp = min(self.alpha, self._largest_convex_alpha), self.weights(rank, t).inp
        return MixingWeights(own=1 - alpha * len(inp), inp=dict.fromkeys(inp, alpha))

    @cached_property
    def _largest_convex_alpha(self) -> float:
        return 1 / max(1, *(len(self.graph.phone_book(rank)) for rank in range(self.graph.world_size)))

    def __repr__(self) -> str:
        """Complete: with the same repr, two mixings have the same weights on all ranks in all rounds."""
        return f"{super().__repr__()[:-1]}, alpha={self.alpha})"


def _default_alpha(graph: GraphManager) -> float:
    if isinstance(graph, ActivatedGraph):
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
    """Return all links of a static graph, or of the matchings that an `ActivatedGraph` uses at all."""
    if isinstance(graph, ActivatedGraph):
        used = (m for m, p in zip(graph.matchings, graph.probabilities, strict=True) if p > 0)
        return [link for matching in used for link in matching]
    return [(i, j) for i in range(graph.world_size) for j in graph.out_peers(i, 0) if i < j]


def _check_contracts(graph: GraphManager, alpha: float) -> None:
    if isinstance(graph, ActivatedGraph) and graph.is_dynamic and not graph.is_periodic:
        rho = contraction(graph.matchings, graph.probabilities, alpha=alpha)
        if rho >= 1:
            raise ValueError(
                f"LaplacianMixing: got alpha={alpha} on {graph!r}, where the distance from the average grows by the "
                f"factor rho={rho:.6g}, expected a factor below 1. Leave alpha out to have the best, {graph.alpha}."
            )
    elif graph.world_size > 1 and (isinstance(graph, ActivatedGraph) or not graph.is_dynamic):
        most = 2 / float(np.linalg.eigvalsh(laplacian(_links(graph), graph.world_size))[-1])
        if alpha >= most * (1 - 1e-12):
            raise ValueError(
                f"LaplacianMixing: got alpha={alpha} on {graph!r}, expected below {most:.6g} = 2 / l_n of its "
                f"Laplacian: a larger one does not shrink the distance from the average. Leave it out to have the best."
            )


def default_mixing(graph: GraphManager, *, push_sum: bool) -> MixingManager:
    """The weights for a graph: its own if it has some, MATCHA's Laplacian, else Metropolis-Hastings or uniform ones.

    Args:
        graph: the graph.
        push_sum: whether uniform weights are to be used on undirected graphs as well.
    """
    if isinstance(graph, WeightedGraph):
        return GraphMixing(graph)
    if isinstance(graph, ActivatedGraph):
        return LaplacianMixing(graph)
    return MetropolisHastingsMixing(graph) if not push_sum and graph.is_symmetric else UniformMixing(graph)
