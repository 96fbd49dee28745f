"""Wire: the messages of models in fewer bits than the models have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ..compression.compressor import Cast, Compressor, wide
from ..compression.quantizer import Absmax
from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector

WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.int8)
"""The dtypes to which messages may be rounded."""
BLOCK_SIZE = 64
"""The number of entries with one scale, where messages have the dtype int8."""


@cache
def code_of(wire_dtype: torch.dtype) -> Compressor:
    """Return the code of messages of this dtype.

    Raises:
        ValueError: messages are not rounded to this dtype.
    """
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(
            f"got wire_dtype={wire_dtype}, expected None, torch.bfloat16, torch.float16 or torch.int8; None does not "
            "round"
        )
    return Absmax(8, BLOCK_SIZE) if wire_dtype is torch.int8 else Cast(wire_dtype)


def rounds_statistics(code: Compressor) -> bool:
    """Whether running statistics are rounded too: see [Note: eight bits] of `PushPull`."""
    return isinstance(code, Cast)


class LayoutRun(NamedTuple):
    """Elements [first, last) of a segment, all of parameters or all of buffers, in one place of a message."""

    segment: int
    first: int
    last: int
    is_buffer: bool
    is_coded: bool


class Wire(ABC):
    """The rounded numbers s' of a vector s, as a message and back."""

    _message: FlatVector | None = None

    def message_of(self, s: FlatVector) -> FlatVector:
        """Return s' with the weight of s; the next call returns the same memory."""
        layout = self._layout(s.layout)
        if self._message is None or self._message.layout != layout or self._message.raw.device != s.raw.device:
            self._message = FlatVector.zeros(layout, s.raw.device)
        self._encode(s, self._message)
        self._message.push_sum_weight.copy_(s.push_sum_weight)
        return self._message

    @abstractmethod
    def add_all_(
        self, x: FlatVector, messages: Sequence[FlatVector], weights: Sequence[float], buffer_weights: Sequence[float]
    ) -> None:
        """x <- x + sum_j weights[j] s'_j, without the weight.

        Args:
            x: the vector, mutated.
            messages: messages of vectors with its layout.
            weights, buffer_weights: the factors for parameters and for buffers.
        """

    @abstractmethod
    def values_of(self, message: FlatVector, layout: FlatLayout) -> FlatVector:
        """Return a vector with the numbers of a message; it may share memory with the message.

        Args:
            message: the message.
            layout: the layout of the vectors.
        """

    @abstractmethod
    def _layout(self, layout: FlatLayout) -> FlatLayout:
        """The layout of messages of vectors with this layout."""

    @abstractmethod
    def _encode(self, s: FlatVector, message: FlatVector) -> None:
        """Write the message of s, without the weight."""


class SixteenBits(Wire):
    """A wire of 16 bits. Each segment of a vector is one of its message, and segments of 16 bits are sent as they are.

    Args:
        wire_dtype: torch.bfloat16 or torch.float16.
    """

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self._cast = Cast(wire_dtype)

    def add_all_(
        self, x: FlatVector, messages: Sequence[FlatVector], weights: Sequence[float], buffer_weights: Sequence[float]
    ) -> None:
        """See `Wire`."""
        if weights == buffer_weights:
            x.add_all_segments_(messages, weights)
            return
        for is_buffer, factors in ((False, weights), (True, buffer_weights)):
            half, *halves = (v.where(is_buffer=is_buffer) for v in (x, *messages))
            half.add_all_segments_(halves, factors)

    def values_of(self, message: FlatVector, layout: FlatLayout) -> FlatVector:
        """See `Wire`; the message, in its own dtypes."""
        return message

    def _layout(self, layout: FlatLayout) -> FlatLayout:
        narrow = self._cast.dtype
        return layout.with_dtypes(lambda dtype: narrow if dtype.itemsize > 2 else dtype)

    def _encode(self, s: FlatVector, message: FlatVector) -> None:
        for part, x in zip(message.segments, s.segments, strict=True):
            if x.element_size() > 2:
                self._cast.compress(x, part.view(torch.uint8))
            else:
                part.copy_(x)


class EightBits(Wire):
    """A wire of 8 bits: see [Note: eight bits] of `PushPull`. Each run of a vector is a segment of its message."""

    code = code_of(torch.int8)

    def add_all_(
        self, x: FlatVector, messages: Sequence[FlatVector], weights: Sequence[float], buffer_weights: Sequence[float]
    ) -> None:
        """See `Wire`."""
        for j, run in enumerate(runs_of(x.layout)):
            own = x.segments[run.segment][run.first : run.last]
            total = own if own.dtype is wide(own) else own.float()  # rounded once
            for message, weight in zip(messages, buffer_weights if run.is_buffer else weights, strict=True):
                if run.is_coded:
                    self.code.add_decompressed(message.segments[j], total, alpha=weight)
                else:
                    total.add_(message.segments[j], alpha=weight)
            if total is not own:
                own.copy_(total)

    def values_of(self, message: FlatVector, layout: FlatLayout) -> FlatVector:
        """See `Wire`; a new vector."""
        values = FlatVector.zeros(layout, message.raw.device)
        self.add_all_(values, [message], [1.0], [1.0])
        values.push_sum_weight.copy_(message.push_sum_weight)
        return values

    def _layout(self, layout: FlatLayout) -> FlatLayout:
        return _layout_in_runs(layout, self.code)

    def _encode(self, s: FlatVector, message: FlatVector) -> None:
        for run, part in zip(runs_of(s.layout), message.segments, strict=True):
            own = s.segments[run.segment][run.first : run.last]
            if run.is_coded:
                self.code.compress(own.to(wide(own)), part)
            else:
                part.copy_(own)


def wire_of(wire_dtype: torch.dtype | None) -> Wire | None:
    """Return the wire of this dtype; None: messages are not rounded.

    Raises:
        ValueError: messages are not rounded to this dtype.
    """
    if wire_dtype is None:
        return None
    code_of(wire_dtype)
    return EightBits() if wire_dtype is torch.int8 else SixteenBits(wire_dtype)


@lru_cache(maxsize=64)
def runs_of(layout: FlatLayout) -> tuple[LayoutRun, ...]:
    """Return the longest runs of a layout, in their order: the parameters of a segment, then its buffers."""
    runs: list[LayoutRun] = []
    halves = (layout.where(is_buffer=is_buffer).segments for is_buffer in (False, True))
    for index, (parameters, buffers) in enumerate(zip(*halves, strict=True)):
        n = parameters.numel
        runs.append(LayoutRun(index, 0, n, is_buffer=False, is_coded=True))
        runs += (LayoutRun(index, n + first, n + last, True, takes_code) for first, last, takes_code in buffers.coded())
    return tuple(run for run in runs if run.first < run.last)


@lru_cache(maxsize=64)
def _layout_in_runs(layout: FlatLayout, code: Compressor) -> FlatLayout:
    sizes: list[tuple[torch.dtype, int]] = []
    for run in runs_of(layout):
        dtype, numel = layout.segments[run.segment].dtype, run.last - run.first
        sizes.append((torch.uint8, code.num_bytes(numel, dtype)) if run.is_coded else (dtype, numel))
    return FlatLayout.of(sizes)
