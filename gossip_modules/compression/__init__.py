"""Compressors of flat vectors: signs, quantization, sparsification, and orthonormal bases for low rank."""

from .chunk_top_k import ChunkTopK
from .compressor import Cast, Compressor
from .quantizer import QSGD, SignNorm
from .sparsifier import RandomK, TopK
from .two_bit import TwoBit

__all__ = [
    "QSGD",
    "Cast",
    "ChunkTopK",
    "Compressor",
    "RandomK",
    "SignNorm",
    "TopK",
    "TwoBit",
]
