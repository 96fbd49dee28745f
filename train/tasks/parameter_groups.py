"""The groups of an optimizer's parameters: which of them decay, the learning rate and the gradients of all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def decay_groups(module: nn.Module, *, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """The trainable parameters of `module` in two groups, as an optimizer takes them.

    Args:
        module: whose parameters are trained.
        weight_decay: the weight decay of tensors of two or more dimensions.
        decay_all: also of biases and normalisation.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": weight_decay if decay_all else 0.0},
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` for every parameter group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(optimizer: torch.optim.Optimizer, norm: float) -> None:
    """Scale the gradients of all parameters down to the 2-norm `norm`, together, where theirs is larger.

    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, arXiv 1211.5063,
    algorithm 1.
    """
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], norm)
