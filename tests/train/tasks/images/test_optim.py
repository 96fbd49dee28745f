"""The learning rate and the optimizer."""

from __future__ import annotations

import pytest
import torch

from train.tasks.images.config import Config
from train.tasks.images.optim import LearningRate


def test_learning_rate_scales_with_the_global_batch_and_drops_at_milestones() -> None:
    rate = LearningRate(0.1, global_batch=1024, steps_per_epoch=10, milestones=(3, 5), factor=0.1)
    assert [rate(step) for step in (0, 29, 30, 49, 50)] == pytest.approx([0.4, 0.4, 0.04, 0.04, 0.004])


def test_warmup_is_linear_in_the_step_from_the_reference_rate() -> None:
    rate = LearningRate(0.1, global_batch=256 * 16, steps_per_epoch=10, warmup_epochs=2)
    rates = torch.tensor([rate(step) for step in range(21)], dtype=torch.float64)
    steps = rates.diff()
    assert torch.allclose(steps[:19], steps[0])
    assert rates[0] == pytest.approx(0.1 + 1.5 / 20)
    assert rates[19] == rates[20] == pytest.approx(1.6)


def test_warmup_of_a_small_global_batch_still_rises() -> None:
    rate = LearningRate(0.1, global_batch=64, steps_per_epoch=4, warmup_epochs=1)
    assert 0 < rate(0) < rate(1) < rate(3) == rate(4) == pytest.approx(0.025)


@pytest.mark.parametrize("num_nodes", [1, 4, 32])
def test_the_warmup_of_the_imagenet_preset_is_the_published_one(num_nodes: int) -> None:
    """From 0.1, by as much every step, to 0.1 per 256 images; none for 256 (Goyal et al., section 2.2)."""
    preset = Config.PRESETS["imagenet-resnet50"]
    rate = LearningRate(
        preset["lr"],
        global_batch=256 * num_nodes,
        steps_per_epoch=10,
        warmup_epochs=preset["warmup_epochs"],
        warmup_lr=preset["warmup_lr"],
    )
    target = 0.1 * num_nodes
    for step in (0, 7, 49):
        assert rate(step) == pytest.approx(0.1 + (target - 0.1) * (step + 1) / 50)
    assert rate(50) == pytest.approx(target)


def test_milestones_must_ascend() -> None:
    with pytest.raises(ValueError, match=r"got milestones=\(5, 3\), expected ascending epochs; sort them"):
        LearningRate(0.1, global_batch=256, steps_per_epoch=1, milestones=(5, 3))
