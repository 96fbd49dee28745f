"""Compressed gossip of the command line: compressors and gossipers by name, with the step sizes that were published."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import gossip_modules as gm

if TYPE_CHECKING:
    from train.config import Config

WIRE_DTYPES: Mapping[str, torch.dtype | None] = {
    "none": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

PUBLISHED_RATIO = 0.01
"""The compression_ratio for which the step sizes of topk and randomk were published."""


@dataclass(frozen=True)
class Compression:
    """A compressor: how it is made, and which options it heeds."""

    make: Callable[[Config], gm.Compressor]
    options: frozenset[str] = frozenset()


COMPRESSORS: Mapping[str, Compression] = {
    "sign": Compression(lambda config: gm.SignNorm()),
    "topk": Compression(lambda config: gm.TopK(config.compression_ratio), frozenset({"compression_ratio"})),
    "randomk": Compression(
        lambda config: gm.RandomK(config.compression_ratio, seed=config.seed), frozenset({"compression_ratio"})
    ),
    "qsgd": Compression(
        lambda config: gm.QSGD(config.compression_bits, seed=config.seed), frozenset({"compression_bits"})
    ),
    "bfloat16": Compression(lambda config: gm.Cast(torch.bfloat16)),
    "float16": Compression(lambda config: gm.Cast(torch.float16)),
}

CHOCO_STEP_SIZES: Mapping[str, float] = {
    "sign": 0.45,
    "topk": 0.0375,
    "randomk": 0.01,
    "qsgd": 0.34,
    "bfloat16": 1.0,
    "float16": 1.0,
}
"""sign: Koloskova et al., ICLR 2020, arXiv 1907.09356; topk: Vogels et al., NeurIPS 2020, arXiv 2008.01425; randomk and
qsgd (16 levels): Koloskova et al., ICML 2019, arXiv 1902.00340; all on a ring. A cast is as good as exact: 1."""
DEEP_SQUEEZE_STEP_SIZES: Mapping[str, float] = {"sign": 0.01}
"""Vogels et al., NeurIPS 2020, arXiv 2008.01425, on a ring of 8."""


def choco(config: Config) -> gm.Gossiper:
    """CHOCO-SGD."""
    return gm.Choco(COMPRESSORS[config.compressor].make(config), step_size=_step_size(config, CHOCO_STEP_SIZES))


def deep_squeeze(config: Config) -> gm.Gossiper:
    """DeepSqueeze."""
    step_size = _step_size(config, DEEP_SQUEEZE_STEP_SIZES)
    return gm.DeepSqueeze(COMPRESSORS[config.compressor].make(config), step_size=step_size)


def moniqua(config: Config) -> gm.Gossiper:
    """Moniqua."""
    return gm.Moniqua(config.theta, bits=config.compression_bits, step_size=config.step_size or 1.0, seed=config.seed)


def power_gossip(config: Config) -> gm.Gossiper:
    """PowerGossip."""
    return gm.PowerGossip(
        rank=config.power_rank,
        num_iterations=config.power_iterations,
        warm_start=config.warm_start,
        step_size=config.step_size or None,
        compress_vectors=config.compress_vectors,
        seed=config.seed,
    )


def _step_size(config: Config, published: Mapping[str, float]) -> float:
    """The step size of the configuration, or the published one for its compressor.

    Raises:
        ValueError: none was published for it.
    """
    if config.step_size:
        return config.step_size
    heeds_ratio = "compression_ratio" in COMPRESSORS[config.compressor].options
    if config.compressor not in published or (heeds_ratio and config.compression_ratio != PUBLISHED_RATIO):
        detail = f" and compression_ratio={config.compression_ratio}" if heeds_ratio else ""
        raise ValueError(
            f"got recipe={config.recipe} with compressor={config.compressor}{detail} and no step_size, expected one: "
            f"published are those of {', '.join(published)}"
            f"{f' at a ratio of {PUBLISHED_RATIO}' if heeds_ratio else ''}; pass --step-size, found on a few steps"
        )
    return published[config.compressor]
