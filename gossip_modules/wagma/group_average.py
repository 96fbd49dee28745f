"""GroupAverage: the exact average within the groups of round t."""

from __future__ import annotations

from collections.abc import Sequence

from torch.profiler import record_function

from ..flat.vector import FlatVector
from ..graph_manager.butterfly_groups import ButterflyGroups, Phase
from ..rounds.mixer import Mixer
from ..transport.base import Pending, Transport


class GroupAverage(Mixer):
    """x_i <- mean of x_j over the group of i in round t: W(t) is made of blocks, symmetric and doubly stochastic.

    Recursive doubling, in log2 S phases for groups of S ranks:

        for mask in groups.masks(t):
            exchange x with the rank whose position differs by mask;  x <- x + (the x received)
        x <- x / (number of members)

    Since a + b and b + a are the same number, all members end with the same bits. Sums are in the dtype of the vector,
    each addition in float32 where that dtype is narrower. A round needs one receive buffer. The push-sum weight is not
    sent: it becomes one. In a world that is no power of two some ranks give their x to a member before the phases and
    get the sum after them: see [Note: other worlds] of `ButterflyGroups`.

    Args:
        groups: the groups of the transport's world.
        transport: the transport of this rank.

    Attributes:
        partner: the rank with which the current phase exchanges; -1 = none.
    """

    def __init__(self, groups: ButterflyGroups, transport: Transport) -> None:
        if groups.world_size != transport.world_size:
            raise ValueError(
                f"got {groups} over a process group of {transport.world_size} ranks, expected equal worlds; "
                "make the groups with that world size"
            )
        self.groups = groups
        self.transport = transport
        self._inbox: FlatVector | None = None
        self._phases: tuple[Phase, ...] = ()
        self._pending: Pending | None = None
        self.partner = -1

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return 1 / self.groups.num_members(self.transport.rank, self._t)

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self.groups.members(self.transport.rank, self._t)

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. Posts the first phase."""
        assert self._pending is None, "a round is in flight: finish() it before the next start()"
        self._t = t
        self._phases = self.groups.phases(self.transport.rank, t)
        if self._inbox is None or self._inbox.layout != s.layout or self._inbox.raw.device != s.raw.device:
            self._inbox = s.like()
        if self._phases:
            self._post(self._phases[0], s)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`. All phases but the first are posted here, each when the one before it is summed."""
        if not self._phases:
            return
        assert self._inbox is not None, "start() comes first"
        num_members = self.groups.num_members(self.transport.rank, self._t)
        for i, phase in enumerate(self._phases):
            if i > 0:
                self._post(phase, s)
            assert self._pending is not None, "no round is in flight: start() comes first"
            pending, self._pending = self._pending, None
            with record_function("gossip.wait"):
                pending.wait()
            if phase.is_result:
                s.raw.copy_(self._inbox.raw)
            elif phase.in_peer is not None:
                s.add_segments_(self._inbox, alpha=1.0)
        self.partner = -1
        s.push_sum_weight.fill_(num_members)
        s.divide_by_weight_()
        s.push_sum_weight.fill_(1.0)

    def _post(self, phase: Phase, s: FlatVector) -> None:
        assert self._inbox is not None, "start() makes it"
        partner = phase.in_peer if phase.out_peer is None else phase.out_peer
        self.partner = -1 if partner is None else partner
        sends = {} if phase.out_peer is None else {phase.out_peer: [s.raw]}
        recvs = {} if phase.in_peer is None else {phase.in_peer: [self._inbox.raw]}
        self._pending = self.transport.exchange(sends, recvs, tag=self._t, what=f"group average in round {self._t}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.groups})"
