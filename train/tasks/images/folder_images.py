"""FolderImages: a tree of image files with a folder per class, decoded and augmented when asked for."""

from __future__ import annotations

import functools
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.datasets import ImageFolder

from train.tasks.images.image_file import Box, read_image
from train.tasks.images.images import BatchKey, Images, random_shift

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, RGB in [0, 1]
NUM_TRIES = 10  # at a random part that fits, as everybody does since Inception's first release
AREA, LOG_ASPECT = (0.08, 1.0), (math.log(3 / 4), math.log(4 / 3))
CENTER_FRACTION = 224 / 256  # of the short side: what is left when 224 pixels are cut from an image scaled to 256


class FolderImages(Images):
    """Images of a folder per class; images[key] is uint8 [B, 3, size, size] in channels_last memory.

    A quarter of the bytes of float32 go from a loader process to the training process and on to its device, and there
    `prepare` normalises a batch at once.

    Args:
        folder: paths and classes; neither its loader nor its transforms are used.
        size: side of the images in pixels.
    """

    num_channels = 3

    def __init__(self, folder: ImageFolder, *, size: int) -> None:
        # One array each instead of a million tuples: loader processes share its memory, while the count of references
        # to an object is written to in every process that reads it, and copies its page.
        self.paths = np.array([os.fsencode(path) for path, _ in folder.samples])
        self.labels = np.asarray(folder.targets, dtype=np.int64)
        self.num_classes = len(folder.classes)
        self.size = size

    @abstractmethod
    def read(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """The images of `indices`, augmented by draws from `generator` if there is one: uint8 [B, 3, size, size]."""

    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        generator = None if key.seed is None else torch.Generator().manual_seed(key.seed)
        return self.read(key.indices, generator), torch.from_numpy(self.labels[key.indices])

    def prepare(self, x: Tensor) -> Tensor:
        """Normalised by mean and standard deviation of ImageNet; see `Images.prepare`."""
        mean, inverse_std = _normalisation(x.device)
        return x.float().sub_(mean).mul_(inverse_std)

    def _read_parts(
        self, indices: np.ndarray, parts: Iterable[Callable[[int, int], Box]], is_mirrored: Sequence[bool]
    ) -> Tensor:
        images = torch.empty(
            (len(indices), self.num_channels, self.size, self.size),
            dtype=torch.uint8,
            memory_format=torch.channels_last,
            device="cpu",
        )
        if get_worker_info() is not None:
            images.share_memory_()  # while it is empty: the way to the training process copies nothing then
        for image, path, part, mirror in zip(images, self.paths[indices], parts, is_mirrored, strict=True):
            pixels = read_image(os.fsdecode(path), part, size=self.size)
            image.copy_(pixels.flip(2) if mirror else pixels)
        return images


class ShiftedImages(FolderImages):
    """Whole images scaled to a square; in training shifted by up to an eighth and mirrored half of the time.

    What came from outside of the image is black. The augmentation of CIFAR-10 since He et al., "Deep Residual Learning
    for Image Recognition", CVPR 2016, arXiv 1512.03385, section 4.2: 4 of 32 pixels.
    """

    def read(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """See `FolderImages`."""
        if generator is None:
            return self._read_parts(indices, [whole] * len(indices), [False] * len(indices))
        is_mirrored = (torch.rand(len(indices), generator=generator, device="cpu") < 0.5).tolist()
        images = self._read_parts(indices, [whole] * len(indices), is_mirrored)
        return random_shift(images, self.size // 8, generator)


class CroppedImages(FolderImages):
    """Parts scaled to a square: the center, in training a random part, mirrored half of the time.

    The augmentation of ImageNet since Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, arXiv 1409.4842,
    section 6, and torchvision's `RandomResizedCrop`: 8 to 100 % of the area, sides from 3:4 to 4:3.
    """

    def read(self, indices: np.ndarray, generator: torch.Generator | None) -> Tensor:
        """See `FolderImages`."""
        if generator is None:
            return self._read_parts(indices, [center] * len(indices), [False] * len(indices))
        is_mirrored = (torch.rand(len(indices), generator=generator, device="cpu") < 0.5).tolist()
        # In float64, where rounding never reaches 1: a part never ends past the edge.
        draws = torch.rand(
            len(indices), 2 * NUM_TRIES + 2, generator=generator, dtype=torch.float64, device="cpu"
        ).tolist()
        return self._read_parts(indices, [functools.partial(random_part, draws=row) for row in draws], is_mirrored)


def whole(height: int, width: int) -> Box:
    """All of an image."""
    return Box(0, 0, height, width)


def center(height: int, width: int) -> Box:
    """The square in the middle that validation sees."""
    side = max(1, round(CENTER_FRACTION * min(height, width)))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def random_part(height: int, width: int, *, draws: Sequence[float]) -> Box:
    """A random part of an image: of the tries the first that fits, else the largest middle of allowed proportions.

    Args:
        height: the height of the image, in pixels.
        width: the width of the image, in pixels.
        draws: independent and uniform in [0, 1): area and proportions of every try, and the place, down and across.
    """
    *shapes, down, across = draws
    for u, v in zip(shapes[::2], shapes[1::2], strict=True):
        area = height * width * (AREA[0] + u * (AREA[1] - AREA[0]))
        aspect = math.exp(LOG_ASPECT[0] + v * (LOG_ASPECT[1] - LOG_ASPECT[0]))
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            return Box(int(down * (height - rows + 1)), int(across * (width - columns + 1)), rows, columns)
    rows = max(1, min(height, round(width / math.exp(LOG_ASPECT[0]))))
    columns = max(1, min(width, round(height * math.exp(LOG_ASPECT[1]))))
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


@functools.cache
def _normalisation(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of pixels in [0, 255], [3, 1, 1]: on a GPU once, as a copy there is a wait."""
    mean, std = (255 * torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
    return mean, 1 / std
