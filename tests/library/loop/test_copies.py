"""Copies of the parameters in optimizers: rounds reach them, or a warning says which average does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo
from tests.harness.problems import fill_, loss_of, mlp
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.loop.optimizers import (
    LEARNING_RATE,
    Lookahead,
    Make,
    MasterSGD,
    Momentum,
    ScheduleFreeSGD,
    SteppedMasters,
)
from tests.library.wrappers.wrapping import irregular, wrap

NUM_STEPS = 7
sgd: Make = partial(torch.optim.SGD, lr=LEARNING_RATE)
MASTERS: list[Make] = [MasterSGD, SteppedMasters, partial(SteppedMasters, is_flat=True)]
WRAPPINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "sync": dict,
    "overlap": lambda: {"overlap": True},
    "weights": lambda: {"graph": irregular()},
    "outer": lambda: {"algorithm": DiLoCo(sync_every=3)},
}


def train(wrapper: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(wrapper, rank, step).backward()
        optimizer.step()


def trained(make: Make, *, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """The parameters of three ranks."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).to(dtype), group, init_sync=True, **options)
        train(wrapper, make(wrapper.parameters()), group.rank(), range(NUM_STEPS))
        wrapper.close()
        return flatten(wrapper.module)

    return run_ranks(3, body)


# Masters that are stepped in place of the parameters are stepped at the estimate, as without hooks on their optimizer.
STEPPED_ALIKE = [(MasterSGD, "weights"), *((make, name) for make in MASTERS for name in ("sync", "overlap", "outer"))]


