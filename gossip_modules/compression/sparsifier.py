"""Compressors that send a few entries of a vector: the largest, the largest of each chunk, or random ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from ..checks import checked_integer, checked_seed
from .bit_packing import indices_size, pack_indices, unpack_indices
from .compressor import Compressor, random_words, wide
from .masks import is_below, nonzero

_SAMPLE_SIZE = 1 << 16
_ENTRIES_AT_ONCE = 1 << 20
_CACHED_ENTRIES = 1 << 18


class _Largest(Compressor):
    """Some entries that are large in magnitude: their values, which may be compressed once more, then packed indices.

    The indices begin at an even byte.
    """

    takes_rows = True
    values: Compressor | None = None

    @abstractmethod
    def _num_kept(self, d: int) -> int:
        """The number of entries that are kept of d."""

    @abstractmethod
    def _indices_of_largest(self, x: Tensor) -> Tensor:
        """The indices of the kept entries, ascending: int64 [..., num_kept]."""

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        num_kept = self._num_kept(d)
        return self._parts(num_kept, dtype)[1] + indices_size(num_kept, d) if d else 0

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        indices = self._indices_of_largest(x)
        stop, start = self._parts(indices.shape[-1], x.dtype)
        if self.values is None:
            message[..., :stop].view(x.dtype).copy_(_entries_at(x, indices))
        else:
            self.values._encode(x.gather(-1, indices), message[..., :stop], t)
        message[..., stop:start].zero_()
        pack_indices(indices, x.shape[-1], message[..., start:])

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        d, num_kept = target.shape[-1], self._num_kept(target.shape[-1])
        stop, start = self._parts(num_kept, dtype)
        if self.values is None:
            values = message[..., :stop].view(dtype)
        else:
            values = message.new_zeros(*message.shape[:-1], num_kept, dtype=wide(target))
            self.values._add(message[..., :stop], values, dtype, 1.0)
        _add_at(unpack_indices(message[..., start:], num_kept, d), values, target, alpha)

    def _parts(self, num_kept: int, dtype: torch.dtype) -> tuple[int, int]:
        """The end of the values and the start of the indices in a message."""
        stop = num_kept * dtype.itemsize if self.values is None else self.values.num_bytes(num_kept, dtype)
        return stop, -(-stop // 2) * 2


class TopK(_Largest):
    """C(x) = the k = max(1, int(ratio d)) entries of x that are largest in magnitude, over the whole vector.

    ||x - C(x)||^2 <= (1 - k/d) ||x||^2. NaN counts as the largest value. The message holds k values in x's dtype and k
    packed indices, 9.4 bits each at 1 % (`bit_packing.pack_indices`).

    Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599, Definition 2.1.

    Args:
        ratio: the share of entries that is kept, in (0, 1].

    Raises:
        ValueError: ratio is out of range.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> top = TopK(0.01)
        >>> message = top.message_like(x)  # 10 values and their indices: 52 bytes
        >>> top.compress(x, message)
        >>> top.add_decompressed(message, y)
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = _checked_ratio(ratio)

    def _num_kept(self, d: int) -> int:
        return _num_kept(self.ratio, d)

    def _indices_of_largest(self, x: Tensor) -> Tensor:
        # For one vector on a CPU a sample gives a threshold below which entries are excluded. If it excludes too many,
        # all are searched.
        k = self._num_kept(x.shape[-1])
        if x.device.type == "cpu" and x.dim() == 1 and x.numel() > 8 * max(k, _SAMPLE_SIZE):
            sample = x[:: x.numel() // _SAMPLE_SIZE | 1].abs()
            expected = sample.numel() * k / x.numel()
            threshold = sample.topk(math.ceil(expected + 4 * math.sqrt(expected)) + 1).values[-1].item()
            parts = x.split(_CACHED_ENTRIES)  # NaN is among those that are not below
            found = [nonzero(is_below(part.abs(), threshold).logical_not_()) for part in parts]
            candidates = torch.cat([indices.add_(n * _CACHED_ENTRIES) for n, indices in enumerate(found)])
            if candidates.numel() >= k:
                return candidates[_largest(x[candidates], k)]
        return _largest(x, k)

    def __repr__(self) -> str:
        return f"TopK({self.ratio})"


class RandomK(Compressor):
    """C(x) = k = max(1, int(ratio d)) entries of x at random positions, each with probability k/d.

    The positions are start + i * stride modulo d, i < k, with a random start and a random stride that has no common
    factor with d. Finding them takes O(k) operations, and they are sent as 16 bytes in addition to the k values.
    E ||x - C(x)||^2 = (1 - k/d) ||x||^2.

    Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599, Definition 2.1.

    Args:
        ratio: the share of entries that is kept, in (0, 1].
        seed: the seed of the positions, >= 0, which are a function of (seed, t); ranks may have different seeds.
        unbiased: whether to scale by d/k, so that E C(x) = x; C is not a contraction then. Finite values stay finite:
            the largest number of x's dtype is the bound.

    Raises:
        ValueError: ratio or seed is out of range.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> random = RandomK(0.01)
        >>> message = random.message_like(x)  # 56 bytes
        >>> random.compress(x, message, t=7)
        >>> random.add_decompressed(message, y)
    """

    takes_rows = True

    def __init__(self, ratio: float, seed: int = 0, *, unbiased: bool = False) -> None:
        self.ratio = _checked_ratio(ratio)
        self.seed = checked_seed(seed)
        self.unbiased = unbiased

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        return 16 + _num_kept(self.ratio, d) * dtype.itemsize if d else 0

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        d, values = x.shape[-1], message[..., 16:].view(x.dtype)
        start, stride = (word % d for word in random_words(self.seed, t, 2))
        while math.gcd(stride, d) != 1:
            stride += 1
        progression = message[..., :16].view(torch.int64)
        progression[..., 0] = start
        progression[..., 1] = stride
        torch.gather(x, -1, self._positions(progression, d), out=values)
        if self.unbiased:
            scaled, largest = values * (d / values.shape[-1]), torch.finfo(x.dtype).max
            values.copy_(torch.where(values.isfinite(), scaled.clamp_(-largest, largest), values))

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        positions = self._positions(message[..., :16].view(torch.int64), target.shape[-1])
        _add_at(positions, message[..., 16:].view(dtype), target, alpha)

    def _positions(self, progression: Tensor, d: int) -> Tensor:
        """int64 [..., k] of starts and strides [..., 2]."""
        i = torch.arange(_num_kept(self.ratio, d), device=progression.device)
        return (i * progression[..., 1:]).add_(progression[..., :1]).remainder_(d)

    def __repr__(self) -> str:
        return f"RandomK({self.ratio}, seed={self.seed}, unbiased={self.unbiased})"


class ChunkTopK(_Largest):
    """C(x) = Q of the k entries that are largest in magnitude in each chunk of x, and zero elsewhere.

    A chunk is `chunk_size` neighbouring entries of the vector, so that every layer sends some of its entries, whatever
    the scale of the others; `TopK` compares the entries of all layers with each other. A last chunk of r entries keeps
    max(1, floor(k r / chunk_size)) of them. Without `values`, Q is the identity, and
    ||x - C(x)||^2 <= (1 - k / chunk_size) ||x||^2 in each whole chunk. NaN counts as the largest value. The message
    holds Q of the kept values, in their order in x, and their packed indices: 9.0 bits each with the defaults
    (`bit_packing.pack_indices`).

    Sarfi, Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv
    2508.15706.

    Args:
        k: the number of entries that are kept of a chunk, 1 to `chunk_size`.
        chunk_size: the number of entries of a chunk.
        values: Q, the compressor of the kept values, such as `TwoBit()` or `Cast(torch.bfloat16)`; None: they travel
            as they are, in x's dtype.

    Raises:
        ValueError: a number out of range, or `values` is no compressor.

    Example:
        >>> x, y = torch.randn(10_000), torch.zeros(10_000)
        >>> top = ChunkTopK(64, values=TwoBit())
        >>> message = top.message_like(x)  # 156 values of 2 bits and their indices: 224 bytes
        >>> top.compress(x, message)
        >>> top.add_decompressed(message, y)
    """

    def __init__(self, k: int = 64, chunk_size: int = 4096, *, values: Compressor | None = None) -> None:
        self.chunk_size = checked_integer("chunk_size", chunk_size, 1, "4096 is usual")
        self.k = checked_integer("k", k, 1, "it is the number of entries that are kept of a chunk")
        if self.k > self.chunk_size:
            raise ValueError(f"got k={k}, expected at most chunk_size={chunk_size}; k are kept of each chunk")
        if values is not None and not isinstance(values, Compressor):
            raise ValueError(f"got values={values!r}, expected a Compressor or None; pass e.g. TwoBit()")
        self.values, self.takes_rows = values, values is None or values.takes_rows

    def _num_kept(self, d: int) -> int:
        num_chunks, rest = divmod(d, self.chunk_size)
        return num_chunks * self.k + (max(1, self.k * rest // self.chunk_size) if rest else 0)

    def _indices_of_largest(self, x: Tensor) -> Tensor:
        d, size = x.shape[-1], self.chunk_size
        whole, step = d // size * size, max(1, _ENTRIES_AT_ONCE // size) * size
        found = []
        for start, stop in pairwise([*range(0, whole, step), whole, d]):
            if start < stop:
                length = min(size, stop - start)
                columns = _largest(x[..., start:stop].unflatten(-1, (-1, length)), self._num_kept(length))
                firsts = torch.arange(start, stop, length, device=x.device)
                found.append((columns + firsts[:, None]).flatten(-2))
        return torch.cat(found, dim=-1)

    def __repr__(self) -> str:
        return f"ChunkTopK({self.k}, {self.chunk_size}, values={self.values})"


def _checked_ratio(ratio: float) -> float:
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < ratio <= 1:
        raise ValueError(f"got ratio={ratio!r}, expected 0 < ratio <= 1; it is the share of entries that is kept")
    return float(ratio)


def _num_kept(ratio: float, d: int) -> int:
    return min(d, max(1, int(d * ratio)))


def _entries_at(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices] along the last dimension; for one vector by the operation that is fastest."""
    return x.index_select(0, indices) if x.dim() == 1 else x.gather(-1, indices)


def _add_at(indices: Tensor, values: Tensor, target: Tensor, alpha: float) -> None:
    """target[indices] += alpha * values along the last dimension, rounded once to target's dtype.

    All indices are different.
    """
    dtype = torch.promote_types(target.dtype, values.dtype)
    sums = values.to(dtype) * alpha
    sums += _entries_at(target, indices)
    target.scatter_(-1, indices, sums.to(target.dtype))


def _largest(x: Tensor, k: int) -> Tensor:
    """The indices of the k entries that are largest in magnitude, ascending. NaN counts as the largest."""
    return x.abs().topk(k, sorted=False).indices.sort().values
