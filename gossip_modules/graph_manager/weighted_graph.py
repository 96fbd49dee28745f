"""Graphs that prescribe the weights of their links."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property

from .base import GraphManager


class WeightedGraph(GraphManager):
    """A graph that prescribes the weight of each of its links, in every round; W(t) is doubly stochastic.

    `GraphMixing` mixes with these weights, and wrappers choose it for such a graph. The weights of a rank sum to at
    most 1; what is left is the rank's own weight. The graph is undirected with W[i, j] = W[j, i]; a directed one
    overrides `out_peers`, `in_peers` and `is_symmetric`, and the weights of the links that leave a rank must sum to the
    same as those of the links that enter it.
    """

    @abstractmethod
    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        """The weight W[rank, j] of each rank j that `rank` receives from in round `t`."""

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return tuple(self.link_weights(rank, t))

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    @cached_property
    def is_symmetric(self) -> bool:
        return True
