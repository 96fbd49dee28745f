"""Outer methods of the simulator: functions of (options, seed)."""

from __future__ import annotations

from typing import Any

from ..algorithms.diloco import DiLoCo
from ..algorithms.eager_diloco import EagerDiLoCo
from ..algorithms.gasloc import GASLoC
from ..algorithms.noloco import NoLoCo
from ..algorithms.outer_method import OuterMethod
from ..algorithms.slowmo import SlowMo
from ..algorithms.sparse_loco import SparseLoCo
from ..algorithms.streaming_diloco import StreamingDiLoCo
from ..compression.chunk_top_k import ChunkTopK
from ..compression.quantizer import QSGD
from ..compression.two_bit import TwoBit
from .simulated_options import MethodOptions


def diloco(options: MethodOptions, seed: int) -> OuterMethod:
    """DiLoCo."""
    return DiLoCo(options.sync_period, **_code(options, seed), **_settings(options))


def streaming_diloco(options: MethodOptions, seed: int) -> OuterMethod:
    """Streaming DiLoCo."""
    cuts: dict[str, Any] = {"fragments": options.outer_fragments, "delay": options.outer_delay}
    if options.outer_own_weight >= 0:
        cuts["own_weight"] = options.outer_own_weight
    return StreamingDiLoCo(options.sync_period, **cuts, **_code(options, seed), **_settings(options))


def eager_diloco(options: MethodOptions, seed: int) -> OuterMethod:
    """DiLoCo with eager updates."""
    return EagerDiLoCo(options.sync_period, **_code(options, seed), **_settings(options))


def slowmo(options: MethodOptions, seed: int) -> OuterMethod:
    """SlowMo over local SGD or gossip, with the learning rate of whatever optimizer steps the model."""
    rounds: dict[str, Any] = {"gossip_every": options.outer_gossip_every}
    return SlowMo(options.sync_period, inner_lr="optimizer", **rounds, **_settings(options))


def noloco(options: MethodOptions, seed: int) -> OuterMethod:
    """NoLoCo in random pairs."""
    return NoLoCo(options.sync_period, pull=options.outer_pull or None, seed=seed, **_settings(options))


def gasloc(options: MethodOptions, seed: int) -> OuterMethod:
    """GASLoC."""
    step_size: dict[str, Any] = {"step_size": options.step_size} if options.step_size else {}
    return GASLoC(options.sync_period, **step_size, **_settings(options))


def sparse_loco(options: MethodOptions, seed: int) -> OuterMethod:
    """SparseLoCo, with a share of each chunk of 4096 entries in two bits."""
    code = ChunkTopK(max(1, round(4096 * options.compression_ratio)), 4096, values=TwoBit())
    return SparseLoCo(options.sync_period, decay=options.error_decay, compressor=code, **_rate_and_place(options))


def _code(options: MethodOptions, seed: int) -> dict[str, Any]:
    """Codes of so many bits, which send most of a drift at once, as momentum wants it: see `DiLoCo`."""
    bits, bucket_sizes = options.outer_bits, {4: 32, 8: 512}
    if not bits:
        return {}
    if bits not in bucket_sizes:
        raise ValueError(f"got outer_bits={bits}, expected 4 or 8, or 0 for drifts as they are")
    return {"compressor": QSGD(bits, bucket_sizes[bits], seed, unbiased=True)}


def _settings(options: MethodOptions) -> dict[str, Any]:
    """Those of all that were set."""
    momentum = {"momentum": options.outer_momentum} if options.outer_momentum >= 0 else {}
    return {**_rate_and_place(options), **momentum}


def _rate_and_place(options: MethodOptions) -> dict[str, Any]:
    rate: dict[str, Any] = {"lr": options.outer_lr} if options.outer_lr else {}
    return rate if options.anchor_device == "model" else {**rate, "anchor_device": options.anchor_device}
