"""AccumAdam is its law, and AdamW where nothing is accumulated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossip_modules import AccumAdam


def gradients(num_steps: int) -> Tensor:
    return torch.randn(num_steps, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


def run(optimizer: torch.optim.Optimizer, x: nn.Parameter, grads: Tensor) -> Tensor:
    for g in grads:
        x.grad = g.clone()
        optimizer.step()
    return x.detach().clone()


def start() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))


def test_without_accumulation_it_is_adamw() -> None:
    x, y = start(), start()
    ours = run(AccumAdam([x], lr=0.1, weight_decay=0.2, accum_steps=1), x, gradients(7))
    torch.testing.assert_close(ours, run(torch.optim.AdamW([y], lr=0.1, weight_decay=0.2), y, gradients(7)))


def dense_law(x: Tensor, grads: Tensor, *, s: int, lr: float, b1: float, b2: float) -> Tensor:
    """The law from its definition, without state: all moments are sums over the windows that are complete."""
    for t in range(len(grads)):
        means = grads[: t - t % s].unflatten(0, (-1, s)).mean(1) if t >= s else grads[:0]
        seen = torch.cat([means, grads[t : t + 1]])  # oldest first
        ages = torch.arange(len(seen) - 1, -1, -1, dtype=torch.float64)[:, None]
        first = (b1**ages * seen).sum(0) / (b1**ages).sum(0)
        second = (b2**ages * seen**2).sum(0) / (b2**ages).sum(0)
        x = x - lr * first / (second.sqrt() + 1e-8)
    return x


@pytest.mark.parametrize("s", [1, 3, 4])
def test_it_is_its_law(s: int) -> None:
    grads = gradients(11)  # the last window is not complete
    expected = dense_law(start().detach(), grads, s=s, lr=0.1, b1=0.8, b2=0.9)
    x = start()
    torch.testing.assert_close(run(AccumAdam([x], lr=0.1, betas=(0.8, 0.9), accum_steps=s), x, grads), expected)


def longest_step_of_adam(num_windows: int, *, b1: float, b2: float) -> float:
    """In learning rates: |sum w_j g_j| / sqrt(sum u_j g_j^2) <= sqrt(sum w_j^2 / u_j) for any g, by Cauchy-Schwarz."""
    ages = torch.arange(num_windows, dtype=torch.float64)
    w, u = b1**ages, b2**ages
    return float((w**2 / w.sum() ** 2 * u.sum() / u).sum().sqrt())


@pytest.mark.parametrize("mean", [0.0, 0.2])
def test_no_step_is_longer_than_one_of_adam_can_be(mean: float) -> None:
    x = nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    optimizer, generator = AccumAdam([x], lr=1e-3), torch.Generator().manual_seed(0)
    for t in range(24):
        before = x.detach().clone()
        x.grad = torch.randn(x.shape, generator=generator, dtype=torch.float64) + mean
        optimizer.step()
        longest = (x.detach() - before).abs().max().item() / 1e-3
        assert longest <= min(3, longest_step_of_adam(t // 4 + 1, b1=0.9, b2=0.999)) + 1e-9


def test_a_checkpoint_within_a_window_goes_on_to_the_bit() -> None:
    x = start()
    optimizer = AccumAdam([x], accum_steps=4)
    run(optimizer, x, gradients(6))
    y = nn.Parameter(x.detach().clone())
    other = AccumAdam([y], accum_steps=4)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(run(optimizer, x, gradients(5)), run(other, y, gradients(5)))


def test_the_state_of_another_law_is_refused() -> None:
    x = start()
    optimizer = AccumAdam([x])
    run(optimizer, x, gradients(1))
    saved = copy.deepcopy(optimizer.state_dict())
    (state,) = saved["state"].values()
    state["m"], state["v"] = state.pop("exp_avg"), state.pop("exp_avg_sq")  # as it was named
    with pytest.raises(ValueError, match=r"got a state of step, accumulated, m, v, expected step, .*; leave it out"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accum_steps": 0}, "got accum_steps=0, expected a whole number of at least 1; 1 is AdamW"),
        ({"betas": (0.9, 1.0)}, r"got betas=\(0.9, 1.0\), expected two numbers of at least 0 and below 1"),
        ({"lr": -1.0}, "got lr=-1.0, expected a number of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AccumAdam([start()], **options)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="AccumAdam: got a sparse gradient, expected a dense one"):
        AccumAdam(embedding.parameters()).step()
