"""What several tests of this folder share."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch import nn

from gossip_modules.extend import FlatVector
from gossip_modules.flat.layout import CHUNK_ALIGNMENT, FlatLayout
from gossip_modules.graph_manager import NetworkXGraph
from tests.harness.problems import fill_
from tests.harness.ranks import CPU

CHUNK = CHUNK_ALIGNMENT


BOTH: tuple[dict[str, Any], ...] = ({}, {"chunk_bytes": CHUNK})  # options of a mixer: whole, in chunks


DIGRAPH = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))


def random_vector(seed: int, layout: FlatLayout) -> FlatVector:
    """Values and weight from this seed."""
    generator = torch.Generator().manual_seed(seed)
    vector = FlatVector.zeros(layout, CPU)
    for segment in vector.segments:
        segment.copy_(torch.randn(segment.shape, generator=generator))
    vector.push_sum_weight.copy_(torch.rand(1, generator=generator, dtype=torch.float64) + 0.5)
    return vector


# Overlap.


def wide(seed: int = 0) -> nn.Module:
    """Some 1500 bytes, so that it is sent in seven chunks."""
    return fill_(nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)), seed)
