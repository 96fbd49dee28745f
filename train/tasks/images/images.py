"""Images: a labelled data set read a batch at a time, augmented by a seed that travels with the request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset


class BatchKey(NamedTuple):
    """Which images to read, and how to augment them."""

    indices: np.ndarray
    """Positions in the data set, int64 [B]."""
    seed: int | None
    """Of the augmentation; None: none."""


class Images(Dataset[tuple[Tensor, Tensor]], ABC):
    """images[key] is one batch: images [B, C, H, W] that `prepare` makes ready for a model, and labels int64 [B].

    A batch is a pure function of its key, in whichever process it is read.
    """

    labels: np.ndarray
    """The class of every image, int64 [N]."""
    num_classes: int
    num_channels: int

    @abstractmethod
    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor]: ...

    def prepare(self, x: Tensor) -> Tensor:
        """What a model takes: float32 [B, C, H, W], normalised.

        Args:
            x: images as self[key] gives them, on the device of the model; not changed.

        Returns:
            x itself where it is ready.
        """
        return x

    def __len__(self) -> int:
        return len(self.labels)


class TensorImages(Images):
    """Images held in memory.

    Args:
        images: float32 [N, C, H, W], normalised.
        labels: int64 [N].
        num_classes: number of classes.
        max_shift: training images move by up to that many pixels each way, zeros come in.
        flip: training images are mirrored half of the time.
    """

    def __init__(
        self, images: Tensor, labels: np.ndarray, *, num_classes: int, max_shift: int = 0, flip: bool = False
    ) -> None:
        self.images = images
        self.labels = labels
        self.num_classes = num_classes
        self.num_channels = images.shape[1]
        self.max_shift = max_shift
        self.flip = flip

    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        images = self.images[torch.from_numpy(key.indices)]
        if key.seed is not None:
            generator = torch.Generator().manual_seed(key.seed)
            images = random_shift(images, self.max_shift, generator)
            if self.flip:
                mirrored = torch.rand(len(images), generator=generator, device="cpu") < 0.5
                images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        return images, torch.from_numpy(self.labels[key.indices])


def random_shift(images: Tensor, max_shift: int, generator: torch.Generator) -> Tensor:
    """Move every image by its own whole number of pixels, uniform in [-max_shift, max_shift] each way.

    Args:
        images: [B, C, H, W]; not changed.
        max_shift: the largest shift in pixels.
        generator: where the shifts are drawn from.

    Returns:
        The shifted images, [B, C, H, W], zeros where nothing was.
    """
    if not max_shift:
        return images
    num_images, _, height, width = images.shape
    shifts = torch.randint(0, 2 * max_shift + 1, (2, num_images, 1), generator=generator, device="cpu")
    rows = (shifts[0] + torch.arange(height, device="cpu"))[:, :, None]
    columns = (shifts[1] + torch.arange(width, device="cpu"))[:, None, :]
    padded = F.pad(images, [max_shift] * 4)
    # Indexing with a slice between index tensors moves the channels last: [B, H, W, C].
    return padded[torch.arange(num_images, device="cpu")[:, None, None], :, rows, columns].permute(0, 3, 1, 2)
