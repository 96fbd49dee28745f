"""Adam as Transformers are trained with it, and its learning rate as a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

START_LEARNING_RATE = 1e-7


@dataclass(frozen=True)
class InverseSquareRoot:
    """lr * min(u / warmup_steps, sqrt(warmup_steps / u)) of the u-th update, the warm-up starting from 1e-7.

    Vaswani et al., 2017, arXiv 1706.03762, equation 3, with the peak in the place of the model's width; the form that
    Ott et al., "Scaling Neural Machine Translation", WMT 2018, arXiv 1806.00187, train with.

    Args:
        lr: reached at the end of the warm-up.
        warmup_steps: optimizer steps of linear warm-up, >= 1.
    """

    lr: float
    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The learning rate of the optimizer step `step`, counted from 0: it is update step + 1."""
        update = step + 1
        if update < self.warmup_steps:
            return START_LEARNING_RATE + (self.lr - START_LEARNING_RATE) * update / self.warmup_steps
        return self.lr * (self.warmup_steps / update) ** 0.5


def adam(module: nn.Module) -> torch.optim.Adam:
    """Adam with (0.9, 0.98) and epsilon 1e-9 over the trainable parameters of `module` (Vaswani et al., section 5.3).

    The learning rate starts at 0: set it before every step with `set_learning_rate`.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # fused: a pass over memory per step instead of ten, and a call instead of hundreds.
    return torch.optim.Adam(parameters, lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
