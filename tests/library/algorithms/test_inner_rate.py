"""SlowMo's eta is the learning rate of the last step before an outer step, whatever a scheduler does after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from gossip_modules import GossipDataParallel, SlowMo
from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START, Point
from tests.harness.ranks import run_ranks, solo_group
from tests.library.rounds.memories import watch_of

H, NUM_RANKS = 4, 3


def one_step(
    wrapper: GossipDataParallel, optimizer: Optimizer, rank: int, scheduler: LRScheduler | None = None
) -> None:
    optimizer.zero_grad()
    wrapper(rank).backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def wrapped(group: dist.ProcessGroup, *, by_function: bool = False) -> tuple[GossipDataParallel, Optimizer]:
    """By SlowMo, which asks for the learning rate of the optimizer beside it."""
    point = Point()
    optimizer = torch.optim.SGD(point.parameters(), lr=LEARNING_RATE)
    slowmo = SlowMo(H, inner_lr=(lambda: optimizer.param_groups[0]["lr"]) if by_function else "optimizer")
    return GossipDataParallel(point, process_group=group, algorithm=slowmo), optimizer


def law(rates: list[float]) -> Tensor:
    """Algorithm 1 of the paper, with gamma_t of the H steps before the outer step."""
    curvatures, minima = (torch.tensor(values[:NUM_RANKS], dtype=torch.float64) for values in (CURVATURES, MINIMA))
    phi = torch.full((NUM_RANKS,), START, dtype=torch.float64)
    x, u = phi, torch.zeros_like(phi)
    for k, rate in enumerate(rates):
        x = x - rate * curvatures * (x - minima)
        if (k + 1) % H == 0:
            u = 0.5 * u + (phi - x.mean()) / rate
            x = phi = phi - rate * u
    return phi


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("schedule", [lambda o: StepLR(o, 2 * H, 0.1), lambda o: CosineAnnealingLR(o, 3 * H)])
def test_it_is_that_of_the_steps_taken(schedule: Callable[[Optimizer], LRScheduler], by_function: bool) -> None:
    """The step decay falls on an outer step, and the cosine has come to 0 at the last one."""

    def body(group: dist.ProcessGroup) -> tuple[float, list[float]]:
        wrapper, optimizer = wrapped(group, by_function=by_function)
        scheduler, rates = schedule(optimizer), []
        for _ in range(3 * H):
            rates.append(optimizer.param_groups[0]["lr"])
            one_step(wrapper, optimizer, group.rank(), scheduler)
        wrapper(group.rank())
        wrapper.close()
        return next(wrapper.parameters()).item(), rates

    results = run_ranks(NUM_RANKS, body)
    found = torch.tensor([x for x, _ in results], dtype=torch.float64)
    torch.testing.assert_close(found, law(results[0][1]), rtol=0, atol=1e-12)


def test_a_rate_of_zero_is_refused() -> None:
    wrapper, optimizer = wrapped(solo_group())
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(H):
        one_step(wrapper, optimizer, 0)
    with pytest.raises(ValueError, match=r"got 0.0 as the inner learning rate of the last step, expected one above 0"):
        wrapper(0)
    wrapper.close()


def test_a_wrapper_that_is_closed_asks_no_more() -> None:
    wrapper, optimizer = wrapped(solo_group())
    one_step(wrapper, optimizer, 0)
    wrapper.close()
    optimizer.param_groups[0]["lr"] = 0.7
    optimizer.step()
    assert watch_of(wrapper).inner_rate == LEARNING_RATE


def test_a_step_that_grad_scaler_leaves_out_inside_step_has_no_rate() -> None:
    point = Point()
    optimizer = torch.optim.SGD(point.parameters(), lr=LEARNING_RATE, fused=True)
    slowmo = SlowMo(H, inner_lr="optimizer")
    wrapper = GossipDataParallel(point, process_group=solo_group(), algorithm=slowmo)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for lr, factor in ((0.1, 1.0), (0.2, float("inf")), (0.3, float("inf"))):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        scaler.scale(wrapper(0) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watch_of(wrapper).inner_rate == 0.1
    wrapper.close()
