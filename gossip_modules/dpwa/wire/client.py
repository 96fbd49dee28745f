"""ModelClient: fetches the model of one live peer at a time."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

from ...flat.vector import FlatVector
from ..interpolation import Standing
from .connection import PeerConnection
from .curve_keys import CurveKeys
from .distance_bound import DistanceBound
from .message import HEADER_BYTES, MIN_LIMIT_BYTES, Message, MessageError, MessageKind, ModelShape, RefusedModelError
from .peer_scores import PeerScores

MAX_POLL_MILLISECONDS = 1 << 30  # ZeroMQ counts in 32 bits
REPLY_FRACTION = 0.25  # of a round's timeout, until a peer has begun to answer


class PeerLostError(ConnectionError):
    """A peer did not answer in time, or closed the connection."""


class Fetched(NamedTuple):
    """Whose model is in the inbox.

    peer: the name of the peer.
    standing: its clock and loss when it published the model.
    """

    peer: str
    standing: Standing


@dataclass
class ClientStats:
    """Counts of what was fetched. Written by the fetching thread only.

    bytes_sent, bytes_received: the bytes of all messages.
    num_fetches: the number of requests; a round that asks several peers counts each.
    num_failed_fetches: the number of requests that were refused, timed out or broken off.
    num_refused_models: the number of models that were refused: of another shape, with infinities or NaN in the model,
        its loss or its clock, too far from the own model, or malformed.
    refusals: the reason of the last refusal of each peer; the training thread takes them out.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    num_fetches: int = 0
    num_failed_fetches: int = 0
    num_refused_models: int = 0
    refusals: dict[str, str] = field(default_factory=dict)


