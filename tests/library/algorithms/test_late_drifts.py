"""Drifts of workers that miss outer steps: the oracle has the golden values of its law, and DiLoCo has its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gossip_modules import DelayedNesterov, DiLoCo
from tests.harness.closes import Closes
from tests.harness.late_drifts import WEIGHTS, outer_steps
from tests.harness.quadratics import START, descended

LATE = {2: [4], 4: [4]}
"""Worker 4 misses the outer steps 2 and 4; its drift in outer step 3 has ten inner steps."""


@pytest.mark.parametrize(
    ("late", "keeps", "anchor", "model"),
    [
        ({}, True, 0.7702157507, 0.7702157507),
        (LATE, False, 0.0778158787, 0.0778158787),
        (LATE, True, 0.1789581115, 1.8775301647),
    ],
    ids=["nobody", "dropped", "kept"],
)
def test_golden_values(late: dict[int, list[int]], keeps: bool, anchor: float, model: float) -> None:
    last = outer_steps(late, keeps=keeps)[-1]
    np.testing.assert_allclose([last.anchor, last.models[4]], [anchor, model], rtol=0, atol=5e-11)


def test_golden_value_of_weights_by_tokens() -> None:
    last = outer_steps({}, weighted_by="tokens", tokens=(1, 2, 3, 4, 5))[-1]
    assert abs(last.anchor - 2.2972042506) < 5e-11


@pytest.mark.parametrize("name", sorted(WEIGHTS, key=str))
def test_a_longer_drift_has_the_weight_of_its_steps(name: str | None) -> None:
    """With c = 1 and b = 0 outer step 3 is a weighted mean of bases less drifts, of which one is twice as long."""
    own_weight = 1.0 if name is None else 2.0  # twice the tokens in twice the steps: 2^2 / 2, 2 and 2

    def step_3(late: list[int]) -> float:
        _, before, after, _ = outer_steps(LATE | {3: late}, weighted_by=name, lr=1.0, momentum=0.0)
        return after.anchor - before.anchor

    expected = (4 * step_3([4]) + own_weight * step_3([0, 1, 2, 3])) / (4 + own_weight)
    assert step_3([]) == pytest.approx(expected, abs=1e-14)


def descend(closes: Closes, tokens: tuple[int, ...], workers: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
    """Five steps of each of these workers, each with its tokens."""
    after = descended(torch.cat(closes.x), 5)
    for rank in workers:
        closes.x[rank].copy_(after[rank])
        for _ in range(5):
            closes.memories[rank].count_tokens(tokens[rank])


@pytest.mark.parametrize("weighted_by", sorted(WEIGHTS, key=str))
@pytest.mark.parametrize("late", [LATE, {1: [0, 3], 2: [3], 4: [1]}], ids=["one", "several"])
def test_a_lost_outer_step_leaves_drift_and_count_to_the_next_one(weighted_by: Any, late: dict[int, list[int]]) -> None:
    """Five workers of which some get `RoundLost`; the first outer step of worker 3 is the third one."""
    tokens = (2, 3, 5, 7, 11)
    closes = Closes(DiLoCo(5, weighted_by=weighted_by), torch.full((1,), START, dtype=torch.float64), 5)
    for r, expected in enumerate(outer_steps(late, weighted_by=weighted_by, tokens=tokens), start=1):
        descend(closes, tokens)
        closes.close([rank for rank in range(5) if rank not in late.get(r, ())])
        np.testing.assert_allclose(torch.cat(closes.x).numpy(), expected.models, rtol=0, atol=1e-12)


def test_closes_of_one_worker_are_asynchronous_outer_steps() -> None:
    """Delayed Nesterov: workers 0 to 4 push in turn, four times, each from the anchor that it has read last."""
    outer = DiLoCo(5, optimizer=lambda parameters: DelayedNesterov(parameters, lr=0.7, momentum=0.9, num_delayed=5))
    closes = Closes(outer, torch.full((1,), START, dtype=torch.float64), 5)
    for push in range(20):
        worker = push % 5
        descend(closes, (1,) * 5, (worker,))
        closes.close([worker], begins=[worker])
    assert abs(closes.x[4].item() - 1.0481975873) < 5e-11
