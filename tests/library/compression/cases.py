"""What every compressor promises: bytes, what its messages mean as dense numpy has it, and the error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gossip_modules.compression import ChunkTopK, TwoBit
from gossip_modules.compression.compressor import Cast, Compressor, Identity
from gossip_modules.compression.quantizer import QSGD, Absmax, BlockFloat, SignNorm
from gossip_modules.compression.sparsifier import RandomK, TopK

Array = NDArray[Any]


def kept(d: int, ratio: float) -> int:
    """k of TopK and RandomK."""
    return 0 if d == 0 else max(1, int(d * ratio))


def top_k_size(d: int, itemsize: int, ratio: float) -> int:
    """Values and indices."""
    k = kept(d, ratio)
    return k * itemsize + index_size(d, k)


def index_size(d: int, k: int) -> int:
    """Low bits of the indices, and a bit per index and per step of the rest; the best number of low bits."""
    sizes = []
    for b in (1, 2, 4, 8, 16):
        steps = math.floor((d - 1) / 2**b) if d else 0
        sizes.append(math.ceil(k * b / 8) + (math.ceil((k + steps) / 8) if steps else 0))
    return min(sizes)


def blocks_of(x: Array, size: int | None) -> list[Array]:
    """x in blocks, the last one short."""
    return [x[i : i + (size or x.size)] for i in range(0, x.size, size or x.size)] if x.size else []


def cast_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """numpy's float16, or the upper half of a float32 rounded to even."""
    # float64 goes through float32 on its way.
    if compressor.dtype == torch.float16:
        return x.clip(-65504, 65504).astype(np.float32).astype(np.float16).astype(x.dtype)
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(x.dtype)


def top_k_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """All but the k largest are zero."""
    result = np.zeros_like(x)
    largest = np.argsort(-abs(x))[: kept(x.size, compressor.ratio)]
    result[largest] = x[largest]
    return result


def random_k_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """The positions follow from the first 16 bytes, and are different from each other."""
    result, k = np.zeros_like(x), kept(x.size, compressor.ratio)
    if k:
        start, stride = np.frombuffer(message[:16], np.int64)
        positions = [int(start + i * stride) % x.size for i in range(k)]
        assert len(set(positions)) == k
        result[positions] = x[positions] * (x.size / k if compressor.unbiased else 1)
    return result


def sign_norm_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """Mean magnitude times sign, block by block."""
    blocks = [np.mean(abs(b), dtype=np.float64) * np.where(b < 0, -1, 1) for b in blocks_of(x, compressor.block_size)]
    return np.concatenate([np.empty(0), *blocks]).astype(x.dtype)


def halves(block: Array) -> Array:
    """For each entry the mean magnitude of its group: those above the mean of all, and the others."""
    magnitudes = abs(block.astype(np.float64))
    is_high = magnitudes > magnitudes.mean()
    low, high = magnitudes[~is_high].mean(), magnitudes[is_high].mean() if is_high.any() else 0.0
    return np.where(is_high, high, low)


def two_bit_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """Sign times the mean of its half, block by block."""
    blocks = [np.where(b < 0, -1, 1) * halves(b) for b in blocks_of(x, compressor.block_size)]
    return np.concatenate([np.empty(0), *blocks]).astype(x.dtype)


