"""Compressors of flat vectors: signs, quantization, sparsification, and orthonormal bases for low rank."""

from .compressor import Cast, Compressor, Identity
from .quantizer import QSGD, SignNorm, TwoBit
from .sparsifier import ChunkTopK, RandomK, TopK

__all__ = [
    "QSGD",
    "Cast",
    "ChunkTopK",
    "Compressor",
    "Identity",
    "RandomK",
    "SignNorm",
    "TopK",
    "TwoBit",
]
