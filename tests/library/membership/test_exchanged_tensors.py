"""The exchanged tensors change in the course of training, with workers that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import Choco, DiLoCo, GossipDataParallel, Membership, NoLoCo, SignNorm
from tests.harness.ranks import run_ranks
from tests.library.membership.test_membership import member_of

METHODS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"algorithm": Choco(SignNorm(), step_size=0.3), "push_sum": False, "graph": "ring"},
    {"algorithm": DiLoCo(sync_every=3), "push_sum": False},
    {"algorithm": NoLoCo(sync_every=3)},
]


def wrap(member: Membership, **options: Any) -> tuple[GossipDataParallel, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapper = GossipDataParallel(model, membership=member, **options)
    return wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.05)


def step_of(wrapper: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    (wrapper(torch.ones(1, 4)) - 2.0**rank).square().sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*other tensors", "ignore:.*saves nothing", "ignore:.*dimension")
@pytest.mark.parametrize("options", METHODS, ids=str)
def test_frozen_tensors_are_averaged_exactly(options: dict[str, Any]) -> None:
    store = dist.HashStore()

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        member = member_of(store, min_workers=3)
        wrapper, optimizer = wrap(member, **options)
        for step in member.steps(16):
            if step >= 5:
                wrapper.module.get_submodule("0").requires_grad_(False)
            step_of(wrapper, optimizer, group.rank())
        state = wrapper.averaged_state_dict(rank0_only=False)
        wrapper.close()
        return wrapper.module.get_parameter("0.weight").detach().clone(), state["0.weight"]

    results = run_ranks(3, body)
    for own, saved in results:
        assert torch.equal(own, results[0][0])
        assert torch.equal(saved, results[0][0])


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_a_worker_that_freezes_alone_is_named(options: dict[str, Any]) -> None:
    store = dist.HashStore()
    errors: list[str] = []

    def body(group: dist.ProcessGroup) -> None:
        member = member_of(store, min_workers=2)
        wrapper, optimizer = wrap(member, **options)
        try:
            for step in member.steps(12):
                if step >= 4 and member.rank == 1:
                    wrapper.module.get_submodule("0").requires_grad_(False)
                step_of(wrapper, optimizer, group.rank())
        except ValueError as error:
            errors.append(str(error))
        wrapper.close()

    run_ranks(2, body)
    assert len(errors) == 2
    assert all("rank 1 has '0.weight (4, 4) torch.float32, frozen'" in text for text in errors), errors
