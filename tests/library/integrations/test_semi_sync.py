"""semi_sync: a loop over the parts of a model has the rounds of the wrapper around the whole, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gossip_modules import GossipDataParallel
from gossip_modules.integrations.semi_sync import semi_sync
from tests.harness.processes import run_processes
from tests.harness.ranks import run_ranks

from .hosts import METHODS, RANKS, assert_equal, values

STEPS = 6


def parts() -> nn.ModuleList:
    """The stages of a model."""
    stages, generator = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 3)]), torch.Generator().manual_seed(1)
    for parameter in stages.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return stages


def loss_of(stages: nn.ModuleList, rank: int, step: int) -> Tensor:
    """Of this rank's batch."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    for stage in stages:
        x = stage(x).tanh()
    return x.square().sum()


class Whole(nn.Module):
    """The model around the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = parts()

    def forward(self, rank: int, step: int) -> Tensor:
        """See torch."""
        return loss_of(self.stages, rank, step)


class Both(torch.optim.Optimizer):
    """An optimizer of optimizers, as torchtitan has one."""

    def __init__(self, stages: nn.ModuleList) -> None:
        super().__init__(list(stages.parameters()), {})
        self.all = [torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9) for stage in stages]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See torch."""
        for optimizer in self.all:
            optimizer.step()


def whole_loop(group: dist.ProcessGroup, options: Any) -> list[Tensor]:
    """The parameters after the loop with a wrapper around the model."""
    model = GossipDataParallel(Whole(), process_group=group, rounds="step", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        model(group.rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return values(model)


def loop_of_parts(group: dist.ProcessGroup, options: Any) -> tuple[list[Tensor], list[float]]:
    """The parameters and the number of rounds after each step, of a loop that calls the stages."""
    stages, rounds = parts(), []
    optimizer = Both(stages)
    with semi_sync(list(stages), optimizer, process_group=group, **options) as gossip:
        for step in range(STEPS):
            loss_of(stages, group.rank(), step).backward()
            optimizer.step()
            stages.zero_grad()
            rounds.append(gossip.comm_stats()["num_rounds"])
        assert sorted(gossip.averaged_state_dict(rank0_only=False)) == sorted(stages.state_dict())
    optimizer.step()  # without gradients, and without a round
    return values(stages), rounds


@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_optimizer_steps(name: str) -> None:
    expected = run_ranks(RANKS, lambda group: whole_loop(group, METHODS[name]))
    found = run_ranks(RANKS, lambda group: loop_of_parts(group, METHODS[name]))
    for (own, rounds), own_expected in zip(found, expected, strict=True):
        assert_equal(own, own_expected)
        ended = {"DiLoCo": [0, 1, 1, 2, 2, 3], "Overlap SGP": [0, 1, 2, 3, 4, 5]}  # one is under way there
        assert rounds == ended.get(name, [1, 2, 3, 4, 5, 6])


@pytest.mark.e2e
def test_a_mesh_names_the_replicas() -> None:
    run_processes(2, with_mesh)


def with_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ends = []
    for is_sharded in (False, True):
        stages = parts()
        for stage in stages if is_sharded else ():
            fully_shard(stage, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(stages.parameters(), lr=0.05, momentum=0.9)
        with semi_sync(list(stages), optimizer, mesh=mesh["replicate"]) as gossip:
            for step in range(STEPS):
                loss_of(stages, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert gossip.comm_stats()["num_rounds"] == STEPS
        ends.append([x.full_tensor() if isinstance(x, DTensor) else x for x in values(stages)])
    assert_equal(*ends)
    model = nn.Linear(2, 2)
    with semi_sync(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh["replicate"]) as gossip:
        assert sorted(gossip.averaged_state_dict(rank0_only=False)) == ["bias", "weight"]


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer: Any
    for optimizer in (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "sgd"):
        with pytest.raises(
            ValueError, match=r"as the optimizer of semi_sync\(\), expected a torch.optim.Optimizer over"
        ):
            semi_sync(nn.Linear(2, 2), optimizer).__enter__()
