"""Running sums of links: the sums that a rank has given to a peer, the last ones that have come, and their inbox."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..transport.datagrams import Datagram

Integers: TypeAlias = NDArray[np.int32]
Weights: TypeAlias = NDArray[np.int64]
SUMS, ANSWER = 0, 1
"""The kinds of datagrams."""
COUNT_BITS = 32
"""Of a number in a datagram: the lower bits are `SentSums.number`, the upper ones the epoch."""
LAST_NUMBER = (1 << COUNT_BITS) - 1
"""After sums with this number a new epoch begins."""
MAX_EPOCHS_AHEAD = 1 << 10
"""More epochs than a rank without datagrams misses, and few enough that no peer brings the number near its end."""
_LEAST_ROUNDS = 10


class Silence:
    """The time that a peer has been silent for, in rounds with this peer.

    A pause of this rank between two rounds, such as an evaluation, counts no more than a tenth of the limit. So the
    limit is reached after ten rounds of this rank with the peer at the earliest.

    Args:
        limit: the seconds after which the peer is silent.

    Attributes:
        seconds: the time.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._last, self.seconds = limit, time.monotonic(), 0.0

    def begin(self) -> None:
        """Count from now on, as the peer has been heard, or nothing is expected from it."""
        self._last, self.seconds = time.monotonic(), 0.0

    def has_ended_patience(self) -> bool:
        """Count the time since the last call; returns whether the limit is reached. Called once a round."""
        now = time.monotonic()
        self.seconds += min(now - self._last, self._limit / _LEAST_ROUNDS)
        self._last = now
        return self.seconds > self._limit * (1 - 1e-9)


class SentSums:
    """The sums sigma of all shares that a rank has given to one out-peer, chunk by chunk.

    Args:
        num_chunks: the number of chunks.
        size: the number of elements of a chunk.
        limit: see `Silence`.

    Attributes:
        x: sigma_x in quanta, int32 [num_chunks, size]; it wraps around.
        w: sigma_w, int64 [num_chunks]; it wraps around.
        number: the number of times that the sums were sent.
        answered: the last one of them that the peer has answered.
        silence: the time since the first of them without an answer.
    """

    def __init__(self, num_chunks: int, size: int, limit: float = math.inf) -> None:
        self.x: Integers = np.zeros((num_chunks, size), np.int32)
        self.w: Weights = np.zeros(num_chunks, np.int64)
        self.number = self.answered = 0
        self.silence = Silence(limit)


class ReceivedSums:
    """The last sums rho of one in-peer that have come, chunk by chunk.

    Args:
        num_chunks: the number of chunks.
        size: the number of elements of a chunk.

    Attributes:
        x, w: rho, with the shapes of `SentSums`.
        numbers: the `SentSums.number` of the last sums that have come, int64 [num_chunks]; 0: none.
        num_lost: the sums that are missing between those that have come.
        num_late: the sums that came after newer ones, or twice; they have no news.
        heard: the largest number that has come; answers have it.
    """

    def __init__(self, num_chunks: int, size: int) -> None:
        self.x: Integers = np.zeros((num_chunks, size), np.int32)
        self.w: Weights = np.zeros(num_chunks, np.int64)
        self.numbers = np.zeros(num_chunks, np.int64)
        self.num_lost = self.num_late = self.heard = 0

    def new_weight(self, chunk: int, w: int) -> int:
        """The weight of the shares that would be new in sums with weight w."""
        return (w - int(self.w[chunk]) + (1 << 63)) % (1 << 64) - (1 << 63)

    def news(self, number: int, chunk: int, x: Integers, w: int) -> tuple[Integers, int] | None:
        """Note the sums of a chunk, and return the new shares; None: the sums are older than noted ones.

        Args:
            number: the number of the sums.
            chunk: the chunk.
            x: sigma_x, int32, at most as long as a chunk.
            w: sigma_w.
        """
        if number <= self.numbers[chunk]:
            self.num_late += 1
            return None
        self.num_lost += number - int(self.numbers[chunk]) - 1
        self.heard = max(self.heard, number)
        rho = self.x[chunk, : len(x)]
        new = x - rho, self.new_weight(chunk, w)
        rho[:], self.w[chunk], self.numbers[chunk] = x, w, number
        return new


