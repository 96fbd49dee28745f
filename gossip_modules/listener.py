"""Listener: messages of a few integers from whichever rank, until all who might write have said goodbye."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta

import torch
from torch import Tensor

from .transport import ProcessGroupTransport

GOODBYE_TIMEOUT = timedelta(seconds=2)
_AT_EXIT = timedelta(milliseconds=1)
_AT_EXIT_SECONDS = 1.0


def say_goodbye(transport: ProcessGroupTransport, peers: Iterable[int], goodbye: Tensor, *, tag: int) -> None:
    """Tell the listeners of `peers` that this rank writes no more; waits two seconds at most, for nobody who is gone.

    Args:
        transport: as theirs.
        peers: who listen.
        goodbye: a message that they understand so, int64.
        tag: of their messages.
    """
    pending = []
    for peer in peers:
        with contextlib.suppress(ConnectionError):  # it is gone
            pending.append(transport.exchange({peer: [goodbye]}, {}, tag=tag, what="goodbye"))
    for sending in pending:  # each counts from when it was posted
        with contextlib.suppress(ConnectionError, TimeoutError):  # gone, or it will find out
            sending.wait(GOODBYE_TIMEOUT)


class Listener:
    """What a thread of its own waits on: the next message from any of `peers`.

    [Note: leaving a listener behind] A receive from any rank over Gloo can be neither polled nor aborted, so a listener
    ends when it has dismissed all peers, who said goodbye. If some never do, its thread is left behind. At the exit
    of the interpreter that is no place to be: a message that arrives then would wake the thread inside C++ code and
    abort the process. But a wait that times out closes its connection, and that ends a receive from any rank too. So
    at exit the connections to those who are still present are closed that way, and the thread comes home.

    Args:
        transport: over Gloo.
        peers: who may write.
        num_integers: in a message.
        tag: of the messages.
    """

    def __init__(
        self, transport: ProcessGroupTransport, peers: Collection[int], *, num_integers: int, tag: int
    ) -> None:
        self.transport = transport
        self.tag = tag
        self._present = set(peers)
        self._message = torch.empty(num_integers, dtype=torch.int64)
        self._thread: threading.Thread | None = None
        self._is_exiting = False

    def messages(self) -> Iterator[tuple[int, list[int]]]:
        """(sender, integers) of each message as it comes, until all peers are dismissed; waits without limit."""
        self._thread = threading.current_thread()
        atexit.register(self._exit)
        try:
            while self._present:
                sender = self.transport.receive_any(self._message, tag=self.tag)
                yield sender, self._message.tolist()
        except ConnectionError:
            if not self._is_exiting:
                raise
        finally:
            atexit.unregister(self._exit)

    def dismiss(self, peer: int) -> None:
        """This peer will write no more. Called by who takes the messages, between two of them."""
        self._present.discard(peer)

    def _exit(self) -> None:
        """[Note: leaving a listener behind]"""
        self._is_exiting = True
        for peer in tuple(self._present):
            with contextlib.suppress(ConnectionError, TimeoutError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self.transport.exchange({}, {peer: [nothing]}, tag=self.tag, what="leaving").wait(_AT_EXIT)
        if self._thread is not None:
            self._thread.join(_AT_EXIT_SECONDS)
