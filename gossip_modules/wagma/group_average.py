"""GroupAverage: the exact average within the groups of round t."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from ..flat.nonfinite import is_finite, refuse
from ..flat.vector import FlatVector, in_chunks
from ..graph_manager.butterfly_groups import ButterflyGroups, Phase
from ..profiling import span
from ..rounds.mixer import Mixer
from ..transport.base import Pending, Transport

CHUNK_BYTES = 8 << 20  # half of plain gossip's, since there is memory for several chunks
_NUM_POSTED = 3  # chunks that are under way at a time


class _Message(NamedTuple):
    """A chunk in a phase; is_mean: whether the phases before have written it to the result."""

    phase: Phase
    chunk: int
    is_mean: bool


class GroupAverage(Mixer):
    """x_i <- mean of x_j over the group of i in round t: W(t) is made of blocks, symmetric and doubly stochastic.

    Recursive doubling, in log2 S phases for groups of S ranks:

        for mask in groups.masks(t):
            exchange x with the rank whose position differs by mask;  x <- the mean of both, weighted by members

    The two ranks of an exchange compute the same expression of the same numbers, so all members end with the same bits.
    Means are in the dtype of the vector, each one computed in float32 if that dtype is narrower. A vector is sent in
    chunks. A chunk is averaged while the next ones, and the last ones of the phase before, are under way. So a round
    needs room for the result and for a few chunks, and phases do not wait for each other. A failed round leaves x
    unchanged. The push-sum weight is not sent: it becomes one. If the world is no power of two, some ranks give their x
    to a member before the phases and get the mean after them: see [Note: other worlds] of `ButterflyGroups`.

    Args:
        groups: the groups of the transport's world.
        transport: the transport of this rank.

    Attributes:
        partner: the peer of the current phase; -1 = none.
        writing: makes the context for filling or adding a chunk.
        is_checked: whether to refuse a vector with infinities or NaN: `start` or `finish` raises FloatingPointError
            before it sends a chunk with one.
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
        self.writing: Callable[[], AbstractContextManager[None]] = nullcontext
        self.is_checked = False
        self._inbox: tuple[tuple[FlatVector, ...], ...] = ()  # room for each chunk in the memory of each of a few
        self._mean: FlatVector | None = None  # of `finish`
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

    def start(self, s: FlatVector, t: int, fill: Callable[[int], None] | None = None) -> None:
        """See `Mixer`. Posts the first chunks of the first phase.

        Args:
            s: the vector to average.
            t: the number of the round.
            fill: `fill(k)` writes chunk k of s. It is called once for each chunk, in order, before the chunk is sent;
                None: s is written already.
        """
        assert not self._posted, "a round is in flight: finish() it before the next start()"
        self._t, self._source, self._fill, self._messages, self._num_posted = t, s, fill, [], 0
        chunks, is_mean = chunks_of(s), False
        for phase in self.groups.phases(self.transport.rank, t):
            self._messages += [_Message(phase, k, is_mean) for k in range(len(chunks))]
            is_mean |= phase.in_peer is not None
        if not self._inbox or [x.layout for x in self._inbox[0]] != [x.layout for x in chunks]:
            self._inbox = _inbox_like(s)
        if fill is not None and not self._messages:  # a group of one
            for k in range(len(chunks)):
                fill(k)
        self._post(len(self._inbox), s)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        if self._mean is None or self._mean.layout != s.layout or self._mean.raw.device != s.raw.device:
            self._mean = s.like()
        self.finish_to(self._mean)
        s.raw.copy_(self._mean.raw)
        s.reset_weight_()

    def finish_to(self, out: FlatVector) -> None:
        """Wait, then out <- the mean, where `start` was called with another vector of the same layout.

        A chunk of `out` is written after the same chunk of s is filled, so s may be filled from `out`.
        """
        if not self._messages:
            out.raw.copy_(self._source.raw)
        for i, (phase, k, is_mean) in enumerate(self._messages):
            # No chunk is posted before the phase before has written it: at most as many as there are have room.
            self._post(i + len(self._inbox), out)
            self.partner = _partner(phase)
            with span("gossip.wait"):
                self._posted.popleft().wait()
            if phase.in_peer is not None:
                first, second = chunks_of(out if is_mean else self._source)[k], self._inbox[i % len(self._inbox)][k]
                if not phase.is_first:
                    first, second = second, first
                with self.writing():
                    _mean_to(chunks_of(out)[k], first, second, phase.weight)
        self.partner = -1

    def _post(self, stop: int, out: FlatVector) -> None:
        """Post the messages before the `stop`-th one; out: the means so far."""
        what = f"group average in round {self._t}"
        for i in range(self._num_posted, min(stop, len(self._messages))):
            phase, k, is_mean = self._messages[i]
            self.partner = _partner(phase)
            own = chunks_of(out if is_mean else self._source)[k]
            if i == k:  # in the first phase
                if self._fill is not None:
                    with self.writing():
                        self._fill(k)
                if self.is_checked and not is_finite(own):
                    refuse(self.transport.names[self.transport.rank], f"round {self._t}")
            sends = {} if phase.out_peer is None else {phase.out_peer: [own.raw]}
            recvs = {} if phase.in_peer is None else {phase.in_peer: [self._inbox[i % len(self._inbox)][k].raw]}
            self._posted.append(self.transport.exchange(sends, recvs, tag=self._t, what=what))
            self._num_posted = i + 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.groups})"


def chunks_of(x: FlatVector) -> Sequence[FlatVector]:
    """Return the chunks of x for sending."""
    return x.chunks(CHUNK_BYTES)


def _mean_to(out: FlatVector, first: FlatVector, second: FlatVector, weight: float) -> None:
    """out <- (1 - weight) first + weight second, in float32 where dtypes are narrower; one pass."""
    for result, a, b in zip(out.segments, first.segments, second.segments, strict=True):
        if result.element_size() >= 4:
            torch.lerp(a, b, weight, out=result)
        else:
            for piece, one, other in in_chunks(result, a, b):
                piece.copy_(torch.lerp(one.float(), other.float(), weight))


def _partner(phase: Phase) -> int:
    partner = phase.in_peer if phase.out_peer is None else phase.out_peer
    return -1 if partner is None else partner


def _inbox_like(s: FlatVector) -> tuple[tuple[FlatVector, ...], ...]:
    """Return receive buffers for the chunks of s under way at a time: each one has a place for any chunk."""
    layouts = [chunk.layout for chunk in chunks_of(s)]
    memory = [s.raw.new_zeros(min(CHUNK_BYTES, s.layout.num_bytes)) for _ in layouts[:_NUM_POSTED]]
    return tuple(tuple(FlatVector(layout, raw[: layout.num_bytes]) for layout in layouts) for raw in memory)
