"""The base class of lossy compressors of flat vectors, and the cast to 16 bits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float64)
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # its bits
_MAGNITUDE = 0x7FFF  # the bits of a number of 16 bits without its sign, in the order of magnitudes


class Compressor(ABC):
    """A lossy compressor C of flat vectors: `compress` writes the message, `add_decompressed` adds C(x) to a tensor.

    Messages are uint8 tensors. Their size is a function of the length and the dtype of the vector, so all ranks know
    it. A message may be a view of a larger buffer that starts at a multiple of 8 bytes. Random choices are a pure
    function of the seed and the round t: a compressor has no state, and ranks with equal seeds choose alike.

    Adding a message to equal targets gives equal bits on all ranks: products are rounded before they are added, since a
    fused multiply-add, which only some loops use, would round differently.
    """

    takes_rows = False
    """Whether `_encode` and `_add` work on any number of leading dimensions, so that `decompressed` calls them once."""
    is_exact = False
    """Whether C(x) = x, so that nobody expects fewer bytes."""

    @abstractmethod
    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        """Return the number of bytes of a message.

        Args:
            d: the length of the vector.
            dtype: its dtype.
        """

    @abstractmethod
    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        """`compress` after its checks; d >= 1."""

    @abstractmethod
    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        """`add_decompressed` after its checks; d >= 1. dtype: a dtype that x may have had."""

    def message_like(self, x: Tensor) -> Tensor:
        """A new message for vectors like x, all zero: uint8 [num_bytes] on its device.

        Raises:
            ValueError: `compress` does not take x.
        """
        _check_vector(x, _DTYPES)
        return x.new_zeros(self.num_bytes(x.numel(), x.dtype), dtype=torch.uint8)

    @torch.no_grad()
    def compress(self, x: Tensor, message: Tensor, *, t: int = 0, rest: Tensor | None = None) -> None:
        """message <- C(x), and rest <- x - C(x) if there is a `rest`.

        Args:
            x: the vector, float32 or float64 [d], contiguous; changed only if it is `rest`.
            message: the result, uint8 [num_bytes], as `message_like(x)` makes it; every byte is written.
            t: the round, >= 0; random choices depend on it.
            rest: the part of x that the message leaves out, like x; x itself, or a vector that shares no memory with
                it. It equals a copy of x after `add_decompressed(message, copy, alpha=-1)`, in less time.

        Raises:
            ValueError: x or message has another dtype, shape or size.
        """
        _check_vector(x, _DTYPES)
        expected = self.num_bytes(x.numel(), x.dtype)
        if message.dtype != torch.uint8 or message.shape != (expected,):
            raise ValueError(
                f"got a message {message.dtype} {list(message.shape)}, expected torch.uint8 [{expected}] for "
                f"{x.numel()} elements of {x.dtype} with {self}; make it with message_like(x)"
            )
        if rest is not None and (rest.dtype != x.dtype or rest.shape != x.shape or not rest.is_contiguous()):
            raise ValueError(
                f"got a rest {rest.dtype} {list(rest.shape)}, expected {x.dtype} {list(x.shape)}, contiguous, as x is"
            )
        if x.numel() and rest is None:
            self._encode(x, message, t)
        elif x.numel() and rest is not None:
            self._encode_and_subtract(x, message, rest, t)

    def _encode_and_subtract(self, x: Tensor, message: Tensor, rest: Tensor, t: int) -> None:
        """`compress` with a rest, after its checks; d >= 1."""
        self._encode(x, message, t)
        if rest is not x:
            rest.copy_(x)
        self._add(message, rest, x.dtype, -1.0)

    @torch.no_grad()
    def add_decompressed(
        self, message: Tensor, target: Tensor, *, alpha: float = 1.0, also: Tensor | None = None
    ) -> None:
        """target <- target + alpha * C(x), rounded once where target is narrower than x; also <- also + C(x).

        Args:
            message: a message that `compress` wrote, uint8 [num_bytes]; not changed.
            target: the tensor that C(x) is added to, [d], contiguous; of x's dtype or any other floating dtype.
            alpha: the factor of C(x).
            also: another such tensor, which shares no memory with target; codes in blocks decode once for both.

        Raises:
            ValueError: target or also has another dtype or shape, or no vector of its length has a message of this
                size.
        """
        d = target.numel()
        _check_vector(target, (*_DTYPES, torch.bfloat16, torch.float16))
        if also is not None:
            _check_vector(also, (*_DTYPES, torch.bfloat16, torch.float16))
            if also.shape != target.shape:
                raise ValueError(f"got also={list(also.shape)}, expected the shape of target, {list(target.shape)}")
        dtype = wide(target)  # of x, mostly
        if message.dtype != torch.uint8 or message.shape != (self.num_bytes(d, dtype),):
            dtype = self._dtype_of(message, d)
        if d and also is None:
            self._add(message, target, dtype, alpha)
        elif d and also is not None:
            self._add_to_both(message, target, also, dtype, alpha)

    def _add_to_both(self, message: Tensor, target: Tensor, also: Tensor, dtype: torch.dtype, alpha: float) -> None:
        """`add_decompressed` with `also`, after its checks; d >= 1."""
        self._add(message, also, dtype, 1.0)
        self._add(message, target, dtype, alpha)

    def _dtype_of(self, message: Tensor, d: int) -> torch.dtype:
        """The dtype of vectors of length d whose messages have this size.

        Raises:
            ValueError: no vector of this length has messages of this size.
        """
        sizes = {self.num_bytes(d, dtype): dtype for dtype in _DTYPES}
        if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() not in sizes:
            raise ValueError(
                f"got a message {message.dtype} {list(message.shape)}, expected torch.uint8 "
                f"[{' or '.join(map(str, sizes))}] for {d} elements with {self}; sender and receiver must use equal "
                "compressors, and target must be as long as the compressed vector"
            )
        return sizes[message.numel()]

    @torch.no_grad()
    def decompressed(self, x: Tensor, *, t: int = 0) -> Tensor:
        """C(x_i) of each row: the values that a receiver of the message of rank i adds.

        Args:
            x: the vectors of n ranks with equal compressors, float32 or float64 [n, d]; not changed.
            t: the round, as in `compress`.

        Returns:
            The values, like x.
        """
        result, num_bytes = torch.zeros_like(x), self.num_bytes(x.shape[1], x.dtype)
        # A message begins at a multiple of 8 bytes.
        messages = x.new_zeros(len(x), -(-num_bytes // 8) * 8, dtype=torch.uint8)[:, :num_bytes]
        if self.takes_rows and x.numel():
            self._encode(x, messages, t)
            self._add(messages, result, x.dtype, 1.0)
        else:
            for row, message, values in zip(x, messages, result, strict=True):
                self.compress(row.contiguous(), message, t=t)
                self.add_decompressed(message, values)
        return result

    @abstractmethod
    def __repr__(self) -> str:
        """All settings; ranks compare this text when a model is wrapped."""


class Cast(Compressor):
    """C(x) = x in a narrower floating dtype: half the bytes of float32.

    Finite values beyond its range become its largest number; infinities and NaN are kept. If no entry overflows or is
    subnormal, ||x - C(x)|| <= u ||x|| with u = 2^-8 (bfloat16) or 2^-11 (float16).

    Args:
        dtype: the narrower dtype; torch.bfloat16 or torch.float16.

    Raises:
        ValueError: another dtype.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> cast = Cast(torch.bfloat16)
        >>> message = cast.message_like(x)  # 2000 bytes
        >>> cast.compress(x, message)
        >>> cast.add_decompressed(message, y)
    """

    takes_rows = True

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"got dtype={dtype}, expected torch.bfloat16 or torch.float16; take Identity() for all bits, and for "
                "fewer bits a code that scales its values, such as BlockFloat(8): a cast to 8 bits loses all small ones"
            )
        self.dtype = dtype

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        return 2 * d

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        largest = torch.finfo(self.dtype).max
        narrow = message.view(self.dtype)
        infinity = _INFINITY[self.dtype]
        for start, stop, _ in chunks(x, 1):
            part, wider = narrow[..., start:stop], x[..., start:stop]
            if x.device.type == "cpu":  # which need not wait for the answer
                part.copy_(wider)
                if part.view(torch.int16).bitwise_and(_MAGNITUDE).amax() < infinity:
                    continue
            part.copy_(saturated(wider, largest))

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        narrow = message.view(self.dtype)
        for start, stop, _ in chunks(target, 1):
            target[..., start:stop].add_(narrow[..., start:stop].to(wide(target)).mul_(alpha))

    def __repr__(self) -> str:
        return f"Cast({self.dtype})"


class Identity(Compressor):
    """C(x) = x, all bits: the algorithm without compression, to compare with or to test.

    Example:
        >>> model = GossipDataParallel(model, algorithm=Choco(Identity(), step_size=1.0))
    """

    takes_rows = is_exact = True

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        return d * dtype.itemsize

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        message.view(x.dtype).copy_(x)

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        target.add_(message.view(dtype), alpha=alpha)

    def __repr__(self) -> str:
        return "Identity()"


class Code(Protocol):
    """Turns a flat tensor into bytes: a `Compressor`, or an algorithm that reads its messages itself."""

    def message_like(self, x: Tensor) -> Tensor:
        """A new message for vectors like x."""

    def compress(self, x: Tensor, message: Tensor, *, t: int) -> None:
        """message <- C(x)."""


def chunks(
    x: Tensor, block_size: int, *, cuts_blocks: bool = True, longest: int | None = None
) -> Iterator[tuple[int, int, slice]]:
    """Cut the last dimension of x into chunks (start, stop, blocks) of whole blocks, or of a part of one long block.

    So temporary tensors stay small; on a CPU a chunk of one row fits in a cache. All blocks of a chunk have the same
    size, and starts are multiples of 8 if block_size is. Messages do not depend on where x is cut, except by `QSGD`.

    Args:
        x: the vector, [..., d].
        block_size: the number of entries of a block.
        cuts_blocks: whether a block that is longer than a chunk is cut in parts.
        longest: the number of entries of a chunk of all rows together on a CPU; a row has 131,072 at least. None: it
            has so many.
    """
    d, num_rows = x.shape[-1], max(math.prod(x.shape[:-1]), 1)
    longest = max((longest or 0) // num_rows, 1 << 17) if x.device.type == "cpu" else 1 << 24
    if not cuts_blocks:
        longest = max(longest, block_size)
    whole, step = d // block_size * block_size, max(longest // block_size, 1) * block_size
    for first, end in pairwise([*range(0, whole, step), whole, d]):
        for start in range(first, end, longest):
            yield start, min(start + longest, end), slice(first // block_size, -(-end // block_size))


class Spare:
    """Memory for the temporary numbers of one chunk after another, so that each chunk does not take new pages.

    Args:
        x: the vector, [..., d], whose chunks follow; the first one is the longest.
        dtype: of the numbers; None: the dtype of x.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype | None = None) -> None:
        self._x, self._dtype = x, dtype or x.dtype
        self._memory: Tensor | None = None

    def part(self, length: int) -> Tensor:
        """Return numbers of any values, [..., length]; the next call returns the same memory."""
        if self._memory is None:
            self._memory = self._x.new_empty(*self._x.shape[:-1], length, dtype=self._dtype)
        return self._memory[..., :length]


