"""Pairwise averaging at any time: an active rank asks, a passive rank answers, both get opposite corrections."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable

import torch

from .listener import GOODBYE_TIMEOUT, Listener, say_goodbye
from .mailbox import Mailbox
from .transport import ProcessGroupTransport

_ASK, _GOODBYE = 0, 1  # what a header says
_HERE, _GONE, _LATER = 0, 1, 2  # what a passive rank replies
_CONTROL_TAG, _MODEL_TAG = 0, 1


class BilateralAverage:
    """y_i <- y_i + w (y_j - y_i) and y_j <- y_j + w (y_i - y_j) between two ranks, while both of them train.

    [Note: bilateral exchange] The active rank sends a header; the passive one, whose listener waits for headers from
    anybody, replies, and then both send a snapshot of y and receive that of the other. Corrections are
    w (received - sent), exact opposites in floating point, and are added to whatever y and the parameters have become
    meanwhile: the sum over ranks is kept although nobody holds a lock across the network. Since active ranks only
    ask and passive ranks only answer, no ring of ranks can wait for each other. A passive rank whose y is not what it
    trains, before its first step or since it has loaded or saved a checkpoint, replies that it has nothing to say yet.

    Args:
        mailbox: of this rank.
        transport: a Gloo transport that carries nothing else but collectives of the same ranks.
        clock: the step of training, for `delivered`.

    Attributes:
        delivered: of each exchange in the mail, the step at which y was read; the engine takes them out.
        is_serving: whether an exchange that a peer asked for is under way.
    """

    def __init__(self, mailbox: Mailbox, transport: ProcessGroupTransport, *, clock: Callable[[], int]) -> None:
        self.mailbox = mailbox
        self.transport = transport
        self.clock = clock
        self.delivered: deque[int] = deque()
        self._sent, self._received = mailbox.host_vector(), mailbox.host_vector()
        self._serving = threading.Lock()
        self._served: int | None = None  # whom, for errors
        self.is_serving = False
        self._is_closing = False

    def ask(self, peer: int, t: int, weight: float) -> bool:
        """One exchange with a passive rank, unless it has nothing to say yet; False when it has said goodbye.

        Args:
            peer: a passive rank.
            t: the round of this rank, for error messages.
            weight: w, the same at both ends: it travels.

        Raises:
            TimeoutError, ConnectionError: naming the peer and the round.
        """
        header = torch.tensor([_ASK, t, _bits(weight)])
        reply = torch.empty(1, dtype=torch.int64)
        what = f"asking in round {t}"
        self.transport.exchange({peer: [header]}, {peer: [reply]}, tag=_CONTROL_TAG, what=what).wait()
        if reply.item() == _HERE:
            self._exchange(peer, weight, f"averaging in round {t}")
        return reply.item() != _GONE

    def answer(self, active_ranks: Collection[int]) -> None:
        """Answer until each of these ranks has said goodbye or been told so; the body of a thread.

        Raises:
            TimeoutError, ConnectionError: a peer that had asked is late or gone; names it.
        """
        listener = Listener(self.transport, active_ranks, num_integers=3, tag=_CONTROL_TAG)
        for source, (kind, t, bits) in listener.messages():
            if kind == _GOODBYE:
                listener.dismiss(source)
                continue
            with self._serving:
                self._served = source
                what = f"answering round {t} of rank {self.transport.names[source]}"
                with self.mailbox.lock:  # before or after a withdrawal, not across it
                    status = _GONE if self._is_closing else _HERE if self.mailbox.is_open else _LATER
                    self.is_serving = status == _HERE
                try:
                    reply = torch.tensor([status])
                    self.transport.exchange({source: [reply]}, {}, tag=_CONTROL_TAG, what=what).wait()
                    if status == _HERE:
                        with torch.profiler.record_function("gossip.round", f"t={t}"):
                            self._exchange(source, _weight(bits), what)
                finally:
                    self.is_serving = False
            if status == _GONE:
                listener.dismiss(source)  # it asks no more

    def wait_until_served(self) -> None:
        """Return when the exchange that is under way is delivered.

        Raises:
            TimeoutError: naming the peer.
        """
        seconds = self.transport.timeout.total_seconds()
        if not self._serving.acquire(timeout=seconds):
            names = self.transport.names
            peer = "a peer" if self._served is None else f"rank {names[self._served]}"
            raise TimeoutError(f"rank {names[self.transport.rank]}: still answering {peer} after {seconds:g} s")
        self._serving.release()

    def say_goodbye(self, passive_ranks: Iterable[int]) -> None:
        """Tell these ranks that this one asks no more; waits two seconds at most, and for nobody who is gone."""
        say_goodbye(self.transport, passive_ranks, torch.tensor([_GOODBYE, 0, 0]), tag=_CONTROL_TAG)

    def stop_answering(self) -> bool:
        """Reply to those who ask from now on that this rank is gone, once the exchange under way is delivered.

        Returns:
            Whether it is delivered; False = it has taken longer than two seconds, and is left to end by itself.
        """
        is_idle = self._serving.acquire(timeout=GOODBYE_TIMEOUT.total_seconds())
        self._is_closing = True
        if is_idle:
            self._serving.release()
        return is_idle

    def _exchange(self, peer: int, weight: float, what: str) -> None:
        step = self.clock()
        self.mailbox.snapshot(self._sent)
        sends, recvs = {peer: [self._sent.raw]}, {peer: [self._received.raw]}
        self.transport.exchange(sends, recvs, tag=_MODEL_TAG, what=what).wait()
        for buffers in self.mailbox.buffers_of(self._sent):
            buffers.zero_()  # the mailbox takes those received as they are
        self._received.add_segments_(self._sent, alpha=-1.0)
        with self.mailbox.lock:
            self.mailbox.deliver(self._received, alpha=weight)
            self.delivered.append(step)


def _bits(weight: float) -> int:
    return int(torch.tensor([weight], dtype=torch.float64).view(torch.int64).item())


def _weight(bits: int) -> float:
    return torch.tensor([bits]).view(torch.float64).item()
