"""What the methods of compressed gossip make of their options: functions of (options, seed)."""

from __future__ import annotations

from ..algorithms.choco import Choco
from ..algorithms.deep_squeeze import DeepSqueeze
from ..algorithms.moniqua import Moniqua
from ..algorithms.power_gossip import PowerGossip
from ..algorithms.sparta import Sparta
from .compressors import (
    CHOCO_STEP_SIZES,
    DEEP_SQUEEZE_STEP_SIZES,
    MONIQUA_STEP_SIZES,
    compressor_step_size,
    make_compressor,
    step_size_of,
)
from .simulated_options import MethodOptions


def choco(options: MethodOptions, seed: int) -> Choco:
    """CHOCO-SGD."""
    step_size = compressor_step_size(options, "choco", CHOCO_STEP_SIZES)
    return Choco(make_compressor(options, seed), step_size=step_size)


def deep_squeeze(options: MethodOptions, seed: int) -> DeepSqueeze:
    """DeepSqueeze."""
    step_size = compressor_step_size(options, "deepsqueeze", DEEP_SQUEEZE_STEP_SIZES)
    return DeepSqueeze(make_compressor(options, seed), step_size=step_size)


def moniqua(options: MethodOptions, seed: int) -> Moniqua:
    """Moniqua."""
    step_size = step_size_of(options, "moniqua", MONIQUA_STEP_SIZES, "moniqua", "compression_bits")
    return Moniqua(options.theta, bits=options.compression_bits, step_size=step_size, seed=seed)


def power_gossip(options: MethodOptions, seed: int) -> PowerGossip:
    """PowerGossip."""
    return PowerGossip(
        rank=options.power_rank,
        num_iterations=options.power_iterations,
        warm_start=options.warm_start,
        step_size=options.step_size or None,
        compress_vectors=options.compress_vectors,
        seed=seed,
    )


def sparta(options: MethodOptions, seed: int) -> Sparta:
    """SPARTA."""
    return Sparta(options.compression_ratio, seed=seed)
