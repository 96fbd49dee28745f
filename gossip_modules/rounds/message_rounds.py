"""MessageRounds: exchanges encoded messages with the peers of a round, and compares their numbers and digests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..compression.compressor import Code as Code
from ..compression.compressor import Compressor
from ..flat.vector import FlatVector, add_
from ..mixing_manager.base import MixingManager
from ..state import State, leaf, transient
from ..transport.base import Pending, Transport
from ..worlds.all_or_none import all_or_none
from .memory import Memory
from .messages import Message, MessageBuffer, Received, warn_of_little, warns_of_much
from .push_pull import Neighbours
from .requests import Mail, Sizes
from .vector import Vector, wide

_PHASES = 64  # exchanges of one round, at most
_WORD = 1 << 32  # the numbers in a header are unsigned and have 32 bits
_HEADER_TAG = -1  # no round has this tag: headers must reach each other even if the two ranks are in different rounds


def header(number: int, checksum: int, device: torch.device) -> Tensor:
    """Make the 8 bytes that are sent ahead of a message, int64 [1]: a number and a checksum, both modulo 2**32."""
    words = np.array([number % _WORD, checksum % _WORD], dtype=np.uint32)
    return torch.from_numpy(words.view(np.int64)).to(device)


def read_header(raw: Tensor) -> list[int]:
    """Return the number and the checksum of a header. Waits for the device."""
    return raw.cpu().numpy().view(np.uint32).tolist()


class MessageCheck(State):
    """For each peer, the number and a digest of the messages so far, and the headers that compare them.

    [Note: out of step] A header of 8 bytes is sent ahead of every message. It holds the number of the message and the
    digest of all earlier messages in both directions. If a peer was resumed from another checkpoint, one of the two
    differs, and both ranks raise an error. Without the header they would decode messages against different states and
    damage the models silently.

    Attributes:
        numbers: the number of the next message to each peer, equal at both ends of a link.
        is_cut_off: whether an exchange failed while messages were in transfer, and other ranks cannot go on without
            this one.
    """

    numbers: dict[int, int] = leaf({}, is_by_peer=True)
    is_cut_off: bool = leaf(False, is_saved=False)
    _digests: dict[int, int] = leaf({}, is_by_peer=True)
    _headers: dict[int, tuple[Tensor, Tensor]] = transient({})
    _pending: Pending | None = transient(None)

    def post(self, transport: Transport, expected: Mapping[int, tuple[int, int]], *, t: int) -> None:
        """Send a header to each peer and post the receive of its header, without waiting.

        Args:
            transport: the transport that the messages use as well.
            expected: for each peer, the number of the next message and a checksum of the state that both ends share.
            t: the round, for error messages.
        """
        device = transport.device
        self._headers = {
            peer: (header(number, self._digests.get(peer, 0) + checksum, device), header(0, 0, device))
            for peer, (number, checksum) in expected.items()
        }
        sends, recvs = ({peer: (pair[side],) for peer, pair in self._headers.items()} for side in (0, 1))
        self._pending = transport.exchange(sends, recvs, tag=_HEADER_TAG, what=f"round {t}, header")

    def arrive(self, transport: Transport) -> Set[int]:
        """Wait for the headers; returns the failed peers."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a header is posted with every message"
        pending.wait()
        return pending.lost

    def wait(self, transport: Transport, *, t: int) -> Set[int]:
        """Wait for the headers and compare them; see [Note: out of step].

        Returns:
            The failed peers, on an elastic transport.

        Raises:
            RuntimeError: a peer sent another message than this rank expects.
            TimeoutError, ConnectionError: naming the peer and the round.
        """
        lost = self.arrive(transport)
        for peer, pair in self._headers.items():
            if peer not in lost:
                mine, theirs = map(read_header, pair)
                if mine != theirs:
                    _refuse(transport, peer, mine, theirs, t=t)
        return lost

    def differing(self, transport: Transport, peers: Iterable[int], *, t: int) -> Set[int]:
        """Return the peers whose number of messages or digest differs, and failed peers."""
        self.post(transport, {peer: (self.numbers.get(peer, 0), 0) for peer in peers}, t=t)
        lost = self.arrive(transport)
        return {peer for peer, pair in self._headers.items() if peer in lost or not torch.equal(*pair)}

    def add(self, peer: int, *messages: MessageBuffer) -> None:
        """Count a message to a peer, and include the messages, to it and from it, in its digest."""
        self.numbers[peer] = self.numbers.get(peer, 0) + 1
        if messages:
            total = sum(int(message.raw.view(torch.int64).sum()) for message in messages)
            self._digests[peer] = (31 * self._digests.get(peer, 0) + total) % _WORD

    def to_layout(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `State`."""
        digests = state.get("digests", {})
        return {**state, "peers": list(digests), "digests": list(digests.values())} if state else state

    def from_layout(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `State`."""
        digests = dict(zip(state.get("peers", ()), state.get("digests", ()), strict=True))
        return {"digests": digests, **{name: state[name] for name in state.keys() - {"peers", "digests"}}}


def _refuse(transport: Transport, peer: int, mine: Sequence[int], theirs: Sequence[int], *, t: int) -> None:
    names = transport.names
    who = f"rank {names[transport.rank]}: round {t}"
    remedy = "resume all ranks from the same checkpoint, or all without one"
    if mine[0] != theirs[0]:
        raise RuntimeError(
            f"{who}: rank {names[peer]} sent its message number {theirs[0]}, expected number {mine[0]}: the two ranks "
            f"have gossiped in a different number of rounds; {remedy}"
        )
    raise RuntimeError(
        f"{who}: rank {names[peer]} sent digest {theirs[1]} before message number {mine[0]}, expected {mine[1]}: "
        f"the two ranks have exchanged other messages or hold different states; {remedy}, and check the machines "
        "if the error repeats"
    )


class MessageRounds(Mail):
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
        self.memory, self.has_links, self._is_checked = memory, has_links, is_checked
        self.message_check = MessageCheck()
        self._pairs: dict[int, tuple[Message, Message]] = {}  # the message to each peer, and the one from it
        self._lost: set[int] = set()  # peers that have failed on this transport
        self._compared: set[int] = set()  # peers with which the link was compared on this transport
        self._phase = 0
        self._has_warned = False  # of large trimmed messages
        self._pending: Pending | None = None
        self._lent: dict[Hashable, Message] = {}  # of this exchange, until no peer can write or read them
        self._free: dict[Hashable, Message] = {}  # of this round, whose algorithm may still read them

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """Set the peers and the transport."""
        self.mixing, self.transport, self._is_elastic = mixing, transport, transport.is_elastic
        self.row = Neighbours(mixing, transport)

    def begin_round(self, flat: FlatVector, t: int, buffers: Sequence[Tensor]) -> None:
        """Begin round t for a vector; sends nothing.

        Args:
            flat: the vector.
            t: the number of the round.
            buffers: the buffers of the model, which the first exchange of the round mixes.
        """
        self._t, self._phase, self._is_planned, self._buffers = t, 0, False, buffers
        self._device, self._weight = flat.raw.device, flat.push_sum_weight
        self._others = tuple((b.dtype, b.numel()) for b in buffers)
        self._room = self.memory.cached("messages", dict[Hashable, Message])  # the messages of earlier rounds
        self._room.update(self._free)
        self._lent, self._free = {}, {}

    def find_peers(self) -> Sequence[int]:
        """Return the live peers of the round.

        The first call in a round with new peers exchanges headers with them, which compare links: see
        [Note: links anew].
        """
        if not self._is_planned:
            self.row.begin(self._t, self._weight)
            self._peers, self._is_planned = tuple(j for j in self.row.in_peers if j not in self._lost), True
            new = [j for j in self._peers if j not in self._compared] if self.has_links and self._is_elastic else []
            self._compared.update(new)
            for peer in self.message_check.differing(self.transport, new, t=self._t) if new else ():
                self._forget(peer)
        return self._peers

    def weight_of(self, peer: int) -> float:
        """See `Vectors`."""
        return self.row.weights.inp[peer]

    def room_for(self, code: Code, x: Vector, *, key: object = "own") -> Message:
        """See `Mail`."""
        shapes = tuple((part.dtype, part.numel()) for part in x.parts)
        return self._kept((key, id(code), shapes), lambda: self._message(self._sizes_of(code, x, shapes), code))

    def _sizes_of(self, code: Code, x: Vector, shapes: Hashable) -> Sizes:
        """Return the sizes of the fields of a message for vectors like x; warns once if the code saves nothing."""

        def make() -> Sizes:
            sizes = self.sizes_of(code, x)
            saves = isinstance(code, Compressor) and not code.is_exact
            if saves and self.transport.rank == 0:  # all have the same layout
                size, num_bytes = sum(part.nbytes for part in x.parts), sum(numel for _, numel in sizes)
                warn_of_little(str(code), exact=0, compressed=size, num_compressed_bytes=num_bytes, remedy="")
            return sizes

        return self.memory.cached(("sizes", id(code), shapes), make)

    def room_for_fields(self, sizes: Sizes, *, key: object) -> Message:
        """See `Vectors.message`."""
        return self._kept((key, *sizes), lambda: self._message(sizes))

    def _message(self, sizes: Sizes, code: Code | None = None) -> Message:
        """Make a message. In the first exchange of a round it begins with the buffers of the model."""
        others = self._others if self._phase == 0 else ()
        return Message(code, MessageBuffer((*others, *sizes), self._device), num_others=len(others))

    def _kept(self, key: Hashable, make: Callable[[], Message]) -> Message:
        """Return the message with this key, which an earlier round may have made."""
        place = key, (self._others if self._phase == 0 else ())
        if self._is_checked:
            if (message := self._room.get(place)) is None:
                message = self._room[place] = make()
            return message
        # Messages without a check are whole models. Those of links belong to the state of the links. On a GPU training
        # may use the memory of others between rounds; on a CPU new memory takes several times as long as a copy.
        if self.has_links or self._device.type != "cpu":
            return make()
        message = self._room.pop(place) if place in self._room else make()
        self._lent[place] = message
        return message

    def _reply_to(self, message: Message, place: int) -> Message:
        """Return the memory for the message of a peer that answers this one.

        Args:
            message: the own message.
            place: the peer, or its number among the peers of the round, so that other rounds use the memory for others.
        """
        sizes = message.buffer.sizes
        reply = self._kept(("from", place, sizes), lambda: message.reply_in(MessageBuffer(sizes, self._device)))
        reply.code = message.code
        return reply

    # Exchanges.

    def share(self, message: Message) -> Received:
        """Send a message to all peers and return the replies, weighted; see `Share`."""
        replies = self.exchange(dict.fromkeys(self.find_peers(), message), {})
        weights, names = self.row.weights, self.transport.names
        row = [(weights.own - 1, message), *((weights.inp[j], reply) for j, reply in replies.items())]
        return Received(row, [names[j] for j in (self.transport.rank, *replies)])

    def exchange(self, messages: Mapping[int, Message], checksums: Mapping[int, int]) -> dict[int, Message]:
        """Send messages and return the replies; see `Exchange`."""
        self.message_check.is_cut_off = not self._is_elastic
        if self._buffers:
            for message in {id(m): m for m in messages.values()}.values():
                message.fill_others(self._buffers)
        self._pairs = {
            j: (message, self._reply_to(message, j if self._is_checked else k))
            for k, (j, message) in enumerate(messages.items())
        }
        if self._is_checked:
            self.post_headers(checksums)
        sends, recvs = ({j: (pair[side].buffer.raw,) for j, pair in self._pairs.items()} for side in (0, 1))
        self._pending = self.transport.exchange(sends, recvs, tag=self._t)
        self.wait()
        if self._phase == 0:
            self._mix_buffers()
        self._phase += 1
        self._peers, replies = tuple(self._pairs), {j: theirs for j, (_, theirs) in self._pairs.items()}
        self._pairs, self.message_check.is_cut_off = {}, False
        return replies

    def post_headers(self, checksums: Mapping[int, int]) -> None:
        """Send the headers of the messages.

        Workers of a membership may have exchanged different numbers of messages, so they number messages by the round.
        """
        round_number = self._t * _PHASES + self._phase if self._is_elastic and not self.has_links else None
        numbers = self.message_check.numbers
        expected = {
            j: (numbers.get(j, 0) if round_number is None else round_number, checksums.get(j, 0)) for j in self._pairs
        }
        self.message_check.post(self.transport, expected, t=self._t)

    def wait(self) -> None:
        """Wait for the replies, and go on without failed peers."""
        messages, self._pending = self._pending, None
        assert messages is not None, "no message is in flight"
        # Headers first: where the numbers differ, the messages may have another size.
        lost = self.message_check.wait(self.transport, t=self._t) if self._is_checked else frozenset()
        messages.wait()
        if not (lost or messages.lost):  # a peer that wakes up may still write into its message
            self._free.update(self._lent)
        self._lent = {}
        if self._is_elastic:
            self._lost |= lost | messages.lost
            if lost := self._lost.intersection(self.row.in_peers):
                self._leave_out(lost)
        for peer, pair in self._pairs.items():
            self.message_check.add(peer, *(message.buffer for message in pair if self._is_checked))

    def _mix_buffers(self) -> None:
        """b <- b + sum_j W_ij (b_j - b), with weights that are not negative."""
        for j, (mine, theirs) in self._pairs.items():
            alpha = self.row.buffer_weights.inp[j]
            for b, own, other in zip(self._buffers, mine.others, theirs.others, strict=True):
                add_(b, other, alpha=alpha)
                add_(b, own, alpha=-alpha)

    def gather(self, message: Message, *, name: str) -> Received:
        """Send a message to all ranks and return the messages of all ranks; see `Gather`.

        All ranks get the messages or none does: [Note: all or none] of `all_or_none`. The buffers become their mean
        over all ranks.

        Args:
            message: the message of this rank.
            name: the algorithm, for a warning where trimmed messages are large.
        """
        message.fill_others(self._buffers)
        n, what = self.transport.world_size, f"messages of round {self._t}"
        with all_or_none(self.transport, what=what):
            mine = message.buffer.raw[: self._longest(message)]
            everyone = mine.new_empty(n * mine.numel())
            if mine.numel():
                self.transport.all_gather(everyone, mine, what=what)
        if message.is_trimmed and not self._has_warned and self.transport.rank == 0:  # sizes are equal on all ranks
            sent, reduced = (n - 1) * mine.numel(), 2 * (n - 1) * message.fields[-1].numel() // n
            self._has_warned = warns_of_much(name, sent=sent, reduced=reduced)
        received = [message.reply_in(MessageBuffer(message.buffer.sizes, raw)) for raw in everyone.view(n, -1)]
        for k, own in enumerate(self._buffers):
            total = torch.zeros_like(own, dtype=wide(own.dtype))
            for theirs in received:
                total.add_(theirs.others[k])
            own.copy_(total.div_(n))
        return Received([(1.0, theirs) for theirs in received], begins_with_own=False)

    def _longest(self, message: Message) -> int:
        """Return the largest number of bytes that a rank sends; ranks agree on it if messages are trimmed."""
        if not message.is_trimmed:
            return message.num_bytes
        sizes = torch.empty(self.transport.world_size, dtype=torch.int64, device=self.transport.device)
        mine = sizes.new_tensor([message.num_bytes])
        self.transport.all_gather(sizes, mine, what=f"sizes of messages of round {self._t}")
        return int(sizes.max())

    # Failed peers and changed transports.

    def _leave_out(self, lost: Set[int]) -> None:
        """Go on without these peers and drop their links: see [Note: lost peers] of `Neighbours`."""
        self.row.leave_out(lost)
        for peer in lost:
            self._pairs.pop(peer, None)
            self._forget(peer)

    def _forget(self, peer: int) -> None:
        self._renumber({other: other for other in range(self.transport.world_size) if other != peer})

    def _renumber(self, ranks: Mapping[int, int]) -> None:
        self.message_check.renumber(ranks)
        self.memory.renumber(ranks)

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`; links to peers whose names are still there are kept."""
        names, ranks = self.transport.names, {name: rank for rank, name in enumerate(transport.names)}
        for peer in self._lost:
            self._forget(peer)
        self.bind(mixing, transport)
        self._lost, self._compared = set(), set()
        peers = mixing.graph.phone_book(transport.rank) if self.has_links else ()
        kept = {rank: ranks[name] for rank, name in enumerate(names) if name in ranks and ranks[name] in peers}
        self._renumber(kept)
