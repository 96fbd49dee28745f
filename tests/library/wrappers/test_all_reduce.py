"""AllReduceDataParallel is DistributedDataParallel, bit for bit, with the methods of the gossip wrappers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossip_modules import AllReduceDataParallel
from gossip_modules.wrappers.averaging import AveragingMixin
from tests.harness.problems import adamw, loss_of, net, sgd, train_step
from tests.harness.processes import run_processes
from tests.harness.reference import flatten


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
    state = model.averaged_state_dict()
    assert list(state) == (list(model.module.state_dict()) if rank == 0 else [])
    model.average_()
    for name, value in state.items():
        torch.testing.assert_close(value, model.module.state_dict()[name])
    torch.testing.assert_close(flatten(model.module), average)
    model.flush()
    model.close()
    model.close()
    return {"distance": distance, "average": average, "before": before}


class Phases(nn.Module):
    """Complex parameters beside real ones, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.phase.abs().sum()


def average_complex_parameters(rank: int) -> None:
    """Ranks 0 and 1 have c and c + 1 + 1j: the average lies in the middle, each rank sqrt(1/2) from it."""
    model = AllReduceDataParallel(Phases())
    model(torch.ones(1, 2)).sum().backward()
    assert model.consensus_distance() == 0
    phase = model.module.get_parameter("phase")
    with torch.no_grad():
        phase += rank * (1 + 1j)
    linear = flatten(model.module.get_submodule("linear"))
    assert model.consensus_distance() == pytest.approx(math.sqrt(3 / 2), rel=1e-6)
    with model.averaged():
        torch.testing.assert_close(phase.detach(), torch.full_like(phase, 1.5 + 0.5j).detach())
    torch.testing.assert_close(phase.detach(), torch.full_like(phase, 1 + rank * (1 + 1j)).detach())
    model.average_()
    torch.testing.assert_close(phase.detach(), torch.full_like(phase, 1.5 + 0.5j).detach())
    assert model.consensus_distance() == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(flatten(model.module.get_submodule("linear")), linear)


def average_after_a_cast(rank: int) -> None:
    """What was float32 at construction is averaged as float64, without rounding to float32."""
    model = AllReduceDataParallel(net(), broadcast_buffers=False)
    model.double()
    with torch.no_grad():
        for tensor in (*model.module.parameters(), *model.module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(1 + rank * 1e-10)
    num_parameters = sum(p.numel() for p in net().parameters())
    assert model.consensus_distance() == pytest.approx(0.5e-10 * math.sqrt(num_parameters), rel=1e-4)
    model.average_()
    x = flatten(model.module)
    torch.testing.assert_close(x, torch.full_like(x, 1 + 0.5e-10), rtol=0, atol=1e-14)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def body(rank: int) -> dict[str, Any]:
    """Everything in one start."""
    average_complex_parameters(rank)
    average_after_a_cast(rank)
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
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised, expected a process group"):
        AllReduceDataParallel(nn.Linear(1, 1))


def sick(rank: int) -> list[int]:
    """The number of training forwards until an infinity is noticed: in all parameters, then in each one alone."""
    num_forwards = []
    parameters = list(net().parameters())
    for sick in (range(len(parameters)), *map(range, range(len(parameters)), range(1, len(parameters) + 1))):
        model = AllReduceDataParallel(net())
        loss_of(model, rank, 0).backward()
        with torch.no_grad():
            for k, parameter in enumerate(model.parameters()):
                if k in sick:
                    parameter.view(-1)[-1] = float("nan")
        told = ""
        for step in range(1, 17):
            try:
                loss_of(model, rank, step).backward()
            except FloatingPointError as error:
                told = str(error)
                num_forwards.append(step)
                break
        assert f"rank {rank}: before step {num_forwards[-1]} the model holds infinities or NaN" in told
        model.close()
    return num_forwards


@pytest.mark.e2e
def test_parameters_that_are_not_finite_are_noticed() -> None:
    first, second = (outcome.result for outcome in run_processes(2, sick))
    num_parameters = len(list(net().parameters()))
    assert first == second  # all ranks at the same step
    assert first[0] == 1
    assert sorted(first[1:]) == list(range(1, num_parameters + 1))  # each is looked at in turn
