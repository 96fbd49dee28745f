"""Words: what ranks that avoid waiting tell each other beside their models, a few numbers at a time."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from .listener import GOODBYE_TIMEOUT, Listener, say_goodbye
from .transport import Pending, ProcessGroupTransport

_WORD_TAG = 0  # on a channel of their own


class Kind(IntEnum):
    """What a word is about."""

    ARRIVED = 0  # somebody has arrived at a version
    SETTLING = 1  # its sender settles
    BEGINNING = 2  # its sender is about to train
    GOODBYE = 3  # its sender will say no more


class Word(NamedTuple):
    """One message: five integers on the wire.

    Attributes:
        kind: what it is about.
        version: that somebody arrived at; or the newest that a rank in a meeting knows of.
        meeting: how many times the sender has begun or, if it settles, settled before.
        stage: (SETTLING, BEGINNING) of the dissemination.
        oldest: (BEGINNING) version that its sender knows of.
    """

    kind: Kind
    version: int = 0
    meeting: int = 0
    stage: int = 0
    oldest: int = 0


class Words:
    """Words between a rank and its dissemination neighbours, the ranks 1, 2, 4, ... places on, modulo the world.

    What each rank passes on once to all of its neighbours reaches everybody in ceil(log2 n) hops, from any rank, in
    any world; it still does when several begin at once, which is not so in a tree that drops what it knows.

    `listen` is the body of a thread, which never sends: who forwards in there may wait for one who forwards to him.

    Args:
        transport: over Gloo; words take a channel of their own. All ranks must make this object at the same point.

    Attributes:
        gone: in-peers who have said goodbye.
    """

    def __init__(self, transport: ProcessGroupTransport) -> None:
        self.transport = copy.deepcopy(transport)
        n, rank = transport.world_size, transport.rank
        distances = [1 << i for i in range((n - 1).bit_length())]
        self.out_peers = tuple((rank + distance) % n for distance in distances)
        self.in_peers = tuple((rank - distance) % n for distance in distances)
        self._lock = threading.Lock()
        self._said: list[Pending] = []
        self.gone: set[int] = set()

    def say(self, word: Word, *, peers: Sequence[int] | None = None) -> None:
        """Tell `peers`, or all neighbours. Returns at once; the words before this one have been heard by then.

        Raises:
            TimeoutError, ConnectionError: one of them was not heard; names the rank.
        """
        with self._lock:
            self._wait_until_heard()
            self._post(word, self.out_peers if peers is None else peers)

    def say_goodbye(self) -> None:
        """Let the neighbours' listeners end. Who is gone needs no goodbye."""
        with self._lock:
            said, self._said = self._said, []
            for pending in said:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    pending.wait(GOODBYE_TIMEOUT)
            say_goodbye(self.transport, self.out_peers, torch.tensor(Word(Kind.GOODBYE)), tag=_WORD_TAG)

    def listen(self, hear: Callable[[Word], None]) -> None:
        """Call `hear` with every word, until every in-peer has said goodbye."""
        listener = Listener(self.transport, self.in_peers, num_integers=len(Word._fields), tag=_WORD_TAG)
        for sender, (kind, *numbers) in listener.messages():
            if kind == Kind.GOODBYE:
                listener.dismiss(sender)
                self.gone.add(sender)
            hear(Word(Kind(kind), *numbers))

    def _wait_until_heard(self) -> None:
        said, self._said = self._said, []
        for pending in said:
            pending.wait()

    def _post(self, word: Word, peers: Sequence[int]) -> None:
        message = torch.tensor(word)
        what = f"telling {word.kind.name} at version {word.version}"
        self._said.append(self.transport.exchange(dict.fromkeys(peers, (message,)), {}, tag=_WORD_TAG, what=what))
