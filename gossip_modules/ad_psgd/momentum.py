"""The continuous momentum of A2CiD2: a second model of each rank, which its exchanges move further than the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..flat.vector import FlatVector, add_
from ..graph_manager.base import GraphManager
from ..mixing_manager.momentum_rates import MomentumRates
from ..state import Restart, State, leaf


class ContinuousMomentum(State):
    """The second model of a rank, kept as its difference to the first one, so that gradient steps move both alike.

    Args:
        memory: a vector of zeros like the corrections, for the difference.
        graph: the bipartite graph.
        rank: this rank.
    """

    difference: list[Tensor] = leaf([], name="momentum", join="zero")

    def __init__(self, memory: FlatVector, graph: GraphManager, rank: int) -> None:
        self.difference = self._memory = list(memory.parameters)
        self.turn_to(graph, rank)

    def turn_to(self, graph: GraphManager, rank: int) -> None:
        """Go on with the rates of another graph; keeps the difference."""
        self._rank, self._rates = rank, MomentumRates.on(graph)

    def apply_(self, correction: FlatVector, num_exchanges: int) -> None:
        """Add the momentum to the correction of some exchanges, and the exchanges to the momentum."""
        rates = self._rates
        moved, kept, gain = rates.coefficients(rates.remaining(self._rank, num_exchanges))
        for part, difference in zip(correction.parameters, self.difference, strict=True):
            add_(part, difference, alpha=moved)
            add_(difference.mul_(kept), part, alpha=gain)

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`."""
        super().check_state(state, of=of)
        found, own = ([part.numel() for part in parts] for parts in (state.get("momentum", self._memory), self._memory))
        if found != own:
            raise ValueError(
                f"got a continuous momentum of {found} elements, expected {own}: other tensors were trained when it "
                "was saved; freeze the same parameters before you wrap the model, or load the model alone: "
                "module.load_state_dict"
            )

    def restarted(self, event: Restart) -> None:
        """See `State`: the memory stays, with other values."""
        if event is Restart.ALL:
            loaded = self.difference or [torch.zeros_like(part) for part in self._memory]
            for part, value in zip(self._memory, loaded, strict=True):
                part.copy_(value)
            self.difference = self._memory
