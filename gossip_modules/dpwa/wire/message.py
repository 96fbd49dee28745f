"""MessageHeader: the header of 56 bytes that workers send each other, alone or before the bytes of a model."""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from ...flat.layout import FlatLayout
from ..interpolation import Standing

MAGIC = b"gdpw"
VERSION = 2
# magic, version, kind, flags, digest, dtypes, tensors, clock, loss, bytes of the model; little-endian, no padding.
_HEADER = struct.Struct("<4sBBH16sIIddQ")
HEADER_BYTES = _HEADER.size
_HAS_LOSS = 1
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


class MessageError(ValueError):
    """Bytes that are not a message of this protocol."""


class RefusedModelError(ValueError):
    """A message whose model must not be merged."""


class MessageKind(IntEnum):
    """The kind of a message: one of two requests, or of the answers to them."""

    FETCH = 1
    PROBE = 2
    MODEL = 3  # the model follows, if its shape is that of the request
    EMPTY = 4  # the answer to a probe, or nothing is published yet


class ModelShape(NamedTuple):
    """What two models must have in common before one is merged into the other.

    digest: a hash of 16 bytes of the name, shape, dtype and strides of every tensor, the layout and the byte order.
    dtypes: a bit mask; bit k says that there is a segment of the k-th dtype of a fixed table.
    num_tensors: the number of tensors.
    num_bytes: the number of bytes of the flat vector.
    """

    digest: bytes
    dtypes: int
    num_tensors: int
    num_bytes: int

    @classmethod
    def of(cls, signature: Sequence[str], layout: FlatLayout) -> ModelShape:
        """The shape of a vector of this layout over the tensors of this signature (`FlatBuffer.signature`).

        Raises:
            ValueError: a dtype that the protocol does not know.
        """
        unknown = [segment.dtype for segment in layout.segments if segment.dtype not in _DTYPES]
        if unknown:
            raise ValueError(f"got parameters of {unknown[0]}, expected one of {list(_DTYPES)}; convert the module")
        dtypes = sum(1 << _DTYPES.index(segment.dtype) for segment in layout.segments)
        places = [(str(segment.dtype), segment.start, segment.numel) for segment in layout.segments]
        text = repr((sys.byteorder, list(signature), places, layout.num_bytes))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        return cls(digest, dtypes, len(signature), layout.num_bytes)

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for k, dtype in enumerate(_DTYPES) if self.dtypes >> k & 1]
        return f"{self.num_tensors} tensors of {'/'.join(names) or 'no known dtype'}, {self.num_bytes} bytes"


class MessageHeader(NamedTuple):
    """A header.

    kind: the kind of the message.
    shape: the shape of the sender's model.
    standing: the clock and loss of the sender.
    """

    kind: MessageKind
    shape: ModelShape
    standing: Standing = Standing()

    def pack(self) -> bytes:
        """The 56 bytes."""
        clock, loss = self.standing
        has_loss = loss is not None
        numbers = (self.shape.dtypes, self.shape.num_tensors, clock, loss if loss is not None else 0.0)
        head = (MAGIC, VERSION, self.kind, _HAS_LOSS * has_loss, self.shape.digest)
        return _HEADER.pack(*head, *numbers, self.shape.num_bytes)

    @classmethod
    def parse(cls, data: bytes) -> MessageHeader:
        """The message in these bytes. Allocates no memory whose size depends on them.

        Raises:
            MessageError: they are not a message, or one of another version.
        """
        if len(data) != HEADER_BYTES:
            raise MessageError(f"got a header of {len(data)} bytes, expected {HEADER_BYTES}; a stranger sent it")
        magic, version, kind, flags, digest, dtypes, num_tensors, clock, loss, num_bytes = _HEADER.unpack(data)
        if magic != MAGIC:
            raise MessageError(f"got a header that begins with {magic!r}, expected {MAGIC!r}; a stranger sent it")
        if version != VERSION:
            raise MessageError(f"got version {version}, expected {VERSION}; install the same release on all workers")
        if kind not in MessageKind._value2member_map_ or flags & ~_HAS_LOSS:
            raise MessageError(
                f"got kind {kind} with flags {flags:#x}, expected kinds 1 to {max(MessageKind)} and flag 0x1"
            )
        shape = ModelShape(digest, dtypes, num_tensors, num_bytes)
        return cls(MessageKind(kind), shape, Standing(clock, loss if flags & _HAS_LOSS else None))

    def check(self, own: ModelShape) -> None:
        """Refuse a model that cannot be merged into one of shape `own`, before its bytes are looked at.

        Raises:
            RefusedModelError: the shape differs, or the clock or loss is not a finite number; says which.
        """
        if self.shape != own:
            why = "names, shapes or dtypes differ" if str(self.shape) == str(own) else "sizes differ"
            raise RefusedModelError(
                f"got a model of {self.shape}, expected {own}: {why}; wrap the same model on all workers"
            )
        clock, loss = self.standing
        if not math.isfinite(clock) or clock < 0:
            raise RefusedModelError(f"got clock {clock}, expected a finite number >= 0; the peer is broken")
        if loss is not None and not math.isfinite(loss):
            raise RefusedModelError(f"got loss {loss}, expected a finite number; the peer has diverged")
