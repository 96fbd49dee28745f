"""What several tests of this folder share."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch.distributed as dist
from torch import nn

from gossip_modules import GossipDataParallel
from gossip_modules.graph_manager import NetworkXGraph

MODES: list[dict[str, Any]] = [{}, {"overlap": True}, {"overlap": True, "max_staleness": 2}]


def irregular() -> NetworkXGraph:
    """0 -> 1 -> 2 -> 0 and 0 -> 2: the smallest digraph on which the push-sum weight moves."""
    return NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    """The wrapper on a group of the tests; every rank keeps its own start."""
    return GossipDataParallel(module, process_group=group, **{"init_sync": False, **options})
