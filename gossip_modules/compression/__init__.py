"""Compressors of flat vectors: signs, quantization, sparsification, and orthonormal bases for low rank."""
