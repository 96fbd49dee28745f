"""Compressors that send a few entries of a vector: the largest, or random ones."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from ..checks import checked_seed
from .bit_packing import indices_size, pack_indices, unpack_indices
from .compressor import Compressor, chunks, decompressed_rows, random_words

_SAMPLE_SIZE = 1 << 16


class TopK(Compressor):
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

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        """See `Compressor`."""
        k = _num_kept(self.ratio, d)
        return k * dtype.itemsize + indices_size(k, d)

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        d, k = x.numel(), _num_kept(self.ratio, x.numel())
        num_value_bytes = k * x.element_size()
        indices = _indices_of_largest(x, k)
        torch.index_select(x, 0, indices, out=message[:num_value_bytes].view(x.dtype))
        pack_indices(indices, d, message[num_value_bytes:])

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        d, k = target.numel(), _num_kept(self.ratio, target.numel())
        num_value_bytes = k * dtype.itemsize
        indices = unpack_indices(message[num_value_bytes:], k, d)
        add_at(indices, message[:num_value_bytes].view(dtype), target, alpha)

    def decompressed(self, x: Tensor, *, t: int = 0) -> Tensor:
        """See `Compressor`."""
        kept = x.abs().topk(_num_kept(self.ratio, x.shape[1]), dim=1, sorted=False).indices
        return torch.zeros_like(x).scatter_(1, kept, x.gather(1, kept))

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

    def __init__(self, ratio: float, seed: int = 0, *, unbiased: bool = False) -> None:
        self.ratio = _checked_ratio(ratio)
        self.seed = checked_seed(seed)
        self.unbiased = unbiased

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        """See `Compressor`."""
        return 16 + _num_kept(self.ratio, d) * dtype.itemsize if d else 0

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        d, values = x.numel(), message[16:].view(x.dtype)
        start, stride = (word % d for word in random_words(self.seed, t, 2))
        while math.gcd(stride, d) != 1:
            stride += 1
        progression = message[:16].view(torch.int64)
        progression[0].fill_(start)
        progression[1].fill_(stride)
        torch.index_select(x, 0, self._positions(progression, d), out=values)
        if self.unbiased:
            scaled, largest = values * (d / values.numel()), torch.finfo(x.dtype).max
            torch.where(values.isfinite(), scaled.clamp_(-largest, largest), values, out=values)

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        positions = self._positions(message[:16].view(torch.int64), target.numel())
        add_at(positions, message[16:].view(dtype), target, alpha)

    def _positions(self, progression: Tensor, d: int) -> Tensor:
        i = torch.arange(_num_kept(self.ratio, d), device=progression.device)
        return i.mul_(progression[1]).add_(progression[0]).remainder_(d)

    def decompressed(self, x: Tensor, *, t: int = 0) -> Tensor:
        """See `Compressor`: all rows keep the same positions."""
        factors = decompressed_rows(self, torch.ones_like(x[:1]), t)[0]
        largest = torch.finfo(x.dtype).max
        return torch.where(factors == 0, 0.0, torch.where(x.isfinite(), (x * factors).clamp_(-largest, largest), x))

    def __repr__(self) -> str:
        return f"RandomK({self.ratio}, seed={self.seed}, unbiased={self.unbiased})"


def _checked_ratio(ratio: float) -> float:
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < ratio <= 1:
        raise ValueError(f"got ratio={ratio!r}, expected 0 < ratio <= 1; it is the share of entries that is kept")
    return float(ratio)


def _num_kept(ratio: float, d: int) -> int:
    return min(d, max(1, int(d * ratio)))


def add_at(indices: Tensor, values: Tensor, target: Tensor, alpha: float) -> None:
    """target[indices] += alpha * values, rounded once to target's dtype. All indices are different."""
    dtype = torch.promote_types(target.dtype, values.dtype)
    sums = values.to(dtype) * alpha
    sums += target.index_select(0, indices)
    target.scatter_(0, indices, sums.to(target.dtype))


def _indices_of_largest(x: Tensor, k: int) -> Tensor:
    """The indices of the k entries of x that are largest in magnitude, ascending. NaN counts as the largest.

    On a CPU a sample gives a threshold below which entries are excluded. If it excludes too many, all are searched.
    """
    if x.device.type == "cpu" and x.numel() > 8 * max(k, _SAMPLE_SIZE):
        sample = x[:: x.numel() // _SAMPLE_SIZE | 1].abs()
        expected = sample.numel() * k / x.numel()
        threshold = sample.topk(math.ceil(expected + 4 * math.sqrt(expected)) + 1).values[-1]
        candidates = _indices_not_below(x, threshold)
        if candidates.numel() >= k:
            chosen = x[candidates].abs().topk(k, sorted=False).indices.sort().values
            return candidates[chosen]
    return x.abs().topk(k, sorted=False).indices.sort().values


def _indices_not_below(x: Tensor, threshold: Tensor) -> Tensor:
    """The indices where |x| < threshold is false, ascending; they include those of NaN."""
    found = []
    for start, stop, _ in chunks(x, 1):
        is_below = x[start:stop].abs() < threshold
        found.append(is_below.logical_not_().nonzero().squeeze(1).add_(start))
    return torch.cat(found)