class Inbox:
    """The new shares of all in-peers, where the thread of the socket puts them.

    [Note: epochs] A rank that loads a model, or gets one by an exact average, or gives up a peer, begins a new epoch:
    its weights are one, and its sums zero. Shares on their way are of a model that it has left, and are dropped.
    Another rank that hears of the epoch begins it too, before its next round, and keeps its z. So all weights are one
    again, and add up to n. Messages of older epochs are left out, and messages of a newer one until this rank has
    begun it, as later sums make up for them. The epoch is in the upper 32 bits of numbers.

    [Note: datagrams that cannot be] A faulty peer with the key could end or drain a healthy rank. So datagrams are
    refused, and counted, whose new weight is negative or more than all ranks have (twice that, as for the range of x),
    which answer sums that were never sent, or whose epoch is more than 1,024 ahead.

    The thread of the socket calls `handle`; the training thread calls the other methods.

    Args:
        max_weight: the largest weight of new shares.

    Attributes:
        epoch: the epoch of this rank.
        newest: the newest one that it has heard of.
        num_lost, num_late: see `ReceivedSums`; of all in-peers and epochs.
        num_refused: datagrams for another layout of the model, and datagrams that cannot be: see the note.
    """

    def __init__(self, max_weight: int) -> None:
        self._lock, self._max_weight = threading.Lock(), max_weight
        self.epoch = self.newest = 0
        self.num_lost = self.num_late = self.num_refused = 0
        self._received: dict[int, ReceivedSums] = {}
        self._answers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # that were sent to each out-peer
        self._num_bytes: dict[int, int] = {}
        self._widths: Sequence[int] = ()
        self._size, self._has_news = 0, False

    def begin(self, epoch: int, widths: Sequence[int], size: int) -> None:
        """Begin an epoch: see [Note: epochs].

        Args:
            epoch: the epoch.
            widths: see `Chunks`.
            size: the number of elements of a chunk.
        """
        with self._lock:
            for sums in self._received.values():
                self.num_lost, self.num_late = self.num_lost + sums.num_lost, self.num_late + sums.num_late
            self.epoch, self.newest, self._widths, self._size = epoch, max(epoch, self.newest), widths, size
            self._new, self._spare, self._has_news = self._nothing(), self._nothing(), False
            self._received, self._answers, self._numbers = {}, {}, {}

    def _nothing(self) -> tuple[Integers, Weights]:
        num_chunks = len(self._widths)
        return np.zeros((num_chunks, self._size), np.int32), np.zeros(num_chunks, np.int64)

    def handle(self, peer: int, datagram: Datagram) -> None:
        """Note a datagram; in the thread of the socket."""
        kind, stamp, chunk, w, body = datagram
        epoch, number = divmod(stamp, 1 << COUNT_BITS)
        with self._lock:
            if epoch > self.epoch + MAX_EPOCHS_AHEAD:
                self.num_refused += 1
                return
            self.newest = max(self.newest, epoch)
            if epoch != self.epoch:
                self.num_late += epoch < self.epoch
                return
            if kind == ANSWER:
                if number > self._numbers.get(peer, 0):
                    self.num_refused += 1
                    return
                self._answers[peer] = max(self._answers.get(peer, 0), number)
                return
            if chunk >= len(self._widths) or len(body) != 4 * self._widths[chunk]:
                self.num_refused += 1
                return
            if (sums := self._received.get(peer)) is None:
                sums = self._received[peer] = ReceivedSums(len(self._widths), self._size)
            if number > sums.numbers[chunk] and not 0 <= sums.new_weight(chunk, w) <= self._max_weight:
                self.num_refused += 1
                return
            self._num_bytes[peer] = self._num_bytes.get(peer, 0) + len(body)
            if (news := sums.news(number, chunk, np.frombuffer(body, "<i4"), w)) is not None:
                x, weight = news
                self._new[0][chunk, : len(x)] += x
                self._new[1][chunk] += weight
                self._has_news = True

    def take(self) -> tuple[Integers, Weights] | None:
        """The sum of the new shares, valid until `end_take`; None: no share has come."""
        with self._lock:
            if not self._has_news:
                return None
            self._new, self._spare, self._has_news = self._spare, self._new, False
        return self._spare

    def end_take(self) -> None:
        """The result of the last `take` is used: its memory becomes zero, for later shares."""
        for values in self._spare:
            values.fill(0)

    def sends(self, peer: int, number: int) -> None:
        """Note that sums with this number are going to an out-peer, before they do."""
        with self._lock:
            self._numbers[peer] = number

    def answered(self, peer: int) -> int:
        """The largest number that an out-peer has answered; 0: none."""
        with self._lock:
            return self._answers.get(peer, 0)

    def heard(self) -> tuple[dict[int, int], dict[int, int]]:
        """The number to answer and the bytes of sums, for each in-peer that has sent some since the last call."""
        with self._lock:
            num_bytes, self._num_bytes = self._num_bytes, {}
            return {peer: self._received[peer].heard for peer in num_bytes if peer in self._received}, num_bytes

    def stats(self) -> dict[str, float]:
        """The counts of lost and late datagrams, by the names of `comm_stats()`."""
        with self._lock:
            received = self._received.values()
            return {
                "datagrams_lost": self.num_lost + sum(sums.num_lost for sums in received),
                "datagrams_late": self.num_late + sum(sums.num_late for sums in received),
            }
