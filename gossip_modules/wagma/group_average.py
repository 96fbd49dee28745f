"""GroupAverage: the exact average within the groups of round t."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..flat.layout import CHUNK_BYTES
from ..flat.vector import CACHED_BYTES, FlatVector
from ..graph_manager.butterfly_groups import ButterflyGroups, Phase
from ..profiling import span
from ..rounds.mixer import Mixer
from ..transport.base import Pending, Transport

_NUM_POSTED = 3  # chunks that are under way at a time


class _Message(NamedTuple):
    """A chunk in a phase; is_summed: whether the phases before have written it to the sum."""

    phase: Phase
    chunk: int
    is_summed: bool

    @property
    def is_sum(self) -> bool:
        """Whether a received chunk is added."""
        return self.phase.in_peer is not None and not self.phase.is_result


class GroupAverage(Mixer):
    """x_i <- mean of x_j over the group of i in round t: W(t) is made of blocks, symmetric and doubly stochastic.

    Recursive doubling, in log2 S phases for groups of S ranks:

        for mask in groups.masks(t):
            exchange x with the rank whose position differs by mask;  x <- x + (the x received)
        x <- x / (number of members)

    Since a + b and b + a are the same number, all members end with the same bits. Sums are in the dtype of the vector,
    each addition in float32 where that dtype is narrower. A vector is sent in chunks, and a chunk is added while the
    next ones are under way, also while the last chunks of the phase before are; so a round needs room for the sum and
    for a few chunks, and phases do not wait for each other. A round that fails leaves x as it
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
        self._inbox: tuple[tuple[FlatVector, ...], ...] = ()  # room for each chunk in the memory of each of a few
        self._sum: FlatVector | None = None  # of `finish`
        self._messages: list[_Message] = []
        self._posted: deque[Pending] = deque()
        self._num_posted = 0

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
        self._t, self._source, self._messages, self._num_posted = t, s, [], 0
        chunks, is_summed = s.chunks(), False
        for phase in self.groups.phases(self.transport.rank, t):
            self._messages += [_Message(phase, k, is_summed) for k in range(len(chunks))]
            is_summed |= phase.in_peer is not None
        if not self._inbox or [x.layout for x in self._inbox[0]] != [x.layout for x in chunks]:
            self._inbox = _inbox_like(s)
        self._post(len(self._inbox), s)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        if self._sum is None or self._sum.layout != s.layout or self._sum.raw.device != s.raw.device:
            self._sum = s.like()
        self.finish_to(self._sum)
        s.raw.copy_(self._sum.raw)
        s.push_sum_weight.fill_(1.0)

    def finish_to(self, out: FlatVector) -> None:
        """Wait, then out <- the mean, where `start` was called with another vector of the same layout."""
        sums = [message.phase for message in self._messages if message.is_sum]
        num_members = self.groups.num_members(self.transport.rank, self._t)
        if not self._messages:
            out.raw.copy_(self._source.raw)
        for i, (phase, k, is_summed) in enumerate(self._messages):
            # No chunk is posted before the phase before has summed it: there is room for as many as there are, at most.
            self._post(i + len(self._inbox), out)
            self.partner = _partner(phase)
            with span("gossip.wait"):
                self._posted.popleft().wait()
            if phase.in_peer is None:
                continue
            chunk, received = out.chunks()[k], self._inbox[i % len(self._inbox)][k]
            if phase.is_result:
                chunk.raw.copy_(received.raw)
            else:
                own = chunk if is_summed else self._source.chunks()[k]
                _sum_to(chunk, received, own, divisor=num_members if phase is sums[-1] else 1)
        self.partner = -1

    def _post(self, stop: int, out: FlatVector) -> None:
        """Post the messages before the `stop`-th one; out: the sums so far."""
        what = f"group average in round {self._t}"
        for i in range(self._num_posted, min(stop, len(self._messages))):
            phase, k, is_summed = self._messages[i]
            self.partner = _partner(phase)
            own = (out if is_summed else self._source).chunks()[k]
            sends = {} if phase.out_peer is None else {phase.out_peer: [own.raw]}
            recvs = {} if phase.in_peer is None else {phase.in_peer: [self._inbox[i % len(self._inbox)][k].raw]}
            self._posted.append(self.transport.exchange(sends, recvs, tag=self._t, what=what))
            self._num_posted = i + 1

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


def _partner(phase: Phase) -> int:
    partner = phase.in_peer if phase.out_peer is None else phase.out_peer
    return -1 if partner is None else partner


def _inbox_like(s: FlatVector) -> tuple[tuple[FlatVector, ...], ...]:
    """Receive buffers for the chunks of s that are under way at a time: in each one there is a place for any chunk."""
    layouts = [chunk.layout for chunk in s.chunks()]
    memory = [s.raw.new_zeros(min(CHUNK_BYTES, s.layout.num_bytes)) for _ in layouts[:_NUM_POSTED]]
    return tuple(tuple(FlatVector(layout, raw[: layout.num_bytes]) for layout in layouts) for raw in memory)
