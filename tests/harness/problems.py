"""A small training problem, the same for the library and for the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.reference import Snapshot, flatten

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers and a batch norm: parameters, floating-point buffers and an integer buffer.

    The batch norm stands behind the nonlinearity: a bias that it would cancel has a gradient of rounding noise only,
    which AdamW blows up to steps of full size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(x))))


def fill_(module: nn.Module, seed: int) -> nn.Module:
    """Parameters uniform in [-0.5, 0.5) from this seed; float32 values in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.detach().copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return module


def net(seed: int = 0) -> nn.Module:
    """`Net`, filled from this seed."""
    return fill_(Net(), seed)


def mlp(seed: int = 0) -> nn.Module:
    """The same without batch norm: only gradients change it."""
    return fill_(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), seed)


def batch(rank: int, step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs [size, 3] and targets [size, 2], float32, of this rank at this step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 2, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The mean squared error of a model on that batch, in the dtype and on the device of the model."""
    like = next(model.parameters())
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x.to(like)), y.to(like))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum and weight decay."""
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-2)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW. A gradient that is nearly zero is rounding noise, which a smaller eps would blow up to a full step."""
    return torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.1, eps=1e-3)


def numerator(wrapper: GossipWrapper) -> Tensor:
    """x = z * w of this rank: what the sum over ranks is kept of."""
    return flatten(wrapper.module) * wrapper.get_extra_state()["weight"].cpu()


def train_step(wrapper: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step of a plain loop."""
    optimizer.zero_grad()
    loss_of(wrapper, rank, step).backward()
    optimizer.step()


def train(wrapper: GossipWrapper, optimizer: torch.optim.Optimizer, rank: int, num_steps: int) -> Snapshot:
    """`num_steps` steps of one rank, seen from inside: a Snapshot with a first dimension of steps, not of ranks."""
    estimates, numerators, weights = [], [], []

    def note(*_: object) -> None:
        estimates.append(flatten(wrapper.module))
        weights.append(wrapper.get_extra_state()["weight"].cpu())

    with wrapper.module.register_forward_pre_hook(note):
        for step in range(num_steps):
            train_step(wrapper, optimizer, rank, step)
            numerators.append(numerator(wrapper).cpu())
    return Snapshot(torch.stack(estimates), torch.stack(numerators), torch.cat(weights))
