"""DelayedNesterov: gradients of workers that arrive one at a time, and outer steps of workers of different speed."""

from __future__ import annotations

import copy
import doctest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import DiLoCo, GossipDataParallel
from gossip_modules.optim import delayed_nesterov
from gossip_modules.optim.delayed_nesterov import DelayedNesterov
from tests.harness.quadratics import START, Point, descended, plain_sgd, solve
from tests.harness.ranks import run_ranks


def asynchronous(optimizer: DelayedNesterov, phi: Tensor) -> None:
    """Problem Q: workers 0 to 4 push in turn, four times, each from the anchor that it has read last."""
    read = [phi.clone() for _ in range(5)]
    for _ in range(4):
        for worker in range(5):
            models = torch.zeros(5, dtype=torch.float64)
            models[worker] = read[worker]
            phi.grad = read[worker] - descended(models, 5)[worker : worker + 1]
            optimizer.step()
            read[worker] = phi.clone()


def test_golden_value() -> None:
    phi = torch.full((1,), START, dtype=torch.float64)
    asynchronous(DelayedNesterov([phi], lr=0.7, momentum=0.9, num_delayed=5), phi)
    assert abs(phi.item() - 1.0481975873) < 1e-9


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.2])
def test_steps_are_the_law_and_a_state_goes_on(spread: float) -> None:
    drifts = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    phi = torch.ones(3, dtype=torch.float64)
    optimizer = DelayedNesterov([phi], lr=0.5, momentum=0.8, num_delayed=5, spread=spread)
    law, m, d = phi.clone(), torch.zeros(3).double(), torch.zeros(3).double()
    for t, g in enumerate(drifts):
        phi.grad = g.clone()
        optimizer.step()
        d = d + g
        if (t + 1) % 5:
            law = law - 0.5 * (spread * 0.8 * m + g / 5)
        else:
            m = 0.8 * m + d / 5
            law = law - 0.5 * ((1 - spread * 5 + spread) * 0.8 * m + g / 5)
            d = torch.zeros(3).double()
        torch.testing.assert_close(phi, law, rtol=0, atol=1e-12)
        if t == 6:
            state, phi = copy.deepcopy(optimizer.state_dict()), phi.clone()
            optimizer = DelayedNesterov([phi])
            optimizer.load_state_dict(state)


def test_one_delayed_gradient_is_nesterov() -> None:
    """As the outer optimizer of DiLoCo."""
    own = solve(lambda: {"algorithm": DiLoCo(5, optimizer=DelayedNesterov)})
    torch.testing.assert_close(own, solve(lambda: {"algorithm": DiLoCo(5)}), rtol=0, atol=1e-12)


def test_workers_take_steps_in_proportion_to_their_speed() -> None:
    """DyLU: each rank takes its own number of steps, then all meet; a faster rank has more weight by its tokens."""
    own_steps, batch = (2, 6), 10

    def body(group: dist.ProcessGroup) -> float:
        rank, point = group.rank(), Point()
        outer = DiLoCo(1, weighted_by="tokens")
        wrapper = GossipDataParallel(point, process_group=group, algorithm=outer, rounds="manual")
        optimizer = plain_sgd(wrapper.parameters())
        for _ in range(3):
            for _ in range(own_steps[rank]):
                optimizer.zero_grad()
                wrapper(rank).backward()
                optimizer.step()
                wrapper.count_tokens(batch)
            wrapper.gossip_step()
        wrapper.close()
        return point.x.item()

    phi, m = torch.full((1,), START, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for _ in range(3):
        drifts = torch.stack([phi - descended(phi.expand(2), steps)[r] for r, steps in enumerate(own_steps)])
        tokens = torch.tensor(own_steps, dtype=torch.float64)[:, None] * batch
        weights = tokens**2 / torch.tensor(own_steps, dtype=torch.float64)[:, None]
        drift = (weights * drifts).sum(0) / weights.sum()
        m = 0.9 * m + drift
        phi = phi - 0.7 * (drift + 0.9 * m)
    torch.testing.assert_close(torch.tensor(run_ranks(2, body)).double(), phi.expand(2), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "got lr=-1.0, expected a number of at least 0"),
        ({"momentum": 1.0}, "got momentum=1.0, expected 0 <= momentum < 1"),
        ({"num_delayed": 0}, "got num_delayed=0, expected a whole number of at least 1"),
        ({"num_delayed": 4, "spread": 0.3}, "got spread=0.3 with num_delayed=4, expected 0 <= spread <= 0.25"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"DelayedNesterov: {message}"):
        DelayedNesterov([torch.zeros(1)], **settings)


def test_the_example_runs() -> None:
    assert doctest.testmod(delayed_nesterov).failed == 0
