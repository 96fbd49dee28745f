"""Waits for messages that another thread can end, and several messages as one wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence, Set
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch.distributed as dist

from .deadline import AT_ONCE
from .threads import CallThread


class Posted(NamedTuple):
    """A posted message, or a chunk of one; without a peer: a collective, or all messages of a round on NCCL."""

    work: dist.Work
    chunk: int = 0
    peer: int | None = None
    is_send: bool = False


class InTurn:
    """Several messages as one; waits for them run one after the other.

    A wait that was given up may still be inside a message in its thread, and goes on to no other message. So the caller
    can wait for the messages after it.

    Args:
        works: the messages.

    Attributes:
        closed: the peers with closed connections; their messages need no wait.
        present: the index of the message of the present, failed or abandoned wait.
        seconds: the time of the waits, by peer.
    """

    def __init__(self, works: Sequence[Posted]) -> None:
        self._works, self._lock, self._is_given_up = works, threading.Lock(), False
        self.closed: Set[int | None] = frozenset()
        self.present = 0
        self.seconds: dict[int | None, float] = {}
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()

    @property
    def peer(self) -> int | None:
        """The peer of the present wait."""
        return self._works[self.present].peer

    def give_up(self, peers: Collection[int] | None = None) -> bool:
        """Let the wait end with the present message, if it is of one of these peers; returns whether it is."""
        with self._lock:
            self._is_given_up |= peers is None or self.peer in peers
        if self._is_given_up:
            why = "the wait was given up, since its connection was closed by this process"
            self._ends.put(RuntimeError(why))
        return self._is_given_up

    def run(self, timeout: timedelta) -> None:
        """As `wait`, in another thread, for the caller of `join`."""
        try:
            self.wait(timeout)
        except BaseException as error:  # noqa: BLE001 (`join` raises it)
            self._ends.put(error)
        else:
            self._ends.put(None)

    def join(self) -> BaseException | None:
        """Wait until `run` has ended, or until the wait is given up; returns the error."""
        return self._ends.get()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all messages.

        Args:
            timeout: the timeout of all waits together; None: the waits have no timeout.

        Raises:
            RuntimeError: the message `present` has failed.
        """
        start = now = time.monotonic()
        left = None if timeout is None else max(timeout, AT_ONCE)
        for k, (work, _, peer, _) in enumerate(self._works):
            with self._lock:
                if self._is_given_up:
                    return
                self.present = k
            if left is None:
                work.wait()
            elif peer in self.closed:
                work.wait(AT_ONCE)
            else:
                work.wait(left)
            before, now = now, time.monotonic()
            self.seconds[peer] = self.seconds.get(peer, 0.0) + now - before
            if timeout is not None:
                left = max(timeout - timedelta(seconds=now - start), AT_ONCE)


class Waits:
    """Waits that another thread can end.

    [Note: waits that do not end] When a connection closes, Gloo ends the waits for messages before their first byte.
    Its lists do not contain half sent or half received messages, nor messages posted while the connection was closing.
    A wait for such a message lasts for its whole timeout, whatever becomes of the connection, and cannot be
    interrupted. So a thread of its own makes each wait, and stays in it when the wait is given up; no byte is written
    to its buffer any more, as the connection is closed. When the wait of a thread has ended, it makes the next one.
    Handing a wait over takes some 20 us.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[CallThread] = []
        self._under_way: set[InTurn] = set()
        self._given_up: set[int | None] = set()
        self._is_closed = False

    def wait(self, work: dist.Work | InTurn, timeout: timedelta, *, of: int | None = None) -> None:
        """Return when `work` is done.

        Args:
            work: a message, several of them, or a collective, of Gloo.
            timeout: the timeout of the wait.
            of: the peer of one message; None: a collective.

        Raises:
            RuntimeError: the operation has failed, was late or was given up.
        """
        turn = work if isinstance(work, InTurn) else InTurn([Posted(work, peer=of)])
        with self._lock:
            is_over, turn.closed = self._is_closed, self._given_up
            if not is_over:
                thread = self._idle.pop() if self._idle else CallThread("gossip-wait")
                self._under_way.add(turn)
                thread.post(partial(turn.run, timeout))
        if is_over:  # the connections are closed: the operation is done already, or never will be
            turn.wait(AT_ONCE)
            return
        error = turn.join()  # an interrupt leaves the wait under way
        with self._lock:
            if turn in self._under_way:
                self._under_way.remove(turn)
                self._idle.append(thread)
            else:  # it was given up
                thread.end()
        try:
            if error is not None:
                raise error
        finally:
            del error  # it holds this frame, and so the caller's objects

    def give_up(self, *of: int) -> None:
        """End the waits for these peers, present and future, with an error; from any thread.

        Close their connections before, so that no byte is written to a buffer afterwards.
        """
        with self._lock:
            self._given_up.update(of)
            self._under_way -= {turn for turn in self._under_way if turn.give_up(of)}

    def under_way(self) -> set[int]:
        """The peers of the present waits."""
        with self._lock:
            return {turn.peer for turn in self._under_way if turn.peer is not None}

    @property
    def is_waiting(self) -> bool:
        """Whether anything is waited for now."""
        return bool(self._under_way)

    def close(self) -> None:
        """End all waits, and the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._under_way -= {turn for turn in self._under_way if turn.give_up()}
            for thread in self._idle:
                thread.end()
            self._idle.clear()
