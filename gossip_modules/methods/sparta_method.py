"""SPARTA as a method: a gossiper for undirected graphs, on the complete one where none is named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..gossiper.gossiper import Gossiper
from ..registry import Method, Paper
from ..sparta.sparta import Sparta
from .graphs import make_undirected_graph
from .options import Context, MethodOptions
from .own import gossiper_method
from .wrapping import code, wrap_gossip


def sparta(options: MethodOptions, seed: int) -> Gossiper:
    """SPARTA."""
    return Sparta(options.compression_ratio, seed=seed)


def everyone_or_neighbours(options: MethodOptions, num_nodes: int, context: Context) -> dict[str, Any]:
    """All ranks, or the neighbours on the undirected graph that is named."""
    return {"graph": None if options.graph == "auto" else make_undirected_graph(options.graph, num_nodes=num_nodes)}


SPARTA_METHOD: Method = replace(
    gossiper_method(
        "sparta",
        sparta,
        algorithm=Sparta,
        title="SPARTA",
        summary="averages a small random share of the parameters in each step",
        paper=Paper(
            "Beton et al.",
            "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging",
            "2025",
        ),
        options=frozenset({"compression_ratio"}),
    ),
    make=partial(wrap_gossip, whom=everyone_or_neighbours, what=partial(code, gossiper=sparta)),
    example="GossipDataParallel(model, gossiper=Sparta())",
    simulated_graph=lambda n: "complete",
)
"""Its entry."""
