"""Message: an encoded vector, and Received: the messages of a round with their weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from ..compression.compressor import Code as Code
from ..compression.compressor import Compressor
from ..flat.layout import align
from .vector import Vector

SIZE_BYTES = 8  # of the number with the size of a trimmed message
_ALIGNMENT = 8  # bytes; a tensor of any dtype may start there
_MIN_BYTES = 4096  # for fewer bytes of parameters latency decides the cost of a round, and no warning is given
_MAX_EXACT = 0.5  # above this share of exact bytes a 16-bit wire saves more than compressing the rest


class MessageBuffer:
    """The memory of one message: fields of any dtype in one uint8 tensor, each aligned to 8 bytes.

    Args:
        sizes: the dtype and the number of elements of each field.
        memory: the device for new memory, or the memory to use, uint8 [number of bytes].

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


def warn_of_little(name: str, *, exact: int, compressed: int, num_compressed_bytes: int, remedy: str) -> None:
    """Warn if compression saves little or nothing.

    Args:
        name: the name of the algorithm or the compressor.
        exact: the bytes of the parameters that are sent uncompressed.
        compressed: the bytes of the parameters that are compressed.
        num_compressed_bytes: the bytes of their compressed message; 0: not known.
        remedy: the remedy to name if most parameters are sent uncompressed.
    """
    if exact + compressed < _MIN_BYTES:
        return
    if exact > _MAX_EXACT * (exact + compressed):
        warnings.warn(
            f"{name}: {exact / (exact + compressed):.0%} of the parameters' bytes ({exact:,}) are in parameters of "
            f"one dimension, which are sent uncompressed in every round; {remedy}",
            stacklevel=3,
        )
    elif compressed and num_compressed_bytes >= compressed:
        warnings.warn(
            f"{name}: the compressed message of {compressed:,} bytes of parameters has {num_compressed_bytes:,} bytes, "
            "so compression saves nothing; choose a coarser compressor, or an algorithm without one",
            stacklevel=3,
        )


def warns_of_much(name: str, *, sent: int, reduced: int) -> bool:
    """Warn if the trimmed messages of a round are larger than an all-reduce of all entries; returns whether it warned.

    Args:
        name: the name of the algorithm.
        sent: the bytes that each rank sends in the round.
        reduced: the bytes that each rank would send in the all-reduce.
    """
    if sent <= reduced or reduced < _MIN_BYTES:
        return False
    warnings.warn(
        f"{name}: each rank has sent {sent:,} bytes in a round, and an all-reduce of all entries sends {reduced:,}: "
        "too many entries change between two rounds; take DiLoCo(), which sends all, or a smaller learning rate",
        stacklevel=3,
    )
    return True


class Message:
    """An encoded vector, one uint8 tensor for each of its parts; or fields that the algorithm fills itself.

    Args:
        code: the code that writes and reads the bytes; None: the algorithm fills the fields.
        buffer: the memory of the message.
        num_others: the number of fields at the beginning of the buffer that belong to the driver.

    Attributes:
        fields: the tensors of the algorithm. The next message with the same key, or the next reply, overwrites their
            memory; for an algorithm without `checks_messages`, in the next round.
        others: the fields of the driver.
        is_trimmed: whether a rank sends only the beginning of its last field: see `trim`.
    """

    is_trimmed = False

    def __init__(self, code: Code | None, buffer: MessageBuffer, num_others: int = 0) -> None:
        self.code, self.buffer = code, buffer
        self.others, self.fields = buffer.fields[:num_others], buffer.fields[num_others:]

    @property
    def num_bytes(self) -> int:
        """The size of the message."""
        return self._num_sent if self.is_trimmed else self.buffer.raw.numel()

    def trim(self, num_bytes: int) -> None:
        """Send only so many bytes of the last field, in a `Gather` whose ranks all call this.

        Ranks may send different numbers of bytes. In the reply, a last field is as long as the longest one, or longer.

        Args:
            num_bytes: the bytes of the last field to send.
        """
        self.is_trimmed, self._num_sent = True, align(self.buffer.starts[-1] + num_bytes, _ALIGNMENT)

    @property
    def raw(self) -> Tensor:
        """The bytes of the fields, uint8; shares memory."""
        return self.buffer.raw[self.buffer.starts[len(self.others)] :]

    def fill_others(self, values: Sequence[Tensor]) -> None:
        """Copy values into the fields of the driver, if this message has some."""
        for field, value in zip(self.others, values, strict=False):
            field.copy_(value)

    def reply_in(self, buffer: MessageBuffer) -> Message:
        """Return the message of another rank with the same code and the same fields, in the memory of `buffer`."""
        return Message(self.code, buffer, len(self.others))

    def write(self, x: Vector, t: int, rest: Vector | None = None) -> Message:
        """self <- C(x), and rest <- x - C(x).

        Args:
            x: the vector to encode.
            t: the round; random choices are a function of it.
            rest: see `Vectors.encode`.
        """
        assert self.code is not None, "the algorithm fills the fields of this message"
        for k, (part, field) in enumerate(zip(x.parts, self.fields, strict=True)):
            if part.numel() and rest is not None:
                cast("Compressor", self.code).compress(part, field, t=t, rest=rest.parts[k])
            elif part.numel():
                self.code.compress(part if part.element_size() >= 4 else part.float(), field, t=t)
        return self

    def add_to(self, x: Vector, alpha: float = 1.0, also: Vector | None = None) -> None:
        """x <- x + alpha C, and also <- also + C, where C is the decoded message."""
        assert self.code is not None, "the algorithm reads the fields of this message"
        code = cast("Compressor", self.code)
        for k, (part, field) in enumerate(zip(x.parts, self.fields, strict=True)):
            if part.numel():
                code.add_decompressed(field, part, alpha=alpha, also=None if also is None else also.parts[k])


class Received:
    """The messages of a round as a row of W(t) - I: the own message with W_ii - 1, then the messages of the peers.

    Iterating gives pairs of weight and message.

    Args:
        row: the pairs.
        names: the names of the ranks that sent the messages, for errors.

    Attributes:
        begins_with_own: whether the first message is the rank's own one, as in the reply to `Share`.
        numbers: the numbers of all ranks, float64 [n, k], in the reply to a `Gather` with numbers.
    """

    numbers: Tensor | None = None

    def __init__(
        self, row: Sequence[tuple[float, Message]], names: Sequence[object] = (), *, begins_with_own: bool = True
    ) -> None:
        self._row, self.names, self.begins_with_own = tuple(row), tuple(names), begins_with_own

    def __iter__(self) -> Iterator[tuple[float, Message]]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def add_to(self, x: Vector, alpha: float = 1.0, own: Vector | None = None) -> None:
        """x <- x + alpha sum_j W_ij (C_j - C_i), and own <- own + C_i, for which C_i is decoded once.

        Args:
            x: the vector of the sum; changed.
            alpha: the factor of the sum.
            own: a vector with the dtypes of x that takes the rank's own message of a `Share`, too; changed.

        Raises:
            ValueError: `own` in the reply to a `Gather`, which has the messages of all ranks in the order of ranks.
        """
        if own is not None and not self.begins_with_own:
            raise ValueError(
                "got own= in the reply to a Gather, expected the reply to a Share; add your message itself"
            )
        with x.adding() as total:
            for k, (weight, message) in enumerate(self):
                message.add_to(total, alpha=alpha * weight, also=None if k else own)
