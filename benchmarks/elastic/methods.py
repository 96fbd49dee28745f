"""The methods that take a membership, as wrappers of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import networkx as nx
from torch import nn

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    MatchaGraph,
    PowerGossip,
    RingGraph,
    SignNorm,
)


def ring(n: int) -> RingGraph:
    """Of any number of workers; two of them are one pair."""
    return RingGraph(n, peers_per_itr=min(2, n - 1))


def matchings(n: int) -> MatchaGraph:
    """Of a ring: in the mean, half of its links are in a round."""
    return MatchaGraph(nx.cycle_graph(n), budget=0.5, seed=1)


def power_gossip(module: nn.Module, **options: Any) -> GossipDataParallel:
    """With a gossiper of its own."""
    return GossipDataParallel(module, algorithm=PowerGossip(), **options)


def choco(module: nn.Module, **options: Any) -> GossipDataParallel:
    """With a gossiper of its own."""
    return GossipDataParallel(module, algorithm=Choco(SignNorm(), step_size=0.4), **options)


METHODS: Mapping[str, Callable[..., Any]] = {
    "SGP": GossipDataParallel,
    "Overlap SGP": partial(GossipDataParallel, overlap=True),
    "D-PSGD, ring": partial(GossipDataParallel, push_sum=False, graph=ring),
    "MATCHA, ring": partial(GossipDataParallel, push_sum=False, graph=matchings),
    "PowerGossip": power_gossip,
    "CHOCO": choco,
    "WAGMA": GroupAverageDataParallel,
    "AD-PSGD": BilatGossipDataParallel,
    "AllReduce": AllReduceDataParallel,
    "DiLoCo": partial(GossipDataParallel, algorithm=DiLoCo(sync_every=10)),
}
"""Each is called with a module and options, such as `membership`."""
HAS_MESSAGES_IN_FLIGHT = ("Overlap SGP",)
"""Those of them in which push-sum weights travel between steps."""
