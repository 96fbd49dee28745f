"""Lossy and lossless codes of vectors: signs, quantisation, sparsification, low rank."""
