"""OuterMethod: the base class of algorithms that move an anchor by the drifts of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from ..compression.compressor import Compressor
from ..rounds import MakeOptimizer, Memory, Periodic, Vector, Vectors, is_number, works_by_element


@dataclass(frozen=True)
class OuterMethod(Periodic):
    """An algorithm that moves an anchor phi by the models x of the ranks every `sync_every` steps, and sets x <- phi.

    The anchor is the model from which the ranks last started. A round mixes the *drift* phi - x over ranks, and an
    outer optimizer uses it as the gradient of the anchor. Write your method as `round`.

    The arguments are the arguments of `Periodic`.
    """

    def anchor(self, m: Memory) -> Vector:
        """Return phi, a vector of the memory m.

        After an exact average of all models an anchor of one rank restarts; a common anchor is kept.
        """
        return m.vector("phi", start="x", average="keep" if self.averages_exactly else "reset")

    def begin(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        self.anchor(m)

    def recover(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        v.x.set_(self.anchor(m))

    def check_shards(self, nprocs_per_node: int) -> None:
        """See `Algorithm`."""
        super().check_shards(nprocs_per_node)
        make: MakeOptimizer | None = getattr(self, "optimizer", None)
        if make is not None and not works_by_element(make):
            raise ValueError(
                f"got the outer optimizer of {self}, which steps an element in another way beside other elements, for "
                f"a model that several processes hold in shards (nprocs_per_node={nprocs_per_node}, or fully_shard), "
                "expected an optimizer that works element by element: norms of a shard, as in LAMB, are no norms of "
                "the model; take `lambda parameters: torch.optim.Adam(parameters, lr=0.3)`, or a whole model in each "
                "process"
            )

    def refuse_shards(self, nprocs_per_node: int, *, needs: str) -> NoReturn:
        """Raise the ValueError of `check_shards` for a method that cannot work on shards.

        Args:
            nprocs_per_node: see `check_shards`.
            needs: the thing that a shard lacks.
        """
        raise ValueError(
            f"got {self} for a model that several processes hold in shards (nprocs_per_node={nprocs_per_node}, or "
            f"fully_shard), expected a whole model in each: it needs {needs}; take DiLoCo(), or a membership, whose "
            "nodes gossip with one process"
        )

    def _check_optimizer(self, optimizer: MakeOptimizer | None) -> None:
        """Raise ValueError if the optimizer is not a function, or if there are rates for a built-in optimizer too."""
        if optimizer is None:
            return
        name, example = type(self).__name__, "`lambda parameters: torch.optim.Adam(parameters, lr=0.3)`"
        if not callable(optimizer):
            raise ValueError(
                f"{name}: got optimizer={optimizer!r}, expected a function of parameters, such as {example}; the "
                "anchor that it steps is made later"
            )
        rates = {rate: getattr(self, rate) for rate in ("lr", "momentum")}
        if rates != {rate: getattr(type(self), rate) for rate in rates}:
            given = " and ".join(f"{rate}={value}" for rate, value in rates.items())
            raise ValueError(
                f"{name}: got {given} beside an optimizer, expected one or the other; give the rates to the optimizer"
            )

    def _check_rates(self, *, momentum: float, **positive: float) -> None:
        """Raise ValueError if a rate is out of range."""
        for name, value in positive.items():
            if not (is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{type(self).__name__}: got {name}={value!r}, expected a number above 0")
        if not (is_number(momentum) and 0 <= momentum < 1):
            raise ValueError(
                f"{type(self).__name__}: got momentum={momentum!r}, expected 0 <= momentum < 1; with 1 the momentum "
                "would be the sum of all drifts"
            )

    def _check_error_feedback(self, compressor: object, **decays: float) -> None:
        """Raise ValueError if `compressor` is not a compressor, or a decay of its error feedback is out of range."""
        name = type(self).__name__
        for argument, value in decays.items():
            if not (is_number(value) and 0 <= value <= 1):
                raise ValueError(
                    f"{name}: got {argument}={value!r}, expected 0 <= {argument} <= 1: above 1 the unsent rest would "
                    "grow; 1 keeps all of it, and 0.95 is usual for SparseLoCo"
                )
        if not isinstance(compressor, Compressor):
            raise ValueError(
                f"{name}: got compressor={compressor!r}, expected a Compressor; pass e.g. "
                "ChunkTopK(64, values=TwoBit()) to SparseLoCo, and QSGD(4, bucket_size=32, unbiased=True) to DiLoCo"
            )
