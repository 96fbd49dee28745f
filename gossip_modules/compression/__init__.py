"""Compressors of flat vectors: signs, quantization, sparsification, and orthonormal bases for low rank."""

from .compressor import Cast, Compressor, Identity
from .quantizer import QSGD, Absmax, SignNorm, TwoBit
from .sparsifier import ChunkTopK, RandomK, TopK

__all__ = [
    "QSGD",
    "Absmax",
    "Cast",
    "ChunkTopK",
    "Compressor",
    "Identity",
    "RandomK",
    "SignNorm",
    "TopK",
    "TwoBit",
]
