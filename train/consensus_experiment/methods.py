"""Variants of the consensus experiment: each method of the registry that only mixes, with its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gossip_modules as gm
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.lab.plan import CODES, LabPlan
from gossip_modules.methods import METHODS, read_algorithm
from gossip_modules.methods.chosen import read_compressor
from gossip_modules.methods.wrapping import WIRE_DTYPES
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.rounds.stacked import Stacked


@dataclass(frozen=True)
class Variant:
    """An algorithm with its settings.

    Args:
        method: a key of METHODS.
        options: arguments of the algorithm, by name; the others are those of its recipe. A compressor is a text.
        is_tuned: whether several step sizes are tried.
        mixes: whether the step size is that of the weights, I - step_size (I - W), and not the algorithm's.
        wire_dtype: a key of WIRE_DTYPES: what plain gossip rounds models to.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_tuned: bool = False
    mixes: bool = False
    wire_dtype: str = "none"

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
            step_size: the consensus step size.
            theta: a bound on the differences of neighbours, for Moniqua.
            seed: the seed of all random numbers.
            shape: the shape of a worker's matrix.
        """
        if self.mixes:
            return Stacked(DPSGD(), mixing, wire_dtype=WIRE_DTYPES[self.wire_dtype])
        chosen = read_algorithm(self.method, seed=seed)
        settings = {"step_size": step_size, "theta": theta, **self.options}
        if "compressor" in self.options:
            settings["compressor"] = read_compressor(self.options["compressor"], seed=seed)
        return Stacked(chosen.with_settings(settings).made, mixing, shapes=[shape])


def variants() -> dict[str, Variant]:
    """All variants by name: those of the methods of this library, then each other algorithm that a schedule runs."""
    plain = {
        "plain" if dtype == "none" else dtype: Variant("dpsgd", mixes=True, wire_dtype=dtype) for dtype in WIRE_DTYPES
    }
    codes = {**CODES, "qsgd": "QSGD(4)"}  # of 4 bits, as published
    coded = {
        f"{name}-{code}": Variant(name, {"compressor": codes[code]}, is_tuned=True)
        for name in METHODS
        for code in LabPlan.of(name).codes
    }
    bits = {f"moniqua-{bits}": Variant("moniqua", {"bits": bits}, is_tuned=bits < 8) for bits in (8, 4, 2)}
    power = {
        f"power-r{rank}-i{number}{'' if is_warm else '-cold'}": Variant(
            "powergossip", {"rank": rank, "num_iterations": number, "warm_start": is_warm}
        )
        for is_warm in (True, False)
        for rank in (1, 2)
        for number in (1, 2)
    }
    named = {**plain, **coded, **bits, **power}
    seen = {variant.method for variant in named.values()}
    others = [
        name
        for name, method in METHODS.items()
        if issubclass(method.make, Algorithm) and "gossip_every" in method.options and name not in seen
    ]
    return {**named, **{name: Variant(name, is_tuned=True) for name in others}}


VARIANTS: Mapping[str, Variant] = variants()
