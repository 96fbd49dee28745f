"""The asking side of a worker: one fetch of one live peer's model."""

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
    """A peer did not answer, or broke off."""


class Fetched(NamedTuple):
    """Whose model is in the inbox, and how far it was."""

    peer: str
    standing: Standing


@dataclass
class ClientStats:
    """What was fetched. Written by the fetching thread only.

    num_fetches: requests, that is rounds and the tries of other peers in them.
    num_failed_fetches: refused, timed out or broken off.
    num_refused_models: with another shape, with infinities or NaN in the model, its loss or its clock, too far from
        ours, or malformed.
    refusals: why, the last one of each peer; the training thread takes them out.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    num_fetches: int = 0
    num_failed_fetches: int = 0
    num_refused_models: int = 0
    refusals: dict[str, str] = field(default_factory=dict)


class ModelClient:
    """Fetches models, one at a time; of several peers that fail within a round the next one is asked.

    ZeroMQ's monitor says at once when a connection is refused or closed. A peer that is there but silent is given up
    after a quarter of the timeout; once it has begun to answer it may use up the round. Frames longer than a model of
    ours are refused before memory is taken for them (ZMQ_MAXMSGSIZE), and the header is judged before the
    model is read. A message of several frames is given up at its first one; but libzmq hands on whole messages only and
    does not bound their frames, so a peer that lies can make it hold what it sends in one message within the timeout.

    All methods but `add`, `remove` and `stop` belong to the fetching thread, `close` included.

    Args:
        context: of the sockets.
        peers: addresses by name.
        scores: of the same peers.
        shape: of its model.
        curve: keys.
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
        self._bell, self._clapper = socket.socketpair()

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
        """How many peers may be asked."""
        with self._lock:
            return len(self._peers)

    def stop(self) -> None:
        """End a fetch that is under way, and all further ones; idempotent."""
        with contextlib.suppress(OSError):  # it has ended
            self._clapper.send(b"!")

    def close(self) -> None:
        """Close all connections; idempotent."""
        for connection in (*self._connections.values(), *self._probes.values()):
            connection.close()
        self._connections.clear()
        self._probes.clear()
        self._bell.close()
        self._clapper.close()

    def fetch(self, inbox: FlatVector, timeout: float) -> Fetched | None:
        """inbox <- the model of a peer.

        Args:
            inbox: mutated, in host memory; undefined where this returns None.
            timeout: in seconds, for all tries together.

        Returns:
            None where no peer has a model for us now, or none is left to ask.
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
        """What it still sends must not be taken for the answer to a later request."""
        self.scores.failed(peer)
        if peer in self._connections:
            self._connections.pop(peer).close()

    def _try(self, peer: str, inbox: FlatVector, deadline: float, timeout: float) -> Standing | None:
        """The standing of the peer whose model is in the inbox; None where it has none for us."""
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
        """The next message, as a buffer; raises where there is none in time."""
        poller = zmq.Poller()
        for waited_for in (connection.socket, connection.monitor, self._bell):
            poller.register(waited_for, zmq.POLLIN)
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            ready = dict(poller.poll(min(math.ceil(1000 * left), MAX_POLL_MILLISECONDS)))
            if self._bell.fileno() in ready:
                raise _Stopped
            if connection.socket in ready and (frame := connection.answer()) is not None:
                self.stats.bytes_received += len(frame.buffer)
                return frame.buffer
            if (why := connection.failure()) is not None:
                raise PeerLostError(why)
            if time.monotonic() >= deadline:
                raise PeerLostError("it did not answer in time")

    def _probe(self, peer: str) -> None:
        """Ask for a sign of life that a later round reads."""
        if peer in self._probes:
            self._probes.pop(peer).close()
        with contextlib.suppress(PeerLostError):  # removed meanwhile
            self._send(self._connect(self._probes, peer), MessageKind.PROBE)

    def _forget_removed(self) -> None:
        with self._lock:
            peers = set(self._peers)
        for connections in (self._connections, self._probes):
            for gone in [peer for peer in connections if peer not in peers]:
                connections.pop(gone).close()

    def _read_probes(self) -> None:
        for peer, connection in list(self._probes.items()):
            try:
                answer = connection.answer()
                if answer is None:
                    continue
                if Message.parse(answer.bytes).kind is MessageKind.ALIVE:
                    self.scores.answered(peer)
            except MessageError:
                pass  # it is broken, which is no sign of life
            self._probes.pop(peer).close()

    def _connect(self, connections: dict[str, PeerConnection], peer: str) -> PeerConnection:
        """The connection to this peer; a new one if there is none, or the old one has failed or is to elsewhere."""
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
    """The worker closes."""
