"""RelaxedMixing: the weights that a consensus step size makes of others."""

from __future__ import annotations

from functools import cached_property

from .base import MixingManager, MixingWeights


class RelaxedMixing(MixingManager):
    """I + gamma (W - I): each rank goes gamma times as far towards its peers.

    Args:
        mixing: W.
        step_size: gamma.

    >>> from gossip_modules.graph_manager import RingGraph
    >>> from gossip_modules.mixing_manager.base import UniformMixing
    >>> RelaxedMixing(UniformMixing(RingGraph(2)), 0.5).weights(0, 0)
    MixingWeights(own=0.75, inp={1: 0.25})
    """

    def __init__(self, mixing: MixingManager, step_size: float) -> None:
        super().__init__(mixing.graph)
        self.mixing, self.step_size = mixing, step_size

    def weights(self, rank: int, t: int) -> MixingWeights:
        """See `MixingManager`."""
        own, inp = self.mixing.weights(rank, t)
        return MixingWeights(1 - self.step_size * (1 - own), {j: self.step_size * w for j, w in inp.items()})

    @property
    def period(self) -> int:
        """See `MixingManager`."""
        return self.mixing.period

    @cached_property
    def is_row_stochastic(self) -> bool:
        """See `MixingManager`."""
        return self.mixing.is_row_stochastic

    @cached_property
    def is_column_stochastic(self) -> bool:
        """See `MixingManager`."""
        return self.mixing.is_column_stochastic

    @cached_property
    def is_symmetric(self) -> bool:
        """See `MixingManager`."""
        return self.mixing.is_symmetric

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mixing!r}, step_size={self.step_size:.6g})"
