"""What a message is made of: its header and its buffer; and the warning where compression saves little."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..flat.layout import align

_ALIGNMENT = 8  # bytes; a tensor of any dtype may start there
WORD = 1 << 32  # the numbers in a header are unsigned and have 32 bits
_MIN_BYTES = 4096  # of parameters; below it latency decides what a round costs, and no warning is given
_MAX_EXACT = 0.5  # of the parameters' bytes; above it a 16-bit wire saves more than compressing the rest


class MessageBuffer:
    """The memory of one message: fields of any dtype in one uint8 tensor, each aligned to 8 bytes.

    Args:
        sizes: the dtype and the number of elements of each field.
        memory: the device of new memory, or memory to use, uint8 [number of bytes].

    Attributes:
        raw: the whole message, uint8 [number of bytes]; zero at first.
        fields: a view of each field.
        starts: the first byte of each field.
    """

    def __init__(self, sizes: Sequence[tuple[torch.dtype, int]], memory: torch.device | Tensor) -> None:
        starts, stop = [], 0
        for dtype, numel in sizes:
            starts.append(stop)
            stop = align(stop + numel * dtype.itemsize, _ALIGNMENT)
        self.sizes, self.starts = tuple(sizes), tuple(starts)
        if isinstance(memory, torch.device):
            memory = torch.zeros(stop, dtype=torch.uint8, device=memory)
        self.raw = memory
        self.fields = tuple(
            self.raw[start : start + numel * dtype.itemsize].view(dtype)
            for start, (dtype, numel) in zip(starts, sizes, strict=True)
        )


class Header:
    """The 8 bytes that are sent ahead of a message: its number and a checksum, both modulo 2**32.

    Args:
        number: the number of the message among those of its sender.
        checksum: a number that the receiver computes as well and compares.
        device: the device of the 8 bytes.
    """

    def __init__(self, number: int = 0, checksum: int = 0, *, device: torch.device) -> None:
        words = torch.tensor([number % WORD, checksum % WORD], dtype=torch.int64, device="cpu")
        # Stored as int32 with the same bits, since torch has few operations on unsigned numbers.
        self.raw = torch.where(words < WORD // 2, words, words - WORD).to(device, torch.int32)

    def read(self) -> tuple[int, int]:
        """The number and the checksum. Waits for the device."""
        number, checksum = self.raw.tolist()
        return number % WORD, checksum % WORD


def warn_of_little(name: str, *, exact: int, compressed: int, num_compressed_bytes: int, remedy: str) -> None:
    """Warn where compression saves little or nothing; a model that is mostly matrices gets no warning.

    Args:
        name: of the gossiper.
        exact: the bytes of parameters that are sent as they are.
        compressed: those of the others.
        num_compressed_bytes: of the message of the latter; 0: not known.
        remedy: where most is sent exactly.
    """
    if exact + compressed < _MIN_BYTES:
        return
    if exact > _MAX_EXACT * (exact + compressed):
        warnings.warn(
            f"{name}: {exact / (exact + compressed):.0%} of the parameters' bytes ({exact:,}) are in parameters of "
            f"one dimension, which are sent as they are in every round; {remedy}",
            stacklevel=3,
        )
    elif compressed and num_compressed_bytes >= compressed:
        warnings.warn(
            f"{name}: the compressed message of {compressed:,} bytes of parameters has {num_compressed_bytes:,} bytes, "
            "so compression saves nothing; choose a coarser compressor, or an algorithm without one",
            stacklevel=3,
        )
