"""TwoBit: two bits per entry, its sign and which of two magnitudes is nearer."""

from __future__ import annotations

import torch
from torch import Tensor

from .bit_packing import pack, packed_size, unpack
from .compressor import Compressor, chunks, saturated, wide
from .quantizer import LARGEST, checked_multiple_of_8


class TwoBit(Compressor):
    """C(x) = sign(x) times one of two magnitudes: two bits per entry, and two float32 per block. sign(0) = +1.

    In each block the magnitudes above the mean magnitude become their own mean, and the others theirs; entries keep
    their signs. A mean is nearest in the least squares: two groups g of n_g entries with the mean magnitude a_g lose
    ||x - C(x)||^2 = ||x||^2 - sum_g n_g a_g^2, which is never more than `SignNorm` loses. If an entry is infinite or
    NaN, its whole block becomes so. Finite entries beyond the range of float32 count as the largest float32.

    Made for values of similar magnitudes, such as those that `ChunkTopK` keeps. The sign and one mean on either side of
    a threshold are those of Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
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

    def __init__(self, block_size: int = 256) -> None:
        self.block_size = checked_multiple_of_8("block_size", block_size)

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        """See `Compressor`."""
        return 8 * -(-d // self.block_size) + packed_size(d, 2)

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        magnitudes, packed = self._parts(message, x.numel())
        for start, stop, blocks in chunks(x, self.block_size):
            rows = saturated(x[start:stop].double(), LARGEST).abs_().view(blocks.stop - blocks.start, -1)
            is_high = rows > rows.mean(dim=1, keepdim=True)
            num_high, high = is_high.sum(dim=1), (rows * is_high).sum(dim=1)
            # NaN and infinity are above no mean that they are part of: they show in that of the others.
            magnitudes[blocks, 0] = (rows.sum(dim=1) - high).div_(rows.shape[1] - num_high).float()
            magnitudes[blocks, 1] = high.div_(num_high.clamp_(min=1)).float()
            codes = is_high.flatten().view(torch.uint8).mul(2).add_((x[start:stop] < 0).view(torch.uint8))
            pack(codes, 2, packed[packed_size(start, 2) : packed_size(stop, 2)])

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        magnitudes, packed = self._parts(message, target.numel())
        magnitudes = magnitudes.to(wide(target)) * alpha
        for start, stop, blocks in chunks(target, self.block_size):
            codes = unpack(packed[packed_size(start, 2) : packed_size(stop, 2)], 2, stop - start)
            low, high = (magnitudes[blocks, k, None] for k in range(2))
            rows = codes.view(blocks.stop - blocks.start, -1)
            values = torch.where(rows >= 2, high, low).flatten()
            target[start:stop] += values.mul_(1 - 2 * (codes & 1).to(values.dtype))

    def _parts(self, message: Tensor, d: int) -> tuple[Tensor, Tensor]:
        """The magnitudes of the blocks, float32 [blocks, 2], and the packed codes."""
        num_bytes = 8 * -(-d // self.block_size)
        return message[:num_bytes].view(torch.float32).view(-1, 2), message[num_bytes:]

    def __repr__(self) -> str:
        return f"TwoBit({self.block_size})"
