"""Packed codes and indices, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossip_modules.compression import bit_packing
from gossip_modules.compression.bit_packing import indices_size, pack, pack_indices, packed_size, unpack, unpack_indices


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_fill_bytes_from_the_lowest_bit(bits: int, n: int) -> None:
    codes = np.random.default_rng(n).integers(0, 1 << bits, n, dtype=np.uint8)
    string = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little").flatten()
    packed = torch.full((packed_size(n, bits),), 255, dtype=torch.uint8)
    pack(torch.from_numpy(codes), bits, packed)
    assert packed.numpy().tolist() == np.packbits(string, bitorder="little").tolist()
    assert unpack(packed, bits, n).numpy().tolist() == codes.tolist()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_are_gathered_by_one_product(bits: int) -> None:
    """As on other devices than a CPU, where numpy packs single bits."""
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << bits, 800, dtype=np.uint8))
    packed = torch.empty(packed_size(800, bits), dtype=torch.uint8)
    pack(codes, bits, packed)
    lanes = bit_packing._gathered(codes.clone().view(bit_packing._LANES[bits]), bits)
    assert torch.equal(lanes.to(torch.uint8), packed)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_signed_codes_are_twos_complement(bits: int) -> None:
    codes = torch.arange(-(1 << bits - 1), 1 << bits - 1, dtype=torch.int8)
    packed = torch.empty(packed_size(codes.numel(), bits), dtype=torch.uint8)
    pack(codes, bits, packed)
    assert unpack(packed, bits, codes.numel(), signed=True).tolist() == codes.tolist()


@pytest.mark.parametrize(
    ("k", "d"),
    [
        *[(1, 1), (1, 2), (2, 2), (1, 65_536), (1, 65_537), (1, 10**7), (7, 10**9), (10, 1000), (500, 1000)],
        *[(1000, 1000), (700, 70_000), (70, 70_000), (20, 200_000), (30_000, 200_000)],
    ],
)
@pytest.mark.parametrize("where", ["anywhere", "first", "last"])
def test_indices_return(k: int, d: int, where: str) -> None:
    if where == "anywhere":
        indices = np.unique(np.random.default_rng(k).integers(0, d, 4 * k + 8))
        indices = np.sort(np.random.default_rng(d).permutation(indices)[:k])
    else:
        indices = np.arange(k) + (d - k if where == "last" else 0)
    packed = torch.full((indices_size(indices.size, d),), 255, dtype=torch.uint8)
    pack_indices(torch.from_numpy(indices), d, packed)
    assert unpack_indices(packed, indices.size, d).tolist() == indices.tolist()


@pytest.mark.parametrize(("k", "d"), [(110_000, 11_000_000), (1_100_000, 11_000_000), (11_000, 11_000_000), (9, 900)])
def test_indices_are_near_the_entropy(k: int, d: int) -> None:
    """log2 of the number of subsets of k out of d is about k (log2(d / k) + 1.44); at most 5 bits each are lost."""
    least = k * (np.log2(d / k) + 1 / np.log(2))
    bits = 8 * indices_size(k, d)
    assert least * 0.98 < bits < least + 5 * k
    assert bits < 16 * k * 1.1


def test_published_bits_per_index() -> None:
    """The figures of the docstring: 8 + 1 + 100 / 256 and 2 + 1 + 10 / 4."""
    assert 8 * indices_size(110_000, 11_000_000) / 110_000 == pytest.approx(8 + 1 + 100 / 256, abs=1e-3)
    assert 8 * indices_size(1_100_000, 11_000_000) / 1_100_000 == pytest.approx(2 + 1 + 10 / 4, abs=1e-3)
