"""What several tests of this folder share."""

from __future__ import annotations

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import RingGraph, connect
from gossip_modules.extend import PushPull
from gossip_modules.graph_manager import CompleteGraph, NetworkXGraph, NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import MatrixMixing, MetropolisHastingsMixing, MixingManager, UniformMixing
from tests.harness.ranks import CPU, TIMEOUT

DIGRAPH = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))


DOUBLY_STOCHASTIC: list[MixingManager] = [
    UniformMixing(NPeerDynamicDirectedExponentialGraph(4)),
    UniformMixing(CompleteGraph(4, peers_per_itr=2)),
    MetropolisHastingsMixing(NetworkXGraph(nx.star_graph(3))),
    UniformMixing(RingGraph(4)),
    MatrixMixing(
        RingGraph(4, peers_per_itr=2),
        [[0.5, 0.3, 0.0, 0.2], [0.2, 0.5, 0.3, 0.0], [0.0, 0.2, 0.5, 0.3], [0.3, 0.0, 0.2, 0.5]],
    ),
]


def bound(gossiper: PushPull, mixing: MixingManager, group: dist.ProcessGroup) -> PushPull:
    """Ready to talk on a group of the tests."""
    gossiper.bind(mixing, connect(group, module_device=CPU, timeout=TIMEOUT))
    return gossiper


def value_of(rank: int, shape: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float64) -> Tensor:
    """This rank's tensor."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)
