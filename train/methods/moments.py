"""The moments of an optimizer, each averaged over all ranks at a period of its own (DES-LOC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import gossip_modules as gm
from gossip_modules.methods import METHODS

NAMES: Mapping[str, tuple[str, ...]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
}
"""What optimizers of torch.optim call their first moment, and their second one if they have it."""


@dataclass(frozen=True)
class MomentPeriods:
    """The optimizer steps from one average of a moment to the next.

    Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models", 2025, arXiv
    2505.22549: K_u and K_v, beside the period of the parameters, K_x.

    Args:
        first: the period of the first moment, in optimizer steps; 0: it is never averaged.
        second: the period of the second moment, in optimizer steps; 0: it is never averaged.
    """

    first: int
    second: int

    def due(self, optimizer: str, step: int) -> tuple[str, ...]:
        """The names of the moments that are averaged after so many steps, which need not be any.

        Args:
            optimizer: a key of NAMES, where a period is set.
            step: the number of steps that each rank has taken.
        """
        periods = [(name, period) for name, period in zip(NAMES.get(optimizer, ()), self._periods, strict=False)]
        return tuple(name for name, period in periods if period and step % period == 0)

    def check(self, recipe: str, optimizer: str, *, is_elastic: bool, amp: str) -> None:
        """Check that a recipe can average moments of an optimizer.

        Args:
            recipe: a key of METHODS.
            optimizer: a class of torch.optim.
            is_elastic: whether workers come and go.
            amp: see `RunConfig`.

        Raises:
            ValueError: it cannot, or it would change nothing; or a period that is no whole number.
        """
        got = f"got first_moment_period={self.first} and second_moment_period={self.second}"
        if not all(type(period) is int for period in self._periods):
            raise ValueError(f"{got}, expected whole numbers of steps, such as 30 and 60; 0 and 0 average nothing")
        if not any(self._periods):
            return
        if why := _why_not(recipe, is_elastic=is_elastic, amp=amp):
            raise ValueError(f"{got} with recipe={recipe!r}, expected 0 and 0: {why}; leave them out")
        num_moments = len(NAMES.get(optimizer, ()))
        if any(self._periods[num_moments:]):
            expected = "0 and 0" if num_moments == 0 else "a second_moment_period of 0"
            raise ValueError(
                f"{got} where {optimizer} steps the model, expected {expected}: first moments are those of "
                "SGD, Adam and AdamW, second ones of Adam and AdamW; leave out what it lacks"
            )

    @property
    def _periods(self) -> tuple[int, int]:
        return self.first, self.second


def _why_not(recipe: str, *, is_elastic: bool, amp: str) -> str:
    """Why moments are not averaged with a recipe, as a clause; "": they can be."""
    method = METHODS[recipe]
    if is_elastic:
        return "workers who come and go have no average of all optimizers"
    if amp == "float16":
        return "with --amp float16 a rank may skip a step by itself, and has no moments then that the others have"
    if method.pace != "lockstep":
        return "its ranks take steps of their own, and do not meet to average"
    if method.needs_sgd:
        return "its law writes the momentum in every step"
    if method.algorithm is gm.AllReduceDataParallel:
        return "its ranks have the same moments already"
    return ""
