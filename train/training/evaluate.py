"""Validation: the metrics of every rank's model and of their average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gossip_modules.methods import Wrapper
from train.tasks.base import Task


@dataclass(frozen=True)
class Validation:
    """The result of one validation."""

    own: Mapping[str, float]
    """Metrics of the model of this rank, on the whole test set."""
    averaged: Mapping[str, float]
    """Metrics of the average of all models, on the whole test set; the same on every rank."""
    consensus_distance: float
    """sqrt(mean_i ||x_i - mean_j x_j||^2)."""
    bytes_sent: float
    """By this rank, for this validation."""


def validate(wrapper: Wrapper, task: Task) -> Validation:
    """Collective: evaluate this rank's model and the averaged one, then go on from where each rank was.

    Ranks have different models, so each reads the whole test set for its own; the averaged model is the same
    everywhere, so each reads its share.

    Args:
        wrapper: in train mode, before and after.
        task: whose test set is read.
    """
    wrapper.eval()
    sent_before = wrapper.comm_stats()["bytes_sent"]
    # The bare module: in evaluation a wrapper has nothing to add, and DDP would broadcast its buffers.
    with torch.no_grad(), task.precision.autocast():
        own = task.evaluate(wrapper.module)
    consensus_distance = wrapper.consensus_distance()
    # A new autocast: the one above may hold copies of other weights.
    with wrapper.averaged(), torch.no_grad(), task.precision.autocast():
        averaged = task.evaluate_averaged(wrapper.module)
    wrapper.train()
    return Validation(own, averaged, consensus_distance, wrapper.comm_stats()["bytes_sent"] - sent_before)


def title_of(metric: str) -> str:
    """The name of a metric with its unit, for the head of a column: accuracy_percent is `accuracy [%]`."""
    name = metric.removesuffix("_percent").replace("_", " ")
    return f"{name} [%]" if metric.endswith("_percent") else name


def in_words(metrics: Mapping[str, float]) -> str:
    """Metrics for one line of text: `accuracy 98.61 %`, `nll 0.48, bleu 31.20`."""
    return ", ".join(
        f"{metric.removesuffix('_percent').replace('_', ' ')} {value:.2f}{' %' if metric.endswith('_percent') else ''}"
        for metric, value in metrics.items()
    )
