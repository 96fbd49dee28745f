"""Frozen parameters that a loop writes: ranks that drift apart in them are seen, and are not called equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    GossipDataParallel,
    GroupAverageDataParallel,
    LocalSGD,
)
from tests.harness.ranks import run_ranks

METHODS: dict[str, Callable[..., Any]] = {
    "SGP": GossipDataParallel,
    "Overlap SGP": lambda module, **options: GossipDataParallel(module, overlap=True, **options),
    "LocalSGD": lambda module, **options: GossipDataParallel(module, algorithm=LocalSGD(4), **options),
    "AD-PSGD": BilatGossipDataParallel,
    "WAGMA": GroupAverageDataParallel,
    "AllReduce": AllReduceDataParallel,
}


class Adapted(nn.Module):
    """x (W + B A)^T: a frozen matrix W and a trained product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64), requires_grad=False)
        self.a, self.b = (nn.Parameter(torch.full((3, 3), x, dtype=torch.float64)) for x in (0.1, 0.2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.w + self.b @ self.a).t()

    @torch.no_grad()
    def merge(self) -> None:
        """W <- W + B A, and A and B start anew (ReLoRA)."""
        self.w.add_(self.b @ self.a)
        self.a.fill_(0.1)
        self.b.fill_(0.2)


def train(wrapper: Any, rank: int, num_steps: int) -> None:
    optimizer = torch.optim.SGD([x for x in wrapper.parameters() if x.requires_grad], lr=0.01)
    for step in range(num_steps):
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        wrapper(x).square().mean().backward()
        optimizer.step()


def warned(body: Callable[[dist.ProcessGroup], Any]) -> tuple[list[Any], list[str]]:
    """The results of two ranks, and the warnings of all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_ranks(2, body)
    return results, [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("name", METHODS)
def test_bases_that_each_rank_has_merged_are_seen(name: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, Tensor]:
        wrapper = METHODS[name](Adapted(), process_group=group)
        train(wrapper, group.rank(), 12)
        wrapper.settle()
        wrapper.module.merge()
        distance = wrapper.consensus_distance()
        wrapper.averaged_state_dict()
        wrapper.close()
        return distance, wrapper.module.w.detach().clone()

    results, messages = warned(body)
    bases = torch.stack([base for _, base in results])
    right = (bases - bases.mean(0)).square().sum().div(2).sqrt().item()  # A and B are equal
    for distance, _ in results:
        assert distance == pytest.approx(right, abs=1e-12)
    differs = name != "AllReduce"
    assert (right > 0) == differs
    assert any("frozen parameters" in text and "'w'" in text and "average_()" in text for text in messages) == differs
    assert not any("equal models" in text for text in messages)


def test_an_average_before_the_merge_keeps_the_bases_together() -> None:
    def body(group: dist.ProcessGroup) -> float:
        wrapper: Any = GossipDataParallel(Adapted(), process_group=group)
        train(wrapper, group.rank(), 12)
        wrapper.average_()
        wrapper.module.merge()
        distance = wrapper.consensus_distance()
        wrapper.averaged_state_dict()
        wrapper.close()
        return distance

    results, messages = warned(body)
    assert results == [0.0, 0.0]
    assert messages == []


def test_frozen_parameters_that_are_ignored_may_differ() -> None:
    def body(group: dist.ProcessGroup) -> float:
        wrapper: Any = GossipDataParallel(Adapted(), process_group=group, ignore=["w"])
        wrapper.module.w.data.fill_(group.rank())
        wrapper.averaged_state_dict()
        distance = wrapper.consensus_distance()
        wrapper.close()
        return distance

    results, messages = warned(body)
    assert results == [0.0, 0.0]
    assert messages == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64], ids=str)
def test_frozen_parameters_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    def body(group: dist.ProcessGroup) -> float:
        module = Adapted()
        module.extra = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        module.same = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
        wrapper = GossipDataParallel(module, process_group=group)
        module.extra.data.fill_(2 * group.rank())
        distance = wrapper.consensus_distance()
        wrapper.close()
        return float(distance)

    results, messages = warned(body)
    assert results == [0.0 if dtype is torch.int8 else 2.0] * 2  # sqrt(4 * 1^2)
    assert len(messages) == 2
    assert all("'extra';" in text for text in messages)


def test_ranks_with_other_frozen_parameters_are_named() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = Adapted()
        wrapper = GossipDataParallel(module, process_group=group)
        if group.rank() == 1:
            module.w.data = torch.zeros(2, 2, dtype=torch.float64)
        assert wrapper.consensus_distance() == 0.0
        wrapper.averaged_state_dict()
        wrapper.close()

    _, messages = warned(body)
    assert len(messages) == 2
    assert all("frozen parameters" in text for text in messages)
