"""ModelClient: fetches the model of one live peer at a time."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from torch.profiler import record_function

from ...engine.background import Background
from ...flat.vector import FlatVector
from ..interpolation import Standing
from .connection import PEER_SECONDS, Connection, Connections, PeerLostError, connect
from .counts import Counts
from .distance_bound import DistanceBound
from .message import Message, MessageError, MessageKind, ModelShape, RefusedModelError
from .peer_scores import PeerScores

REPLY_FRACTION = 0.25  # of a round's timeout, until a peer has begun to answer


class Fetched(NamedTuple):
    """Whose model is in the inbox.

    peer: the name of the peer.
    standing: its clock and loss when it published the model.
    """

    peer: str
    standing: Standing


class ModelClient:
    """Fetches models, one at a time, each over a connection of its own; when a peer fails, another one is asked.

    A peer that is silent is given up after a quarter of the timeout; once it has begun to answer it may use the rest of
    the round. The header is checked before the model is read, and the model is read straight into the inbox, whose
    length it must have: see [Note: The wire of dpwa].

    `add`, `remove` and `stop` may be called from any thread, `fetch` from the fetching thread. What they share needs no
    lock: each operation on the addresses, and on the names of the peers that are being probed, is one of Python's own.

    Args:
        peers: the addresses of the peers by name.
        scores: the scores of the same peers.
        shape: the shape of this worker's model.
        bound: which models are refused.
        counts: mutated.
        background: starts the threads that probe.
        context: of TLS, for the client's side; None = in the clear.

    Attributes:
        asked: the peer that was asked last, for errors.
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        scores: PeerScores,
        *,
        shape: ModelShape,
        bound: DistanceBound,
        counts: Counts,
        background: Background,
        context: ssl.SSLContext | None,
    ) -> None:
        self.scores, self.bound = scores, bound
        self.asked: str | None = None
        self._shape, self._counts, self._background, self._context = shape, counts, background, context
        self._connections = Connections()
        self._peers = dict(peers)
        self._probed: set[str] = set()

    def add(self, peer: str, address: str) -> None:
        """Ask this peer too from the next round on."""
        self._peers[peer] = address
        self.scores.add(peer)

    def remove(self, peer: str) -> None:
        """Do not ask this peer any more from the next round on."""
        self.scores.remove(peer)
        self._peers.pop(peer, None)

    @property
    def num_peers(self) -> int:
        """The number of peers that may be asked."""
        return len(self._peers)

    def stop(self) -> None:
        """Give up the fetch that is under way, and all further ones; idempotent."""
        self._connections.stop()

    def fetch(self, inbox: FlatVector, timeout: float) -> Fetched | None:
        """inbox <- the model of a peer.

        Args:
            inbox: mutated, in host memory; undefined where this returns None.
            timeout: in seconds, for all tries together.

        Returns:
            None where no peer has a model to send now, or none is left to ask.
        """
        deadline = time.monotonic() + timeout
        for suspect in self.scores.start_round():
            self._start_probe(suspect, min(timeout, PEER_SECONDS))
        tried: set[str] = set()
        while not self._connections.is_stopped and time.monotonic() < deadline:
            if (peer := self.scores.choose(tried)) is None:
                break
            tried.add(peer)
            self.asked = peer
            self._counts.add(num_fetches=1)
            try:
                standing = self._try(peer, inbox, deadline, timeout)
            except (OSError, MessageError, RefusedModelError) as error:
                self.scores.failed(peer)
                self._count(peer, error)
            else:
                self.scores.succeeded(peer)
                if standing is not None:
                    return Fetched(peer, standing)
        return None

    def _try(self, peer: str, inbox: FlatVector, deadline: float, timeout: float) -> Standing | None:
        """inbox <- the model of this peer; returns its standing, None where it has no model to send."""
        reply_deadline = min(deadline, time.monotonic() + REPLY_FRACTION * timeout)
        with self._asking(peer, MessageKind.FETCH, reply_deadline) as (connection, reply):
            if reply.kind is MessageKind.EMPTY:
                return None
            reply.check(self._shape)
            if reply.kind is not MessageKind.MODEL:
                raise MessageError(f"got kind {reply.kind.name}, expected a model; the peer is broken")
            with record_function("gossip.receive"):
                connection.receive_into(inbox.raw.numpy().data, deadline)
        self.bound.check(inbox)
        return reply.standing

    @contextlib.contextmanager
    def _asking(self, peer: str, kind: MessageKind, deadline: float) -> Iterator[tuple[Connection, Message]]:
        """A context with the connection over which a peer was asked, and the header of its reply."""
        if (address := self._peers.get(peer)) is None:
            raise PeerLostError("it was removed")
        connection = connect(address, self._context, deadline)
        with self._connections.holding(connection):
            try:
                connection.secure(deadline)
                connection.send(Message(kind, self._shape), deadline=deadline)
                yield connection, connection.receive(deadline)
            finally:
                self._counts.add(bytes_sent=connection.num_sent, bytes_received=connection.num_received)

    def _count(self, peer: str, error: Exception) -> None:
        """Count a fetch that failed, or a model or TLS that was refused, with the reason."""
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            error = RefusedModelError(
                f"got {error}, expected TLS on both ends and a certificate for the host of the address that the other "
                "end trusts; check server_ssl= and client_ssl= of both workers"
            )
        if isinstance(error, OSError):
            self._counts.add(num_failed_fetches=1)
        else:
            self._counts.add(num_refused_models=1)
            self._counts.refusals[peer] = str(error)

    def _start_probe(self, peer: str, seconds: float) -> None:
        """Ask a peer whether it is there, in a thread of its own; one at a time."""
        if peer not in self._probed:
            self._probed.add(peer)
            self._background.start("gossip-probe", partial(self._probe, peer, time.monotonic() + seconds))

    def _probe(self, peer: str, deadline: float) -> None:
        try:
            with contextlib.suppress(OSError, MessageError), self._asking(peer, MessageKind.PROBE, deadline):
                self.scores.answered(peer)
        finally:
            self._probed.discard(peer)
