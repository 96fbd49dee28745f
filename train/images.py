"""Images: a labelled data set read a batch at a time, augmented by a seed that travels with the request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

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
    """images[key] is one batch: images float32 [B, C, H, W], normalised, and labels int64 [B].

    A batch is a pure function of its key, in whichever process it is read.
    """

    labels: np.ndarray
    """The class of every image, int64 [N]."""
    num_classes: int
    num_channels: int

    @abstractmethod
    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor]: ...

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
                mirrored = torch.rand(len(images), generator=generator) < 0.5
                images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        return images, torch.from_numpy(self.labels[key.indices])


class FolderImages(Images):
    """The images of a `torchvision.datasets.ImageFolder`, decoded when asked for.

    Args:
        folder: the data set of paths and classes; its own transform is not used.
        train_transform: of a PIL image into float32 [3, H, W], drawing from torch's global generator.
        test_transform: the same, without randomness.
    """

    def __init__(
        self, folder: Any, *, train_transform: Callable[[Any], Tensor], test_transform: Callable[[Any], Tensor]
    ):
        self.folder = folder
        self.labels = np.asarray(folder.targets, dtype=np.int64)
        self.num_classes = len(folder.classes)
        self.num_channels = 3
        self.train_transform = train_transform
        self.test_transform = test_transform

    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        transform = self.test_transform if key.seed is None else self.train_transform
        # torchvision's transforms take no generator: lend them the global one, and put it back.
        with torch.random.fork_rng(devices=[]):
            if key.seed is not None:
                torch.manual_seed(key.seed)
            images = [transform(self._read(self.folder.samples[index][0])) for index in key.indices]
        return torch.stack(images), torch.from_numpy(self.labels[key.indices])

    def _read(self, path: str) -> Any:
        try:
            return self.folder.loader(path)
        except (OSError, SyntaxError, ValueError) as error:  # all that PIL raises; none of it names the file
            raise ValueError(f"got {path} that does not decode ({error}), expected an image; replace it") from error


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
    shifts = torch.randint(0, 2 * max_shift + 1, (2, num_images, 1), generator=generator)
    rows = (shifts[0] + torch.arange(height))[:, :, None]
    columns = (shifts[1] + torch.arange(width))[:, None, :]
    padded = F.pad(images, [max_shift] * 4)
    # Indexing with a slice between index tensors moves the channels last: [B, H, W, C].
    return padded[torch.arange(num_images)[:, None, None], :, rows, columns].permute(0, 3, 1, 2)