def in_blocks(x: Tensor, blocks: slice) -> Tensor:
    """A chunk [..., m] with so many blocks as [..., blocks, m / blocks]; a view."""
    return x.unflatten(-1, (blocks.stop - blocks.start, -1))


def saturated(x: Tensor, largest: float) -> Tensor:
    """x with finite numbers beyond +-largest replaced by +-largest; infinities and NaN are kept.

    Args:
        x: the numbers, float32 or float64; not changed.
        largest: the bound; at least 1.
    """
    # Adding tiny * x restores infinities, and changes a finite number by less than rounding does.
    return x.clamp(-largest, largest).add_(x, alpha=torch.finfo(x.dtype).tiny)


def wide(target: Tensor) -> torch.dtype:
    """The dtype of sums with target: its own, or float32 if its own is narrower."""
    return torch.promote_types(target.dtype, torch.float32)


def random_words(seed: int, t: int, num_words: int) -> list[int]:
    """`num_words` random numbers of 64 bits, a pure function of (seed, t) on every machine."""
    return [int(word) for word in np.random.SeedSequence((seed, t)).generate_state(num_words, np.uint64)]


def checked_compressor(compressor: Compressor) -> Compressor:
    """The compressor; raises ValueError if it is something else."""
    if not isinstance(compressor, Compressor):
        raise ValueError(f"got compressor={compressor!r}, expected a Compressor; pass e.g. SignNorm() or TopK(0.01)")
    return compressor


def _check_vector(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in dtypes or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()}, expected a contiguous vector of "
            f"{' or '.join(map(str, dtypes))}; flatten it, or cast it first"
        )
