"""Buffers of which a mean says nothing: each rank keeps its own, and an averaged model has those of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    Schedule,
    gossip,
)
from tests.harness.cases import each_once
from tests.harness.problems import fill_
from tests.harness.ranks import run_ranks

Make = Callable[..., Any]
WRAPPERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGP": (GossipDataParallel, {}),
    "overlapped": (GossipDataParallel, {"overlap": True}),
    "local SGD": (GossipDataParallel, {"schedule": Schedule(gossip_every=5, average_every=1)}),
    "DiLoCo": (GossipDataParallel, {"algorithm": DiLoCo(sync_every=4)}),
    "in place": (gossip, {}),
    "AD-PSGD": (BilatGossipDataParallel, {}),
    "WAGMA": (GroupAverageDataParallel, {"wait_avoiding": False, "group_size": 1, "sync_period": 3}),
    "AR": (AllReduceDataParallel, {}),
}


class Bank(nn.Module):
    """A linear layer beside a queue, a pointer that is a float, running statistics and a counter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = fill_(nn.Linear(3, 2), rank)
        self.register_buffer("queue", torch.eye(3)[:, rank].repeat(2, 1))
        self.register_buffer("pointer", torch.tensor(2.0 * rank))
        self.register_buffer("running_mean", torch.full((2,), float(rank)))
        self.register_buffer("seen", torch.tensor([rank], dtype=torch.int64))
        self.register_buffer("flag", torch.tensor([rank == 0, True, False]))  # 3 bytes, so that the end is not aligned
        self.register_buffer("cache", torch.tensor(float(rank)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def values(module: nn.Module) -> list[list[float]]:
    return [buffer.double().flatten().tolist() for buffer in module.buffers()]


def of_rank(rank: int) -> list[list[float]]:
    return values(Bank(rank))


@pytest.mark.parametrize(("make", "options"), WRAPPERS.values(), ids=WRAPPERS)
def test_an_average_has_the_buffers_of_rank_0_and_they_come_back(make: Make, options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Any, ...]:
        rank, module = group.rank(), Bank(group.rank())
        wrapper = make(module, process_group=group, **options)
        with torch.no_grad():
            for own, other in zip(module.buffers(), Bank(rank).buffers(), strict=True):
                own.copy_(other)
        with wrapper.averaged():
            inside = values(module)
        after = values(module)
        state = wrapper.averaged_state_dict(rank0_only=False)
        assert [state[name].double().flatten().tolist() for name, _ in module.named_buffers() if name != "cache"] == (
            inside[:-1]
        )
        with pytest.raises(KeyError), wrapper.averaged():
            raise KeyError
        assert values(module) == after
        wrapper.average_()
        last = values(module)
        wrapper.close()
        return inside, after, last

    results = run_ranks(2, body)
    queue, pointer, _, seen, flag, _ = of_rank(0)
    for rank, (inside, after, last) in enumerate(results):
        cache = [float(rank)]
        assert inside == last == [queue, pointer, [0.5, 0.5], seen, flag, cache]
        assert after == of_rank(rank)


@pytest.mark.parametrize("name", ["SGP", "DiLoCo", "AD-PSGD", "WAGMA"])
def test_rounds_leave_them_alone(name: str) -> None:
    make, options = WRAPPERS[name]

    def body(group: dist.ProcessGroup) -> list[list[float]]:
        module = Bank(group.rank())
        wrapper = make(module, process_group=group, **options)
        with torch.no_grad():
            for own, other in zip(module.buffers(), Bank(group.rank()).buffers(), strict=True):
                own.copy_(other)
        for _ in range(8):
            wrapper(torch.ones(2, 3)).sum().backward()
        wrapper.settle()
        found = values(module)
        wrapper.close()
        return found

    for rank, found in enumerate(run_ranks(2, body)):
        expected = of_rank(rank)
        assert found[:2] + found[3:] == expected[:2] + expected[3:]


def test_with_no_buffers_all_of_them_stay_local() -> None:
    def body(group: dist.ProcessGroup) -> list[list[float]]:
        module = Bank(group.rank())
        with GossipDataParallel(module, process_group=group, init_sync=False, gossip_buffers=False).averaged():
            return values(module)

    assert run_ranks(2, body) == [of_rank(0), of_rank(1)]


def test_buffers_that_are_named_travel() -> None:
    def body(group: dist.ProcessGroup) -> list[list[float]]:
        module = Bank(group.rank())
        names = ["queue", "point*"]
        wrapper = GossipDataParallel(module, process_group=group, push_sum=False, init_sync=False, gossip_buffers=names)
        wrapper(torch.ones(2, 3)).sum().backward()
        wrapper.close()
        return values(module)

    mixed = [[0.5, 0.5, 0.0] * 2, [1.0]]
    assert run_ranks(2, body) == [mixed + of_rank(rank)[2:] for rank in range(2)]


def test_buffers_of_another_shape_than_those_of_rank_0_are_refused_on_all_ranks() -> None:
    def body(group: dist.ProcessGroup) -> list[float]:
        module = Bank(group.rank())
        wrapper: Any = BilatGossipDataParallel(module, process_group=group, init_sync=False)
        if group.rank() == 1:
            module.queue = torch.zeros(5, 3)
        before = values(module)
        message = r"got buffers on ranks \[1\] that have other names, shapes or dtypes than those of rank 0.*ignore="
        with pytest.raises(ValueError, match=message), wrapper.averaged():
            pass
        assert values(module) == before
        wrapper.close()
        with pytest.raises(
            ValueError, match=r"rank 1: beside exchanged tensors: got queue \(5, 3\).*expected queue \(2, 3"
        ):
            GossipDataParallel(module, process_group=group)
        wrapper = GossipDataParallel(module, process_group=group, ignore=["queue"])
        with wrapper.averaged():
            inside = values(module)
        wrapper.close()
        return inside[0]

    assert run_ranks(2, body) == [of_rank(0)[0], [0.0] * 15]


def test_ranks_in_lockstep_compare_the_shapes_of_buffers_before_they_meet() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = Bank(group.rank())
        wrapper = GossipDataParallel(module, process_group=group, init_sync=False, timeout=20)
        if group.rank() == 1:
            module.queue = torch.zeros(5, 3)
        before = values(module)
        message = r"queue \(5, 3\).*queue \(2, 3\)|queue \(2, 3\).*queue \(5, 3\)"
        with pytest.raises(ValueError, match=message), wrapper.averaged():
            pass
        assert values(module) == before

    run_ranks(2, body)


# Modules of torch whose weight is made of a parameter and buffers.


def train(wrapper: Any, module: nn.Module, rank: int, num_steps: int, *, prune_at: int = -1) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(32, 4, generator=generator) * (rank + 1)
    y = torch.sin(3 * x).sum(1, keepdim=True)
    for step in range(num_steps):
        if step == prune_at:
            noise = torch.rand(8, 4, generator=generator)  # so that each rank prunes other weights
            module[0].weight.data.add_(noise)  # type: ignore[index]
            prune.l1_unstructured(module[0], "weight", amount=0.5)  # type: ignore[index]
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05)
        optimizer.zero_grad()
        (wrapper(x) - y).square().mean().backward()
        optimizer.step()


AVERAGED = ["SGP", "overlapped", "local SGD", "DiLoCo", "in place", "AD-PSGD", "WAGMA", "AR"]


@pytest.mark.parametrize(("name", "normed"), each_once(AVERAGED, [spectral_norm, parametrizations.spectral_norm]))
def test_the_spectral_norm_of_the_averaged_model_is_1(normed: Callable[[nn.Module], nn.Module], name: str) -> None:
    make, options = WRAPPERS[name]

    def body(group: dist.ProcessGroup) -> tuple[float, dict[str, Tensor]]:
        module = nn.Sequential(normed(fill_(nn.Linear(4, 8), 0)), nn.Tanh(), normed(fill_(nn.Linear(8, 1), 1)))
        wrapper = make(module, process_group=group, **options)
        train(wrapper, module, group.rank(), 20)
        wrapper.eval()
        with wrapper.averaged(), torch.no_grad():
            at_once = torch.linalg.matrix_norm(module[0].weight, 2)
            wrapper(torch.ones(1, 4))
            norm = torch.linalg.matrix_norm(module[0].weight, 2)
            torch.testing.assert_close(at_once, norm)
        state = wrapper.averaged_state_dict(rank0_only=False)
        wrapper.close()
        return norm.item(), state

    results = run_ranks(3, body)
    for norm, state in results:
        assert norm == pytest.approx(1, abs=1e-3)
        for key, value in state.items():
            torch.testing.assert_close(value, results[0][1][key], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["SGP", "local SGD", "AD-PSGD"])
def test_the_averaged_model_is_pruned_as_rank_0_has_pruned_its_own(name: str) -> None:
    make, options = WRAPPERS[name]

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        module = nn.Sequential(fill_(nn.Linear(4, 8), 0), nn.Tanh(), fill_(nn.Linear(8, 1), 1))
        layer: Any = module[0]
        # AD-PSGD refuses to choose anew while it trains.
        at = -1 if make is BilatGossipDataParallel else 4
        if at < 0:
            with torch.no_grad():
                layer.weight.add_(torch.rand(8, 4, generator=torch.Generator().manual_seed(group.rank())))
            prune.l1_unstructured(module[0], "weight", amount=0.5)
        wrapper = make(module, process_group=group, init_sync=False, **options)
        train(wrapper, module, group.rank(), 8, prune_at=at)
        wrapper.settle()
        own = layer.weight_mask.clone()
        wrapper.eval()
        with wrapper.averaged(), torch.no_grad():
            wrapper(torch.ones(1, 4))
            mask, weight = layer.weight_mask.clone(), layer.weight.clone()
        assert torch.equal(layer.weight_mask, own)
        wrapper.close()
        return own, mask, weight

    results = run_ranks(3, body)
    assert not torch.equal(results[0][0], results[1][0])
    for _, mask, weight in results:
        assert torch.equal(mask, results[0][0])
        assert (weight == 0).double().mean() == 0.5
