"""Methods of the consensus experiment: each way to gossip, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import gossip_modules as gm


@dataclass(frozen=True)
class Method:
    """A way to gossip: how it is made of (step size, bound on differences, seed), and whether its step size is tuned.

    Where `mixes` the step size is that of the weights, I - step_size (I - W); else it is the gossiper's.
    """

    make: Callable[[float, float, int], gm.Gossiper]
    is_tuned: bool = False
    mixes: bool = False


def _plain(wire_dtype: torch.dtype | None) -> Method:
    return Method(lambda step_size, theta, seed: gm.PushPull(wire_dtype=wire_dtype), mixes=True)


def _tuned(algorithm: Callable[..., gm.Gossiper], compressor: Callable[[int], gm.Compressor]) -> Method:
    return Method(lambda step_size, theta, seed: algorithm(compressor(seed), step_size=step_size), is_tuned=True)


def _moniqua(bits: int) -> Method:
    return Method(
        lambda step_size, theta, seed: gm.Moniqua(theta, bits=bits, step_size=step_size, seed=seed),
        is_tuned=bits < 8,
    )


def _power(rank: int, num_iterations: int, warm_start: bool) -> Method:
    def make(step_size: float, theta: float, seed: int) -> gm.Gossiper:
        return gm.PowerGossip(
            rank=rank, num_iterations=num_iterations, warm_start=warm_start, step_size=step_size, seed=seed
        )

    return Method(make)


COMPRESSORS: Mapping[str, Callable[[int], gm.Compressor]] = {
    "sign": lambda seed: gm.SignNorm(),
    "topk": lambda seed: gm.TopK(0.01),
    "randomk": lambda seed: gm.RandomK(0.01, seed=seed),
    "qsgd": lambda seed: gm.QSGD(4, seed=seed),
    "bfloat16": lambda seed: gm.Cast(torch.bfloat16),
    "float16": lambda seed: gm.Cast(torch.float16),
}
METHODS: Mapping[str, Method] = {
    "plain": _plain(None),
    "bfloat16": _plain(torch.bfloat16),
    "float16": _plain(torch.float16),
    **{f"choco-{name}": _tuned(gm.Choco, make) for name, make in COMPRESSORS.items()},
    **{f"deepsqueeze-{name}": _tuned(gm.DeepSqueeze, make) for name, make in COMPRESSORS.items()},
    **{f"moniqua-{bits}": _moniqua(bits) for bits in (8, 4, 2)},
    **{f"power-r{rank}-i{num}": _power(rank, num, True) for rank in (1, 2) for num in (1, 2)},
    **{f"power-r{rank}-i{num}-cold": _power(rank, num, False) for rank in (1, 2) for num in (1, 2)},
}
"""topk and randomk send 1 % of the entries, qsgd 4 bits of each."""