def chunk_top_k_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """The k largest of each chunk, which are compressed side by side."""
    result, chunk_size = np.zeros_like(x), compressor.chunk_size
    kept_indices: list[int] = []
    for start in range(0, x.size, chunk_size):
        chunk = x[start : start + chunk_size]
        k = compressor.k if chunk.size == chunk_size else max(1, compressor.k * chunk.size // chunk_size)
        kept_indices += sorted(start + np.argsort(-abs(chunk))[:k])
    values = x[kept_indices]
    result[kept_indices] = values if compressor.values is None else two_bit_oracle(values, b"", compressor.values)
    return result


def qsgd_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """Levels are read bit by bit from the message; each is one of the two beside s x / ||x||."""
    size, bits = compressor.bucket_size, compressor.bits
    s = 2 ** (bits - 1) - 1
    blocks = blocks_of(x, size)
    string = np.unpackbits(np.frombuffer(message[4 * len(blocks) :], np.uint8), bitorder="little")
    codes = string[: x.size * bits].reshape(-1, bits).astype(int) @ (1 << np.arange(bits))
    levels = np.where(codes >= 1 << bits - 1, codes - (1 << bits), codes)
    omega = min(size / s**2, math.sqrt(size) / s)
    result = []
    for b, level in zip(blocks, blocks_of(levels, size), strict=True):
        norm = float(np.linalg.norm(b.astype(np.float64)))
        assert (abs(level - s * b / (norm or 1)) < 1 + 1e-4).all()
        assert (abs(level) <= s).all()
        result.append(level * norm / s / (1 if compressor.unbiased else 1 + omega))
    return np.concatenate([np.empty(0), *result]).astype(x.dtype)


def absmax_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """The nearest of evenly spaced levels up to the largest magnitude, block by block."""
    s, result = 2 ** (compressor.bits - 1) - 1, []
    for b in blocks_of(x, compressor.block_size):
        largest = np.abs(b).max().astype(np.float32)
        levels = np.rint(b * (np.float32(s) / (largest or np.float32(1))).astype(x.dtype))
        result.append(levels.astype(np.float64) * float(largest) / s)
    return np.concatenate([np.empty(0), *result]).astype(x.dtype)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [0.0, *(m / 512 for m in range(1, 8)), *((1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8))][:-1]
"""The positive numbers of the two formats; the last place of E4M3 is NaN."""


def block_float_oracle(x: Array, message: bytes, compressor: Any) -> Array:
    """The nearest number of the format, in units of the largest magnitude of the block."""
    numbers, result = np.array(E4M3 if compressor.bits == 8 else E2M1), []
    for b in blocks_of(x, compressor.block_size):
        largest = float(np.abs(b).max().astype(np.float32)) or 1.0
        units = np.abs(b).astype(np.float64) / largest * numbers[-1]
        nearest = numbers[np.abs(units[:, None] - numbers).argmin(1)]
        result.append(np.sign(b) * nearest * largest / numbers[-1])
    return np.concatenate([np.empty(0), *result]).astype(x.dtype)


class Case(NamedTuple):
    """A compressor and what it promises: bytes for (d, itemsize), C(x), and E ||x - C(x)||^2 <= error(x)."""

    make: Callable[[], Compressor]
    size: Callable[[int, int], int]
    oracle: Callable[[Array, bytes, Any], Array]
    error: Callable[[Array], float]
    is_random: bool = False
    is_unbiased: bool = False


def energy(x: Array) -> float:
    """||x||^2."""
    return float((x.astype(np.float64) ** 2).sum())


def sign_error(x: Array, block_size: int | None) -> float:
    """sum over blocks of ||x||_2^2 - ||x||_1^2 / m."""
    return sum(energy(b) - float(abs(b.astype(np.float64)).sum()) ** 2 / b.size for b in blocks_of(x, block_size))


def cast_case(dtype: torch.dtype, unit_roundoff: float) -> Case:
    """A cast loses a share of each entry."""
    return Case(lambda: Cast(dtype), lambda d, i: 2 * d, cast_oracle, lambda x: unit_roundoff**2 * energy(x))


def top_k_case(ratio: float) -> Case:
    """delta = k / d."""
    return Case(
        lambda: TopK(ratio),
        lambda d, i: top_k_size(d, i, ratio),
        top_k_oracle,
        lambda x: (1 - kept(x.size, ratio) / x.size) * energy(x),
    )


def random_k_case(ratio: float, unbiased: bool) -> Case:
    """delta = k / d; unbiased, omega = d / k - 1."""
    return Case(
        lambda: RandomK(ratio, seed=3, unbiased=unbiased),
        lambda d, i: d and 16 + kept(d, ratio) * i,
        random_k_oracle,
        lambda x: (x.size / kept(x.size, ratio) - 1 if unbiased else 1 - kept(x.size, ratio) / x.size) * energy(x),
        is_random=True,
        is_unbiased=unbiased,
    )


def sign_norm_case(block_size: int | None) -> Case:
    """delta = ||x||_1^2 / (m ||x||_2^2) in each block."""
    return Case(
        lambda: SignNorm(block_size),
        lambda d, i: 4 * math.ceil(d / (block_size or max(d, 1))) + math.ceil(d / 8),
        sign_norm_oracle,
        lambda x: sign_error(x, block_size),
    )


def two_bit_case(block_size: int) -> Case:
    """||x||^2 - ||C(x)||^2 in each block, since each mean is the nearest number in the least squares."""
    return Case(
        lambda: TwoBit(block_size),
        lambda d, i: 8 * math.ceil(d / block_size) + math.ceil(d / 4),
        two_bit_oracle,
        lambda x: energy(x) - sum(energy(halves(b)) for b in blocks_of(x, block_size)),
    )


def chunk_top_k_case(k: int, chunk_size: int, values_block: int | None) -> Case:
    """delta = k / chunk_size in each chunk; two bits lose what they lose of the kept values."""

    def num_kept(d: int) -> int:
        return d // chunk_size * k + (max(1, k * (d % chunk_size) // chunk_size) if d % chunk_size else 0)

    def size(d: int, itemsize: int) -> int:
        n = num_kept(d)
        num_bytes = n * itemsize if values_block is None else 8 * math.ceil(n / values_block) + math.ceil(n / 4)
        return math.ceil(num_bytes / 2) * 2 + index_size(d, n) if d else 0

    def error(x: Array) -> float:
        code = ChunkTopK(k, chunk_size)
        values = chunk_top_k_oracle(x, b"", code)
        lost = sum(energy(c) * (1 - num_kept(c.size) / c.size) for c in blocks_of(x, chunk_size))
        return lost + (0.0 if values_block is None else energy(values))  # where all kept values are alike but one

    return Case(
        lambda: ChunkTopK(k, chunk_size, values=None if values_block is None else TwoBit(values_block)),
        size,
        chunk_top_k_oracle,
        error,
    )


def qsgd_case(bits: int, bucket_size: int, unbiased: bool) -> Case:
    """omega = min(B / s^2, sqrt(B) / s); biased, delta = 1 / (1 + omega)."""
    s = 2 ** (bits - 1) - 1
    omega = min(bucket_size / s**2, math.sqrt(bucket_size) / s)
    return Case(
        lambda: QSGD(bits, bucket_size, seed=3, unbiased=unbiased),
        lambda d, i: 4 * math.ceil(d / bucket_size) + math.ceil(d * bits / 8),
        qsgd_oracle,
        lambda x: (omega if unbiased else 1 - 1 / (1 + omega)) * energy(x),
        is_random=True,
        is_unbiased=unbiased,
    )


def absmax_case(bits: int, block_size: int) -> Case:
    """Half a level in each entry, and no more than the entry."""
    s = 2 ** (bits - 1) - 1
    return Case(
        lambda: Absmax(bits, block_size),
        lambda d, i: 4 * math.ceil(d / block_size) + math.ceil(d * bits / 8),
        absmax_oracle,
        lambda x: sum(energy(abs(b).clip(max=1.001 * abs(b).max() / 2 / s)) for b in blocks_of(x, block_size)),
    )


def block_float_case(bits: int, block_size: int) -> Case:
    """Half the distance to the next number: a share of the entry, and of the smallest number where that is more."""
    share, least = (2**-4, 2**-10 / 448) if bits == 8 else (1 / 4, 1 / 4 / 6)

    def error(x: Array) -> float:
        blocks = blocks_of(x, block_size)
        return sum(energy(np.maximum(share * abs(b), least * abs(b).max()).clip(max=abs(b))) for b in blocks) * 1.001

    size = lambda d, i: 4 * math.ceil(d / block_size) + math.ceil(d * bits / 8)  # noqa: E731
    return Case(lambda: BlockFloat(bits, block_size), size, block_float_oracle, error)


CASES: dict[str, Case] = {
    "bfloat16": cast_case(torch.bfloat16, 2**-8),
    "float16": cast_case(torch.float16, 2**-11),
    "exact": Case(Identity, lambda d, i: d * i, lambda x, message, compressor: x, lambda x: 0.0),
    "top 1 %": top_k_case(0.01),
    "top 10 %": top_k_case(0.1),
    "top 100 %": top_k_case(1.0),
    "random 1 %": random_k_case(0.01, False),
    "random 25 %, unbiased": random_k_case(0.25, True),
    "sign": sign_norm_case(2048),
    "sign, blocks of 8": sign_norm_case(8),
    "sign, large blocks": sign_norm_case(1 << 18),
    "sign, one block": sign_norm_case(None),
    "2 bits, means": two_bit_case(256),
    "2 bits, means of large blocks": two_bit_case(1 << 18),
    "top of chunks": chunk_top_k_case(64, 4096, None),
    "top of small chunks, 2 bits": chunk_top_k_case(5, 50, 64),
    "8 bits": qsgd_case(8, 512, False),
    "4 bits": qsgd_case(4, 64, False),
    "2 bits": qsgd_case(2, 512, False),
    "8 bits, unbiased": qsgd_case(8, 1 << 18, True),
    "4 bits, unbiased": qsgd_case(4, 512, True),
    "2 bits, unbiased": qsgd_case(2, 8, True),
    "8 bits, largest magnitude": absmax_case(8, 64),
    "4 bits, largest magnitude": absmax_case(4, 32),
    "2 bits, largest magnitude of large blocks": absmax_case(2, 1 << 18),
    "8 bits, floating point": block_float_case(8, 32),
    "4 bits, floating point": block_float_case(4, 64),
}
