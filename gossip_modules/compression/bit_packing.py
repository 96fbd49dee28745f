"""Packing of integers: codes of 1, 2, 4 or 8 bits each, and sorted indices in about the fewest bits possible.

All functions work along the last dimension of a tensor, so several vectors may be packed at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# For each number of bits, the integer type with one byte for each of the 8 / bits codes that share a packed byte.
_LANES = {1: torch.int64, 2: torch.int32, 4: torch.int16, 8: torch.uint8}
# The factor that moves these codes next to each other: code i goes from bit 8 i to bit 8 (8 / bits - 1) + bits i.
_GATHER = {bits: sum(1 << 8 * (8 // bits - 1) - (8 - bits) * i for i in range(8 // bits)) for bits in (1, 2, 4)}
_LOW_BITS = (1, 2, 4, 8, 16)


def packed_size(num_codes: int, bits: int) -> int:
    """The number of bytes of `num_codes` codes of `bits` bits: ceil(num_codes * bits / 8)."""
    return -(-num_codes * bits // 8)


def pack(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Write the low `bits` bits of each code to `packed`, the first code in the lowest bits of a byte.

    Args:
        codes: the codes, int8 or uint8 [..., n], contiguous and the only tensor in their storage; not changed.
        bits: the number of bits of a code; 1, 2, 4 or 8.
        packed: the result, uint8 [..., packed_size(n, bits)]; unused bits of its last byte become zero.
    """
    if bits == 8:
        packed.copy_(codes.view(torch.uint8))
        return
    if bits == 1 and codes.device.type == "cpu":
        packed.copy_(torch.from_numpy(np.packbits(codes.numpy().view(np.uint8) & 1, axis=-1, bitorder="little")))
        return
    per_byte = 8 // bits
    lanes = codes.view(torch.uint8).bitwise_and((1 << bits) - 1)
    if codes.shape[-1] % per_byte:
        lanes = torch.nn.functional.pad(lanes, (0, -codes.shape[-1] % per_byte))
    packed.copy_(_gathered(lanes.view(_LANES[bits]), bits))


