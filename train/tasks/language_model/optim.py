"""AdamW as language models are trained with it, and its learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from train.tasks.parameter_groups import decay_groups


@dataclass(frozen=True)
class WarmupCosine:
    """Linear to `lr` over the warm-up, then half a cosine to `final_share` of it at the end of the run.

    Loshchilov and Hutter, "SGDR", ICLR 2017, arXiv 1608.03983, equation 5 without restarts; with the warm-up and the
    final tenth of Brown et al., "Language Models are Few-Shot Learners", NeurIPS 2020, arXiv 2005.14165, appendix B.

    Args:
        lr: reached at the end of the warm-up.
        warmup_steps: optimizer steps of linear warm-up; 0: none.
        num_steps: optimizer steps per rank of the run.
        final_share: of `lr`, after the last step.
    """

    lr: float
    warmup_steps: int
    num_steps: int
    final_share: float = 0.1

    def __call__(self, step: int) -> float:
        """The learning rate of the optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = min(1.0, (step + 1 - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        return self.lr * (self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * progress)) / 2)


def adamw(module: nn.Module, *, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with (0.9, 0.95) over the trainable parameters of `module`; matrices and embeddings decay.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, arXiv 1711.05101; with the betas of
    Brown et al., 2020. The learning rate starts at 0: set it before every step with `set_learning_rate`.
    """
    # fused: a pass over memory per step instead of ten, and a call instead of hundreds.
    return torch.optim.AdamW(decay_groups(module, weight_decay=weight_decay), lr=0.0, betas=(0.9, 0.95), fused=True)
