"""Steps that take back the corrections of rounds are an error; steps along gradients are not, whatever they undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel, GroupAverageDataParallel, LocalSGD
from tests.harness.ranks import TIMEOUT, run_ranks

NUM_STEPS = 44  # two looks
SIZE = 128
METHODS: dict[str, Callable[..., Any]] = {
    "SGP": GossipDataParallel,
    "Overlap SGP": lambda module, **options: GossipDataParallel(module, overlap=True, **options),
    "LocalSGD": lambda module, **options: GossipDataParallel(module, algorithm=LocalSGD(2), **options),
    "AD-PSGD": BilatGossipDataParallel,
    "WAGMA": GroupAverageDataParallel,
}


class Target(nn.Module):
    """A vector whose loss is half its squared distance from a target, so that the gradient is the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, target: Tensor) -> Tensor:
        return (self.weight - target).square().sum() / 2


class Steps:
    """Steps along the gradient without an optimizer of torch."""

    def __init__(self, module: Target, lr: float) -> None:
        self.weight, self.lr = module.weight, lr

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        self.weight.sub_(self.weight.grad, alpha=self.lr)
        self.weight.grad = None


class CopySteps(Steps):
    """Steps of a copy that nobody knows, which is written over the parameter."""

    def __init__(self, module: Target, lr: float) -> None:
        super().__init__(module, lr)
        self.copy = module.weight.detach().clone()

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        self.weight.copy_(self.copy.sub_(self.weight.grad, alpha=self.lr))
        self.weight.grad = None


class FlatCopySteps(CopySteps):
    """The same where the copy is a part of a flat tensor, in a wider dtype."""

    def __init__(self, module: Target, lr: float) -> None:
        super().__init__(module, lr)
        self.flat = torch.cat([torch.zeros(5), self.copy, torch.ones(3)]).double()
        self.copy = self.flat[5:-3]


class CopyOptimizer(torch.optim.Optimizer):
    """The same as an optimizer of the parameter."""

    def __init__(self, module: Target, lr: float) -> None:
        super().__init__([module.weight], {})
        self.steps = CopySteps(module, lr)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps.step()


class Swap(Steps):
    """Steps whose weights stand aside for an average after each of them."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        backup = self.weight.detach().clone()
        self.weight.data.mul_(0.5)
        self.weight.data.copy_(backup)


class Decay(Steps):
    """Steps with momentum and weight decay."""

    def __init__(self, module: Target, lr: float) -> None:
        super().__init__(module, lr)
        self.momentum = torch.zeros_like(module.weight)

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        self.momentum.mul_(0.9).add_(self.weight.grad).add_(self.weight, alpha=0.1)
        self.weight.sub_(self.momentum, alpha=self.lr)
        self.weight.grad = None


class Newton(Steps):
    """Steps to a minimum, as another curvature would have it: down the gradient, in another direction."""

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        self.weight.sub_(self.weight.grad / torch.logspace(-1.5, 1.5, SIZE), alpha=self.lr)
        self.weight.grad = None


class Signs(Steps):
    """Steps of one size along the signs of the gradient."""

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        self.weight.sub_(self.weight.grad.sign(), alpha=self.lr)
        self.weight.grad = None


class Adam(Steps):
    """Steps of Adam, without an optimizer of torch."""

    def __init__(self, module: Target, lr: float) -> None:
        super().__init__(module, lr)
        self.mean, self.square = torch.zeros_like(module.weight), torch.zeros_like(module.weight)

    @torch.no_grad()
    def step(self) -> None:
        gradient = self.weight.grad
        assert gradient is not None
        self.mean.lerp_(gradient, 0.1)
        self.square.lerp_(gradient.square(), 0.1)
        self.weight.sub_(self.mean / (self.square.sqrt() + 1e-8), alpha=self.lr)
        self.weight.grad = None


class Clipped(Steps):
    """Steps with momentum whose weights are clipped, as in a Wasserstein GAN; the script keeps the last weights."""

    def __init__(self, module: Target, lr: float) -> None:
        super().__init__(module, lr)
        self.momentum, self.last = torch.zeros_like(module.weight), module.weight.detach().clone()

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        self.momentum.mul_(0.9).add_(self.weight.grad)
        self.weight.sub_(self.momentum, alpha=self.lr).clamp_(-0.01, 0.01)
        self.weight.grad, self.last = None, self.weight.detach().clone()


class Unit(Steps):
    """Steps whose weights have the length 1 after each of them; the script keeps the last weights."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        self.weight.div_(torch.linalg.vector_norm(self.weight))
        self.last = self.weight.detach().clone()


class Rounded(Steps):
    """Steps whose weights are rounded to a grid."""

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        self.weight.copy_((self.weight * 4).round() / 4)


class CurvedTarget(Target):
    """The same with a curvature of each element."""

    def forward(self, target: Tensor) -> Tensor:
        return (torch.logspace(-1.5, 1.5, SIZE) * (self.weight - target).square()).sum() / 2


def run(method: str, make: Callable[[Target, float], Any], *, lr: float, noise: float, num_ranks: int = 2) -> list[str]:
    """For each rank the error of a loop, or ""."""

    def body(group: dist.ProcessGroup) -> str:
        module = CurvedTarget() if make is Newton else Target()
        generator = torch.Generator().manual_seed(5 + group.rank())
        wrapper = METHODS[method](module, process_group=group, timeout=TIMEOUT)
        optimizer, target = make(module, lr), torch.randn(SIZE, generator=generator)
        try:
            for _ in range(NUM_STEPS):
                wrapper(target + noise * torch.randn(SIZE, generator=generator)).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error)
        finally:
            wrapper.close()
        return ""

    return run_ranks(num_ranks, body)


@pytest.mark.parametrize("method", ["SGP", "Overlap SGP", "LocalSGD", "WAGMA"])
@pytest.mark.parametrize("make", [CopySteps, FlatCopySteps, CopyOptimizer])
def test_a_hidden_copy_that_steps_write_over_the_parameters_is_an_error(make: Any, method: str) -> None:
    name = "CopyOptimizer" if make is CopyOptimizer else "a script"
    found = run(method, make, lr=0.02, noise=0.1)
    expected = f"('weight') from which the steps of {name} have taken back the corrections of 3 rounds"
    assert any(expected in text and "call model.follow(" in text for text in found)


@pytest.mark.parametrize(
    ("make", "lr"),
    [(Steps, 0.05), (Steps, 0.5), (Steps, 1.0), (Steps, 1.9), (Decay, 0.05), (Swap, 0.1)],
    ids=["small", "large", "to the own target", "beyond it", "momentum", "swap"],
)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_along_gradients_are_no_error(make: Any, lr: float, noise: float) -> None:
    assert run("SGP", make, lr=lr, noise=noise, num_ranks=3) == ["", "", ""]


@pytest.mark.parametrize(
    ("make", "lr"),
    [(Newton, 1.0), (Newton, 0.9), (Signs, 0.1), (Adam, 0.1), (Clipped, 0.001), (Unit, 10.0), (Rounded, 0.05)],
)
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_steps_that_lead_back_are_no_error(make: Any, lr: float, noise: float) -> None:
    assert run("SGP", make, lr=lr, noise=noise) == ["", ""]


@pytest.mark.parametrize("method", ["Overlap SGP", "LocalSGD", "AD-PSGD"])
def test_steps_along_gradients_are_no_error_with_any_method(method: str) -> None:
    assert run(method, Steps, lr=0.5, noise=0.0) == ["", ""]
