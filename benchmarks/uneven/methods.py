"""The methods that are compared: what a user passes to the wrapper, from which the stacked way is made as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gossip_modules import D2, DecentLaM, GradientTracking, QGDSGDm, RelaySGD, RingGraph
from gossip_modules.graph_manager import BaseGraph, ChainGraph


@dataclass(frozen=True)
class UnevenMethod:
    """A method on a graph.

    Attributes:
        title: of tables.
        arguments: of `GossipDataParallel`, by the number of workers; None: `AllReduceDataParallel` instead.
        needs_momentum: whether its law is that of momentum SGD.
    """

    title: str
    arguments: Callable[[int], Mapping[str, Any]] | None
    needs_momentum: bool = False


def _ring(num_workers: int) -> RingGraph:
    return RingGraph(num_workers, peers_per_itr=2)


def _on_base_graph(num_workers: int, num_peers: int) -> Mapping[str, Any]:
    return {"push_sum": False, "graph": BaseGraph(num_workers, min(num_peers, num_workers - 1))}


METHODS: Mapping[str, UnevenMethod] = {
    "ar": UnevenMethod("All-reduce", None),
    "relaysgd": UnevenMethod("RelaySGD, two binary trees", lambda n: {"algorithm": RelaySGD()}),
    "relaysgd-chain": UnevenMethod("RelaySGD, chain", lambda n: {"algorithm": RelaySGD(), "graph": ChainGraph(n)}),
    "sgp": UnevenMethod("SGP, one-peer exponential", lambda n: {}),
    "base": UnevenMethod("D-PSGD, Base-2", lambda n: _on_base_graph(n, 1)),
    "base3": UnevenMethod("D-PSGD, Base-3", lambda n: _on_base_graph(n, 2)),
    "base5": UnevenMethod("D-PSGD, Base-5", lambda n: _on_base_graph(n, 4)),
    "dpsgd": UnevenMethod("D-PSGD, ring", lambda n: {"push_sum": False, "graph": _ring(n)}),
    "qgdsgdm": UnevenMethod(
        "QG-DSGDm, ring", lambda n: {"algorithm": QGDSGDm(), "graph": _ring(n)}, needs_momentum=True
    ),
    "d2": UnevenMethod("D2, ring", lambda n: {"algorithm": D2()}),
    "gradienttracking": UnevenMethod("Gradient tracking, ring", lambda n: {"algorithm": GradientTracking()}),
    "decentlam": UnevenMethod("DecentLaM, ring", lambda n: {"algorithm": DecentLaM()}, needs_momentum=True),
}
"""By name. SGP on the one-peer exponential graph is also D-PSGD there: its weights are doubly stochastic."""
