"""Compressors of flat vectors: signs, quantization, sparsification, and orthonormal bases for low rank."""

from .compressor import Cast, Compressor, Identity
from .quantizer import QSGD, Absmax, BlockFloat, SignNorm, TwoBit
from .sparsifier import ChunkTopK, RandomK, TopK

__all__ = [
    "QSGD",
    "Absmax",
    "BlockFloat",
    "Cast",
    "ChunkTopK",
    "Compressor",
    "Identity",
    "RandomK",
    "SignNorm",
    "TopK",
    "TwoBit",
]
