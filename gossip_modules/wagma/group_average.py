"""GroupAverage: the exact average within the groups of round t."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ..flat.layout import CHUNK_BYTES
from ..flat.vector import CACHED_BYTES, FlatVector
from ..graph_manager.butterfly_groups import ButterflyGroups, Phase
from ..profiling import span
from ..rounds.mixer import Mixer
from ..transport.base import Pending, Transport

_NUM_POSTED = 3  # chunks that are under way at a time


class GroupAverage(Mixer):
    """x_i <- mean of x_j over the group of i in round t: W(t) is made of blocks, symmetric and doubly stochastic.

    Recursive doubling, in log2 S phases for groups of S ranks:

        for mask in groups.masks(t):
            exchange x with the rank whose position differs by mask;  x <- x + (the x received)
        x <- x / (number of members)

    Since a + b and b + a are the same number, all members end with the same bits. Sums are in the dtype of the vector,
    each addition in float32 where that dtype is narrower. A vector is sent in chunks, and a chunk is added while the
    next ones are under way; so a round needs room for the sum and for a few chunks. A round that fails leaves x as it
    was. The push-sum weight is not sent: it becomes one. In a world that is no power of two some ranks give their x to
    a member before the phases and get the mean after them: see [Note: other worlds] of `ButterflyGroups`.

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
        self.partner = -1
        self._inbox: tuple[FlatVector, ...] = ()  # by chunk; the memory is that of a few
        self._sum: FlatVector | None = None  # of `finish`
        self._phases: tuple[Phase, ...] = ()
        self._posted: deque[Pending] = deque()
        self._num_posted = 0  # in the present phase

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return 1 / self.groups.num_members(self.transport.rank, self._t)

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self.groups.members(self.transport.rank, self._t)

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`. Posts the first chunks of the first phase."""
        assert not self._posted, "a round is in flight: finish() it before the next start()"
        self._t, self._source = t, s
        self._phases = self.groups.phases(self.transport.rank, t)
        if [x.layout for x in self._inbox] != [x.layout for x in s.chunks()]:
            self._inbox = _inbox_like(s)
        if self._phases:
            self._post(self._phases[0], _NUM_POSTED)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        if self._sum is None or self._sum.layout != s.layout or self._sum.raw.device != s.raw.device:
            self._sum = s.like()
        self.finish_to(self._sum)
        s.raw.copy_(self._sum.raw)
        s.push_sum_weight.fill_(1.0)

    def finish_to(self, out: FlatVector) -> None:
        """Wait, then out <- the mean, where `start` was called with another vector of the same layout."""
        sums = [phase for phase in self._phases if phase.in_peer is not None and not phase.is_result]
        num_members = self.groups.num_members(self.transport.rank, self._t)
        if not self._phases:
            out.raw.copy_(self._source.raw)
        for phase in self._phases:
            for k, chunk in enumerate(out.chunks()):
                self._post(phase, k + _NUM_POSTED)
                with span("gossip.wait"):
                    self._posted.popleft().wait()
                if phase.in_peer is None:
                    continue
                if phase.is_result:
                    chunk.raw.copy_(self._inbox[k].raw)
                else:
                    divisor = num_members if phase is sums[-1] else 1
                    _sum_to(chunk, self._inbox[k], self._source.chunks()[k], divisor=divisor)
            self._num_posted = 0
            if phase.in_peer is not None:
                self._source = out
        self.partner = -1

    def _post(self, phase: Phase, stop: int) -> None:
        """Post the chunks before the `stop`-th one."""
        partner = phase.in_peer if phase.out_peer is None else phase.out_peer
        self.partner = -1 if partner is None else partner
        chunks, what = self._source.chunks(), f"group average in round {self._t}"
        for k in range(self._num_posted, min(stop, len(chunks))):
            sends = {} if phase.out_peer is None else {phase.out_peer: [chunks[k].raw]}
            recvs = {} if phase.in_peer is None else {phase.in_peer: [self._inbox[k].raw]}
            self._posted.append(self.transport.exchange(sends, recvs, tag=self._t, what=what))
            self._num_posted = k + 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.groups})"


def _sum_to(out: FlatVector, x: FlatVector, y: FlatVector, *, divisor: int) -> None:
    """out <- (x + y) / divisor, in pieces that stay in cache, and in float32 where dtypes are narrower."""
    for result, a, b in zip(out.segments, x.segments, y.segments, strict=True):
        size = torch.get_num_threads() * CACHED_BYTES // result.element_size()
        for piece, one, other in zip(result.split(size), a.split(size), b.split(size), strict=True):
            if piece.element_size() >= 4:
                torch.add(one, other, out=piece)
                if divisor > 1:
                    piece.div_(divisor)
                continue
            piece.copy_(one.float().add_(other.float()))
            if divisor > 1:
                piece.copy_(piece.float().div_(divisor))


def _inbox_like(s: FlatVector) -> tuple[FlatVector, ...]:
    """Receive buffers for all chunks of s, in memory for those that are under way at a time."""
    memory = [s.raw.new_zeros(min(CHUNK_BYTES, s.layout.num_bytes)) for _ in range(min(_NUM_POSTED, len(s.chunks())))]
    places = [(x.layout, memory[k % len(memory)]) for k, x in enumerate(s.chunks())]
    return tuple(FlatVector(layout, raw[: layout.num_bytes]) for layout, raw in places)
