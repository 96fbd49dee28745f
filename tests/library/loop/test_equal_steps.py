"""Models that another tool makes equal in each step are an error, with each method; other equal models are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    BilatGossipDataParallel,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    LocalSGD,
)
from tests.harness.problems import fill_
from tests.harness.ranks import TIMEOUT, run_ranks, solo_group

NUM_STEPS = 20
METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "SGP": (GossipDataParallel, {}),
    "overlap": (GossipDataParallel, {"overlap": True}),
    "local SGD": (GossipDataParallel, {"algorithm": LocalSGD(sync_every=4)}),
    "DiLoCo": (GossipDataParallel, {"algorithm": DiLoCo(sync_every=4)}),
    "after steps": (GossipDataParallel, {"rounds": "step"}),
    "AD-PSGD": (BilatGossipDataParallel, {}),
    "WAGMA": (GroupAverageDataParallel, {}),
}


class Momentum(torch.optim.Optimizer):
    """Normalised momentum; with a group the work is shared: each parameter is stepped on one rank."""

    def __init__(self, parameters: Any, lr: float = 0.02, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self.group = group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for k, parameter in enumerate(self.param_groups[0]["params"]):
            if self.group is None or k % self.group.size() == self.group.rank():
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.05)
                parameter.add_(momentum / momentum.norm().clamp(min=1e-7), alpha=-self.param_groups[0]["lr"])
            if self.group is not None:
                self.group.broadcast(parameter.data, k % self.group.size()).wait()


class Signs(torch.optim.Optimizer):
    """Steps of one length, along the signs of momentum: ranks may take the same ones with different gradients."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            parameter.sub_(momentum.lerp_(parameter.grad, 0.05).add(0.1).sign(), alpha=self.param_groups[0]["lr"])


def model() -> nn.Module:
    return fill_(nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)]), 0)


def train(wrapper: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_STEPS):
        x, y = torch.randn(2, 8, 6, generator=generator)
        optimizer.zero_grad()
        (wrapper(x) - y).square().mean().backward()
        optimizer.step()


def run(
    method: str, make: Callable[[Any, dist.ProcessGroup], torch.optim.Optimizer], *, seeds: Any = (0, 1)
) -> list[Any]:
    """The models of two ranks at the end, or the error of each."""

    def body(group: dist.ProcessGroup) -> Tensor | str:
        wrap, options = METHODS[method]
        wrapper = wrap(model(), process_group=group, timeout=TIMEOUT, **options)
        try:
            train(wrapper, make(wrapper.parameters(), group), seeds[group.rank()])
        except RuntimeError as error:
            if "another tool" not in str(error):
                raise
            return str(error)
        finally:
            wrapper.close()
        return torch.cat([x.detach().flatten() for x in wrapper.module.parameters()])

    return run_ranks(2, body)


@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_that_shares_its_work_between_ranks_is_an_error_on_all_of_them(method: str) -> None:
    for found in run(method, lambda parameters, group: Momentum(parameters, group=group)):
        assert "equal on ranks [0, 1] after each of 3 steps of Momentum with different gradients" in found
        assert "an optimizer of each rank's own" in found


@pytest.mark.parametrize("method", ["SGP", "local SGD", "WAGMA"])
def test_an_optimizer_of_each_rank_trains(method: str) -> None:
    assert all(isinstance(x, Tensor) for x in run(method, lambda parameters, _: Momentum(parameters)))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters, _: Momentum(parameters, lr=0.0),
        lambda parameters, _: Signs(parameters),
        lambda parameters, group: Momentum(list(parameters)[:1], lr=0.0, group=group),
    ],
    ids=["no steps", "signs", "frozen"],
)
def test_models_that_are_equal_for_a_reason_are_no_error(make: Any) -> None:
    assert all(isinstance(x, Tensor) for x in run("SGP", make))


def test_models_of_equal_data_are_no_error() -> None:
    found = run("SGP", lambda parameters, group: Momentum(parameters, group=None), seeds=(0, 0))
    assert torch.equal(found[0], found[1])


def test_one_rank_has_nothing_to_compare() -> None:
    wrapper = GossipDataParallel(model(), process_group=solo_group())
    train(wrapper, Momentum(wrapper.parameters()), 0)
    wrapper.close()


class Complex(nn.Module):
    """A vector of complex numbers whose loss is its squared distance from a target."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, dtype=torch.complex64))

    def forward(self, target: Tensor) -> Tensor:
        return (self.weight - target).abs().square().sum()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, Momentum])
def test_complex_parameters_are_compared_too(optimizer_class: Any) -> None:
    def body(group: dist.ProcessGroup) -> float:
        model, generator = Complex(), torch.Generator().manual_seed(group.rank())
        wrapper = GossipDataParallel(model, process_group=group, timeout=TIMEOUT)
        optimizer = optimizer_class(model.parameters(), lr=0.05)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            wrapper(torch.randn(32, dtype=torch.complex64, generator=generator)).backward()
            optimizer.step()
        wrapper.close()
        return wrapper.comm_stats()["num_rounds"]

    assert run_ranks(2, body) == [NUM_STEPS] * 2
