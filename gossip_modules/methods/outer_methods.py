"""Outer optimizers as methods: their entries, and what the options say of them."""

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
from ..registry import Method, Paper
from .options import MethodOptions
from .outer_simulation import simulate_outer
from .simulated import static
from .wrapping import undirected_neighbours, wrap_with


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


OPTIONS = frozenset({"sync_period", "outer_lr", "outer_momentum", "anchor_device", "nprocs_per_node"})
"""Those of all outer methods."""
DILOCO_OPTIONS = OPTIONS | {"outer_bits"}
"""Those of DiLoCo and what is made of it."""
OUTER_METHODS: tuple[Method, ...] = (
    Method(
        "diloco",
        "DiLoCo",
        "trains alone, and takes a Nesterov step along the mean drift of all ranks every few steps",
        DiLoCo,
        make=wrap_with("outer", diloco),
        simulate=simulate_outer(diloco),
        paper=Paper(
            "Douillard et al.",
            "DiLoCo: Distributed Low-Communication Training of Language Models",
            "2023",
            "2311.08105",
        ),
        example="GossipDataParallel(model, outer=DiLoCo())",
        options=DILOCO_OPTIONS,
    ),
    Method(
        "streamingdiloco",
        "Streaming DiLoCo",
        "takes the outer steps of parts of the model at different times, under the next steps of training",
        StreamingDiLoCo,
        make=wrap_with("outer", streaming_diloco),
        simulate=simulate_outer(streaming_diloco),
        paper=Paper(
            "Douillard et al.",
            "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
            "2025",
            "2501.18512",
        ),
        example="GossipDataParallel(model, outer=StreamingDiLoCo())",
        options=DILOCO_OPTIONS | {"outer_fragments", "outer_delay", "outer_own_weight"},
    ),
    Method(
        "eagerdiloco",
        "Eager DiLoCo",
        "takes a rank's own part of the mean drift at once, and that of the others one outer step later",
        EagerDiLoCo,
        make=wrap_with("outer", eager_diloco),
        simulate=simulate_outer(eager_diloco),
        paper=Paper(
            "Kale et al.",
            "Eager Updates For Overlapped Communication and Computation in DiLoCo",
            "2025",
            "2502.12996",
        ),
        example="GossipDataParallel(model, outer=EagerDiLoCo())",
        options=DILOCO_OPTIONS,
    ),
    Method(
        "sparseloco",
        "SparseLoCo",
        "sends the few largest entries of the drifts in two bits, and keeps the others for the next outer step",
        SparseLoCo,
        make=wrap_with("outer", sparse_loco),
        simulate=simulate_outer(sparse_loco),
        paper=Paper(
            "Sarfi, Therien, Lidin, Belilovsky",
            "Communication Efficient LLM Pre-training with SparseLoCo",
            "2025",
            "2508.15706",
        ),
        example="GossipDataParallel(model, outer=SparseLoCo())",
        options=OPTIONS - {"outer_momentum"} | {"compression_ratio", "error_decay"},
    ),
    Method(
        "slowmo",
        "SlowMo",
        "puts a slow momentum on the averages of local SGD or gossip",
        SlowMo,
        make=wrap_with("outer", slowmo),
        simulate=simulate_outer(slowmo),
        paper=Paper(
            "Wang, Tantia, Ballas, Rabbat",
            "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
            "ICLR 2020",
            "1910.00643",
        ),
        example="GossipDataParallel(model, outer=SlowMo())",
        options=OPTIONS | {"outer_gossip_every"},
    ),
    Method(
        "noloco",
        "NoLoCo",
        "takes outer steps in random pairs, which pull their anchors together",
        NoLoCo,
        make=wrap_with("outer", noloco),
        simulate=simulate_outer(noloco),
        paper=Paper(
            "Kolehmainen et al.",
            "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
            "2025",
            "2506.10911",
        ),
        example="GossipDataParallel(model, outer=NoLoCo())",
        options=OPTIONS | {"outer_pull"},
    ),
    Method(
        "gasloc",
        "GASLoC",
        "takes outer steps alone, and gossips their result along with the momentum",
        GASLoC,
        make=wrap_with("outer", gasloc, whom=undirected_neighbours),
        simulate=simulate_outer(gasloc),
        paper=Paper(
            "Cagnasso, Belilovsky, Oyallon",
            "Unifying Local Communications and Local Updates for LLM Pretraining",
            "2026",
            "2606.11081",
        ),
        example="GossipDataParallel(model, outer=GASLoC())",
        graph="undirected",
        options=OPTIONS | {"graph", "step_size"},
        simulated_graph=static,
    ),
)
