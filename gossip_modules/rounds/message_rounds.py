"""MessageRounds: exchanges encoded messages with the peers of a round, and compares their numbers and digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Code as Code
from ..compression.compressor import Compressor
from ..flat.vector import add_
from ..mixing_manager.base import MixingManager
from ..transport.base import Pending, Transport
from .memory import Memory
from .messages import Message, MessageBuffer, Received, warn_of_little
from .push_pull import Neighbours
from .vector import Vector

_PHASES = 64  # exchanges of one round, at most
_WORD = 1 << 32  # the numbers in a header are unsigned and have 32 bits
_HEADER_TAG = -1  # no round has this tag: headers must reach each other even if the two ranks are in different rounds


class Header:
    """The 8 bytes that are sent ahead of a message: its number and a checksum, both modulo 2**32.

    Args:
        number: the number of the message, counted by its sender.
        checksum: a number that the receiver computes as well and compares.
        device: the device of the 8 bytes.
    """

    def __init__(self, number: int = 0, checksum: int = 0, *, device: torch.device) -> None:
        words = torch.tensor([number % _WORD, checksum % _WORD], dtype=torch.int64, device="cpu")
        # Stored as int32 with the same bits, since torch has few operations on unsigned numbers.
        self.raw = torch.where(words < _WORD // 2, words, words - _WORD).to(device, torch.int32)

    def read(self) -> tuple[int, int]:
        """The number and the checksum. Waits for the device."""
        number, checksum = self.raw.tolist()
        return number % _WORD, checksum % _WORD


class MessageCheck:
    """For each peer, a digest of all messages that the two ranks have exchanged, and the headers that compare it.

    [Note: out of step] A header of 8 bytes is sent ahead of every message. It holds the number of the message and the
    digest of all earlier messages in both directions. If a peer was resumed from another checkpoint, one of the two
    differs, and both ranks raise an error. Without the header they would decode messages against different states and
    damage the models silently.
    """

    def __init__(self) -> None:
        self._digests: dict[int, int] = {}
        self._headers: dict[int, tuple[Header, Header]] = {}
        self._pending: Pending | None = None

    def post(self, transport: Transport, expected: Mapping[int, tuple[int, int]], *, t: int) -> None:
        """Send a header to each peer and post the receive of its header, without waiting.

        Args:
            transport: the transport that the messages use as well.
            expected: for each peer, the number of the next message and a checksum of the state that both ends share.
            t: the round, for error messages.
        """
        device = transport.device
        self._headers = {
            peer: (Header(number, self._digests.get(peer, 0) + checksum, device=device), Header(device=device))
            for peer, (number, checksum) in expected.items()
        }
        sends = {peer: (mine.raw,) for peer, (mine, _) in self._headers.items()}
        recvs = {peer: (theirs.raw,) for peer, (_, theirs) in self._headers.items()}
        self._pending = transport.exchange(sends, recvs, tag=_HEADER_TAG, what=f"round {t}, header")

    def wait(self, transport: Transport, *, t: int) -> Set[int]:
        """Wait for the headers and compare them; see [Note: out of step].

        Returns:
            The peers that have failed, on an elastic transport.

        Raises:
            RuntimeError: a peer sent another message than this rank expects.
            TimeoutError, ConnectionError: naming the peer and the round.
        """
        lost = self._arrive(transport)
        for peer, (mine, theirs) in self._headers.items():
            if peer not in lost:
                _require_equal(transport, peer, mine.read(), theirs.read(), t=t)
        return lost

    def differing(self, transport: Transport, expected: Mapping[int, tuple[int, int]], *, t: int) -> Set[int]:
        """Return the peers whose number or checksum differs, and failed peers; arguments as for `post`."""
        self.post(transport, expected, t=t)
        lost = self._arrive(transport)
        pairs = self._headers.items()
        return {peer for peer, (mine, theirs) in pairs if peer in lost or mine.read() != theirs.read()}

    def _arrive(self, transport: Transport) -> Set[int]:
        """Wait for the headers; returns the peers that have failed."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a header is posted with every message"
        pending.wait()
        return pending.lost

    def forget(self, peer: int) -> None:
        """Drop the digest of a peer, so that the next message starts a new one."""
        self._digests.pop(peer, None)

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Keep the digests of these peers only, under new ranks.

        Args:
            ranks: the new rank of each peer, by its old rank.
        """
        self._digests = {ranks[peer]: digest for peer, digest in self._digests.items() if peer in ranks}

    def add(self, peer: int, messages: Iterable[MessageBuffer]) -> None:
        """Include messages to and from a peer in its digest."""
        total = sum(int(message.raw.view(torch.int64).sum()) for message in messages)
        self._digests[peer] = (31 * self._digests.get(peer, 0) + total) % _WORD

    def state_dict(self) -> dict[str, Any]:
        """The digests, for a checkpoint."""
        return {"peers": list(self._digests), "digests": list(self._digests.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the digests from a state, which may hold other entries too; an empty state resets them."""
        self._digests = dict(zip(state.get("peers", ()), state.get("digests", ()), strict=True))