def _gathered(lanes: Tensor, bits: int) -> Tensor:
    """Move the codes that are the bytes of an integer next to each other, to its lowest byte.

    The product has all of them in its highest byte, and no two of its terms have a bit in common.

    Args:
        lanes: the integers; changed.
        bits: the number of bits of a code.
    """
    return lanes.mul_(_GATHER[bits]).bitwise_right_shift_(64 // bits - 8)


def unpack(packed: Tensor, bits: int, num_codes: int, *, signed: bool = False) -> Tensor:
    """The codes that `pack` wrote: uint8 [..., num_codes], or int8 in two's complement when `signed`."""
    if bits == 8:
        return packed.view(torch.int8) if signed else packed
    if packed.device.type == "cpu":  # where numpy is faster
        array = packed.numpy()
        if bits == 1 and not signed:
            return torch.from_numpy(np.unpackbits(array, axis=-1, count=num_codes, bitorder="little"))
        codes = _in_high_bits(array.astype(f"u{8 // bits}"), bits).view(np.int8 if signed else np.uint8)
        codes >>= 8 - bits
        return torch.from_numpy(codes)[..., :num_codes]
    lanes = _in_high_bits(packed.to(_LANES[bits]), bits)
    return lanes.view(torch.int8 if signed else torch.uint8).bitwise_right_shift_(8 - bits)[..., :num_codes]


def _in_high_bits(lanes: Any, bits: int) -> Any:
    """Move each code in the lowest byte of an integer to the highest bits of a byte of its own.

    Args:
        lanes: the integers, a tensor or an array; changed.
        bits: the number of bits of a code.
    """
    lanes <<= 8 - bits
    moved = lanes + 0
    for _ in range(8 // bits - 1):
        lanes <<= 8 - bits
        moved |= lanes
    moved &= _in_lanes(((1 << bits) - 1) << (8 - bits), bits, signed=isinstance(lanes, Tensor))
    return moved


def _in_lanes(byte: int, bits: int, *, signed: bool) -> int:
    """The integer of 8 / bits bytes that are all `byte`."""
    return int.from_bytes(bytes([byte] * (8 // bits)), "little", signed=signed)


class _Packing(NamedTuple):
    """The sizes of packed indices: low bits of each index, their bytes, bits of the unary code, and bytes in all."""

    low_bits: int
    num_low_bytes: int
    num_step_bits: int
    num_bytes: int


@lru_cache(maxsize=1024)
def _packing(k: int, d: int) -> _Packing:
    """The packing of k indices below d that takes the fewest bytes; see `pack_indices`."""
    packings = []
    for low_bits in _LOW_BITS:
        num_steps = max(d - 1, 0) >> low_bits
        num_low_bytes, num_step_bits = packed_size(k, low_bits), k + num_steps if num_steps else 0
        packings.append(_Packing(low_bits, num_low_bytes, num_step_bits, num_low_bytes + packed_size(num_step_bits, 1)))
    return min(packings, key=lambda packing: packing.num_bytes)


@lru_cache
def indices_size(num_indices: int, d: int) -> int:
    """The number of bytes of `num_indices` different indices below d; see `pack_indices`."""
    return _packing(num_indices, d).num_bytes


def pack_indices(indices: Tensor, d: int, packed: Tensor) -> None:
    """Write sorted indices below d to `packed`, in low_bits + 1 + d / (k 2^low_bits) bits each for the best low_bits.

    That is 9.4 bits at k = d / 100 and 5.5 at k = d / 10; the minimum, log2(binomial(d, k)) / k, is 8.1 and 4.7.
    The lowest low_bits bits of every index are stored as they are. The bits above them never decrease from one index
    to the next, so they are stored in unary: index i sets bit i + (index >> low_bits) of a bit string, whose zeros
    count the increments. All sizes are functions of k and d. Elias, "Efficient Storage and Retrieval by Content and
    Address of Static Files", J. ACM 1974.

    Args:
        indices: the indices, int64 [..., k], ascending and different from each other; not changed.
        d: an upper bound; every index is less.
        packed: the result, uint8 [..., indices_size(k, d)]; must start at an even byte of its storage.
    """
    k = indices.shape[-1]
    low_bits, num_low_bytes, num_step_bits, _ = _packing(k, d)
    lows = indices.bitwise_and((1 << low_bits) - 1)
    if low_bits == 16:
        packed[..., :num_low_bytes].view(torch.int16).copy_(lows.sub_(1 << 15))
    else:
        pack(lows.to(torch.uint8), low_bits, packed[..., :num_low_bytes])
    if num_step_bits:
        steps = torch.zeros(*indices.shape[:-1], num_step_bits, dtype=torch.uint8, device=indices.device)
        steps.scatter_(-1, (indices >> low_bits) + torch.arange(k, device=indices.device), 1)
        pack(steps, 1, packed[..., num_low_bytes:])


def unpack_indices(packed: Tensor, num_indices: int, d: int) -> Tensor:
    """The indices that `pack_indices` wrote, int64 [..., num_indices]. Does not wait for the device."""
    k, (low_bits, num_low_bytes, num_step_bits, _) = num_indices, _packing(num_indices, d)
    if low_bits == 16:
        indices = packed[..., :num_low_bytes].view(torch.int16).long().add_(1 << 15)
    else:
        indices = unpack(packed[..., :num_low_bytes], low_bits, k).long()
    if num_step_bits:
        is_index = unpack(packed[..., num_low_bytes:], 1, num_step_bits)
        num_indices_through = is_index.cumsum(-1)
        num_steps_through = torch.arange(1, num_step_bits + 1, device=packed.device) - num_indices_through
        # Entries that are no index are written to place k, which is dropped. So all shapes are known without waiting
        # for the device.
        place = num_indices_through.sub_(1).masked_fill_(is_index == 0, k)
        steps = indices.new_empty(*indices.shape[:-1], k + 1).scatter_(-1, place, num_steps_through)
        indices += steps[..., :k] << low_bits
    return indices
