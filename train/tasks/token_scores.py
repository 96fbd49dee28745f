"""Scores of predicted tokens: how likely the right ones are, and how many of them are the likeliest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from train.tasks.byte_tokenizer import PAD


def count_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """What `nll` and `token_accuracy_percent` are made of, to be added up over batches and ranks.

    Args:
        logits: [B, T, num_tokens].
        targets: int64 [B, T], padded with PAD.

    Returns:
        Negative log-likelihood in nats, tokens that are the likeliest, tokens: float64 [3] on the CPU.
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, reduction="sum")
    return torch.stack([loss.double(), num_right(logits, targets).double(), (targets != PAD).sum().double()]).cpu()


def num_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Tokens that are the likeliest, int64 scalar; arguments as in `count_tokens`."""
    return ((logits.argmax(2) == targets) & (targets != PAD)).sum()


def mean_loss(logits: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
    """Mean cross-entropy of a token that is no padding, a scalar; arguments as in `count_tokens`."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, label_smoothing=label_smoothing
    )


def nll(counts: Tensor) -> float:
    """Mean negative log-likelihood of a token in nats; `counts` is a sum of `count_tokens`."""
    return float(counts[0] / counts[2])


def token_accuracy_percent(counts: Tensor) -> float:
    """Tokens that are the likeliest after those before them; `counts` is a sum of `count_tokens`."""
    return float(100 * counts[1] / counts[2])
