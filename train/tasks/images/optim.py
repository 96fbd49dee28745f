"""The learning rate of SGD on images, a pure function of the step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """lr * global_batch / 256, reached linearly from lr over the warm-up and multiplied by `factor` at each milestone.

    Being a pure function of the step it has no state to save, and every rank agrees on it. The linear scaling rule and
    the gradual warm-up: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv 1706.02677, sections 2.1 and 2.2.

    Args:
        lr: learning rate for a global batch of 256.
        global_batch: images per optimizer step over all ranks.
        steps_per_epoch: optimizer steps in an epoch; with workers that share one stream of batches, a fraction.
        warmup_epochs: epochs of linear warm-up.
        warmup_lr: what it starts from, unless the target is lower; 0: the smaller of lr and a tenth of the target.
        milestones: epochs, ascending, from which one more `factor` applies.
        factor: what a milestone multiplies by.
    """

    lr: float
    global_batch: int
    steps_per_epoch: float
    warmup_epochs: int = 0
    warmup_lr: float = 0.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError(f"got milestones={self.milestones}, expected ascending epochs; sort them")

    def __call__(self, step: int) -> float:
        """The learning rate of the optimizer step `step`, counted from 0."""
        target = self.lr * self.global_batch / 256
        warmup_steps = self.warmup_epochs * self.steps_per_epoch
        if step < warmup_steps:
            start = min(self.warmup_lr, target) if self.warmup_lr else min(self.lr, target / 10)
            return start + (target - start) * (step + 1) / warmup_steps
        return target * self.factor ** bisect_right(self.milestones, int(step // self.steps_per_epoch))
