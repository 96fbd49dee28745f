"""The weights that a graph prescribes, and the weights that fit a graph where the user names none."""

from __future__ import annotations

import math
from functools import cached_property

from ..graph_manager import WeightedGraph
from ..graph_manager.base import GraphManager
from ..matcha.graph import MatchaGraph
from .base import DoublyStochasticMixing, MetropolisHastingsMixing, MixingManager, MixingWeights, UniformMixing
from .laplacian import LaplacianMixing


class GraphMixing(DoublyStochasticMixing):
    """The weights that the graph itself prescribes, such as those of `BaseGraph`: doubly stochastic.

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

    @cached_property
    def is_symmetric(self) -> bool:
        return self.graph.is_symmetric

    def weights(self, rank: int, t: int) -> MixingWeights:
        inp = self._link_weights(rank, t)
        return MixingWeights(own=1 - math.fsum(inp.values()), inp=inp)


def default_mixing(graph: GraphManager, *, push_sum: bool) -> MixingManager:
    """The weights for a graph: its own if it has some, MATCHA's Laplacian, else Metropolis-Hastings or uniform ones.

    Args:
        graph: the graph.
        push_sum: whether uniform weights are to be used on undirected graphs as well.
    """
    if isinstance(graph, WeightedGraph):
        return GraphMixing(graph)
    if isinstance(graph, MatchaGraph):
        return LaplacianMixing(graph)
    return MetropolisHastingsMixing(graph) if not push_sum and graph.is_symmetric else UniformMixing(graph)
