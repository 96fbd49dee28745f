"""BilateralParticipant: the part of AD-PSGD in a membership."""

from __future__ import annotations

from ..membership.links import LinkTransport
from ..membership.lockstep import GraphParticipant


class BilateralParticipant(GraphParticipant):
    """The part of a wrapper whose pairs exchange at any time in its membership.

    The active ranks are computed anew for each number of workers. See [Note: generations of an engine]
    and [Note: lost peers of an exchange].
    """

    is_in_lockstep = False

    def _turn_to(self, transport: LinkTransport, growth: float) -> None:
        """See `ModelParticipant`."""
        super()._turn_to(transport, growth)
        self.wrapper._averager.transport = transport

    def flush(self) -> None:
        """See `ModelParticipant`. Peers get no model before the next round, so that only one exchange is waited for."""
        self.wrapper._engine.withdraw()
        super().flush()

    def settle(self) -> None:
        """See `ModelParticipant`. Peers get no model any more, and corrections that come later are dropped."""
        self.wrapper._engine.give_up(self.wrapper._buffer.vector)

    def _go_to(self, t: int, step: int) -> None:
        """See `ModelParticipant`. A worker that joins again may be ahead of its donor: no step comes twice."""
        super()._go_to(t, max(step, self.step))
