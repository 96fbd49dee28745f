"""The algorithms whose ranks send messages, and what their tests share."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import (
    QSGD,
    Choco,
    DeepSqueeze,
    GossipDataParallel,
    MatchaGraph,
    Moniqua,
    PowerGossip,
    RandomK,
    RingGraph,
    SignNorm,
    Sparta,
    TopK,
    connect,
)
from gossip_modules.extend import FlatVector, PushPull
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.graph_manager import DynamicBipartiteExponentialGraph, NetworkXGraph
from gossip_modules.mixing_manager import LaplacianMixing, MetropolisHastingsMixing, MixingManager
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.rounds.rounds import Rounds
from tests.harness.problems import train_step
from tests.harness.ranks import CPU, TIMEOUT

Make = Callable[[], Algorithm]


ALGORITHMS: dict[str, Make] = {
    "Choco SignNorm": lambda: Choco(SignNorm(8), step_size=0.3),
    "Choco TopK": lambda: Choco(TopK(0.3), step_size=0.3),
    "Choco QSGD": lambda: Choco(QSGD(bits=4, bucket_size=16), step_size=0.3),
    "DeepSqueeze SignNorm": lambda: DeepSqueeze(SignNorm(8), step_size=0.1),
    "DeepSqueeze RandomK": lambda: DeepSqueeze(RandomK(0.5), step_size=0.2),
    "Moniqua": lambda: Moniqua(20.0),
    "Sparta": lambda: Sparta(0.5),
    "PowerGossip": PowerGossip,
    "PowerGossip rank 2, twice": lambda: PowerGossip(rank=2, num_iterations=2, compress_vectors=True, check_every=1),
    "PowerGossip cold": lambda: PowerGossip(warm_start=False, step_size=1.0),
}


ANY_GRAPH = [name for name in ALGORITHMS if "Choco" not in name]


ANY_NAME = pytest.mark.parametrize("name", ALGORITHMS)


ANY_MEMORY = ["Choco TopK", "DeepSqueeze SignNorm", "Moniqua", "PowerGossip rank 2, twice"]
"""One for each kind of memory: public copies, an error, none, and links."""


EACH_MEMORY = pytest.mark.parametrize("name", ANY_MEMORY)


def ring(n: int) -> MixingManager:
    """Both neighbours."""
    return MetropolisHastingsMixing(RingGraph(n, peers_per_itr=2 if n > 2 else 1))


STATIC: dict[str, MixingManager] = {
    "ring": ring(4),
    "star": MetropolisHastingsMixing(NetworkXGraph(nx.star_graph(3))),
    "path": MetropolisHastingsMixing(NetworkXGraph(nx.path_graph(4))),
    "negative": LaplacianMixing(NetworkXGraph(nx.star_graph(3))),  # the centre gives itself a negative weight
}


DYNAMIC: dict[str, MixingManager] = {
    "bipartite": MetropolisHastingsMixing(DynamicBipartiteExponentialGraph(4)),
    "MATCHA": LaplacianMixing(MatchaGraph(nx.cycle_graph(4), budget=0.5, seed=1)),
}


MIXINGS = STATIC | DYNAMIC


SPECS = [*map(TensorSpec, [(4, 3), (4, 3), (3, 2, 2), (1, 7), (7,), (), (0, 3)])]


BUFFERS = [TensorSpec((3,), True), TensorSpec((), True)]


LAYOUT = FlatLayout.of([(torch.float64, [*SPECS, *BUFFERS])])


def cases(*graphs: str, of: Iterable[str] = ALGORITHMS) -> pytest.MarkDecorator:
    """Every algorithm on those of the graphs that it takes."""
    pairs = [(name, graph) for name in of for graph in graphs if graph in STATIC or name in ANY_GRAPH]
    return pytest.mark.parametrize(("name", "graph"), pairs)


def bound(algorithm: Algorithm, mixing: MixingManager, group: dist.ProcessGroup) -> Rounds:
    """The rounds of an algorithm, ready to talk on a group of the tests."""
    rounds = Rounds(algorithm, PushPull())
    rounds.bind(mixing, connect(group, module_device=CPU, timeout=TIMEOUT))
    return rounds


def vector_of(rank: int, layout: FlatLayout = LAYOUT) -> FlatVector:
    """This rank's values, standard normal."""
    generator = torch.Generator().manual_seed(rank)
    s = FlatVector.zeros(layout, CPU)
    for segment in s.segments:
        segment.copy_(torch.randn(segment.shape, generator=generator, dtype=torch.float64))
    return s


# Memory.


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """As from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Around a model.


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    """The wrapper on a group of the tests; every rank keeps its own start."""
    return GossipDataParallel(module, process_group=group, **{"init_sync": False, **options})


def train(wrapper: GossipDataParallel, rank: int, steps: Sequence[int]) -> None:
    """Plain SGD, which has no state."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.02)
    for step in steps:
        train_step(wrapper, optimizer, rank, step)
