"""The base of gossipers that number their messages, and the check that two ranks have sent each other the same ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch

from ..flat.layout import FlatLayout
from ..mixing_manager.base import MixingManager
from ..transport.base import ElasticPending, Pending, Transport, is_elastic
from .gossiper import Gossiper
from .message import WORD, Header, MessageBuffer

_HEADER_TAG = -1  # no round has this tag: headers must reach each other even if the two ranks are in different rounds


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
        """The peers with which this rank does not hold the same, see [Note: links anew]; arguments as for `post`."""
        self.post(transport, expected, t=t)
        lost = self._arrive(transport)
        pairs = self._headers.items()
        return {peer for peer, (mine, theirs) in pairs if peer in lost or mine.read() != theirs.read()}

    def _arrive(self, transport: Transport) -> Set[int]:
        """Wait for the headers; the peers that have failed."""
        pending, self._pending = self._pending, None
        assert pending is not None, "a header is posted with every message"
        pending.wait()
        return cast("ElasticPending", pending).lost if is_elastic(transport) else frozenset()

    def forget(self, peer: int) -> None:
        """Begin a new digest with a peer."""
        self._digests.pop(peer, None)

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Keep the digests of these peers only, under new ranks. ranks: the new rank of each, by its old one."""
        self._digests = {ranks[peer]: digest for peer, digest in self._digests.items() if peer in ranks}

    def add(self, peer: int, messages: Iterable[MessageBuffer]) -> None:
        """Include messages to and from a peer in its digest."""
        total = sum(int(message.raw.view(torch.int64).sum()) for message in messages)
        self._digests[peer] = (31 * self._digests.get(peer, 0) + total) % WORD

    def state_dict(self) -> dict[str, Any]:
        """The digests, for a checkpoint."""
        return {"peers": list(self._digests), "digests": list(self._digests.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the digests out of a state that holds them beside other things; an empty state has none."""
        self._digests = dict(zip(state.get("peers", ()), state.get("digests", ()), strict=True))


class LinkedGossiper(Gossiper):
    """A gossiper whose messages have numbers and digests that both ends of a link compare.

    [Note: links anew] On an elastic transport a peer that fails is left out ([Note: lost peers]), and what is kept of
    its link is dropped. If the peer lives all the same, it may have dropped nothing, or have applied a message more.
    So at the first round over a link after the transport has changed, both ends compare its age and the digest of its
    messages. Where these are equal, both keep what they have; otherwise both drop it, and begin anew in this round.
    Links are known by the names of their ends. Checkpoints have nothing of it: who loads one may have other peers.
    """

    has_links = False
    """Whether something is kept that must be the same at both ends of a link: see [Note: links anew]."""

    def __init__(self) -> None:
        self._layout: FlatLayout | None = None  # of which something is kept
        self._message_check = MessageCheck()
        self._buffers: dict[int, tuple[MessageBuffer, MessageBuffer]] = {}  # outgoing and incoming, by peer
        self._lost: set[int] = set()  # of this transport's peers
        self._compared: set[int] = set()  # those with which the state of the link was, on this transport

    # What a subclass writes.

    @abstractmethod
    def message_number(self, peer: int) -> int:
        """The number of the next message to and from this peer."""

    def state_checksum(self, peer: int) -> int:
        """A checksum of the state that this rank and the peer must have in common; 0 if there is none."""
        return 0

    def link_age(self, peer: int) -> int:
        """A number that is the same at both ends of a link that is kept, and 0 where nothing is."""
        return 0

    def forget_link(self, peer: int) -> None:
        """Drop what is kept of the link to a peer, if anything is."""

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """Drop what is kept of links but of these. ranks: the new rank of each peer, by its old one."""

    # A round.

    def live(self, peers: Sequence[int]) -> Sequence[int]:
        """Those of the peers of a round that have not failed; begins anew with some, see [Note: links anew]."""
        if not self._is_elastic:
            return peers
        peers = [peer for peer in peers if peer not in self._lost]
        new = [peer for peer in peers if peer not in self._compared] if self.has_links else []
        self._compared.update(new)
        if new:
            ages = {peer: (self.link_age(peer), 0) for peer in new}
            for peer in self._message_check.differing(self.transport, ages, t=self._t):
                self._forget(peer)
        return peers

    def post_headers(self) -> None:
        """Send the headers of the messages in `_buffers`."""
        numbers = {peer: (self.message_number(peer), self.state_checksum(peer)) for peer in self._buffers}
        self._message_check.post(self.transport, numbers, t=self._t)

    def _wait(self) -> None:
        messages, self._pending = self._pending, None
        assert messages is not None, "no round is in flight: start() comes first"
        # Headers first: where the numbers differ, the messages may have another size.
        lost = self._message_check.wait(self.transport, t=self._t)
        messages.wait()
        if self._is_elastic:
            self._lost |= lost | cast("ElasticPending", messages).lost
            if lost := self._lost.intersection(self._in_peers):
                self._leave_out(lost)
        for peer, buffers in self._buffers.items():
            self._message_check.add(peer, buffers)

    # Peers that fail, and transports that change.

    def _leave_out(self, lost: Set[int]) -> None:
        """See `Gossiper`; a peer that fails again is another one for what is kept."""
        super()._leave_out(lost)
        for peer in lost:
            self._buffers.pop(peer, None)
            self._forget(peer)

    def _forget(self, peer: int) -> None:
        self.forget_link(peer)
        self._message_check.forget(peer)

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`; links are kept by the names of their ends."""
        names, ranks = self.transport.names, {name: rank for rank, name in enumerate(transport.names)}
        for peer in self._lost:
            self._forget(peer)
        super().rebind(mixing, transport)
        self._lost, self._compared = set(), set()
        peers = mixing.graph.phone_book(transport.rank) if self.has_links else ()
        kept = {rank: ranks[name] for rank, name in enumerate(names) if name in ranks and ranks[name] in peers}
        self._message_check.renumber(kept)
        if self._layout is not None:
            self.renumber_links(kept)


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
            "if this comes back"
        )
