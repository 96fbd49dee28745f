"""Meters: running sums of the epoch and totals of the run, part of every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Meters:
    """Loss, accuracy and time of the current epoch, and the seconds and bytes of the whole run.

    Sums stay on `device`, so that no step waits for the GPU; only `loss` and `accuracy_percent` read them.
    """

    def __init__(self, device: torch.device) -> None:
        # float64 holds integers exactly up to 2^53, so the two counts are exact.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Loss times images, correct answers, images."""
        self.data_seconds = 0.0
        """Waited for the loader in this epoch."""
        self.train_seconds = 0.0
        """Trained in the whole run, validation and checkpoints apart."""
        self.bytes_sent_before = 0.0
        """Sent by the processes that this run was resumed from."""

    def update(self, outputs: Tensor, labels: Tensor, loss: Tensor) -> None:
        """Count a micro-batch.

        Args:
            outputs: logits [B, num_classes].
            labels: classes, int64 [B].
            loss: mean loss over the micro-batch, a scalar.
        """
        num_correct = (outputs.detach().argmax(1) == labels).sum()
        num_images = num_correct.new_tensor(len(labels))
        self.sums += torch.stack([loss.detach().double() * num_images, num_correct, num_images])

    @property
    def loss(self) -> float:
        """Mean over the images of the epoch so far; nan before the first."""
        return float(self.sums[0] / self.sums[2])

    @property
    def accuracy_percent(self) -> float:
        """Of the training images of the epoch so far, as augmented, while the model was changing."""
        return float(100 * self.sums[1] / self.sums[2])

    @property
    def has_images(self) -> bool:
        """Whether this epoch has had any so far."""
        return bool(self.sums[2])

    @property
    def is_finite(self) -> bool:
        """Whether every loss of the epoch so far was a number."""
        return bool(self.sums.isfinite().all())

    def require_finite(self, step: int) -> None:
        """Check the losses of the epoch up to `step`: nobody trains on, or saves, what has diverged.

        Raises:
            ValueError: one of them was no number.
        """
        if not self.is_finite:
            raise ValueError(
                f"got a loss of {self.loss} by step {step}, expected a number: training has diverged; lower --lr, "
                "lengthen --warmup-epochs, or leave --amp float16"
            )

    def start_epoch(self) -> None:
        """Forget the epoch, keep the totals."""
        self.sums.zero_()
        self.data_seconds = 0.0

    def state_dict(self, *, bytes_sent: float) -> dict[str, Any]:
        """What `load_state_dict` takes; `bytes_sent` is the count of this process since it started."""
        return {
            "sums": self.sums.clone(),
            "data_seconds": self.data_seconds,
            "train_seconds": self.train_seconds,
            "bytes_sent": self.bytes_sent_before + bytes_sent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.sums.copy_(state["sums"])
        self.data_seconds = state["data_seconds"]
        self.train_seconds = state["train_seconds"]
        self.bytes_sent_before = state["bytes_sent"]
