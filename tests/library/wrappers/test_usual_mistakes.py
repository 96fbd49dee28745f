"""Mistakes of training loops that once showed nowhere, or without a remedy: each one is told, with what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import DiLoCo, GossipDataParallel
from tests.harness.problems import loss_of, mlp, sgd
from tests.harness.ranks import run_ranks


def loop(
    group: dist.ProcessGroup,
    *,
    steps: int = 12,
    loss: Callable[[Any, int, int], Any] = loss_of,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    change: Callable[[nn.Sequential, int, int], None] = lambda model, rank, step: None,
    **options: Any,
) -> GossipDataParallel:
    """A wrapper after some steps, with a mistake in one of them.

    Args:
        group: of all ranks.
        steps: of this rank.
        loss: of the wrapper, the rank and the step.
        optimizer: of the module.
        change: of the model, before a step.
        options: of the wrapper.
    """
    rank, model = group.rank(), mlp()
    assert isinstance(model, nn.Sequential)
    wrapper = GossipDataParallel(model, process_group=group, **{"timeout": 20.0, **options})
    stepping = optimizer(model)
    for step in range(steps):
        change(model, rank, step)
        stepping.zero_grad()
        loss(wrapper, rank, step).backward()
        stepping.step()
    return wrapper


def replace_on_one_rank(model: nn.Sequential, rank: int, step: int) -> None:
    if rank == 1 and step == 3:
        model[0] = nn.Linear(3, 4, bias=False)


def same_data(group: dist.ProcessGroup) -> None:
    wrapper = loop(group, loss=lambda wrapper, rank, step: loss_of(wrapper, 0, step))
    for _ in range(2):  # told once
        wrapper.averaged_state_dict()
    wrapper.close()


def micro_batches(group: dist.ProcessGroup) -> None:
    loop(group, loss=lambda wrapper, rank, step: loss_of(wrapper, rank, step) + loss_of(wrapper, rank, step)).close()


def uneven(group: dist.ProcessGroup) -> None:
    wrapper = loop(group, steps=3 + group.rank(), timeout=2.0)
    wrapper.close()


def batch_left_out(group: dist.ProcessGroup, *, evaluates: bool) -> None:
    wrapper = GossipDataParallel(mlp(), process_group=group, timeout=1.0)
    optimizer = sgd(wrapper)
    for step in range(4):
        if (group.rank(), step) == (1, 2):
            continue
        optimizer.zero_grad()
        loss_of(wrapper, group.rank(), step).backward()
        optimizer.step()
    if evaluates:
        wrapper.consensus_distance()
    wrapper.close()


MISTAKES: dict[str, tuple[Callable[[dist.ProcessGroup], Any], type[BaseException], str]] = {
    "the loss of the inner module": (
        lambda group: loop(group, loss=lambda wrapper, rank, step: loss_of(wrapper.module, rank, step)),
        RuntimeError,
        r"the loss is computed by the inner module .*\(call the wrapper itself\)",
    ),
    "an optimizer of a copy": (
        lambda group: loop(group, optimizer=lambda model: sgd(copy.deepcopy(model))).close(),
        UserWarning,
        r"got 10 steps of SGD over tensors .* expected an optimizer of model.parameters\(\)",
    ),
    "the same data on all ranks": (
        same_data,
        UserWarning,
        r"got equal models on all ranks .* after 12 optimizer steps: .*DistributedSampler",
    ),
    "micro-batches outside no_sync()": (
        micro_batches,
        UserWarning,
        r"got 2 training forwards .* put all forwards of a step but the last in no_sync\(\)",
    ),
    "a period longer than the run": (
        lambda group: loop(group, algorithm=DiLoCo(30)).close(),
        UserWarning,
        r"after 12 steps without a round: .* smaller sync_every=",
    ),
    "a layer replaced on one rank": (
        lambda group: loop(group, change=replace_on_one_rank),
        ValueError,
        r"'?0\.bias.* on all ranks at the same step",
    ),
    "ranks with other numbers of batches": (
        uneven,
        OSError,
        r"torch.distributed.algorithms.Join",
    ),
    "a batch that one rank leaves out": (
        lambda group: batch_left_out(group, evaluates=False),
        TimeoutError,
        r"left out a batch: call gossip_step\(\) in its place",
    ),
    "a batch that one rank leaves out, before an average": (
        lambda group: batch_left_out(group, evaluates=True),
        TimeoutError,
        r"left out a batch.*: call gossip_step\(\)",
    ),
    "an attribute of the module": (
        lambda group: loop(group, steps=0).append,
        AttributeError,
        r"write model.module.append",
    ),
    "a context of DistributedDataParallel": (
        lambda group: loop(group, steps=0).join,
        AttributeError,
        r"torch.distributed.algorithms.Join",
    ),
    "a bucket size of DistributedDataParallel": (
        lambda group: loop(group, steps=0, bucket_cap_mb=25).close(),
        UserWarning,
        r"bucket_cap_mb.* no buckets",
    ),
    "mixed precision of DistributedDataParallel": (
        lambda group: loop(group, steps=0, mixed_precision=object()),
        ValueError,
        r"put torch.autocast around the forward",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_its_remedy(mistake: str) -> None:
    make, kind, message = MISTAKES[mistake]
    expected = re.compile(message, re.DOTALL)
    if issubclass(kind, Warning):
        with pytest.warns(kind, match=expected):
            run_ranks(2, make)
        return

    def body(group: dist.ProcessGroup) -> str:
        try:
            make(group)
        except kind as error:
            return str(error)
        return ""

    assert any(map(expected.search, run_ranks(2, body)))


def test_models_that_differ_by_less_than_their_dtype_resolves_are_no_mistake() -> None:
    """Steps of bfloat16 models are a few units in the last place."""

    def near(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.param_groups[0]["lr"] = 0.002
        return optimizer

    def body(group: dist.ProcessGroup) -> None:
        wrapper = loop(
            group,
            optimizer=lambda model: near(sgd(model.bfloat16())),
        )
        wrapper.averaged_state_dict()
        wrapper.close()

    run_ranks(2, body)
