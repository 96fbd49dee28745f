"""SPARTA averages the parameters that its seed draws, exactly, and leaves the others alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, RandomK, RingGraph, Sparta
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.graph_manager.base import GraphManager
from gossip_modules.mixing_manager.graph_weights import default_mixing
from tests.harness.ranks import run_ranks

NUM_RANKS, D, NUM_ROUNDS = 4, 200, 9


def models_of_all(graph: GraphManager | None, *, overlap: bool = False) -> tuple[list[Tensor], float]:
    """float64 [NUM_RANKS, D] after each round, without training between them; and the bytes that rank 0 has sent."""

    def body(group: dist.ProcessGroup) -> tuple[list[Tensor], float]:
        model = nn.Linear(D, 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, D, generator=torch.Generator().manual_seed(group.rank())))
        options: dict[str, Any] = {"process_group": group, "init_sync": False, "overlap": overlap}
        wrapper = GossipDataParallel(model, graph=graph, algorithm=Sparta(0.1, seed=3), **options)
        before, seen = wrapper.comm_stats()["bytes_sent"], [model.weight.detach()[0].clone()]
        for _ in range(NUM_ROUNDS):
            wrapper(torch.ones(1, D, dtype=torch.float64))
            wrapper.flush()
            seen.append(model.weight.detach()[0].clone())
        num_bytes = wrapper.comm_stats()["bytes_sent"] - before
        wrapper.close()
        return seen, num_bytes

    results = run_ranks(NUM_RANKS, body)
    return [torch.stack(models) for models in zip(*(seen for seen, _ in results), strict=True)], results[0][1]


def drawn(t: int) -> Tensor:
    """Whether each element is averaged in round t: bool [D]."""
    ones, is_drawn = torch.ones(D), torch.zeros(D)
    compressor = RandomK(0.1, seed=3)
    message = compressor.message_like(ones)
    compressor.compress(ones, message, t=t)
    compressor.add_decompressed(message, is_drawn)
    return is_drawn.bool()


@pytest.mark.parametrize("graph", [None, RingGraph(NUM_RANKS, peers_per_itr=2)], ids=["everyone", "ring"])
@pytest.mark.parametrize("overlap", [False, True])
def test_sparta_is_its_law(graph: GraphManager | None, overlap: bool) -> None:
    models, num_bytes = models_of_all(graph, overlap=overlap)
    x = models[0]
    mixing = default_mixing(graph or CompleteGraph(NUM_RANKS, peers_per_itr=3), push_sum=False)
    for t, found in enumerate(models[1:]):
        is_drawn = drawn(t)
        assert is_drawn.sum() == D // 10
        x = torch.where(is_drawn, mixing.matrix(t).double() @ x, x)
        torch.testing.assert_close(found, x, rtol=0, atol=1e-12)
        assert torch.equal(found[:, ~is_drawn], models[t][:, ~is_drawn])
    num_peers = 3 if graph is None else 2
    assert num_bytes == NUM_ROUNDS * num_peers * (8 + 16 + 8 * D // 10)  # header, place, values
