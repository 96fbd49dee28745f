"""MessageRounds: encoded messages to the peers of a round and from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.vector import FlatVector, add_
from ..gossiper.gossiper import Gossiper, Messages
from ..gossiper.linked import LinkedGossiper
from ..gossiper.message import MessageBuffer, warn_of_little
from ..mixing_manager.base import MixingManager, MixingWeights
from ..transport.base import Transport
from .memory import Memory
from .message import Code, Message, Received
from .vector import Vector

_PHASES = 64  # exchanges of one round, at most


class MessageRounds(LinkedGossiper):
    """Sends the messages of an algorithm, with the buffers of the model in front of them, and receives those of peers.

    Messages are numbered and compared by digests: see [Note: out of step] of `MessageCheck`. A peer that fails is left
    out of the round: see [Note: lost peers] of `Gossiper`.

    Args:
        memory: forgets links, or knows them under other ranks, when messages do.
        has_links: whether the algorithm keeps something that must be the same at both ends of a link.
        is_checked: whether numbers and digests are compared.
    """

    is_elastic = True

    def __init__(self, memory: Memory, *, has_links: bool, is_checked: bool = True) -> None:
        super().__init__()
        self.has_links = has_links
        self._kept, self._is_checked = memory, is_checked
        self._numbers: dict[int, int] = {}  # of messages to each peer
        self._phase = 0
        self._checksums: Mapping[int, int] = {}
        self._inboxes: Mapping[int, Message] = {}

    def begin_round(self, x: Vector, t: int) -> None:
        """Round t is about x; nothing is sent."""
        self._x, self._t, self._phase = x, t, 0
        self._is_planned = False

    def release(self) -> None:
        """The vector of the last round is needed no more."""
        self._x = Vector(())

    @property
    def peers(self) -> Sequence[int]:
        """The peers of the round that are there. The first look of a round compares links, see [Note: links anew]."""
        if not self._is_planned:
            assert self._x.flat is not None, "messages carry the buffers of a flat vector"
            self._begin(self._x.flat, self._t)
            self._peers, self._is_planned = tuple(self.live(self._in_peers)), True
        return self._peers

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> Message:
        """A message of that code for vectors like x; its memory is used again for the next one of that key."""
        flat = self._x.flat
        assert flat is not None, "messages carry the buffers of a flat vector"
        shapes = tuple((part.dtype, part.numel()) for part in x.parts)
        sizes = self._kept.cached(("sizes", id(code), shapes), lambda: (code, self._sizes_of(code, x)))[1]
        message = self.room_for_fields(sizes, key=key)
        message.code = code
        return message

    def _sizes_of(self, code: Code, x: Vector) -> Sequence[tuple[torch.dtype, int]]:
        wide = [part if part.element_size() >= 4 else part.float() for part in x.parts]
        num_bytes = [code.message_like(part).numel() if part.numel() else 0 for part in wide]
        if self.transport.rank == 0 and isinstance(code, Compressor):  # all have the same layout
            size = sum(part.numel() * part.element_size() for part in x.parts)
            warn_of_little(str(code), exact=0, compressed=size, num_compressed_bytes=sum(num_bytes), remedy="")
        return [(torch.uint8, size) for size in num_bytes]

    def room_for_fields(self, sizes: Sequence[tuple[torch.dtype, int]], *, key: object) -> Message:
        """See `Vectors.message`; in the first exchange of a round the buffers of the model are in front."""
        flat = self._x.flat
        assert flat is not None, "messages carry the buffers of a flat vector"
        others = [(b.dtype, b.numel()) for b in flat.buffers] if self._phase == 0 else []
        return Message(None, self._room((*others, *sizes), key), num_others=len(others))

    def _room(self, sizes: tuple[tuple[torch.dtype, int], ...], key: object) -> MessageBuffer:
        flat = self._x.flat
        assert flat is not None, "messages carry the buffers of a flat vector"
        return self._kept.cached((key, sizes), lambda: MessageBuffer(sizes, flat.raw.device))

    def row_of(self, message: Message, replies: Mapping[int, Message]) -> Received:
        """See `Share`. message: went to all peers. replies: of the peers."""
        inp, names = self._weights.inp, self.transport.names
        row = [(self._weights.own - 1, message), *((inp[j], reply) for j, reply in replies.items())]
        return Received(row, [names[j] for j in (self.transport.rank, *replies)])

    def post(
        self, messages: Mapping[int, Message], buffers: Sequence[Tensor], *, checksums: Mapping[int, int] | None = None
    ) -> None:
        """See `Exchange`; `wait` comes next. buffers: of the model, sent in the first exchange of a round."""
        num_others = len(buffers) if self._phase == 0 else 0
        for message in {id(m): m for m in messages.values()}.values():
            for field, mine in zip(message.buffer.fields[:num_others], buffers, strict=False):
                field.copy_(mine)
        self._inboxes = {
            j: Message(message.code, self._room(message.buffer.sizes, ("from", j)), num_others)
            for j, message in messages.items()
        }
        self._buffers = {j: (message.buffer, self._inboxes[j].buffer) for j, message in messages.items()}
        self._checksums = checksums or {}
        if self._is_checked:
            self.post_headers()
        sends = {j: (mine.raw,) for j, (mine, _) in self._buffers.items()}
        self._pending = self.transport.exchange(
            sends, {j: (theirs.raw,) for j, (_, theirs) in self._buffers.items()}, tag=self._t
        )

    def wait(self, buffers: Sequence[Tensor]) -> dict[int, Message]:
        """The replies to what was posted. buffers: of the model, mutated in the first exchange of a round."""
        self._wait()
        for j in self._buffers:
            self._numbers[j] = self._numbers.get(j, 0) + 1
        if self._phase == 0:
            self._mix_buffers(buffers)
        self._phase += 1
        self._peers = tuple(self._buffers)
        return {j: self._inboxes[j] for j in self._buffers}

    def _wait(self) -> None:
        if self._is_checked:
            super()._wait()
        else:
            Gossiper._wait(self)

    def weight_of(self, peer: int) -> float:
        """See `Vectors`."""
        return self._weights.inp[peer]

    def _mix_buffers(self, buffers: Sequence[Tensor]) -> None:
        """b <- b + sum_j W_ij (b_j - b), with weights that are not negative."""
        for j, (mine, theirs) in self._buffers.items():
            alpha = self._buffer_weights.inp[j]
            for b, own, other in zip(buffers, mine.fields, theirs.fields, strict=False):
                add_(b, other, alpha=alpha)
                add_(b, own, alpha=-alpha)

    # See `LinkedGossiper`.

    def message_number(self, peer: int) -> int:
        """See `LinkedGossiper`. Workers of a membership have exchanged more or fewer messages, so the round counts."""
        if self._is_elastic and not self.has_links:
            return self._t * _PHASES + self._phase
        return self._numbers.get(peer, 0)

    def state_checksum(self, peer: int) -> int:
        """See `LinkedGossiper`."""
        return self._checksums.get(peer, 0)

    def link_age(self, peer: int) -> int:
        """See `LinkedGossiper`."""
        return self._numbers.get(peer, 0)

    def forget_link(self, peer: int) -> None:
        """See `LinkedGossiper`."""
        self._numbers.pop(peer, None)
        self._kept.forget_peer(peer)

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """See `LinkedGossiper`."""
        self._numbers = {ranks[peer]: number for peer, number in self._numbers.items() if peer in ranks}
        self._kept.renumber_links(ranks)

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`; the algorithm has looked."""

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`; `exchange` is called in its place."""
        raise AssertionError("messages of algorithms go through exchange()")

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `encode`."""
        raise AssertionError("messages of algorithms go through exchange()")

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`: the numbers and digests of messages."""
        return {} if self._is_elastic else {"numbers": dict(self._numbers), **self._message_check.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`."""
        state = {} if self._is_elastic else state
        self._numbers = dict(state.get("numbers", {}))
        self._message_check.load_state_dict(state)

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `LinkedGossiper`."""
        self._layout = self._layout or FlatVector.over(torch.zeros(1, device="cpu")).layout  # something is kept
        super().rebind(mixing, transport)
