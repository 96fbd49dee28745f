"""MATCHA's communicators: a round of a plain module after optimizer.step(), in the order of the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules.communicator import (
    ChocoCommunicator,
    Communicator,
    FixedProcessor,
    MatchaProcessor,
    centralizedCommunicator,
    decenCommunicator,
)
from tests.harness.ranks import run_ranks, solo_group

NUM_STEPS = 6


def slope(rank: int, step: int) -> Tensor:
    """The gradient of a rank's loss, float64 [1, 2]."""
    return torch.randn(1, 2, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


def train(communicator: Communicator, rank: int) -> list[Tensor]:
    """The parameters after each step, with MATCHA's own order of lines."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.constant_(model.weight, float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(NUM_STEPS):
        loss = (model(torch.eye(2, dtype=torch.float64)).T * slope(rank, step)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert communicator.communicate(model) > 0
        history.append(model.weight.detach().clone())
    communicator.close()
    return history


def oracle(num_ranks: int, matrix: Callable[[int], Tensor]) -> Tensor:
    """x <- W(t) (x - lr g), float64 [steps, ranks, 2]."""
    x = torch.arange(num_ranks, dtype=torch.float64)[:, None].repeat(1, 2)
    history = []
    for step in range(NUM_STEPS):
        gradients = torch.cat([slope(rank, step) for rank in range(num_ranks)])
        x = matrix(step) @ (x - 0.1 * gradients)
        history.append(x)
    return torch.stack(history)


def topology(kind: type[MatchaProcessor], rank: int, budget: float = 0.5) -> MatchaProcessor:
    return kind(nx.path_graph(4), budget, rank, 4, NUM_STEPS, seed=3)


@pytest.mark.parametrize(("kind", "budget"), [(MatchaProcessor, 0.5), (FixedProcessor, 0.5), (FixedProcessor, 1.0)])
def test_communicate_is_a_round_after_the_step(kind: type[MatchaProcessor], budget: float) -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        rank = group.rank()
        graph = topology(kind, rank, budget)
        return train(decenCommunicator(rank, 4, graph, process_group=group), rank)

    result = torch.stack([torch.cat(history) for history in run_ranks(4, body)], dim=1)
    expected = oracle(4, gm.mixing_manager.LaplacianMixing(topology(kind, 0, budget)).matrix)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_the_centralized_one_averages_exactly() -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        return train(centralizedCommunicator(group.rank(), 3, process_group=group), group.rank())

    result = torch.stack([torch.cat(history) for history in run_ranks(3, body)], dim=1)
    expected = oracle(3, lambda t: torch.full((3, 3), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_choco_is_that_of_the_library() -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
        rank = group.rank()
        graph = topology(FixedProcessor, rank, 1.0)
        mine = train(ChocoCommunicator(rank, 4, graph, 0.5, 0.2, process_group=group), rank)
        gossiper = gm.Choco(gm.TopK(0.5), step_size=0.2)
        other = decenCommunicator(rank, 4, gm.MatchaGraph(nx.path_graph(4), budget=1.0), process_group=group)
        other._options["gossiper"] = gossiper
        return mine, train(other, rank)

    for mine, theirs in run_ranks(4, body):
        assert torch.equal(torch.cat(mine), torch.cat(theirs))


def test_choco_refuses_links_that_change() -> None:
    with pytest.raises(ValueError, match=r"got a topology whose links change .*; pass commBudget=1$"):
        ChocoCommunicator(0, 4, topology(MatchaProcessor, 0), 0.9, 0.1)
    with pytest.raises(ValueError, match=r"got ratio=1, expected 0 <= ratio < 1"):
        ChocoCommunicator(0, 4, topology(FixedProcessor, 0, 1.0), 1, 0.1)


def test_refused_arguments() -> None:
    communicator = centralizedCommunicator(0, 1, process_group=solo_group())
    model: Any = nn.Linear(2, 1)
    communicator.close()  # before there is anything
    communicator.communicate(model)
    assert communicator.wrapper is not None
    assert communicator.wrapper.module is model
    with pytest.raises(ValueError, match=r"got another Linear than in the first communicate\(model\)"):
        communicator.communicate(nn.Linear(2, 1))
    communicator.close()
    communicator.close()
    with pytest.raises(ValueError, match=r"got rank=1 and size=2 on rank 0 of 1, expected these; pass"):
        centralizedCommunicator(1, 2, process_group=solo_group()).communicate(nn.Linear(2, 1))
