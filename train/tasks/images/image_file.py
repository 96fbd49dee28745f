"""An image file: of its pixels, the part that is asked for, at the size that is asked for."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from train.job.errors import DataError


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def read_image(path: str, choose: Callable[[int, int], Box], *, size: int) -> Tensor:
    """Part of an image, scaled to a square by the antialiased bilinear filter of Pillow and torchvision.

    Pillow decodes, into RGB: one channel is repeated, CMYK is converted, transparency is dropped. PyTorch scales, by
    vector instructions that Pillow lacks. Of a JPEG whose part has at least twice `size` pixels each way, only the
    lower frequencies are decoded, as many as leave it at least `size`: libjpeg's own scaling by 2, 4 or 8.

    Args:
        path: the path of the file.
        choose: the part, given height and width of the whole in pixels.
        size: height and width of the result in pixels.

    Returns:
        uint8 [3, size, size] in channels_last memory.

    Raises:
        DataError: the file cannot be read, is not an image, or is not whole.
    """
    try:
        with open(path, "rb") as file:
            data = io.BytesIO(file.read())
    except OSError as error:
        raise DataError(f"got {path} that cannot be read ({error.strerror}), expected an image; replace it") from error
    try:
        image: Image.Image = Image.open(data)
        height = image.height
        box = choose(height, image.width)
        reduction = max(scale for scale in (1, 2, 4, 8) if scale == 1 or size * scale <= min(box.height, box.width))
        if reduction > 1:
            image.draft(None, (image.width // reduction, height // reduction))  # used by JPEG alone
            box = _divided(box, round(height / image.height))
        if (box.height, box.width) != (image.height, image.width):
            image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    # All that Pillow raises for a file that is not sound; none of it names the file.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"got {path} that does not decode ({error}), expected an image; replace it") from error
    # A view with all strides as channels_last has them, which the fast kernel asks for; [None] would not do.
    part = torch.from_numpy(pixels).view(1, box.height, box.width, 3).permute(0, 3, 1, 2)
    if (box.height, box.width) != (size, size):
        part = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)
    return part[0]


def _divided(box: Box, scale: int) -> Box:
    """`box` in an image smaller by `scale`: nearest edges, of which a whole number of pixels is never cut off."""
    top, left, bottom, right = (
        (edge + scale // 2) // scale for edge in (box.top, box.left, box.top + box.height, box.left + box.width)
    )
    return Box(top, left, bottom - top, right - left)
