"""What a wrapper uses when the user names no graph, mixing or gossiper."""

from __future__ import annotations

from .dynamic_graphs import DynamicBipartiteExponentialGraph, NPeerDynamicDirectedExponentialGraph
from .gossiper import Gossiper, PushPull, PushSum
from .graph_manager import GraphManager
from .mixing_manager import MetropolisHastingsMixing, MixingManager, UniformMixing
from .static_graphs import RingGraph


def choose_gossiper(gossiper: Gossiper | None, *, push_sum: bool) -> Gossiper:
    """`gossiper`, or push-sum, or push-pull."""
    if gossiper is not None:
        return gossiper
    return PushSum() if push_sum else PushPull()


def choose_mixing(
    graph: GraphManager | None, mixing: MixingManager | None, *, push_sum: bool, world_size: int
) -> MixingManager:
    """The mixing manager, with its graph.

    Push-sum: the one-peer exponential graph with uniform weights. Push-pull: pairs on the bipartite exponential graph
    where the world is even, else both neighbours on a ring; Metropolis-Hastings weights where the graph is symmetric.

    Raises:
        ValueError: `mixing` is over another graph than `graph`.
    """
    if mixing is not None:
        if graph is not None and repr(graph) != repr(mixing.graph):
            raise ValueError(
                f"got graph={graph} and a mixing over {mixing.graph}, expected one graph; pass mixing only"
            )
        return mixing
    if graph is None:
        graph = _default_graph(push_sum, world_size)
    if not push_sum and graph.is_symmetric:
        return MetropolisHastingsMixing(graph)
    return UniformMixing(graph)


def _default_graph(push_sum: bool, world_size: int) -> GraphManager:
    if push_sum:
        return NPeerDynamicDirectedExponentialGraph(world_size)
    if world_size % 2 == 0:
        return DynamicBipartiteExponentialGraph(world_size)
    return RingGraph(world_size, peers_per_itr=2)
