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
        """Loss times items, correct answers, items: images, or tokens."""
        self.data_seconds = 0.0
        """Waited for the loader in this epoch."""
        self.train_seconds = 0.0
        """Trained in the whole run, validation and checkpoints apart."""
        self.bytes_sent_before = 0.0
        """Sent by the processes that this run was resumed from."""

    def update(self, loss: Tensor, num_correct: Tensor, num_items: int) -> None:
        """Count a batch.

        Args:
            loss: mean over the batch, a scalar on the device.
            num_correct: items that the model had right, a scalar on the device.
            num_items: images, or tokens.
        """
        self.sums[0] += loss.double() * num_items
        self.sums[1] += num_correct
        self.sums[2] += num_items

    @property
    def loss(self) -> float:
        """Mean over the items of the epoch so far; nan before the first."""
        return float(self.sums[0] / self.sums[2])

    @property
    def accuracy_percent(self) -> float:
        """Of the training items of the epoch so far, as augmented, while the model was changing."""
        return float(100 * self.sums[1] / self.sums[2])

    @property
    def has_items(self) -> bool:
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
                "lengthen the warm-up, or leave --amp float16"
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
