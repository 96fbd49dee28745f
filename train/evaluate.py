"""Accuracy on the test set of every rank's model and of their average; exact, as images are counted, not batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.data import Data
from train.precision import Precision
from train.recipes import Wrapper


@dataclass(frozen=True)
class Validation:
    """The result of one validation."""

    own_accuracy_percent: float
    """Of the model of this rank, on the whole test set."""
    averaged_accuracy_percent: float
    """Of the average of all models, on the whole test set; the same on every rank."""
    consensus_distance: float
    """sqrt(mean_i ||x_i - mean_j x_j||^2)."""
    bytes_sent: float
    """By this rank, for this validation."""


def count_correct(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    precision: Precision,
) -> Tensor:
    """How many images `model` classifies right.

    Args:
        model: in eval mode.
        batches: images [B, C, H, W] and labels [B] on the CPU.
        precision: of the forward.

    Returns:
        int64 [2] on the CPU: right answers, images.
    """
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for images, labels in batches:
            with precision.autocast():
                answers = model(precision.prepare(images)).argmax(1).cpu()
            counts += torch.tensor([int((answers == labels).sum()), len(labels)])
    return counts


def validate(
    wrapper: Wrapper,
    data: Data,
    precision: Precision,
    *,
    control: dist.ProcessGroup,
) -> Validation:
    """Collective: evaluate this rank's model and the averaged one, then go on from where each rank was.

    Ranks have different models, so each reads the whole test set for its own; the averaged model is the same
    everywhere, so each reads its share and the counts are summed.

    Args:
        wrapper: in train mode, before and after.
        data: whose test set is read.
        precision: of the forward.
        control: a Gloo group of all ranks.
    """
    wrapper.eval()
    sent_before = wrapper.comm_stats()["bytes_sent"]
    # The bare module: in evaluation a wrapper has nothing to add, and DDP would broadcast its buffers.
    own = count_correct(wrapper.module, data.test_batches(sharded=False), precision)
    consensus_distance = wrapper.consensus_distance()
    with wrapper.averaged():
        averaged = count_correct(wrapper.module, data.test_batches(sharded=True), precision)
    dist.all_reduce(averaged, group=control)
    wrapper.train()
    return Validation(
        own_accuracy_percent=float(100 * own[0] / own[1]),
        averaged_accuracy_percent=float(100 * averaged[0] / averaged[1]),
        consensus_distance=consensus_distance,
        bytes_sent=wrapper.comm_stats()["bytes_sent"] - sent_before,
    )
