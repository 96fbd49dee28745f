"""Compressors that send every entry in few bits: its sign, its sign and a magnitude, or a randomly rounded value."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ..checks import checked_seed
from ..devices import wide_dtype
from .bit_packing import pack, packed_size, unpack
from .compressor import Compressor, Spare, chunks, in_blocks, random_words, saturated, wide
from .masks import is_below

_TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max * (1 - 2**-20)  # a scale of this size times a level stays finite in float32


class _BlockCode(Compressor):
    """A code of `bits` bits for each entry, and `num_scales` float32 for each block: scales first, then packed codes.

    Subclasses have a `block_size`, None for one block.
    """

    takes_rows = True
    bits: int
    num_scales = 1
    is_signed = False  # whether codes are in two's complement
    block_size: int | None
    step = 1.0  # a factor of all scales
    longest: int | None = None  # see `chunks`

    @abstractmethod
    def _codes(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        """Write the scales, [..., blocks, num_scales]; yields (start, stop, codes [..., stop - start]).

        The caller may change the codes and this part of x before it takes the next ones.
        """

    @abstractmethod
    def _write_values(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the values of codes [..., blocks, m] in `out`, with scales [..., blocks, num_scales]; changes codes."""

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        return 4 * self.num_scales * -(-d // self._size(d)) + packed_size(d, self.bits)

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        for _ in self._write(x, message, t):
            pass

    def _encode_and_subtract(self, x: Tensor, message: Tensor, rest: Tensor, t: int) -> None:
        scales, size = self._parts(message, x.shape[-1])[0], self._size(x.shape[-1])
        spare = Spare(x)
        for start, stop, codes in self._write(x, message, t):  # codes are in the cache
            blocks, values = slice(start // size, -(-stop // size)), spare.part(stop - start)
            own = scales[blocks].to(x.dtype) * -self.step
            self._write_values(in_blocks(codes, blocks), own, in_blocks(values, blocks))
            torch.add(x[start:stop], values, out=rest[start:stop])

    def _in_units_of_largest(self, x: Tensor, scales: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Write the largest magnitude of each block as its scale; yields (start, stop, x in these units, in blocks).

        A block of zeros stays zero. A block with infinities or NaN has an infinite scale, or NaN.
        """
        spare = Spare(x)
        for start, stop, blocks in chunks(x, self._size(x.shape[-1]), cuts_blocks=False, longest=self.longest):
            rows = in_blocks(_in_range_of_float32(x[..., start:stop]), blocks)
            units = in_blocks(spare.part(stop - start), blocks)
            scales[..., blocks, :] = saturated(torch.abs(rows, out=units).amax(-1, keepdim=True), LARGEST)
            yield start, stop, torch.div(rows, scales[..., blocks, :].clamp_min(_TINY), out=units)

    def _write(self, x: Tensor, message: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        """Write the message, and yield the codes of each part, as `_codes` does."""
        scales, packed = self._parts(message, x.shape[-1])
        for start, stop, codes in self._codes(x, scales, t):
            pack(codes, self.bits, packed[..., packed_size(start, self.bits) : packed_size(stop, self.bits)])
            yield start, stop, codes

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        for start, stop, values in self._decoded(message, target, alpha):
            target[..., start:stop].add_(values)

    def _add_to_both(self, message: Tensor, target: Tensor, also: Tensor, dtype: torch.dtype, alpha: float) -> None:
        wider = max(target, also, key=lambda x: x.element_size())
        for start, stop, values in self._decoded(message, wider, 1.0):
            also[start:stop].add_(values)
            target[start:stop].add_(values.mul_(alpha))

    def _decoded(self, message: Tensor, like: Tensor, alpha: float) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, alpha C(x) [..., stop - start]) in a dtype that is wide enough for a vector `like` x."""
        scales, packed = self._parts(message, like.shape[-1])
        scales = scales.to(wide(like)) * (alpha * self.step)
        spare = Spare(like, wide(like))
        for start, stop, blocks in chunks(like, self._size(like.shape[-1]), longest=self.longest):
            own = packed[..., packed_size(start, self.bits) : packed_size(stop, self.bits)]
            codes, values = unpack(own, self.bits, stop - start, signed=self.is_signed), spare.part(stop - start)
            self._write_values(in_blocks(codes, blocks), scales[..., blocks, :], in_blocks(values, blocks))
            yield start, stop, values

    def _size(self, d: int) -> int:
        return self.block_size or max(d, 1)

    def _parts(self, message: Tensor, d: int) -> tuple[Tensor, Tensor]:
        """The scales, float32 [..., blocks, num_scales], and the packed codes."""
        num_bytes = 4 * self.num_scales * -(-d // self._size(d))
        return message[..., :num_bytes].view(torch.float32).unflatten(-1, (-1, self.num_scales)), message[
            ..., num_bytes:
        ]


class _LevelCode(_BlockCode):
    """A code of integers: C(x) is the nearest or a random level, times the scale of the block and `step`.

    Subclasses have `num_levels`; levels are integers between -num_levels and num_levels.
    """

    is_signed = True
    num_levels: int

    @abstractmethod
    def _levels(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        """Write the scales, [..., blocks, 1]; yields (start, stop, levels [..., blocks, m]), floating as x or wider.

        The caller may change the levels and this part of x before it takes the next ones.
        """

    def _codes(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        for start, stop, levels in self._levels(x, scales, t):
            yield start, stop, levels.to(torch.int8).flatten(-2)

    def _encode_and_subtract(self, x: Tensor, message: Tensor, rest: Tensor, t: int) -> None:
        scales, packed = self._parts(message, x.shape[-1])
        size = self._size(x.shape[-1])
        for start, stop, levels in self._levels(x, scales, t):
            codes = levels.to(torch.int8).flatten(-2)
            pack(codes, self.bits, packed[packed_size(start, self.bits) : packed_size(stop, self.bits)])
            values = levels.mul_(scales[start // size : -(-stop // size)].to(x.dtype) * self.step)
            torch.sub(x[start:stop], values.flatten(-2), out=rest[start:stop])

    def _write_values(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(codes).mul_(scales)


class SignNorm(_BlockCode):
    """C(x) = mean |x| * sign(x) in each block: one bit per entry and a float32 per block. sign(0) = +1.

    ||x - C(x)||^2 = (1 - ||x||_1^2 / (m ||x||_2^2)) ||x||^2 in a block of m entries. If an entry is infinite or NaN,
    its whole block becomes so. Finite entries beyond the range of float32 count as the largest float32.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
    arXiv 1901.09847, Lemma 8.

    Args:
        block_size: the number of entries per scale, a multiple of 8; the last block may be shorter. None: one scale
            for the whole vector.

    Raises:
        ValueError: block_size is not a positive multiple of 8.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> sign = SignNorm()
        >>> message = sign.message_like(x)  # 129 bytes
        >>> sign.compress(x, message)
        >>> sign.add_decompressed(message, y)
    """

    bits = 1

    def __init__(self, block_size: int | None = 2048) -> None:
        self.block_size = None if block_size is None else checked_multiple_of_8("block_size", block_size)

    def _codes(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        size = self._size(x.shape[-1])
        sums = _norms(x, size, 1)
        sums[..., :-1] /= size
        sums[..., -1] /= x.shape[-1] - (sums.shape[-1] - 1) * size
        scales[..., 0] = saturated(sums, LARGEST)
        for start, stop, _ in chunks(x, size):
            yield start, stop, is_below(x[..., start:stop], 0).view(torch.uint8)

    def _write_values(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8).mul_(-2).add_(1)).mul_(scales)

    def __repr__(self) -> str:
        return f"SignNorm({self.block_size})"


class QSGD(_LevelCode):
    """C(x) = ||x||_2 / s * xi(s x / ||x||_2) in each bucket; xi rounds at random to an integer, with E xi(y) = y.

    With s = 2^(bits-1) - 1 an entry takes a sign and bits - 1 bits, and a bucket of B entries one float32 in addition.
    E ||x - C(x)||^2 <= omega ||x||^2, omega = min(B / s^2, sqrt(B) / s). C / (1 + omega), the default, is a
    contraction: E ||x - C(x)||^2 <= (1 - 1 / (1 + omega)) ||x||^2. If an entry is infinite or NaN, its whole bucket
    becomes so. A norm beyond the range of float32 is sent as the largest float32, which is still larger than every
    float32 entry; finite float64 entries beyond it become that number.

    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017,
    arXiv 1610.02132, Section 3.1; scaled as in Koloskova et al., "Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication", ICML 2019, arXiv 1902.00340, Section 3.5.

    Args:
        bits: the number of bits per entry; 8, 4 or 2.
        bucket_size: the number of entries per norm, a multiple of 8; the last bucket may be shorter.
        seed: the seed of the rounding, >= 0; the rounding is a function of (seed, t) on each kind of device. Chunks of
            a long vector, of about 131,072 entries on a CPU and 16.8 million on a GPU, share random numbers, rotated by
            a random distance.
        unbiased: whether not to divide by 1 + omega, so that E C(x) = x.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> qsgd = QSGD(bits=4)
        >>> message = qsgd.message_like(x)  # 508 bytes
        >>> qsgd.compress(x, message, t=7)
        >>> qsgd.add_decompressed(message, y)
    """

    def __init__(self, bits: int = 8, bucket_size: int = 512, seed: int = 0, *, unbiased: bool = False) -> None:
        self.bits = checked_bits(bits)
        self.bucket_size = self.block_size = checked_multiple_of_8("bucket_size", bucket_size)
        self.seed = checked_seed(seed)
        self.unbiased = unbiased
        self.num_levels = 2 ** (bits - 1) - 1
        omega = min(bucket_size / self.num_levels**2, math.sqrt(bucket_size) / self.num_levels)
        self.step = 1 / self.num_levels / (1 if unbiased else 1 + omega)  # the value of level 1, in units of the norm

    def _levels(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        scales[..., 0] = saturated(_norms(x, self.bucket_size, 2), LARGEST)
        word, stride = random_words(self.seed, t, 2)
        generator, dither = torch.Generator(x.device).manual_seed(word), x.new_empty(0)
        for k, (start, stop, buckets) in enumerate(chunks(x, self.bucket_size)):
            if not k:  # the longest chunk; random numbers cost more than all else
                dither = x.new_empty(stop - start, dtype=scales.dtype).uniform_(generator=generator)
            levels = in_blocks(x[..., start:stop], buckets) / scales[..., buckets, :]
            rolled = dither.roll(k * stride % len(dither)) if k else dither
            levels.mul_(self.num_levels).add_(in_blocks(rolled[: stop - start], buckets))  # one dither for all rows
            # Sums may round up to s + 1. NaN becomes level 0: from 0 / 0, and where the norm is not finite either.
            levels.floor_().clamp_(-self.num_levels, self.num_levels).nan_to_num_(nan=0.0)
            yield start, stop, levels

    def __repr__(self) -> str:
        return f"QSGD(bits={self.bits}, bucket_size={self.bucket_size}, seed={self.seed}, unbiased={self.unbiased})"


class Absmax(_LevelCode):
    """C(x) = M / s round(s x / M) in each block, with its largest magnitude M: the nearest of 2 s + 1 even levels.

    With s = 2^(bits-1) - 1 an entry takes `bits` bits, and a block one float32 in addition. An entry errs by M / (2 s)
    at most, and by its own magnitude at most. Nothing is random, and the mean of C(x) is not the mean of x: take it
    with error feedback, as outer methods have it. It takes less time than `QSGD`, which draws random numbers. If an
    entry is infinite or NaN, so is its whole block. Finite entries beyond the range of float32 count as the
    largest float32.

    Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861,
    Section 2.1, the linear map.

    Args:
        bits: the number of bits per entry; 8, 4 or 2.
        block_size: the number of entries per scale, a multiple of 8; the last block may be shorter.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> absmax = Absmax(bits=4)
        >>> message = absmax.message_like(x)  # 564 bytes
        >>> absmax.compress(x, message)
        >>> absmax.add_decompressed(message, y)
    """

    longest = 1 << 19  # a run of `CodedAverage` is one chunk: calls take more time than the cache saves

    def __init__(self, bits: int = 8, block_size: int = 64) -> None:
        self.bits = checked_bits(bits)
        self.block_size = checked_multiple_of_8("block_size", block_size)
        self.num_levels = 2 ** (bits - 1) - 1
        self.step = 1 / self.num_levels

    def _levels(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        for start, stop, units in self._in_units_of_largest(x, scales):
            # Where the scale is not finite, all levels give NaN or infinity.
            yield start, stop, units.mul_(self.num_levels).round_()

    def __repr__(self) -> str:
        return f"Absmax(bits={self.bits}, block_size={self.block_size})"


class BlockFloat(_BlockCode):
    """C(x) = the nearest floating-point number of 8 or 4 bits, in each block in units of its largest magnitude M.

    With 8 bits the format is E4M3: 4 bits of exponent and 3 of fraction, so entries keep about 4 binary digits down to
    M / 2^15, where `Absmax` has even levels of M / 127. With 4 bits it is E2M1, with the numbers 0, 1/2, 1, 3/2, 2, 3,
    4 and 6, in units of M / 6. A block takes a float32 in addition. Nothing is random, and the mean of C(x) is not the
    mean of x: take it with error feedback. If an entry is infinite or NaN, so is its whole block. Finite entries beyond
    the range of float32 count as the largest float32.

    The formats of Rouhani et al., "Microscaling Data Formats for Deep Learning", 2023, arXiv 2310.10537, with a float32
    as the scale of a block.

    Args:
        bits: the number of bits per entry; 8 (E4M3) or 4 (E2M1).
        block_size: the number of entries per scale, a multiple of 8; the last block may be shorter.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> code = BlockFloat(bits=4)
        >>> message = code.message_like(x)  # 628 bytes
        >>> code.compress(x, message)
        >>> code.add_decompressed(message, y)
    """

    def __init__(self, bits: int = 8, block_size: int = 32) -> None:
        if bits not in (4, 8) or not isinstance(bits, int):
            raise ValueError(f"got bits={bits!r}, expected 8 (E4M3) or 4 (E2M1); for 2 bits use TwoBit or Absmax(2)")
        self.bits = bits
        self.block_size = checked_multiple_of_8("block_size", block_size)
        self.largest = 448.0 if bits == 8 else 6.0
        self.step = 1 / self.largest

    def _codes(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        for start, stop, shares in self._in_units_of_largest(x, scales):
            units = shares.mul_(self.largest).float()
            if self.bits == 8:
                codes = units.to(torch.float8_e4m3fn).view(torch.uint8)
            else:
                places, is_negative = units.abs(), is_below(units, 0).view(torch.int8)
                # The numbers are the values of a convex function at 0 to 7, so the place of a number is concave.
                places = torch.minimum(torch.minimum(2 * places, places + 2), places / 2 + 4)
                codes = places.round_().to(torch.int8).add_(is_negative, alpha=8).view(torch.uint8)
            yield start, stop, codes.flatten(-2)

    def _write_values(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        numbers = _numbers(self.bits, out.dtype, out.device)
        torch.mul(numbers.index_select(0, codes.flatten().int()).view(codes.shape), scales, out=out)

    def __repr__(self) -> str:
        return f"BlockFloat(bits={self.bits}, block_size={self.block_size})"


@lru_cache(maxsize=16)
def _numbers(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number of each code of `BlockFloat`."""
    if bits == 8:
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(dtype).to(device)
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=dtype, device=device)
    return torch.cat([positive, -positive])


class TwoBit(_BlockCode):
    """C(x) = sign(x) times one of two magnitudes: two bits per entry, and two float32 per block. sign(0) = +1.

    In each block the magnitudes above the mean magnitude become their own mean, and the others theirs; entries keep
    their signs. A mean is nearest in the least squares: two groups g of n_g entries with the mean magnitude a_g lose
    ||x - C(x)||^2 = ||x||^2 - sum_g n_g a_g^2, which is never more than `SignNorm` loses. If an entry is infinite or
    NaN, its whole block becomes so. Finite entries beyond the range of float32 count as the largest float32.

    Made for values of similar magnitudes, such as those that `ChunkTopK` keeps. The sign and one mean on either side of
    a threshold are from Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, for magnitudes.

    Args:
        block_size: the number of entries per pair of magnitudes, a multiple of 8; the last block may be shorter.

    Raises:
        ValueError: block_size is not a positive multiple of 8.

    Example:
        >>> x, y = torch.randn(1000), torch.zeros(1000)
        >>> code = TwoBit()
        >>> message = code.message_like(x)  # 282 bytes
        >>> code.compress(x, message)
        >>> code.add_decompressed(message, y)
    """

    bits = 2
    num_scales = 2

    def __init__(self, block_size: int = 256) -> None:
        self.block_size = checked_multiple_of_8("block_size", block_size)

    def _codes(self, x: Tensor, scales: Tensor, t: int) -> Iterator[tuple[int, int, Tensor]]:
        for start, stop, blocks in chunks(x, self._size(x.shape[-1]), cuts_blocks=False):
            rows = in_blocks(saturated(x[..., start:stop].double(), LARGEST).abs_(), blocks)
            is_high = rows > rows.mean(dim=-1, keepdim=True)
            num_high, high = is_high.sum(dim=-1), (rows * is_high).sum(dim=-1)
            # NaN and infinity are above no mean that they are part of: they show in the mean of the others.
            scales[..., blocks, 0] = (rows.sum(dim=-1) - high).div_(rows.shape[-1] - num_high).float()
            scales[..., blocks, 1] = high.div_(num_high.clamp_(min=1)).float()
            is_negative = x[..., start:stop] < 0
            yield start, stop, is_high.flatten(-2).view(torch.uint8).mul(2).add_(is_negative.view(torch.uint8))

    def _write_values(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        magnitudes = torch.where(codes >= 2, scales[..., 1:], scales[..., :1])
        torch.mul(magnitudes, 1 - 2 * (codes & 1).to(out.dtype), out=out)

    def __repr__(self) -> str:
        return f"TwoBit({self.block_size})"


def checked_bits(bits: int) -> int:
    """The number of bits of a code; raises ValueError if it is not 2, 4 or 8."""
    if not isinstance(bits, int) or bits not in (2, 4, 8):
        raise ValueError(f"got bits={bits}, expected 2, 4 or 8, which fill bytes; for 1 bit use SignNorm")
    return bits


def checked_multiple_of_8(name: str, size: int) -> int:
    """The size; raises ValueError if it is not a positive multiple of 8."""
    if not isinstance(size, int) or size < 8 or size % 8:
        raise ValueError(f"got {name}={size}, expected a positive multiple of 8, so that blocks begin with a byte")
    return size


def _norms(x: Tensor, block_size: int, p: int) -> Tensor:
    """||x||_p of every block, [..., blocks] in `wide_dtype`.

    In float64 squares of float32 numbers do not over- or underflow.

    float64 entries beyond the range of float32, which no scale can represent, count as the largest float32.
    """
    dtype = wide_dtype(x.device)
    sums = torch.zeros(*x.shape[:-1], -(-x.shape[-1] // block_size), dtype=dtype, device=x.device)
    for start, stop, blocks in chunks(x, block_size):
        rows = in_blocks(_in_range_of_float32(x[..., start:stop]), blocks)
        if p == 1:
            sums[..., blocks] += _sums(rows.abs(), dtype)
        else:
            sums[..., blocks] += torch.linalg.vector_norm(rows, p, dim=-1, dtype=dtype).pow_(p)
    return sums.pow_(1 / p)


def _in_range_of_float32(x: Tensor) -> Tensor:
    """x, float32 or float64, with finite numbers beyond the range of float32 replaced by its largest number."""
    return x if x.dtype == torch.float32 else saturated(x, LARGEST)


def _sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of positive numbers over the last dimension, with the range of `dtype`."""
    if x.device.type != "cpu":  # it would wait for the answer
        return x.sum(-1, dtype=dtype)
    sums = x.sum(-1)
    is_finite = sums.isfinite()
    return sums if bool(is_finite.all()) else torch.where(is_finite, sums.to(dtype), x.sum(-1, dtype=dtype))
