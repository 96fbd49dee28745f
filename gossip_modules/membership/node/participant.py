"""What one process of a node has to do with the membership of its node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..lockstep import LockstepParticipant
from ..participant import ModelParticipant


class NodeParticipant(LockstepParticipant):
    """The participant of one process of a node; see [Note: one worker, several processes]."""

    def at_step(self) -> None:
        """See `ModelParticipant`; `Siblings` looks at the weight, before it tells the others."""
        ModelParticipant.at_step(self)

    def begin(self, growth: float) -> None:
        """See `Participant`."""
        super().begin(growth)
        self.place()

    def place(self) -> None:
        """Say which process of how many this is: those of a node have consecutive ranks, as without a membership."""
        membership = self.membership
        assert membership.siblings is not None
        control = membership.siblings.control
        g = control.world_size
        self.wrapper._place = membership.rank * g + control.rank, membership.world_size * g

    def copy(self) -> Mapping[str, Any]:
        """What `give` gives, with the whole weight, which stays here too; of the engine its counters only."""
        state = self.give()
        self.take_back(state)
        engine = self.wrapper._engine
        counters = {"engine": engine.state_name, "t": engine.t, "step": engine.step}
        return {**state, "engine": counters, "weight": self.wrapper._buffer.vector.push_sum_weight.clone()}
