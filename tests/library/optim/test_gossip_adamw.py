"""GossipAdamW is its law, AdamW for one rank, and has the second moments that all-reduce would have."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import GossipAdamW
from gossip_modules.optim.gossip_adamw import noise_share


def gradients(num_steps: int) -> Tensor:
    return torch.randn(num_steps, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


def run(optimizer: torch.optim.Optimizer, x: nn.Parameter, grads: Tensor) -> Tensor:
    for g in grads:
        x.grad = g.clone()
        optimizer.step()
    return x.detach().clone()


def start() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))


def longest_step_of_adam(num_windows: int, *, b1: float, b2: float) -> float:
    """In learning rates: |sum w_j g_j| / sqrt(sum u_j g_j^2) <= sqrt(sum w_j^2 / u_j) for any g, by Cauchy-Schwarz."""
    ages = torch.arange(num_windows, dtype=torch.float64)
    w, u = b1**ages, b2**ages
    return float((w**2 / w.sum() ** 2 * u.sum() / u).sum().sqrt())


def test_for_one_rank_it_is_adamw() -> None:
    x, y = start(), start()
    ours = run(GossipAdamW([x], lr=0.1, betas=(0.9, 0.999), weight_decay=0.2, num_ranks=1), x, gradients(7))
    torch.testing.assert_close(ours, run(torch.optim.AdamW([y], lr=0.1, weight_decay=0.2), y, gradients(7)))


def share_of(t: int, b1: float, b2: float) -> float:
    """The variance of the average m' of unit noise, averaged over the steps up to t; from the weights of both."""

    powers, decay = (b ** torch.arange(t, dtype=torch.float64) for b in (b1, b2))
    variances = powers.square().cumsum(0) / powers.cumsum(0).square()  # of m' after 1, 2, ..., t steps
    return float((decay.flip(0) * variances).sum() / decay.sum())


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.97, 0.99), (0.01, 0.5)])
def test_the_share_of_the_noise_is_the_sum_of_squared_weights(b1: float, b2: float) -> None:
    """Before and after the step from which a closed form gives the share, which is 8 to 1,286 here."""
    for t in (1, 2, 3, 7, 8, 9, 10, 30, 60, 371, 372, 373, 374, 500, 1285, 1286, 1287, 1400):
        assert noise_share(t, b1, b2) == pytest.approx(share_of(t, b1, b2), rel=1e-12)
    assert noise_share(10**6, b1, b2) == pytest.approx((1 - b1) / (1 + b1), rel=1e-12)


def dense_law(x: Tensor, grads: Tensor, *, n: int, lr: float, b1: float, b2: float) -> Tensor:
    """The law from its definition, without state: all moments are sums over the steps."""

    def average(rows: Tensor, b: float) -> Tensor:
        weights = b ** torch.arange(len(rows) - 1, -1, -1, dtype=torch.float64)[:, None]
        return (weights * rows).sum(0) / weights.sum(0)

    firsts = torch.stack([average(grads[: t + 1], b1) for t in range(len(grads))])
    longest = (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2))
    for t in range(1, len(grads) + 1):
        both, kept_only, kept = average(grads[:t] ** 2, b2), average(firsts[:t] ** 2, b2), share_of(t, b1, b2)
        share = max(1 / n, kept)
        second = ((share - kept) * both + (1 - share) * kept_only) / (1 - kept) if share > kept else kept_only
        x = x - lr * (firsts[t - 1] / (second.sqrt() + 1e-8)).clamp(-longest, longest)
    return x


@pytest.mark.parametrize("n", [2, 8, 64])
def test_it_is_its_law(n: int) -> None:
    grads = 3 * gradients(11)
    expected = dense_law(start().detach(), grads, n=n, lr=0.1, b1=0.8, b2=0.9)
    x = start()
    optimizer = GossipAdamW([x], lr=0.1, betas=(0.8, 0.9), weight_decay=0.0, num_ranks=n)
    torch.testing.assert_close(run(optimizer, x, grads), expected)


@pytest.mark.parametrize("gradient", [0.0, 0.3])
def test_the_second_moment_is_one_of_the_mean_gradient(gradient: float) -> None:
    n, generator = 8, torch.Generator().manual_seed(0)
    x = nn.Parameter(torch.zeros(4000, dtype=torch.float64))
    optimizer = GossipAdamW([x], lr=0.0, num_ranks=n)
    for _ in range(200):
        x.grad = torch.randn(x.shape, generator=generator, dtype=torch.float64) + gradient
        optimizer.step()
    state, kept = optimizer.state[x], 0.1 / 1.9
    second = ((1 / n - kept) * state["exp_avg_sq"] + (1 - 1 / n) * state["exp_sq_avg"]).mean() / (1 - kept)
    assert second.item() == pytest.approx(gradient**2 + 1 / n, rel=0.03)