def _require_equal(transport: Transport, peer: int, mine: tuple[int, int], theirs: tuple[int, int], *, t: int) -> None:
    names = transport.names
    who = f"rank {names[transport.rank]}: round {t}"
    remedy = "resume all ranks from the same checkpoint, or all without one"
    if mine[0] != theirs[0]:
        raise RuntimeError(
            f"{who}: rank {names[peer]} sent its message number {theirs[0]}, expected number {mine[0]}: the two ranks "
            f"have gossiped in a different number of rounds; {remedy}"
        )
    if mine[1] != theirs[1]:
        raise RuntimeError(
            f"{who}: rank {names[peer]} sent digest {theirs[1]} before message number {mine[0]}, expected {mine[1]}: "
            f"the two ranks have exchanged other messages or hold different states; {remedy}, and check the machines "
            "if the error repeats"
        )


class MessageRounds:
    """Exchanges the messages of an algorithm with peers, with the buffers of the model in front of each message.

    Messages are numbered, and digests compare them: see [Note: out of step] of `MessageCheck`. A round goes on without
    peers that fail: see [Note: lost peers] of `Neighbours`.

    [Note: links anew] If a peer fails, this rank drops the state of the link to it. The peer may be alive all the same;
    it may then have kept its state, or applied one more message. So when the transport has changed, both ends of a link
    compare the number and the digest of its messages before the first round over it. If they are equal, both ends keep
    the state of the link. Otherwise both drop it and start a new one in this round. Links are identified by the names
    of their ends. Checkpoints of jobs with a membership contain no links, since the worker that loads one may have
    other peers.

    Args:
        memory: the memory with the links of the algorithm, which are dropped and renumbered along with the messages.
        has_links: whether the algorithm keeps a state that must be equal at both ends of a link.
        is_checked: whether numbers and digests are compared.
    """

    def __init__(self, memory: Memory, *, has_links: bool, is_checked: bool = True) -> None:
        self.has_links = has_links
        self.memory, self._is_checked = memory, is_checked
        self._message_check = MessageCheck()
        self._numbers: dict[int, int] = {}  # the number of the next message to each peer
        self._buffers: dict[int, tuple[MessageBuffer, MessageBuffer]] = {}  # outgoing and incoming, by peer
        self._lost: set[int] = set()  # peers that have failed on this transport
        self._compared: set[int] = set()  # peers with which the link was compared on this transport
        self._phase = 0
        self._checksums: Mapping[int, int] = {}
        self._inboxes: Mapping[int, Message] = {}
        self._pending: Pending | None = None

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """Set the peers and the transport."""
        self.mixing, self.transport, self._is_elastic = mixing, transport, transport.is_elastic
        self._row = Neighbours(mixing, transport)

    @property
    def sources(self) -> Sequence[int]:
        """The in-peers of the last round that has begun."""
        return self._row.in_peers

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return self._row.buffer_weights.own

    def begin_round(self, x: Vector, t: int) -> None:
        """Begin round t for the vector x; sends nothing."""
        self._x, self._t, self._phase = x, t, 0
        self._is_planned = False

    def release(self) -> None:
        """Drop the reference to the vector of the last round."""
        self._x = Vector(())

    @property
    def peers(self) -> Sequence[int]:
        """The live peers of the round. The first access in a round compares links: see [Note: links anew]."""
        if not self._is_planned:
            assert self._x.flat is not None, "messages carry the buffers of a flat vector"
            self._row.begin(self._t, self._x.flat.push_sum_weight)
            self._peers, self._is_planned = self._live_peers(), True
        return self._peers

    def _live_peers(self) -> tuple[int, ...]:
        """Return the peers of the round that have not failed, and restart links that differ: [Note: links anew]."""
        peers = tuple(peer for peer in self._row.in_peers if peer not in self._lost)
        new = [peer for peer in peers if peer not in self._compared] if self.has_links and self._is_elastic else []
        self._compared.update(new)
        if new:
            ages = {peer: (self.link_age(peer), 0) for peer in new}
            for peer in self._message_check.differing(self.transport, ages, t=self._t):
                self._forget(peer)
        return peers

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> Message:
        """Return a message for vectors like x. The next message with the same key reuses its memory."""
        flat = self._x.flat
        assert flat is not None, "messages carry the buffers of a flat vector"
        shapes = tuple((part.dtype, part.numel()) for part in x.parts)
        sizes = self.memory.cached(("sizes", id(code), shapes), lambda: (code, self._sizes_of(code, x)))[1]
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
        """See `Vectors.message`. In the first exchange of a round the message begins with the buffers of the model."""
        flat = self._x.flat
        assert flat is not None, "messages carry the buffers of a flat vector"
        others = [(b.dtype, b.numel()) for b in flat.buffers] if self._phase == 0 else []
        return Message(None, self._room((*others, *sizes), key), num_others=len(others))

    def _room(self, sizes: tuple[tuple[torch.dtype, int], ...], key: object) -> MessageBuffer:
        flat = self._x.flat
        assert flat is not None, "messages carry the buffers of a flat vector"
        if not self._is_checked:  # messages are whole models, whose memory training may use between rounds
            return MessageBuffer(sizes, flat.raw.device)
        return self.memory.cached((key, sizes), lambda: MessageBuffer(sizes, flat.raw.device))

    def row_of(self, message: Message, replies: Mapping[int, Message]) -> Received:
        """Return the reply to `Share`.

        Args:
            message: the message that was sent to all peers.
            replies: the messages of the peers.
        """
        weights, inp, names = self._row.weights, self._row.weights.inp, self.transport.names
        row = [(weights.own - 1, message), *((inp[j], reply) for j, reply in replies.items())]
        return Received(row, [names[j] for j in (self.transport.rank, *replies)])

    def post(
        self, messages: Mapping[int, Message], buffers: Sequence[Tensor], *, checksums: Mapping[int, int] | None = None
    ) -> None:
        """Send messages and post the receives of the replies; call `wait` next. See `Exchange`.

        Args:
            messages: the message for each peer.
            buffers: the buffers of the model, sent in the first exchange of a round.
            checksums: see `Exchange`.
        """
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
        """Wait for the replies to the posted messages, and return them.

        Args:
            buffers: the buffers of the model, mutated in the first exchange of a round.
        """
        self._wait()
        for j in self._buffers:
            self._numbers[j] = self._numbers.get(j, 0) + 1
        if self._phase == 0:
            self._mix_buffers(buffers)
        self._phase += 1
        self._peers = tuple(self._buffers)
        replies = {j: self._inboxes[j] for j in self._buffers}
        self._buffers, self._inboxes = {}, {}
        return replies

    def gather(self, message: Message, buffers: Sequence[Tensor]) -> Received:
        """Send a message to all ranks and return the messages of all ranks; see `Gather`.

        On an elastic transport a second collective confirms that all ranks have the messages, as in `ElasticAverage`.

        Args:
            message: the message of this rank.
            buffers: the buffers of the model, sent along; mutated to their mean over all ranks.
        """
        num_others = len(message.buffer.fields) - len(message.fields)
        for field, own in zip(message.buffer.fields[:num_others], buffers, strict=True):
            field.copy_(own)
        mine, n = message.buffer.raw, self.transport.world_size
        everyone = mine.new_empty(n * mine.numel())
        if mine.numel():
            self.transport.all_gather(everyone, mine, what=f"messages of round {self._t}")
        if self._is_elastic:
            end = torch.zeros(1, device="cpu")
            self.transport.all_reduce(end, what=f"end of the messages of round {self._t}")
        sizes = message.buffer.sizes
        received = [Message(message.code, MessageBuffer(sizes, raw), num_others) for raw in everyone.view(n, -1)]
        for k, own in enumerate(buffers):
            total = torch.zeros_like(own, dtype=own.dtype if own.element_size() >= 4 else torch.float32)
            for theirs in received:
                total.add_(theirs.buffer.fields[k])
            own.copy_(total.div_(n))
        return Received([(1.0, theirs) for theirs in received])

    def post_headers(self) -> None:
        """Send the headers of the messages in `_buffers`."""
        numbers = {peer: (self._message_number(peer), self._checksums.get(peer, 0)) for peer in self._buffers}
        self._message_check.post(self.transport, numbers, t=self._t)

    def _wait(self) -> None:
        messages, self._pending = self._pending, None
        assert messages is not None, "no message is in flight: post() comes first"
        # Headers first: where the numbers differ, the messages may have another size.
        lost = self._message_check.wait(self.transport, t=self._t) if self._is_checked else frozenset()
        messages.wait()
        if self._is_elastic:
            self._lost |= lost | messages.lost
            if lost := self._lost.intersection(self._row.in_peers):
                self._leave_out(lost)
        if self._is_checked:
            for peer, buffers in self._buffers.items():
                self._message_check.add(peer, buffers)

    def _message_number(self, peer: int) -> int:
        """Return the number of the next message.

        Workers of a membership may have exchanged different numbers of messages, so they use the number of the round.
        """
        if self._is_elastic and not self.has_links:
            return self._t * _PHASES + self._phase
        return self._numbers.get(peer, 0)

    def weight_of(self, peer: int) -> float:
        """See `Vectors`."""
        return self._row.weights.inp[peer]

    def _mix_buffers(self, buffers: Sequence[Tensor]) -> None:
        """b <- b + sum_j W_ij (b_j - b), with weights that are not negative."""
        for j, (mine, theirs) in self._buffers.items():
            alpha = self._row.buffer_weights.inp[j]
            for b, own, other in zip(buffers, mine.fields, theirs.fields, strict=False):
                add_(b, other, alpha=alpha)
                add_(b, own, alpha=-alpha)

    # Failed peers and changed transports.

    def link_age(self, peer: int) -> int:
        """Return the number of messages over a link, equal at both ends; 0 if no state is kept for it."""
        return self._numbers.get(peer, 0)

    def _leave_out(self, lost: Set[int]) -> None:
        """Go on without these peers and drop their links: see [Note: lost peers]."""
        self._row.leave_out(lost)
        for peer in lost:
            self._buffers.pop(peer, None)
            self._forget(peer)

    def _forget(self, peer: int) -> None:
        self._numbers.pop(peer, None)
        self.memory.forget_peer(peer)
        self._message_check.forget(peer)

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`; links to peers whose names are still there are kept."""
        names, ranks = self.transport.names, {name: rank for rank, name in enumerate(transport.names)}
        for peer in self._lost:
            self._forget(peer)
        self.bind(mixing, transport)
        self._lost, self._compared = set(), set()
        peers = mixing.graph.phone_book(transport.rank) if self.has_links else ()
        kept = {rank: ranks[name] for rank, name in enumerate(names) if name in ranks and ranks[name] in peers}
        self._message_check.renumber(kept)
        self._numbers = {kept[peer]: number for peer, number in self._numbers.items() if peer in kept}
        self.memory.renumber_links(kept)

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`: the numbers and digests of messages."""
        return {} if self._is_elastic else {"numbers": dict(self._numbers), **self._message_check.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`."""
        state = {} if self._is_elastic else state
        self._numbers = dict(state.get("numbers", {}))
        self._message_check.load_state_dict(state)
