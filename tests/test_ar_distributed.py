"""AllReduceDataParallel is DistributedDataParallel, bit for bit, with the methods of the gossip wrappers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossip_modules import AllReduceDataParallel
from gossip_modules.averaging import AveragingMixin
from tests.problems import adamw, loss_of, net, sgd, train_step
from tests.processes import run_processes
from tests.reference import flatten


def train_both(rank: int) -> int:
    """The same training under both wrappers, step by step; how many steps were compared."""
    num_steps = 0
    options: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True, "broadcast_buffers": False}]
    for make in (sgd, adamw):
        for ddp_options in options:
            ours, theirs = (
                AllReduceDataParallel(net(rank), **ddp_options),
                DistributedDataParallel(net(rank), **ddp_options),
            )
            first, second = make(ours), make(theirs)
            for step in range(5):
                with ours.no_sync(), theirs.no_sync():
                    if step % 2:
                        loss_of(ours, rank, 100 + step).backward()
                        loss_of(theirs, rank, 100 + step).backward()
                train_step(ours, first, rank, step)
                train_step(theirs, second, rank, step)
                for key, tensor in theirs.state_dict().items():
                    assert torch.equal(ours.state_dict()[key], tensor), key
                num_steps += 1
            num_parameters = sum(p.numel() for p in net().parameters())
            stats = ours.comm_stats()
            assert stats["bytes_sent"] == 5 * 4 * num_parameters  # a ring of two sends each gradient once
            assert stats["num_rounds"] == 5
            assert math.isnan(stats["wait_seconds"])
            assert math.isnan(stats["consensus_distance"])
    return num_steps


def use_the_common_methods(rank: int) -> dict[str, Any]:
    """average_(), averaged() and consensus_distance() on models that were made to differ."""
    model = AllReduceDataParallel(net(), broadcast_buffers=False)
    assert isinstance(model, DistributedDataParallel)
    assert isinstance(model, AveragingMixin)
    assert model.consensus_distance() == 0
    with torch.no_grad():
        for tensor in (*model.module.parameters(), *model.module.buffers()):
            if tensor.is_floating_point():
                tensor.add_(rank)
    before = flatten(model.module)
    distance = model.consensus_distance()
    assert torch.equal(flatten(model.module), before)
    with model.averaged() as inside:
        assert inside is model
        average = flatten(model.module)
    assert torch.equal(flatten(model.module), before)
    model.average_()
    torch.testing.assert_close(flatten(model.module), average)
    model.flush()
    model.close()
    model.close()
    return {"distance": distance, "average": average, "before": before}


def body(rank: int) -> dict[str, Any]:
    """Everything in one start."""
    return {"num_steps": train_both(rank), **use_the_common_methods(rank)}


@pytest.mark.e2e
def test_equals_distributed_data_parallel_bit_for_bit() -> None:
    first, second = (outcome.result for outcome in run_processes(2, body))
    assert first["num_steps"] == 20
    torch.testing.assert_close(first["average"], (first["before"] + second["before"]) / 2, rtol=0, atol=1e-6)
    num_parameters = sum(p.numel() for p in net().parameters())
    for result in (first, second):  # each parameter is 1/2 from the mean on both ranks
        assert result["distance"] == pytest.approx(math.sqrt(num_parameters / 4), rel=1e-6)


def test_without_torch_distributed() -> None:
    with pytest.raises(ValueError, match="process group"):
        AllReduceDataParallel(nn.Linear(1, 1))
