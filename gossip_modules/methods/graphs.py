"""The graphs of methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..graph_manager import named_graphs, networkx_graph
from ..graph_manager.base import GraphManager
from ..graph_manager.named_graphs import (
    PREDEFINED_GRAPHS,
    STATIC_GRAPHS,
    TREES,
    default_graph,
    default_graph_name,
    named_graph,
)

if TYPE_CHECKING:
    import networkx as nx

GRAPHS: Mapping[str, Callable[..., GraphManager] | None] = {"auto": None, **named_graphs.GRAPHS}
"""Graphs that take a number of peers per round; auto: the wrapper's choice."""


def pairs(world_size: int, peers_per_itr: int | Mapping[int, int] = 1) -> str:
    """The graph of D-PSGD where none is named: pairs, or in small odd worlds a ring."""
    if world_size == 1:
        return "bipartite-exponential"
    return default_graph_name(world_size, push_sum=False, peers_per_itr=peers_per_itr)


def static(world_size: int, peers_per_itr: int | Mapping[int, int] = 1) -> str:
    """The best static undirected graph."""
    if world_size & (world_size - 1) == 0:
        return "hypercube"
    is_prime = all(world_size % divisor for divisor in range(2, int(world_size**0.5) + 1))
    return "ring" if is_prime else "torus"


def make_graph(
    name: str, *, num_nodes: int, peers_per_itr: int | Mapping[int, int], push_sum: bool
) -> GraphManager | None:
    """The graph of that name in GRAPHS; None lets the wrapper choose, for one peer per round.

    Args:
        name: key of GRAPHS.
        num_nodes: ranks of the graph.
        peers_per_itr: peers per round, or by first round.
        push_sum: whether the graph may be directed.

    Raises:
        ValueError: a predefined graph or a tree has no number of peers per round.
    """
    if name in PREDEFINED_GRAPHS or name in TREES:
        raise ValueError(
            f"got graph={name!r}, expected one of {', '.join(GRAPHS)} for a recipe that chooses peers_per_itr; for "
            "D-PSGD on it take --algorithm 'MATCHA(budget=1.0)'"
        )
    graph = GRAPHS[name]
    if graph is not None:
        return graph(num_nodes, peers_per_itr=peers_per_itr)
    if peers_per_itr == 1:
        return None
    return default_graph(num_nodes, push_sum=push_sum, peers_per_itr=peers_per_itr)


def base_graph(name: str, *, num_nodes: int) -> nx.Graph:
    """The base graph of MATCHA by its name, with all its neighbours: undirected, and the same for ever.

    Args:
        name: key of STATIC_GRAPHS, PREDEFINED_GRAPHS or TREES; auto: a ring.
        num_nodes: ranks of the graph.

    Raises:
        ValueError: another name, or a predefined graph of another size.
    """
    choices = ["auto", *STATIC_GRAPHS, *PREDEFINED_GRAPHS, *TREES]
    if name not in choices:
        raise ValueError(
            f"got graph={name!r}, expected one of {', '.join(choices)}: MATCHA samples matchings of an undirected "
            "graph that never changes; choose one of them"
        )
    return networkx_graph(named_graph("ring" if name == "auto" else name, num_nodes))


def peers_by_round(text: str, *, steps_per_epoch: int, steps_per_round: int) -> int | dict[int, int]:
    """Peers per round out of '2', or, by the first round of each epoch named, out of '0:2,30:1'.

    Args:
        text: one number, or comma-separated <epoch>:<peers>, the first epoch being 0.
        steps_per_epoch: optimizer steps, hence training forwards, in an epoch.
        steps_per_round: steps from one round to the next.

    Raises:
        ValueError: the text says something else.
    """
    try:
        if ":" not in text:
            return int(text)
        pairs = [(int(epoch), int(peers)) for epoch, peers in (pair.split(":") for pair in text.split(","))]
    except ValueError as error:
        raise ValueError(
            f"got peers_per_itr={text!r}, expected a number or <epoch>:<peers> pairs; write '2' or '0:2,30:1'"
        ) from error
    # Rounds happen at the multiples of steps_per_round: the first one in an epoch rounds its first step up.
    return {-(-epoch * steps_per_epoch // steps_per_round): peers for epoch, peers in pairs}
