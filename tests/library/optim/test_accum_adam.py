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


def test_it_is_its_law() -> None:
    grads, b1, b2 = gradients(10), 0.8, 0.9
    x, m, v = start().detach(), torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for t in range(1, 11):
        m = b1 * m + (1 - b1) * grads[t - 1]
        if t % 3 == 0:
            v = b2 * v + (1 - b2) * grads[t - 3 : t].mean(0) ** 2
        second = v / (1 - b2 ** (t // 3)) if t >= 3 else grads[:t].mean(0) ** 2
        x = x - 0.1 * (m / (1 - b1**t)) / (second.sqrt() + 1e-8)
    y = start()
    torch.testing.assert_close(run(AccumAdam([y], lr=0.1, betas=(b1, b2), accum_steps=3), y, grads), x)


def test_a_checkpoint_within_a_window_goes_on_to_the_bit() -> None:
    x = start()
    optimizer = AccumAdam([x], accum_steps=4)
    run(optimizer, x, gradients(6))
    y = nn.Parameter(x.detach().clone())
    other = AccumAdam([y], accum_steps=4)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(run(optimizer, x, gradients(5)), run(other, y, gradients(5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accum_steps": 0}, "got accum_steps=0, expected a whole number of steps, at least 1; 1 is AdamW"),
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
