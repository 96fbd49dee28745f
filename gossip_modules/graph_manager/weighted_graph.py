"""Graphs that prescribe the weights of their links."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property

from .base import GraphManager


class WeightedGraph(GraphManager):
    """An undirected graph that prescribes the weight of each of its links, in every round.

    `GraphMixing` mixes with these weights, and wrappers choose it for such a graph. The weights of a rank sum to at
    most 1; what is left is the rank's own weight.
    """

    @abstractmethod
    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        """The weight W[rank, j] = W[j, rank] of each peer j of `rank` in round `t`."""

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return tuple(self.link_weights(rank, t))

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self.out_peers(rank, t)

    @cached_property
    def is_symmetric(self) -> bool:
        return True
