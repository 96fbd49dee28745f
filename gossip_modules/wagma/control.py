"""Words: what ranks that avoid waiting tell each other beside their models, a few numbers at a time."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch

from ..transport.process_group import FOREVER, PROBE_TAG, Pending, ProcessGroupTransport

GOODBYE_TIMEOUT = timedelta(seconds=2)
_LAST_WORDS_TIMEOUT = timedelta(seconds=0.5)
_GRACE = timedelta(seconds=5)
_AT_ONCE = timedelta(milliseconds=1)
_WORD_TAG = 0  # on a channel of their own


class Kind(IntEnum):
    """What a word is about."""

    ARRIVED = 0  # somebody has arrived at a version
    SETTLING = 1  # its sender settles
    BEGINNING = 2  # its sender is about to train
    GOODBYE = 3  # its sender has closed and will say no more
    ASKING = 4  # its sender wants to know where the receiver is
    STANDING = 5  # where its sender is; answers ASKING
    FAILED = 6  # its sender has failed, by the fault of a rank, and will say no more


class Word(NamedTuple):
    """One message: five integers on the wire.

    Attributes:
        kind: what it is about.
        version: that somebody arrived at; the newest that a rank in a meeting knows of; the round of a rank that says
            where it stands; (FAILED) the rank at fault, or -1.
        meeting: how many times the sender has begun or, if it settles, settled before.
        stage: (SETTLING, BEGINNING) of the dissemination; (STANDING) a `Place`; (FAILED) a `Fault`.
        oldest: (BEGINNING) version that its sender knows of; (STANDING) the rank that its sender waits for, or -1.
    """

    kind: Kind
    version: int = 0
    meeting: int = 0
    stage: int = 0
    oldest: int = 0


class Words:
    """Words between a rank and its dissemination neighbours, the ranks 1, 2, 4, ... places on, modulo the world.

    What each rank passes on once to all of its out-neighbours reaches everybody in ceil(log2 n) hops, from any rank, in
    any world; it still does when several begin at once, which is not so in a tree that drops what it knows.

    [Note: one thread per neighbour] `listen` is the body of a thread that waits for one neighbour, in either direction:
    a receive from one rank ends at once when that rank's connection closes, a receive from any rank does not. So the
    neighbours of a dead rank know of it at once. They include all ranks with which it shares a group. Such a thread
    posts answers and never waits for them: who waits in there may wait for one who waits for him.

    [Note: parting] The last word to a neighbour is GOODBYE or FAILED. Who hears one answers with its own GOODBYE, by
    the listening thread, so that both threads end within milliseconds though only one of the two ranks has closed.

    Args:
        transport: over Gloo; words take a channel of their own. All ranks must make this object at the same point.

    Attributes:
        neighbours: ranks with a listening thread.
        gone: neighbours who have said goodbye, and when (`time.monotonic()`).
    """

    def __init__(self, transport: ProcessGroupTransport) -> None:
        self.transport = copy.deepcopy(transport)
        self.transport.timeout = transport.timeout + _GRACE  # `Watch` ends waits before Gloo, which would hang up
        n, rank = transport.world_size, transport.rank
        distances = [1 << i for i in range((n - 1).bit_length())]
        self.out_peers = tuple((rank + distance) % n for distance in distances)
        self.in_peers = tuple((rank - distance) % n for distance in distances)
        self.neighbours = tuple(sorted({*self.out_peers, *self.in_peers}))
        self.gone: dict[int, float] = {}
        self._saying = threading.Lock()  # held while waiting: never by a listening thread
        self._posting = threading.Lock()  # never held while waiting
        self._said: list[Pending] = []
        self._notes: dict[tuple[int, Kind], Pending] = {}  # the last question and the last answer to each neighbour
        self._goodbyes: list[Pending] = []
        self._parted: set[int] = set()  # neighbours who have had this rank's last word

    def say(self, word: Word, *, peers: Sequence[int] | None = None) -> None:
        """Tell `peers`, or all out-neighbours. Returns when the words before this one have been heard.

        Raises:
            TimeoutError, ConnectionError: one of them was not heard; names the rank.
        """
        with self._saying:
            said, self._said = self._said, []
            for pending in said:
                pending.wait()
            with self._posting:
                listening = [peer for peer in (self.out_peers if peers is None else peers) if peer not in self._parted]
                self._said.append(self._post(word, listening))

    def note(self, word: Word, peer: int) -> None:
        """Tell one neighbour, without waiting; from any thread. One that is gone is not told.

        Of each kind one is on the way: the next question comes after the answer, and the next answer after a question.
        """
        with self._posting, contextlib.suppress(ConnectionError):  # its listening thread says that it is gone
            if peer not in self._parted:
                self._notes[peer, word.kind] = self._post(word, [peer])

    def part(self, word: Word, peers: Iterable[int] | None = None) -> None:
        """The last word to `peers`, or to all neighbours who have not had it. Does not wait. From any thread."""
        with self._posting:
            for peer in self.neighbours if peers is None else peers:
                if peer not in self._parted:
                    self._parted.add(peer)
                    with contextlib.suppress(ConnectionError):  # it is gone
                        self._goodbyes.append(self._post(word, [peer]))

    def wait_until_parted(self, *, is_failed: bool = False) -> None:
        """Return when the last words have been heard; after two seconds at most, or half a second after a failure."""
        with self._posting:
            goodbyes, self._goodbyes = self._goodbyes, []
        deadline = time.monotonic() + (_LAST_WORDS_TIMEOUT if is_failed else GOODBYE_TIMEOUT).total_seconds()
        for pending in goodbyes:
            left = max(timedelta(seconds=deadline - time.monotonic()), _AT_ONCE)
            with contextlib.suppress(ConnectionError, TimeoutError):  # gone, or it will find out
                pending.wait(left)

    def listen(self, peer: int, hear: Callable[[int, Word], None]) -> None:
        """Call `hear` with the rank and every word of that neighbour, until its last one.

        Raises:
            ConnectionError: its connection has closed before.
        """
        message = torch.empty(len(Word._fields), dtype=torch.int64)
        is_over = False
        while not is_over:
            receiving = self.transport.exchange({}, {peer: (message,)}, tag=_WORD_TAG, what="listening")
            receiving.wait(FOREVER)
            kind, *numbers = message.tolist()
            word = Word(Kind(kind), *numbers)
            if is_over := word.kind in (Kind.GOODBYE, Kind.FAILED):
                self.part(Word(Kind.GOODBYE), [peer])  # [Note: parting]
                self.gone[peer] = time.monotonic()
            hear(peer, word)

    def hang_up(self) -> None:
        """Close this rank's connections over the group, so that all waits on them end.

        Gloo has no call for it, but a wait that times out closes all connections of its rank.
        """
        for peer in self.neighbours:
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self.transport.group.recv([nothing], peer, PROBE_TAG).wait(_AT_ONCE)

    def _post(self, word: Word, peers: Sequence[int]) -> Pending:
        message = torch.tensor(word)
        what = f"telling {word.kind.name} at version {word.version}"
        return self.transport.exchange(dict.fromkeys(peers, (message,)), {}, tag=_WORD_TAG, what=what)
