"""Deltas: messages of 16-bit words, sent as their changes since the last message over the same link."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from ..compression.bit_packing import pack, packed_size, unpack
from ..compression.compressor import chunks
from ..compression.masks import nonzero
from ..transport.base import Pending, Transport
from ..transport.exchange import Messages

WHOLE = 16  # bits of a code: it is the word itself
LARGEST = {0: 0, 2: 1, 4: 7, 8: 127}  # by the bits of a code: the largest change that it says, either way

_LISTED_BYTES = 3  # of a listed word, about: the word, and the way to it from the one before
_SKIP = 255  # a byte of places: so many words of which none is listed
_NUM_SAMPLES = 4096  # words, to choose the bits of a code
_NUM_WATCHED = 16  # messages, until it is clear whether they are smaller than whole ones
_MOST = 0.9  # of the bytes of whole messages; more is no saving
_MIN_BYTES = 4096  # for fewer bytes latency decides the cost of a round, and no warning is given


class Changes(NamedTuple):
    """The changes from one message to the next: a code for each word, and the words whose change no code says.

    Attributes:
        bits: the bits of a code: 0 (no codes), 2, 4, 8, or `WHOLE`.
        codes: the codes, uint8 [d bits / 8].
        listed: the other words, int16 [k].
        places: their places, uint8: see `pack_places`.
    """

    bits: int
    codes: Tensor
    listed: Tensor
    places: Tensor

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 2 * self.listed.numel() + self.places.numel()

    @classmethod
    def between(cls, last: Tensor | None, words: Tensor, *, becomes: bool = False) -> Changes:
        """Return the changes from `last` to `words`.

        Args:
            last: the last message, int16 [d]; None: this message is the first one.
            words: the message, int16 [d]; not changed.
            becomes: whether last <- words.
        """
        bits = WHOLE if last is None else choose_bits(last, words)
        if last is None or bits == WHOLE:
            if last is not None and becomes:
                last.copy_(words)
            return cls(WHOLE, words.view(torch.uint8), words[:0], words[:0].view(torch.uint8))
        codes = words.new_empty(packed_size(words.numel(), bits), dtype=torch.uint8)
        largest, found = LARGEST[bits], [words.new_empty(0, dtype=torch.int64)]
        for start, stop, _ in chunks(words, 1):  # on a CPU a chunk stays in cache for all that follows
            change = words[start:stop] - last[start:stop]  # wraps around, and the receiver's sum wraps back
            if becomes:
                last[start:stop] = words[start:stop]
            if bits:
                said = change.clamp(-largest, largest)
                pack(said.to(torch.int8), bits, codes[start * bits // 8 : packed_size(stop, bits)])
                change -= said
            found.append(nonzero(change).add_(start))
        where = torch.cat(found)
        return cls(bits, codes, words[where], pack_places(where))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The bytes of a message in their order: listed words first, so that they start at an even address."""
        return self.listed.view(torch.uint8), self.codes, self.places

    def apply(self, words: Tensor) -> None:
        """words <- the message, from the last one, int16 [d].

        Raises:
            ValueError: a place is outside the message.
        """
        if self.bits == WHOLE:
            words.view(torch.uint8).copy_(self.codes)
            return
        for start, stop, _ in chunks(words, 1) if self.bits else ():
            packed = self.codes[start * self.bits // 8 : packed_size(stop, self.bits)]
            words[start:stop].add_(unpack(packed, self.bits, stop - start, signed=True))
        if self.listed.numel():
            where = unpack_places(self.places)
            if len(where) != len(self.listed) or int(where[-1]) >= len(words):
                raise ValueError(f"got {len(where)} places up to {where.max()} for {len(self.listed)} words")
            words[where] = self.listed


def choose_bits(last: Tensor, words: Tensor) -> int:
    """Return the bits of a code that give the smallest message, judged by a sample of the words."""
    step = len(words) // _NUM_SAMPLES | 1
    change = (words[::step] - last[::step]).int().abs()
    shares = torch.stack([(change > largest).float().mean() for largest in LARGEST.values()]).tolist()
    costs = [bits / 8 + _LISTED_BYTES * share for bits, share in zip(LARGEST, shares, strict=True)]
    return min(zip((*costs, WHOLE / 8), (*LARGEST, WHOLE), strict=True))[1]


def pack_places(where: Tensor) -> Tensor:
    """Return ascending different indices, int64 [k], as bytes: gaps of up to 254, and 255 for as many without an index.

    An index takes one byte, and one more for each 255 entries before it without one.
    """
    gaps = where.diff(prepend=where.new_full((1,), -1)).sub_(1)
    ends = (gaps // _SKIP).add_(1).cumsum(0)
    packed = where.new_full((int(ends[-1]) if len(ends) else 0,), _SKIP, dtype=torch.uint8)
    packed[ends.sub_(1)] = gaps.remainder_(_SKIP).to(torch.uint8)
    return packed


def unpack_places(packed: Tensor) -> Tensor:
    """Return the indices that `pack_places` wrote, int64 [k]."""
    ends = nonzero(_SKIP - packed)
    steps = packed.long()
    steps[ends] += 1
    return steps.cumsum_(0)[ends].sub_(1)


class _Link:
    """One direction of a link.

    Attributes:
        number: the number that the sender gave the last message; 0: no message has come.
        words: the last message, int16 [d]. Links that it has left on share its memory.
        num_bytes: its size, without its header.
    """

    number = 0
    words: Tensor | None = None
    num_bytes = 0

    def room(self, words: Tensor) -> int:
        """Return the bytes of the next message that travel at once, equal at both ends."""
        whole = 2 * len(words)
        return min(whole, self.num_bytes + self.num_bytes // 8 + 64) if self.number else whole


class Header(NamedTuple):
    """The first bytes of a message, int64: the numbers of the message and of the last one, and its sizes."""

    number: int
    last: int
    bits: int
    num_listed: int
    num_place_bytes: int

    def num_bytes(self, d: int) -> int:
        """The size of the rest of a message of d words."""
        return packed_size(d, self.bits) + 2 * self.num_listed + self.num_place_bytes

    def changes(self, stream: Tensor, d: int) -> Changes:
        """The parts of the rest; views."""
        codes, listed = packed_size(d, self.bits), 2 * self.num_listed
        parts = stream[: self.num_bytes(d)].split([listed, codes, self.num_place_bytes])
        return Changes(self.bits, parts[1], parts[0].view(torch.int16), parts[2])


HEADER_BYTES = 8 * len(Header._fields)


class Deltas:
    """Exchanges messages of 16-bit words; each link carries the changes since its last message.

    [Note: deltas] Both ends of a link keep the last message of each direction. The sender subtracts it, word by word,
    from the new one. The words are subtracted as integers: a change of one is one unit in the last place. All changes
    travel in codes of 0, 2, 4 or 8 bits, by a sample of the words. Words with a larger change are listed. So the
    receiver has the bits of the new message, whatever its numbers are. The first message over a link is whole, as are
    messages that would not be smaller.

    The receiver posts room for an eighth more bytes than the last message over the link had. The header of a longer
    message has its size, and the other bytes travel in a second exchange when both ends wait for the first one.

    Links begin anew with each transport and with each change of the graph, as when workers come or go, and in a process
    that resumes from a checkpoint. All ends do so in the same round.

    Memory: 2 d bytes for each in-peer of the graph, and 2 d for each last message to an out-peer that differs from the
    others: one where all rounds have the same out-peers.

    Args:
        transport: the transport of the messages.
        name: the algorithm, for warnings and errors.
    """

    def __init__(self, transport: Transport, *, name: str) -> None:
        self.transport, self.name = transport, name
        self.number = 0
        self.outgoing: dict[int, _Link] = {}
        self.incoming: dict[int, _Link] = {}
        self.is_cut_off = False  # an exchange has failed, and its messages may have changed one end of a link only
        self._sizes: list[tuple[int, int]] | None = []  # of messages, and of whole ones; None: they were compared

    def exchange(self, sends: Messages, recvs: Messages, *, tag: int) -> Pending:
        """Post the messages of one round; see `Transport.exchange`.

        Args:
            sends: the message to each out-peer, one tensor with equal contents for all: uint8 [2 d].
            recvs: the memory of the message of each in-peer, one tensor: uint8 [2 d]; it holds the message after
                `wait()`, and until the next one of this peer nothing else may write to it.
            tag: the round.

        Raises:
            RuntimeError: an earlier exchange has failed.
        """
        if self.is_cut_off:
            raise RuntimeError(
                f"rank {self.transport.names[self.transport.rank]}: round {tag}: an earlier round of {self.name} ended "
                "with an error, so the ends of a link may have kept different messages; make new wrappers on all "
                "ranks, or start all ranks from a checkpoint"
            )
        self.is_cut_off = True
        return PendingDeltas(self, self._streams(sends), recvs, tag=tag)

    def _streams(self, sends: Messages) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the two parts of the stream to each peer; the message becomes the last one of each link."""
        self.number += 1
        groups: dict[int, list[int]] = {}  # peers by the number of the last message to them
        for peer, (message,) in sends.items():
            link = self.link(self.outgoing, peer, message)
            groups.setdefault(link.number, []).append(peer)
        streams: dict[int, tuple[Tensor, Tensor]] = {}
        kept: Tensor | None = None  # the memory that now holds this message
        for number, peers in groups.items():
            words, links = sends[peers[0]][0].view(torch.int16), [self.outgoing[peer] for peer in peers]
            last, users = links[0].words, sum(link.number == number for link in self.outgoing.values())
            becomes = last is not None and kept is None and users == len(peers)
            changes = Changes.between(last, words, becomes=becomes)
            kept = last if becomes else kept
            header = Header(self.number, number, changes.bits, len(changes.listed), len(changes.places))
            rooms = [link.room(words) for link in links]
            parts = [torch.tensor(header, device=words.device).view(torch.uint8), *changes.parts]
            padding = max(0, max(rooms) - changes.num_bytes)
            stream = torch.cat([*parts, words.new_zeros(padding, dtype=torch.uint8)]).to(self.wire_device(words))
            for peer, link, room in zip(peers, links, rooms, strict=True):
                stop = HEADER_BYTES + room
                streams[peer] = stream[:stop], stream[stop : max(stop, HEADER_BYTES + changes.num_bytes)]
                link.num_bytes = changes.num_bytes
                if last is not None:
                    self._compare(max(room, changes.num_bytes) + HEADER_BYTES, 2 * len(words))
        for peer, (message,) in sends.items():
            kept = message.view(torch.int16).clone() if kept is None else kept
            self.outgoing[peer].words, self.outgoing[peer].number = kept, self.number
        return streams

    def wire_device(self, message: Tensor) -> torch.device:
        """The device of the streams of a message: of the wire, as a transport keeps a staging buffer for each size."""
        wire = self.transport.device
        return message.device if message.device.type == wire.type else wire

    @staticmethod
    def link(links: dict[int, _Link], peer: int, message: Tensor) -> _Link:
        """Return the link, anew if the message has another length, with its words on the device of the message."""
        link = links.setdefault(peer, _Link())
        if link.words is not None and 2 * len(link.words) != len(message):
            link = links[peer] = _Link()
        if link.words is not None:
            link.words = link.words.to(message.device)
        return link

    def _compare(self, num_bytes: int, whole: int) -> None:
        """Note the size of a message, and warn once if messages are about as large as whole ones."""
        if self._sizes is None or whole < _MIN_BYTES:
            return
        self._sizes.append((num_bytes, whole))
        if len(self._sizes) == _NUM_WATCHED:
            sent, plain = map(sum, zip(*self._sizes, strict=True))
            self._sizes = None
            if sent > _MOST * plain:
                warnings.warn(
                    f"{self.name}: the last {_NUM_WATCHED} messages had {sent / plain:.0%} of the bytes of whole ones: "
                    "nearly all numbers change by much between two messages over a link; leave deltas out, or take a "
                    "graph with the same peers in each round, such as RingGraph, or a smaller learning rate",
                    stacklevel=2,
                )


class PendingDeltas:
    """One posted round of `Deltas`; a `Pending`.

    Args:
        deltas: the links.
        streams: the two parts of the stream to each out-peer; the second one may be empty.
        recvs: see `Deltas.exchange`.
        tag: the round.

    Attributes:
        lost: see `Pending`.
    """

    def __init__(self, deltas: Deltas, streams: dict[int, tuple[Tensor, Tensor]], recvs: Messages, *, tag: int) -> None:
        self.lost: frozenset[int] = frozenset()
        self._deltas, self._recvs, self._tag = deltas, recvs, tag
        self._rest = {peer: rest for peer, (_, rest) in streams.items() if rest.numel()}
        self._streams: dict[int, Tensor] = {}
        for peer, (message,) in recvs.items():
            link = deltas.link(deltas.incoming, peer, message)
            room = HEADER_BYTES + link.room(message.view(torch.int16))
            self._streams[peer] = message.new_empty(room, device=deltas.wire_device(message))
        self._first = self._exchange({peer: first for peer, (first, _) in streams.items()}, self._streams)

    def _exchange(self, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> Pending:
        messages = [Messages({peer: (x,) for peer, x in xs.items()}) for xs in (sends, recvs)]
        return self._deltas.transport.exchange(*messages, tag=self._tag)

    def arrivals(self) -> Iterator[int]:
        """See `Pending`."""
        self.wait()
        yield 0

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`.

        Raises:
            RuntimeError: a message does not follow the last one over its link, or has impossible sizes.
        """
        deltas = self._deltas
        self._wait(self._first, timeout)
        headers = {peer: self._header(peer) for peer in self._streams}
        rest = {
            peer: self._streams[peer].new_empty(length)
            for peer, header in headers.items()
            if (length := HEADER_BYTES + header.num_bytes(self._d(peer)) - len(self._streams[peer])) > 0
        }
        if self._rest or rest:
            self._wait(self._exchange(self._rest, rest), timeout)
        for peer, stream in self._streams.items():
            link, header, words = deltas.incoming[peer], headers[peer], self._recvs[peer][0].view(torch.int16)
            whole = torch.cat([stream, rest[peer]]) if peer in rest else stream
            if link.words is not None and link.words.data_ptr() != words.data_ptr():
                words.copy_(link.words)
            try:
                header.changes(whole[HEADER_BYTES:].to(words.device), len(words)).apply(words)
            except ValueError as error:
                raise self._wrong(peer, str(error)) from None
            link.words, link.number, link.num_bytes = words, header.number, header.num_bytes(len(words))
        deltas.is_cut_off = False

    def _wait(self, pending: Pending, timeout: timedelta | None) -> None:
        pending.wait(timeout)
        self.lost |= pending.lost
        for peer in pending.lost:  # for good: links to a peer that comes back are on another transport
            self._streams.pop(peer, None)
            self._rest.pop(peer, None)

    def _d(self, peer: int) -> int:
        """The number of words of the message of a peer."""
        return len(self._recvs[peer][0]) // 2

    def _header(self, peer: int) -> Header:
        """Read the header of a message, and compare it with the link."""
        header, link = (
            Header(*self._streams[peer][:HEADER_BYTES].view(torch.int64).tolist()),
            self._deltas.incoming[peer],
        )
        if header.last != link.number:
            raise self._wrong(peer, f"changes since its message {header.last}, the last one here is {link.number}")
        d, sizes = self._d(peer), (header.num_listed, header.num_place_bytes)
        if header.bits not in (*LARGEST, WHOLE) or not all(0 <= size <= 2 * d for size in sizes):
            raise self._wrong(peer, f"{header} for {d} words")
        return header

    def _wrong(self, peer: int, what: str) -> RuntimeError:
        names = self._deltas.transport.names
        return RuntimeError(
            f"rank {names[self._deltas.transport.rank]}: round {self._tag}: rank {names[peer]} sent {what}; make new "
            "wrappers on all ranks, or start all ranks from the same checkpoint"
        )
