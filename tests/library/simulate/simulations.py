"""What several tests of this folder share."""

from __future__ import annotations

import networkx as nx

import gossip_modules as gm
from gossip_modules.graph_manager.named_graphs import GRAPHS, named_graph
from gossip_modules.simulate import (
    Choice,
    ComputeModel,
    LinkModel,
    Prediction,
    Setting,
)

EVEN = ComputeModel(seconds=0.15, overhead_seconds=0.01)


UNEVEN = ComputeModel(
    seconds=0.1, overhead_seconds=0.02, rank_spread=0.3, step_spread=0.4, straggle_share=0.2, straggle_factor=5, seed=3
)


LINKS = LinkModel(rate_bit_s=1e9)


CLUSTER = Setting(8, 11_175_000, EVEN, LINKS)  # 44.7 MB


def irregular(n: int, *, is_directed: bool) -> gm.graph_manager.GraphManager:
    """A ring with chords from rank 0: degrees differ."""
    graph = nx.cycle_graph(n, create_using=nx.DiGraph if is_directed else nx.Graph)
    graph.add_edges_from((0, j) for j in range(2, n - 1, 2))
    return gm.graph_manager.NetworkXGraph(graph)


def graphs(n: int) -> dict[str, gm.graph_manager.GraphManager]:
    """All kinds that exist for n ranks, with one peer and with more."""
    found: dict[str, gm.graph_manager.GraphManager] = {}
    for name in GRAPHS:
        for peers in (1, 2, None):
            try:
                found[f"{name} {peers}"] = named_graph(name, n, peers)
            except ValueError:
                continue  # no such size
    found["matcha"] = gm.MatchaGraph(nx.cycle_graph(n), budget=0.5, seed=1)
    return {**found, "undirected": irregular(n, is_directed=False), "directed": irregular(n, is_directed=True)}


def prediction(method: str, *, error: float, seconds: float, disagreement: float = 0.0) -> Prediction:
    return Prediction(
        Choice(method, "", ""), 0.4, error, 10.0, seconds / 10, seconds, 1e6, 0.5, disagreement, max_disagreement=0.2
    )
