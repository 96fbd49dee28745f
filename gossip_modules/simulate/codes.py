"""Lossy codes of the models of all n ranks at once: what a `Compressor` makes of every row, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..compression.compressor import Cast, Compressor
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


def coded_message(compressor: Compressor, num_parameters: int, links: LinkModel) -> MessageCost:
    """What it costs to send a model of so many float32 parameters in this code."""
    encode, decode = CODE_PASSES.get(type(compressor), UNKNOWN_PASSES)
    one_pass = links.memory_seconds(4 * num_parameters)
    return MessageCost(
        compressor.num_bytes(num_parameters, torch.float32),
        encode_seconds=(encode + decode + _MEMORY_PASSES) * one_pass,  # a rank hears itself as well
        decode_seconds=decode * one_pass,
    )
