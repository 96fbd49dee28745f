"""MessageCheck: whether two ranks have sent each other the same messages so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import torch

from ..transport.base import ElasticPending, Pending, Transport, is_elastic
from .message import MessageBuffer

_WORD = 1 << 32  # the numbers in a header are unsigned and have 32 bits
_HEADER_TAG = -1  # no round has this tag: headers must reach each other even if the two ranks are in different rounds


class Header:
    """The 8 bytes that are sent ahead of a message: its number and a checksum, both modulo 2**32.

    Args:
        number: the number of the message among those of its sender.
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
        self._digests[peer] = (31 * self._digests.get(peer, 0) + total) % _WORD

    def state_dict(self) -> dict[str, Any]:
        """The digests, for a checkpoint."""
        return {"peers": list(self._digests), "digests": list(self._digests.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the digests out of a state that holds them beside other things; an empty state has none."""
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
            "if this comes back"
        )
