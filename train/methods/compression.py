"""Compressed gossip of the command line: compressors and gossipers by name, with the step sizes that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

import gossip_modules as gm

if TYPE_CHECKING:
    from train.run_config import RunConfig

WIRE_DTYPES: Mapping[str, torch.dtype | None] = {
    "none": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Compression:
    """A compressor: how it is made, and which options it heeds."""

    make: Callable[[RunConfig], gm.Compressor]
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

StepSizes: TypeAlias = Mapping[tuple[str, float | None], float]
"""Step sizes by compressor and its option, bits or ratio; None for compressors without one."""

CHOCO_STEP_SIZES: StepSizes = {
    ("sign", None): 0.45,
    ("topk", 0.01): 0.0375,
    ("randomk", 0.01): 0.01,
    ("qsgd", 4): 0.34,
    ("qsgd", 8): 0.34,
    ("bfloat16", None): 1.0,
    ("float16", None): 1.0,
}
"""sign: Koloskova et al., ICLR 2020, arXiv 1907.09356; topk: Vogels et al., NeurIPS 2020, arXiv 2008.01425; randomk and
qsgd with 16 levels, 4 bits: Koloskova et al., ICML 2019, arXiv 1902.00340; all on a ring. 8 bits are finer than 4, so
what serves those serves them; at 2 bits it diverges. A cast is as good as exact: 1."""
DEEP_SQUEEZE_STEP_SIZES: StepSizes = {("sign", None): 0.01}
"""Vogels et al., NeurIPS 2020, arXiv 2008.01425, on a ring of 8."""
MONIQUA_STEP_SIZES: StepSizes = {("moniqua", 8): 1.0}
"""A grid of 8 bits is as good as exact: 1. Coarser ones want less, how much depends on theta."""


def choco(config: RunConfig) -> gm.Gossiper:
    """CHOCO-SGD."""
    step_size = _step_size(config, CHOCO_STEP_SIZES, *_compression(config))
    return gm.Choco(COMPRESSORS[config.compressor].make(config), step_size=step_size)


def deep_squeeze(config: RunConfig) -> gm.Gossiper:
    """DeepSqueeze."""
    step_size = _step_size(config, DEEP_SQUEEZE_STEP_SIZES, *_compression(config))
    return gm.DeepSqueeze(COMPRESSORS[config.compressor].make(config), step_size=step_size)


def moniqua(config: RunConfig) -> gm.Gossiper:
    """Moniqua."""
    step_size = _step_size(config, MONIQUA_STEP_SIZES, "moniqua", "compression_bits")
    return gm.Moniqua(config.theta, bits=config.compression_bits, step_size=step_size, seed=config.seed)


def power_gossip(config: RunConfig) -> gm.Gossiper:
    """PowerGossip."""
    return gm.PowerGossip(
        rank=config.power_rank,
        num_iterations=config.power_iterations,
        warm_start=config.warm_start,
        step_size=config.step_size or None,
        compress_vectors=config.compress_vectors,
        seed=config.seed,
    )


def _compression(config: RunConfig) -> tuple[str, str | None]:
    """The compressor and the option that it heeds, if any."""
    return config.compressor, next(iter(COMPRESSORS[config.compressor].options), None)


def _step_size(config: RunConfig, published: StepSizes, name: str, option: str | None) -> float:
    """The step size of the configuration, or the known one for `name` with the value of its `option`.

    Raises:
        ValueError: none is known for it.
    """
    if config.step_size:
        return config.step_size
    key = (name, getattr(config, option) if option else None)
    if key not in published:
        compressor = f"compressor={name}" if name in COMPRESSORS else ""
        got = " and ".join(word for word in (compressor, f"{option}={key[1]}" if option else "") if word)
        known = ", ".join(other if value is None else f"{other} at {_unit(value)}" for other, value in published)
        raise ValueError(
            f"got recipe={config.recipe} with {got} and no step_size, expected one: known are those of {known}; pass "
            "--step-size, found on a few steps"
        )
    return published[key]


def _unit(value: float) -> str:
    return f"{value} bits" if value > 1 else f"a ratio of {value}"