@pytest.mark.parametrize(("make", "wrapping"), STEPPED_ALIKE)
def test_masters_of_full_precision_train_as_the_parameters_do(make: Make, wrapping: str) -> None:
    options = WRAPPINGS[wrapping]
    for found, expected in zip(trained(make, **options()), trained(sgd, **options()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", MASTERS)
def test_float32_masters_of_a_bfloat16_model_train_as_a_float32_model_does(make: Make) -> None:
    for found, expected in zip(trained(make, dtype=torch.bfloat16), trained(sgd), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)


def test_a_round_leaves_the_rounding_error_of_the_parameter_in_its_master() -> None:
    module = nn.Linear(3, 3)
    fill_(module, 0).bfloat16()
    wrapper = wrap(module, solo_group())
    optimizer = MasterSGD(wrapper.parameters())
    train_alone(wrapper, optimizer)
    master = optimizer.state[module.weight]["master"]
    before, rest = module.weight.detach().clone(), master - module.weight.float()
    assert rest.any()
    with torch.no_grad():
        module.weight.add_(0.25)  # as a round does
    change = module.weight.detach().float() - before.float()
    expected = master + change - LEARNING_RATE * train_alone(wrapper, optimizer)
    torch.testing.assert_close(optimizer.state[module.weight]["master"], expected)
    wrapper.close()


def train_alone(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step; the gradient of the weight."""
    optimizer.zero_grad()
    wrapper(torch.full((1, 3), 0.37, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    gradient = next(wrapper.parameters()).grad
    assert gradient is not None
    return gradient.float()


@pytest.mark.parametrize("make", [MasterSGD, SteppedMasters])
def test_a_run_from_a_checkpoint_knows_of_masters_at_its_first_step(make: Any) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        def start() -> tuple[Any, Any]:
            wrapper = wrap(mlp(group.rank()).bfloat16(), group, init_sync=True)
            return wrapper, make(wrapper.parameters())

        wrapper, optimizer = start()
        train(wrapper, optimizer, group.rank(), range(4))
        states = copy.deepcopy(wrapper.state_dict()), [x.clone() for x in optimizer.copies()]
        train(wrapper, optimizer, group.rank(), range(4, 8))
        wrapper.close()
        again, other = start()
        again.load_state_dict(states[0])
        other.load_copies(states[1])
        train(again, other, group.rank(), range(4, 8))
        again.close()
        return flatten(wrapper.module), flatten(again.module)

    for first, second in run_ranks(2, body):
        assert torch.equal(first, second)


# State that is a model of its own.


@pytest.mark.parametrize("options", [{}, {"algorithm": DiLoCo(sync_every=2)}])
@pytest.mark.parametrize(("make", "name"), [(ScheduleFreeSGD, "z"), (Lookahead, "slow")])
def test_a_copy_that_goes_its_own_way_is_told_once_with_the_remedy(
    make: Any, name: str, options: dict[str, Any]
) -> None:
    wrapper = wrap(mlp(), solo_group(), init_sync=True, **options)
    optimizer = make(wrapper.parameters())
    expected = (
        rf"got {make.__name__}, whose state '{name}' began as a copy of the parameters and now differs from them: .*"
        rf"model\.average_optimizer_state\(optimizer, names=\('{name}',\)\)"
    )
    with pytest.warns(UserWarning, match=expected) as told:
        train(wrapper, optimizer, 0, range(10))
    assert len(told) == 1
    assert told[0].filename == __file__
    wrapper.close()


def test_the_remedy_makes_the_copies_of_all_ranks_one_and_is_not_told_of_any_more() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        wrapper = wrap(mlp(group.rank()), group)
        optimizer = ScheduleFreeSGD(wrapper.parameters())
        for step in range(4):
            train(wrapper, optimizer, group.rank(), range(step, step + 1))
            before = torch.cat([optimizer.state[x]["z"].flatten() for x in wrapper.parameters()])
            wrapper.average_optimizer_state(optimizer, names=("z",))
        after = torch.cat([optimizer.state[x]["z"].flatten() for x in wrapper.parameters()])
        wrapper.close()
        return before, after

    results = run_ranks(2, body)
    mean = torch.stack([before for before, _ in results]).mean(0)
    for _, after in results:
        torch.testing.assert_close(after, mean)


@pytest.mark.parametrize("graph", [None, irregular()])
def test_the_average_of_masters_is_that_of_the_models(graph: Any) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        wrapper = wrap(mlp(group.rank()).bfloat16(), group, graph=graph)
        optimizer = MasterSGD(wrapper.parameters())
        train(wrapper, optimizer, group.rank(), range(3))
        with wrapper.averaged():
            mean = flatten(wrapper.module)
        wrapper.average_optimizer_state(optimizer, names=("master",))
        own = flatten(wrapper.module)
        loss_of(wrapper, group.rank(), 3)
        for parameter in wrapper.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # writes the masters over the model
        after = flatten(wrapper.module)
        wrapper.close()
        return mean, own, after

    for mean, own, after in run_ranks(3, body):
        torch.testing.assert_close(own, mean, rtol=0.02, atol=0.005)
        torch.testing.assert_close(after, mean, rtol=0.02, atol=0.005)


# What is no copy.


class Quadratic(nn.Module):
    """The parameter, whose gradient is the parameter itself under the loss |p|^2 / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.zero = nn.Parameter(torch.tensor([0.5, -2.0, 3.0])), nn.Parameter(torch.zeros(2))

    def forward(self) -> Tensor:
        return (self.p.square().sum() + self.zero.square().sum()) / 2


def test_momentum_counters_and_zeros_are_left_alone() -> None:
    module = Quadratic()
    wrapper = wrap(module, solo_group())
    optimizer = Momentum(wrapper.parameters())
    p, m = module.p.detach().clone(), torch.zeros(3)
    for _ in range(5):
        optimizer.zero_grad()
        wrapper().backward()
        with torch.no_grad():
            module.p.add_(0.125)  # as a round does; the gradient is of before
        m = 0.5 * m + p
        p = p + 0.125 - LEARNING_RATE * m
        optimizer.step()
        torch.testing.assert_close(optimizer.state[module.p]["momentum"], m)
        torch.testing.assert_close(module.p.detach(), p)
    wrapper.close()


def test_an_optimizer_of_another_model_of_the_same_values_keeps_its_weights() -> None:
    module, other = mlp(), mlp()
    wrapper = wrap(module, solo_group())
    others, own = sgd(other.parameters()), sgd(wrapper.parameters())
    alone = mlp()
    for step in range(3):
        train(other, others, 0, range(step, step + 1))
        train(wrapper, own, 1, range(step, step + 1))
    train(alone, sgd(alone.parameters()), 0, range(3))
    assert torch.equal(flatten(other), flatten(alone))
    wrapper.close()


def test_weights_that_stand_in_between_two_steps_do_not_reach_the_masters() -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group, init_sync=True, overlap=True)
        optimizer = MasterSGD(wrapper.parameters())
        for step in range(NUM_STEPS):
            train(wrapper, optimizer, group.rank(), range(step, step + 1))
            saved = [x.detach().clone() for x in wrapper.parameters()]
            for x in wrapper.parameters():
                x.data.mul_(0.5)
            wrapper.eval()
            for x, before in zip(wrapper.parameters(), saved, strict=True):
                x.data.copy_(before)
            wrapper.train()
        wrapper.close()
        return flatten(wrapper.module)

    for found, expected in zip(run_ranks(3, body), trained(sgd, overlap=True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
