"""Communication graphs by name, with the weights that a run mixes with, as dense matrices W(t)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, gcd, lcm, pi, sin
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

import gossip_modules as gm
from gossip_modules.graph_manager.named_graphs import default_graph_name, named_graph
from gossip_modules.mixing_manager import default_mixing

Matrix = npt.NDArray[np.float64]

PUSH_SUM = ("sgp", "osgp")
ALL_NEIGHBOURS = (
    *("choco", "deepsqueeze", "moniqua", "powergossip", "gasloc"),
    *("d2", "exactdiffusion", "gradienttracking", "decentlam"),
)


_AVERAGED = {
    "diloco": "DiLoCo",
    "streamingdiloco": "Streaming DiLoCo",
    "eagerdiloco": "Eager DiLoCo",
    "sparseloco": "SparseLoCo",
    "slowmo": "SlowMo",
}
"""Recipes whose outer steps are along the mean drift of all ranks, and their titles."""


@dataclass(frozen=True)
class MatrixRounds:
    """Who mixes with whom, and how.

    Attributes:
        title: names the graph.
        num_ranks: n.
        period: rounds until W(t) repeats; 0: never.
        matrix: W(t), float64 [n, n], of the round t: row i has the weights that rank i gives.
    """

    title: str
    num_ranks: int
    period: int
    matrix: Callable[[int], Matrix]

    @classmethod
    def of(cls, mixing: gm.mixing_manager.MixingManager, title: str) -> MatrixRounds:
        """Those of a mixing manager."""
        return cls(title, mixing.graph.world_size, mixing.period, lambda t: np.asarray(mixing.matrix(t)))


def circle(num_ranks: int) -> list[tuple[float, float]]:
    """Where ranks stand in every picture of a graph without places: clockwise on a circle, rank 0 on top."""
    return [(sin(2 * pi * rank / num_ranks), cos(2 * pi * rank / num_ranks)) for rank in range(num_ranks)]


def make_mixing(graph: gm.graph_manager.GraphManager) -> gm.mixing_manager.MixingManager:
    """Weights for a graph as D-PSGD takes them: its own, its Laplacian for MATCHA, else Metropolis-Hastings or uniform.

    On a regular graph, as all named graphs but base and bipartite-complete are, the last two are the same.
    """
    return default_mixing(graph, push_sum=False)


def rounds_of_run(config: Mapping[str, Any], world_size: int) -> MatrixRounds | str:
    """The mixing of a run, or why there is none to show.

    Where the number of peers changes with the epochs, the rounds are those before it first does.

    Args:
        config: options of the run, as in its summary.json.
        world_size: processes of the run.

    Raises:
        ValueError: options that no run can have.
    """
    recipe, name = config.get("recipe"), config.get("graph", "auto")
    num_nodes = world_size // int(config.get("nprocs_per_node", 1))
    if recipe == "ar":
        return "AllReduce: gradients are averaged over all ranks in every step; there is no graph."
    if recipe == "localsgd":
        period = config.get("sync_period", 10)
        return f"Local SGD: parameters are averaged over all ranks every {period} steps; there is no graph."
    mixes_between = recipe == "slowmo" and config.get("outer_gossip_every", 0) > 0
    if recipe in _AVERAGED and not mixes_between:
        title, period = _AVERAGED[recipe], config.get("sync_period", 10)
        return f"{title}: an outer step along the mean drift of all ranks every {period} steps; there is no graph."
    if recipe == "noloco":
        return "NoLoCo: each outer step is in random pairs of ranks; there is no fixed graph."
    if recipe == "relaysgd":
        return "RelaySGD: sums of models are relayed through two binary trees, without mixing weights."
    if recipe == "dpwa":
        return "dpwa: each rank pulls the model of a random live peer; there is no fixed graph."
    if num_nodes < 2:
        return "A single node has no peers."
    if recipe == "wagma":
        groups = gm.graph_manager.ButterflyGroups(num_nodes, group_size=config.get("group_size") or None)
        period = config.get("sync_period", 0)
        return _groups(groups, f", all ranks every {period} rounds" if period else "")
    if recipe == "matcha" and config.get("plan"):
        matcha = gm.MatchaGraph.from_plan(config["plan"], seed=config["seed"], world_size=num_nodes)
        return MatrixRounds.of(make_mixing(matcha), f"MATCHA by {config['plan']}")
    if recipe == "matcha":
        name = "ring" if name == "auto" else name
        base = nx.Graph(_edges(named_graph(name, num_nodes)))
        matcha = gm.MatchaGraph(base, budget=config["budget"], seed=config["seed"])
        return MatrixRounds.of(make_mixing(matcha), f"MATCHA on {name}, budget {config['budget']:g}")
    if recipe in ALL_NEIGHBOURS:
        name = "ring" if name == "auto" else name
        return MatrixRounds.of(make_mixing(named_graph(name, num_nodes)), f"{name}, all neighbours")
    is_push_sum = recipe in PUSH_SUM or mixes_between
    by_epoch = {0: 1} if recipe == "adpsgd" else _peers_by_epoch(str(config.get("peers_per_itr", "1")))
    peers = by_epoch[min(by_epoch)]
    changes = [epoch for epoch, later in sorted(by_epoch.items()) if later != peers]
    if name == "auto":
        name = default_graph_name(num_nodes, push_sum=is_push_sum, peers_per_itr=by_epoch)
        if recipe == "adpsgd" and num_nodes % 2:
            name = "bipartite-complete"
        peers = max(peers, 2) if name == "ring" and not changes else peers
    graph = named_graph(name, num_nodes, peers)
    mixing = default_mixing(graph, push_sum=is_push_sum)
    between = ", between averages over all ranks" if mixes_between else ""
    until = f" until epoch {changes[0]}" if changes else ""
    return MatrixRounds.of(mixing, f"{name}, {peers} peer{'s' if peers > 1 else ''} per round{until}{between}")


def _peers_by_epoch(text: str) -> dict[int, int]:
    """Peers per round by first epoch: '0:2,30:1' is two from epoch 0 and one from 30 on, '2' is two throughout."""
    if ":" not in text:
        return {0: int(text)}
    return {int(epoch): int(peers) for epoch, peers in (pair.split(":") for pair in text.split(","))}


def _edges(graph: gm.graph_manager.GraphManager) -> list[tuple[int, int]]:
    return [(i, j) for i in range(graph.world_size) for j in graph.phone_book(i)]


def _groups(groups: gm.graph_manager.ButterflyGroups, ending: str) -> MatrixRounds:
    """The average of a group as weights."""
    n = groups.world_size
    num_bits, num_masks = n.bit_length() - 1, groups.group_size.bit_length() - 1
    # The window over the butterfly comes around, and so do the ranks that are left over.
    period = lcm(num_bits // gcd(num_bits, num_masks), n // gcd(n, n - 2**num_bits)) if num_masks else 1

    def matrix(t: int) -> Matrix:
        weights = np.zeros((n, n))
        for rank in range(n):
            members = groups.members(rank, t)
            weights[rank, list(members)] = 1 / len(members)
        return weights

    return MatrixRounds(f"groups of {groups.group_size}{ending}", n, period, matrix)
