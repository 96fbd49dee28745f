"""Problem Q: five ranks, each with a parabola of its own, whose common minimum is 0.8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, Schedule
from gossip_modules.extend import Algorithm, SGDStep
from gossip_modules.mixing_manager import MixingManager
from gossip_modules.rounds.stacked import Stacked
from tests.harness.ranks import run_ranks

CURVATURES, MINIMA = (1.0, 1.5, 2.0, 2.5, 3.0), (-2.0, -1.0, 0.0, 1.0, 3.0)
START, LEARNING_RATE = 0.5, 0.05


class Point(nn.Module):
    """The number x, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((1,), START, dtype=torch.float64))

    def forward(self, rank: int) -> Tensor:
        return CURVATURES[rank] / 2 * (self.x - MINIMA[rank]).square().sum()


def descended(x: Tensor, num_steps: int) -> Tensor:
    """x float64 [..., n] of all ranks after so many steps of SGD, each on its own parabola."""
    curvatures, minima = (torch.tensor(values[: x.shape[-1]], dtype=torch.float64) for values in (CURVATURES, MINIMA))
    for _ in range(num_steps):
        x = x - LEARNING_RATE * curvatures * (x - minima)
    return x


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD without momentum."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def solve(
    make_options: Callable[[], dict[str, Any]],
    *,
    num_steps: int = 20,
    num_ranks: int = 5,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = plain_sgd,
) -> Tensor:
    """x float64 [..., n] of all ranks after so many steps, and the round that is due then.

    Args:
        make_options: the arguments of `GossipDataParallel`; called on each rank.
        num_steps: of the optimizer.
        num_ranks: the first of the ranks.
        make_optimizer: the optimizer of each rank.
    """

    def body(group: dist.ProcessGroup) -> float:
        point = Point()
        wrapper = GossipDataParallel(point, process_group=group, **make_options())
        optimizer = make_optimizer(wrapper.parameters())
        for _ in range(num_steps):
            optimizer.zero_grad()
            wrapper(group.rank()).backward()
            optimizer.step()
        wrapper(group.rank())  # an outer step runs at the forward after it
        wrapper.close()
        return point.x.item()

    return torch.tensor(run_ranks(num_ranks, body), dtype=torch.float64)


def train_rows(
    algorithm: Algorithm,
    mixing: MixingManager,
    num_steps: int,
    *,
    rate: Callable[[int], float] = lambda k: LEARNING_RATE,
    momentum: float = 0.0,
    curvatures: Sequence[float] = CURVATURES,
    **options: Any,
) -> Tensor:
    """x float64 [num_steps + 1, n] after each round of the algorithm, of ranks that are the rows of one tensor.

    Use it in place of `solve` for more than some twenty steps: hundreds of steps take milliseconds.

    Args:
        algorithm: of the rounds.
        mixing: its weights, for the first n of the ranks.
        num_steps: of SGD; a round comes before the first step and after each.
        rate: the learning rate of step k.
        momentum: of SGD.
        curvatures: of the parabolas.
        options: schedule, and those of `Stacked`.
    """
    n, schedule = mixing.graph.world_size, options.pop("schedule", Schedule())
    a, b = (torch.tensor(values[:n], dtype=torch.float64) for values in (curvatures, MINIMA))
    x, m = torch.full((n,), START, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    driver, history = Stacked(algorithm, mixing, **options), []
    for k in range(num_steps + 1):
        if k:
            m = momentum * m + a * (x - b)
            x -= rate(k - 1) * m
        driver.step(x[:, None], k, schedule.action(k), sgd=SGDStep(rate(k - 1), momentum) if k else None)
        if k and driver.momentum is not None:
            m = driver.momentum[:, 0].clone()
        history.append(x.clone())
    return torch.stack(history)
