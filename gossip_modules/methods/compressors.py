"""Codes of compressed gossip by name, and the step sizes of consensus that are published for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..compression.compressor import Cast, Compressor
from ..compression.quantizer import QSGD, SignNorm
from ..compression.sparsifier import RandomK, TopK
from ..registry import StepSizes
from .simulated_options import MethodOptions

WIRE_DTYPES: Mapping[str, torch.dtype | None] = {
    "none": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class NamedCode:
    """A compressor by name: how it is made of (options, seed), and which option it uses, if any."""

    make: Callable[[MethodOptions, int], Compressor]
    option: str | None = None


COMPRESSORS: Mapping[str, NamedCode] = {
    "sign": NamedCode(lambda options, seed: SignNorm()),
    "topk": NamedCode(lambda options, seed: TopK(options.compression_ratio), "compression_ratio"),
    "randomk": NamedCode(lambda options, seed: RandomK(options.compression_ratio, seed=seed), "compression_ratio"),
    "qsgd": NamedCode(lambda options, seed: QSGD(options.compression_bits, seed=seed), "compression_bits"),
    "bfloat16": NamedCode(lambda options, seed: Cast(torch.bfloat16)),
    "float16": NamedCode(lambda options, seed: Cast(torch.float16)),
}

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


def step_size_of(options: MethodOptions, method: str, published: StepSizes, code: str, option: str | None) -> float:
    """The step size in `options`, or the published one.

    Args:
        options: of the method.
        method: its name, for the error.
        published: step sizes by code.
        code: the name of the code.
        option: the name of the option that the code uses, if any.

    Raises:
        ValueError: there is none in `options`, and none is published for this code.
    """
    if options.step_size:
        return options.step_size
    key = (code, getattr(options, option) if option else None)
    if key not in published:
        compressor = f"compressor={code}" if code in COMPRESSORS else ""
        got = " and ".join(word for word in (compressor, f"{option}={key[1]}" if option else "") if word)
        known = ", ".join(other if value is None else f"{other} at {_unit(value)}" for other, value in published)
        raise ValueError(
            f"got {method} with {got} and no step_size, expected one: known are those of {known}; pass "
            "--step-size, found on a few steps"
        )
    return published[key]


def _unit(value: float) -> str:
    return f"{value} bits" if value > 1 else f"a ratio of {value}"


def make_compressor(options: MethodOptions, seed: int) -> Compressor:
    """The compressor that `options` name."""
    return COMPRESSORS[options.compressor].make(options, seed)


def compressor_step_size(options: MethodOptions, method: str, published: StepSizes) -> float:
    """`step_size_of` the compressor that `options` name."""
    return step_size_of(options, method, published, options.compressor, COMPRESSORS[options.compressor].option)
