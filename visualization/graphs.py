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
from gossip_modules.methods import read_algorithm, read_graph
from gossip_modules.mixing_manager import default_mixing

Matrix = npt.NDArray[np.float64]


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
    recipe, name = str(config["recipe"]), config.get("graph", "auto")
    num_nodes = world_size // int(config.get("nprocs_per_node", 1))
    chosen = read_algorithm(config.get("algorithm") or recipe, seed=config.get("seed"))
    algorithm = chosen.arguments.get("algorithm")
    own = getattr(algorithm, "outer", algorithm)  # of one over another
    settings = {**chosen.arguments, **config}  # runs of version 0.1 have settings of methods among the options
    period = settings.get("sync_period", chosen.period)
    mixes_between = settings.get("outer_gossip_every", getattr(own, "gossip_every", 0)) > 0
    if recipe == "ar":
        return "AllReduce: gradients are averaged over all ranks in every step; there is no graph."
    if recipe == "localsgd":
        return f"Local SGD: parameters are averaged over all ranks every {period} steps; there is no graph."
    if own is not None and own.averages_exactly and not mixes_between:
        title = own.title or type(own).__name__
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
        groups = gm.graph_manager.ButterflyGroups(num_nodes, group_size=settings["group_size"] or None)
        return _groups(groups, f", all ranks every {period} rounds" if period else "")
    if recipe == "matcha" and settings["plan"]:
        matcha = gm.MatchaGraph.from_plan(settings["plan"], seed=config["seed"], world_size=num_nodes)
        return MatrixRounds.of(make_mixing(matcha), f"MATCHA by {settings['plan']}")
    if recipe == "matcha":
        name, budget = "ring" if name == "auto" else name, settings["budget"]
        base = nx.Graph(_edges(named_graph(name, num_nodes)))
        matcha = gm.MatchaGraph(base, budget=budget, seed=config["seed"])
        return MatrixRounds.of(make_mixing(matcha), f"MATCHA on {name}, budget {budget:g}")
    is_push_sum = bool(chosen.arguments.get("push_sum")) or mixes_between
    if "(" in name:
        graph = read_graph(name, seed=config.get("seed"))(num_nodes)
        return MatrixRounds.of(default_mixing(graph, push_sum=is_push_sum), str(graph))
    takes_peers = "peers_per_itr" in chosen.method.options or chosen.method.pace != "lockstep"
    if own is not None and not takes_peers and name == "auto":
        if (graph := own.default_graph(num_nodes)) is not None:
            return MatrixRounds.of(make_mixing(graph), str(graph))
        name = "ring" if own.needs_symmetric_weights or own.needs_static_graph else name
    if not takes_peers and name != "auto":
        mixing = default_mixing(named_graph(name, num_nodes), push_sum=is_push_sum)
        return MatrixRounds.of(mixing, f"{name}, all neighbours")
    by_epoch = _peers_by_epoch(str(config.get("peers_per_itr", "1"))) if takes_peers and recipe != "adpsgd" else {0: 1}
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