class ModelClient:
    """Fetches models, one at a time; when a peer fails within a round, another one is asked.

    ZeroMQ's monitor reports at once that a connection was refused or closed. A peer that is connected but silent is
    given up after a quarter of the timeout; once it has begun to answer it may use the rest of the round. Frames longer
    than the own model are refused before memory is taken for them (ZMQ_MAXMSGSIZE), and the header is checked before
    the model is read. A message of several frames is given up at its first one. libzmq, however, hands on whole
    messages only and does not bound their number of frames, so a malicious peer can make it hold what it sends in one
    message within the timeout.

    `add`, `remove` and `stop` may be called from any thread, everything else, `close` included, from the fetching
    thread. `_lock` guards the addresses and keys of peers, and is never held while a socket is used.

    Args:
        context: the context of the sockets.
        peers: the addresses of the peers by name.
        scores: the scores of the same peers.
        shape: the shape of this worker's model.
        curve: the keys; None = no encryption.
        bound: which models are refused.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peers: Mapping[str, str],
        scores: PeerScores,
        *,
        shape: ModelShape,
        curve: CurveKeys | None,
        bound: DistanceBound,
    ) -> None:
        self.scores = scores
        self.stats = ClientStats()
        self.asked: str | None = None  # the last peer, for errors
        self._context = context
        self._shape = shape
        self._curve = curve
        self.bound = bound
        self._lock = threading.Lock()
        self._peers = dict(peers)
        self._keys = {peer: curve.of_peer(peer) for peer in peers} if curve is not None else {}
        self._connections: dict[str, PeerConnection] = {}
        self._probes: dict[str, PeerConnection] = {}
        self._num_requests = 0
        self._wakeup, self._wakeup_sender = socket.socketpair()

    def add(self, peer: str, address: str, public_key: str | None) -> None:
        """Ask this peer too from the next round on."""
        with self._lock:
            self._peers[peer] = address
            if public_key is not None:
                self._keys[peer] = public_key
        self.scores.add(peer)

    def remove(self, peer: str) -> None:
        """Do not ask this peer any more from the next round on."""
        self.scores.remove(peer)
        with self._lock:
            self._peers.pop(peer, None)
            self._keys.pop(peer, None)

    @property
    def num_peers(self) -> int:
        """The number of peers that may be asked."""
        with self._lock:
            return len(self._peers)

    def stop(self) -> None:
        """Give up the fetch that is under way, and all further ones; idempotent."""
        with contextlib.suppress(OSError):  # it has ended
            self._wakeup_sender.send(b"!")

    def close(self) -> None:
        """Close all connections; idempotent."""
        for connection in (*self._connections.values(), *self._probes.values()):
            connection.close()
        self._connections.clear()
        self._probes.clear()
        self._wakeup.close()
        self._wakeup_sender.close()

    def fetch(self, inbox: FlatVector, timeout: float) -> Fetched | None:
        """inbox <- the model of a peer.

        Args:
            inbox: mutated, in host memory; undefined where this returns None.
            timeout: in seconds, for all tries together.

        Returns:
            None where no peer has a model to send now, or none is left to ask.
        """
        deadline = time.monotonic() + timeout
        self._forget_removed()
        self._read_probes()
        for suspect in self.scores.start_round():
            self._probe(suspect)
        tried: set[str] = set()
        while time.monotonic() < deadline and (peer := self.scores.choose(tried)) is not None:
            tried.add(peer)
            self.asked = peer
            self.stats.num_fetches += 1
            try:
                standing = self._try(peer, inbox, deadline, timeout)
            except _Stopped:
                return None
            except PeerLostError:
                self.stats.num_failed_fetches += 1
                self._give_up(peer)
            except (RefusedModelError, MessageError) as error:
                self.stats.num_refused_models += 1
                self.stats.refusals[peer] = str(error)
                self._give_up(peer)
            else:
                self.scores.succeeded(peer)
                if standing is not None:
                    return Fetched(peer, standing)
        return None

    def _give_up(self, peer: str) -> None:
        """Lower the score and close the connection: what it still sends would be taken for a later answer."""
        self.scores.failed(peer)
        if peer in self._connections:
            self._connections.pop(peer).close()

    def _try(self, peer: str, inbox: FlatVector, deadline: float, timeout: float) -> Standing | None:
        """inbox <- the model of this peer; returns its standing, None where it has no model to send."""
        connection = self._connect(self._connections, peer)
        request = self._send(connection, MessageKind.FETCH)
        reply_deadline = min(deadline, time.monotonic() + REPLY_FRACTION * timeout)
        while True:
            reply = Message.parse(self._receive(connection, reply_deadline))
            if reply.request == request:
                break
        if reply.kind in (MessageKind.EMPTY, MessageKind.BUSY):
            return None
        reply.check(self._shape)
        if reply.kind is not MessageKind.MODEL:
            raise MessageError(f"got kind {reply.kind.name}, expected a model; the peer is broken")
        with torch.profiler.record_function("gossip.receive"):
            payload = self._receive(connection, deadline)
            if len(payload) != self._shape.num_bytes:
                raise MessageError(f"got a model of {len(payload)} bytes, expected {self._shape.num_bytes}")
            inbox.raw.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        self.bound.check(inbox)
        return reply.standing

    def _send(self, connection: PeerConnection, kind: MessageKind) -> int:
        self._num_requests += 1
        try:
            connection.socket.send(Message(kind, self._num_requests, self._shape).pack(), zmq.NOBLOCK)
        except zmq.Again as error:  # the connection has just failed
            raise PeerLostError("it cannot be reached") from error
        self.stats.bytes_sent += HEADER_BYTES
        return self._num_requests

    def _receive(self, connection: PeerConnection, deadline: float) -> Any:
        """The next message, as a buffer. Raises PeerLostError where none comes in time."""
        poller = zmq.Poller()
        for waited_for in (connection.socket, connection.monitor, self._wakeup):
            poller.register(waited_for, zmq.POLLIN)
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            ready = dict(poller.poll(min(math.ceil(1000 * left), MAX_POLL_MILLISECONDS)))
            if self._wakeup.fileno() in ready:
                raise _Stopped
            if connection.socket in ready and (frame := connection.answer()) is not None:
                self.stats.bytes_received += len(frame.buffer)
                return frame.buffer
            if (why := connection.failure()) is not None:
                raise PeerLostError(why)
            if time.monotonic() >= deadline:
                raise PeerLostError("it did not answer in time")

    def _probe(self, peer: str) -> None:
        """Send a probe, whose answer a later round reads."""
        if peer in self._probes:
            self._probes.pop(peer).close()
        with contextlib.suppress(PeerLostError):  # removed meanwhile
            self._send(self._connect(self._probes, peer), MessageKind.PROBE)

    def _forget_removed(self) -> None:
        with self._lock:
            peers = set(self._peers)
        for connections in (self._connections, self._probes):
            for removed in [peer for peer in connections if peer not in peers]:
                connections.pop(removed).close()

    def _read_probes(self) -> None:
        for peer, connection in list(self._probes.items()):
            try:
                answer = connection.answer()
                if answer is None:
                    continue
                if Message.parse(answer.bytes).kind is MessageKind.ALIVE:
                    self.scores.answered(peer)
            except MessageError:
                pass  # a broken answer does not count
            self._probes.pop(peer).close()

    def _connect(self, connections: dict[str, PeerConnection], peer: str) -> PeerConnection:
        """The connection to this peer; a new one if there is none, or the old one failed or has another address."""
        with self._lock:
            address, key = self._peers.get(peer), self._keys.get(peer)
        if address is None:
            raise PeerLostError("it was removed")
        old = connections.get(peer)
        if old is not None:
            if (old.address, old.server_key) == (address, key) and old.failure() is None:
                return old
            connections.pop(peer).close()
        keys = None if self._curve is None or key is None else (self._curve, key)
        max_bytes = max(MIN_LIMIT_BYTES, self._shape.num_bytes)
        try:
            connections[peer] = PeerConnection(self._context, address, max_bytes=max_bytes, keys=keys)
        except zmq.ZMQError as error:
            raise PeerLostError(f"cannot connect to {address!r}: {error}") from error
        return connections[peer]


class _Stopped(Exception):
    """The worker closes while a fetch is under way."""