@pytest.mark.parametrize("gradient", [0.0, 0.3])
@pytest.mark.parametrize("n", [2, 8])
def test_from_the_first_steps_on_the_second_moment_is_one_of_all_reduce(n: int, gradient: float) -> None:
    """Workers with independent gradients; the tolerance is five standard errors over the coordinates.

    Up to the step at which m' has averaged enough gradients, the second moment has the least share of the noise.
    """
    b1, b2, size, generator = 0.9, 0.95, 20_000, torch.Generator().manual_seed(n)
    x = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    optimizer, reduced, enough = GossipAdamW([x], lr=0.0, betas=(b1, b2), num_ranks=n), torch.zeros(size), 0
    for t in range(1, 41):
        noise = torch.randn(n, size, generator=generator, dtype=torch.float64)
        x.grad = noise[0] + gradient
        optimizer.step()
        reduced = b2 * reduced + (1 - b2) * (noise.mean(dim=0) + gradient) ** 2
        share = max(1 / n, share_of(t, b1, b2))
        v, s = (optimizer.state[x][name] / (1 - b2**t) for name in ("exp_avg_sq", "exp_sq_avg"))
        weight = (share - share_of(t, b1, b2)) / (1 - share_of(t, b1, b2) + 1e-300)
        own = weight * v + (1 - weight) * s
        error = 5 * own.std().item() / size**0.5
        assert own.mean().item() == pytest.approx(gradient**2 + share, abs=error)
        if share == 1 / n:
            enough += 1
            difference = own - reduced / (1 - b2**t)
            assert abs(difference.mean().item()) < 5 * difference.std().item() / size**0.5
    assert enough >= 16  # from step 25 on with eight workers


@pytest.mark.parametrize(("mean", "b2"), [(0.0, 0.95), (0.2, 0.999)])
def test_no_step_is_longer_than_one_of_adam_can_be(mean: float, b2: float) -> None:
    x = nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    optimizer, generator = GossipAdamW([x], lr=1e-3, betas=(0.9, b2), num_ranks=64), torch.Generator().manual_seed(0)
    for t in range(24):
        before = x.detach().clone()
        scale = 1e3 if t == 12 else 1.0
        x.grad = scale * (torch.randn(x.shape, generator=generator, dtype=torch.float64) + mean)
        optimizer.step()
        longest = (x.detach() - before).abs().max().item() / 1e-3
        assert longest <= longest_step_of_adam(10_000, b1=0.9, b2=b2) + 1e-3


def test_parameters_that_were_frozen_count_their_own_steps() -> None:
    first, second = start(), start()
    optimizer = GossipAdamW([first, second], num_ranks=4)
    run(optimizer, first, gradients(3))
    alone = start()
    expected = run(GossipAdamW([alone], num_ranks=4), alone, gradients(2))
    first.grad = None
    assert torch.equal(run(optimizer, second, gradients(2)), expected)


def test_a_checkpoint_goes_on_to_the_bit() -> None:
    x = start()
    optimizer = GossipAdamW([x], num_ranks=4)
    run(optimizer, x, gradients(6))
    y = nn.Parameter(x.detach().clone())
    other = GossipAdamW([y], num_ranks=4)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(run(optimizer, x, gradients(5)), run(other, y, gradients(5)))


def test_a_loaded_state_leaves_the_number_of_ranks() -> None:
    x = start()
    optimizer = GossipAdamW([x], lr=0.1, num_ranks=4)
    run(optimizer, x, gradients(2))
    other = GossipAdamW([start()], num_ranks=2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (other.param_groups[0]["num_ranks"], other.param_groups[0]["lr"]) == (2, 0.1)


def test_the_state_of_another_optimizer_is_refused() -> None:
    x, y = start(), start()
    run(other := torch.optim.AdamW([x]), x, gradients(1))
    with pytest.raises(ValueError, match=r"got a state of step, exp_avg, exp_avg_sq, expected step, .*; leave it out"):
        GossipAdamW([y], num_ranks=2).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "got num_ranks=0, expected a whole number of at least 1; 1 is AdamW"),
        ({"betas": (0.9, 0.8)}, r"got betas=\(0.9, 0.8\), expected numbers between 0 and 1 with b1\^2 < b2"),
        ({"betas": (0.0, 0.5)}, r"got betas=\(0.0, 0.5\), expected numbers between 0 and 1"),
        ({"weight_decay": -1.0}, "got weight_decay=-1.0, expected a number of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GossipAdamW([start()], **{"num_ranks": 2, **options})
    with pytest.raises(ValueError, match=message):  # in a group of its own
        GossipAdamW([{"params": [start()], **options}], num_ranks=2)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="GossipAdamW: got a sparse gradient, expected a dense one"):
        GossipAdamW(embedding.parameters(), num_ranks=2).step()
