"""Message: an encoded vector on its way to peers, and the messages that have come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor

from ..compression.compressor import Code as Code
from ..compression.compressor import Compressor
from ..gossiper.message import MessageBuffer as MessageBuffer
from ..gossiper.message import warn_of_little as warn_of_little
from .vector import Vector


class Message:
    """What a code makes of a vector: one uint8 tensor for each of its parts. Or fields that the algorithm fills itself.

    Args:
        code: writes and reads the bytes; None: the algorithm does.
        buffer: the memory of the bytes.
        num_others: fields of the buffer before those of the algorithm, which are the driver's.

    Attributes:
        fields: the tensors that are sent, in memory that the next message of the same key, or the next one of the same
            peer, is written to.
    """

    def __init__(self, code: Code | None, buffer: MessageBuffer, num_others: int = 0) -> None:
        self.code, self.buffer = code, buffer
        self.fields, self._num_others = buffer.fields[num_others:], num_others

    @property
    def raw(self) -> Tensor:
        """The bytes of the fields, uint8; shares memory."""
        return self.buffer.raw[self.buffer.starts[self._num_others] :]

    def write(self, x: Vector, t: int) -> Message:
        """self <- C(x). t: the round, of which random choices are a function."""
        assert self.code is not None, "the algorithm fills the fields of this message"
        for part, field in zip(x.parts, self.fields, strict=True):
            if part.numel():
                self.code.compress(part if part.element_size() >= 4 else part.float(), field, t=t)
        return self

    def add_to(self, x: Vector, alpha: float = 1.0) -> None:
        """x <- x + alpha C: what the bytes mean is added."""
        assert self.code is not None, "the algorithm reads the fields of this message"
        code = cast("Compressor", self.code)
        for part, field in zip(x.parts, self.fields, strict=True):
            if part.numel():
                code.add_decompressed(field, part, alpha=alpha)


class Received:
    """The messages of a round as a row of W(t) - I: first this rank's own with W_ii - 1, then those of its peers.

    Iterating gives pairs of weight and message.

    Args:
        row: the pairs.
        names: of the ranks that have sent the messages, for errors.
    """

    def __init__(self, row: Sequence[tuple[float, Message]], names: Sequence[object] = ()) -> None:
        self._row, self.names = tuple(row), tuple(names)

    def __iter__(self) -> Iterator[tuple[float, Message]]:
        return iter(self._row)

    def add_to(self, x: Vector, alpha: float = 1.0) -> None:
        """x <- x + alpha sum_j W_ij (C_j - C_i)."""
        with x.adding() as total:
            for weight, message in self._row:
                message.add_to(total, alpha=alpha * weight)
