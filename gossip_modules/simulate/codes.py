"""Lossy codes of the models of all n ranks at once: what a `Compressor` makes of every row, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..compression.compressor import Cast, Compressor, chunks, random_words
from ..compression.quantizer import QSGD, SignNorm
from ..compression.sparsifier import RandomK, TopK
from .delays import LinkModel, MessageCost

CODE_PASSES: Mapping[type[Compressor], tuple[float, float]] = {
    Cast: (1.5, 2.5),
    SignNorm: (5.0, 3.5),
    QSGD: (10.5, 3.0),
    TopK: (6.0, 1.0),
    RandomK: (0.3, 0.8),
}
"""Encoding and decoding, in the time of a pass over the model: measured, see benchmarks/compression.py."""
UNKNOWN_PASSES = (10.0, 4.0)
_MEMORY_PASSES = 3.0  # of error feedback or public copies, beside the code itself


def code_rows(compressor: Compressor, x: Tensor, t: int) -> Tensor:
    """C(x_i) for every row of x: what all peers of rank i understand of it.

    All ranks have equal compressors with equal seeds, as in training. Codes of this library are computed for all rows
    at once (tests hold them to `compress` and `add_decompressed`), others row by row.

    Args:
        x: float32 or float64 [n, d]; not changed.
        t: the round, which chooses what is random.

    Returns:
        Like x.

    >>> code_rows(SignNorm(), torch.tensor([[1.0, -3.0], [0.5, 0.5]]), 0)
    tensor([[ 2.0000, -2.0000],
            [ 0.5000,  0.5000]])
    """
    if isinstance(compressor, Cast):
        largest = torch.finfo(compressor.dtype).max
        return x.clamp(-largest, largest).to(compressor.dtype).to(x.dtype)
    if isinstance(compressor, SignNorm):
        return torch.cat([_sign(block) for block in x.split(compressor.block_size or x.shape[1], dim=1)], dim=1)
    if isinstance(compressor, QSGD):
        return _qsgd(compressor, x, t)
    if isinstance(compressor, TopK):
        k = max(1, int(x.shape[1] * compressor.ratio))
        kept = x.abs().topk(k, dim=1, sorted=False).indices
        return torch.zeros_like(x).scatter_(1, kept, x.gather(1, kept))
    if isinstance(compressor, RandomK):  # ranks keep the same positions: those that it keeps of ones
        return x * _decompressed(compressor, torch.ones_like(x[0]), t)
    return torch.stack([_decompressed(compressor, row, t) for row in x])


def coded_message(compressor: Compressor, num_parameters: int, links: LinkModel) -> MessageCost:
    """What it costs to send a model of so many float32 parameters in this code."""
    encode, decode = CODE_PASSES.get(type(compressor), UNKNOWN_PASSES)
    one_pass = links.memory_seconds(4 * num_parameters)
    return MessageCost(
        compressor.num_bytes(num_parameters, torch.float32),
        encode_seconds=(encode + decode + _MEMORY_PASSES) * one_pass,  # a rank hears itself as well
        decode_seconds=decode * one_pass,
    )


def _decompressed(compressor: Compressor, x: Tensor, t: int) -> Tensor:
    message, target = compressor.message_like(x), torch.zeros_like(x)
    compressor.compress(x.contiguous(), message, t=t)
    compressor.add_decompressed(message, target)
    return target


def _sign(block: Tensor) -> Tensor:
    scales = block.abs().mean(dim=1, keepdim=True, dtype=torch.float64).float().to(block.dtype)
    return (block >= 0).to(block.dtype).mul_(2).sub_(1).mul_(scales)


def _qsgd(compressor: QSGD, x: Tensor, t: int) -> Tensor:
    """As `QSGD` does it, with the same dither for all rows: it depends on (seed, t) only."""
    result = torch.empty_like(x)
    # What level 1 means, in norms: the highest level is all that a vector of one entry has.
    step = float(_decompressed(compressor, torch.ones(1, dtype=torch.float64, device="cpu"), t)) / compressor.num_levels
    generator = torch.Generator().manual_seed(random_words(compressor.seed, t, 1)[0])
    for start, stop, buckets in chunks(x[0], compressor.bucket_size):
        rows = x[:, start:stop].reshape(len(x), buckets.stop - buckets.start, -1)
        norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True, dtype=torch.float64).float()
        dither = torch.empty(rows.shape[1:], dtype=x.dtype, device="cpu").uniform_(generator=generator)
        levels = (rows / norms).mul_(compressor.num_levels).add_(dither).floor_()
        levels.clamp_(-compressor.num_levels, compressor.num_levels).nan_to_num_(nan=0.0)
        result[:, start:stop] = levels.mul_(norms.to(x.dtype) * step).flatten(1)
    return result
