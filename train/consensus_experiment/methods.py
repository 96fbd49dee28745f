"""Variants of the consensus experiment: each method of the registry that only mixes, with its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gossip_modules as gm
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.methods import METHODS
from gossip_modules.methods.compressors import WIRE_DTYPES
from gossip_modules.methods.one_thread import OneThread
from gossip_modules.methods.simulated_options import MethodOptions
from gossip_modules.rounds.stacked import Stacked

PUBLISHED = MethodOptions(compression_bits=4)
"""What variants do not say themselves: top-k and random-k send 1 % of the entries, QSGD 4 bits of each."""


@dataclass(frozen=True)
class Variant:
    """A gossiper with its options.

    Args:
        method: a key of METHODS, which has a gossiper.
        options: of the method, by name; the others are those of PUBLISHED.
        is_tuned: whether several step sizes are tried.
        mixes: whether the step size is that of the weights, I - step_size (I - W), and not the gossiper's.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_tuned: bool = False
    mixes: bool = False

    def make(
        self,
        mixing: gm.mixing_manager.MixingManager,
        step_size: float,
        theta: float,
        seed: int,
        *,
        shape: tuple[int, ...],
    ) -> Stacked:
        """What runs the rounds of all workers.

        Args:
            mixing: whom they gossip with, and the weights.
            step_size: of consensus.
            theta: a bound on the differences of neighbours, for Moniqua.
            seed: of what is random.
            shape: of a worker's matrix.
        """
        make = METHODS[self.method].gossiper
        assert make is not None, f"{self.method} has no gossiper"
        options = replace(PUBLISHED, **{"step_size": step_size, "theta": theta, **self.options})
        made = make(options, seed)
        if isinstance(made, gm.extend.Gossiper):
            return OneThread(lambda: make(options, seed), mixing)
        if isinstance(made, gm.extend.PushPull):
            return Stacked(DPSGD(), mixing, wire_dtype=made.wire_dtype)
        return Stacked(made, mixing, shape=shape)


def variants() -> dict[str, Variant]:
    """All variants by name: those of the methods of this library, then each other gossiper of the registry."""
    plain = {
        "plain" if dtype == "none" else dtype: Variant("dpsgd", {"wire_dtype": dtype}, mixes=True)
        for dtype in WIRE_DTYPES
    }
    coded = {
        f"{name}-{code}": Variant(name, {"compressor": code}, is_tuned=True)
        for name, method in METHODS.items()
        for code in method.codes
    }
    bits = {f"moniqua-{bits}": Variant("moniqua", {"compression_bits": bits}, is_tuned=bits < 8) for bits in (8, 4, 2)}
    power = {
        f"power-r{rank}-i{number}{'' if is_warm else '-cold'}": Variant(
            "powergossip", {"power_rank": rank, "power_iterations": number, "warm_start": is_warm}
        )
        for is_warm in (True, False)
        for rank in (1, 2)
        for number in (1, 2)
    }
    named = {**plain, **coded, **bits, **power}
    seen = {variant.method for variant in named.values()}
    others = [name for name, method in METHODS.items() if method.gossiper is not None and name not in seen]
    return {**named, **{name: Variant(name, is_tuned=True) for name in others}}


VARIANTS: Mapping[str, Variant] = variants()
