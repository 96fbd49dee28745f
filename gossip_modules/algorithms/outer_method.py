"""OuterMethod: the base of algorithms that move an anchor by where ranks have come from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..compression.compressor import Compressor
from ..rounds import MakeOptimizer, Memory, Periodic, Vector, Vectors, is_number


@dataclass(frozen=True)
class OuterMethod(Periodic):
    """What happens every `sync_every` optimizer steps: the models x of the ranks move an anchor phi, and x <- phi.

    The anchor is the model with which the ranks last began. The *drift* phi - x of each rank is mixed over ranks, and
    an optimizer, the outer one, takes it as the gradient of the anchor. A method writes its `round`.

    Where the model of a rank is not finite and on_nonfinite="skip", it goes back to the anchor: its steps since then
    are lost, it brings a drift of zero, and nothing else is lost.

    It takes the arguments of `Periodic`.
    """

    def anchor(self, m: Memory) -> Vector:
        """phi. After an exact average of all models it stays where all ranks have one, and else starts anew."""
        return m.vector("phi", start="x", average="keep" if self.averages_exactly else "reset")

    def begin(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        self.anchor(m)

    def recover(self, v: Vectors, m: Memory) -> None:
        """See `Algorithm`."""
        v.x.set_(self.anchor(m))

    def _check_optimizer(self, optimizer: MakeOptimizer | None) -> None:
        """Raise ValueError where it is no function, or stands beside rates that the method would make its own with."""
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
        """Raise ValueError where a rate is none."""
        for name, value in positive.items():
            if not (is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{type(self).__name__}: got {name}={value!r}, expected a number above 0")
        if not (is_number(momentum) and 0 <= momentum < 1):
            raise ValueError(
                f"{type(self).__name__}: got momentum={momentum!r}, expected 0 <= momentum < 1; 1 would sum up all "
                "drifts for ever"
            )

    def _check_error_feedback(self, compressor: object, **decays: float) -> None:
        """Raise ValueError where it is no compressor, or a decay of its error feedback is out of range."""
        name = type(self).__name__
        for argument, value in decays.items():
            if not (is_number(value) and 0 <= value <= 1):
                raise ValueError(
                    f"{name}: got {argument}={value!r}, expected 0 <= {argument} <= 1: above 1 what was not sent would "
                    "grow; 1 keeps all of it, and 0.95 is usual for SparseLoCo"
                )
        if not isinstance(compressor, Compressor):
            raise ValueError(
                f"{name}: got compressor={compressor!r}, expected a Compressor; pass e.g. "
                "ChunkTopK(64, values=TwoBit()) to SparseLoCo, and QSGD(4, bucket_size=32, unbiased=True) to DiLoCo"
            )
