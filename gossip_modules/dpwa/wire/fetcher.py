"""ModelFetcher: fetches the model of one live peer at a time, in the background, while training computes a batch."""

from __future__ import annotations

import contextlib
import queue
import ssl
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import NamedTuple

import torch
from torch.profiler import record_function

from ...engine.background import Background
from ...flat.vector import FlatVector
from ..interpolation import Standing
from .connection import PEER_SECONDS, PeerConnection, PeerConnections, PeerLostError, connect
from .counts import Counts
from .distance_bound import DistanceBound
from .message import MessageError, MessageHeader, MessageKind, ModelShape, RefusedModelError
from .peer_scores import PeerScores

REPLY_FRACTION = 0.25  # of a round's timeout, until a peer has begun to answer
GRACE_SECONDS = 5.0  # beyond the timeout of a round, for the copy and check of what has arrived


class Fetched(NamedTuple):
    """The origin of the model that has arrived.

    peer: the name of the peer.
    standing: its clock and loss when it published the model.
    """

    peer: str
    standing: Standing


class ModelFetcher:
    """One fetch at a time, in a thread of its own: `start`, and then `wait` or `is_done`.

    A fetch asks the peer with the best score, and where that one fails another one, until the timeout. A peer that is
    silent is given up after a quarter of the timeout; once it has begun to answer it may use the rest of the round. The
    header is checked before the model is read, and the model is read straight into the memory for it, whose length it
    must have: see [Note: The wire of dpwa]. Peers that failed before are probed meanwhile, each in a thread of its own.

    For parameters on a GPU a model arrives in pinned memory and is copied to the GPU on a side stream before the fetch
    counts as done. The memory of the model belongs to the fetching thread from `start` until the future is done, and to
    the training thread otherwise, so there is no lock.

    Args:
        x: the parameters, whose layout and device fetched models have.
        peers: the addresses of the peers by name; any thread may change it.
        scores: the scores of the same peers.
        name: the name of this worker, for errors.
        timeout: the timeout of a fetch, in seconds.
        shape: the shape of x.
        bound: which models are refused.
        counts: mutated.
        background: starts the threads that probe.
        context: of TLS, for the client's side; None = in the clear.

    Attributes:
        arrived: the model that the last fetch has brought; valid until the next one starts.
    """

    def __init__(
        self,
        x: FlatVector,
        peers: Mapping[str, str],
        scores: PeerScores,
        *,
        name: str,
        timeout: float,
        shape: ModelShape,
        bound: DistanceBound,
        counts: Counts,
        background: Background,
        context: ssl.SSLContext | None,
    ) -> None:
        self._peers, self._scores, self._name, self._timeout = peers, scores, name, timeout
        self._shape, self._bound, self._counts, self._context = shape, bound, counts, context
        self._background, self._connections = background, PeerConnections()
        self._probed: set[str] = set()
        self._asked: str | None = None  # the last peer, for errors
        self._future: Future[Fetched | None] | None = None
        self._jobs: queue.SimpleQueue[Future[Fetched | None] | None] = queue.SimpleQueue()
        raw = torch.zeros(x.layout.num_bytes, dtype=torch.uint8, pin_memory=x.raw.is_cuda, device="cpu")
        self._inbox = self.arrived = FlatVector(x.layout, raw)
        if x.raw.is_cuda:
            self.arrived = x.like()
            self._stream = torch.cuda.Stream(x.raw.device)
            self._read = torch.cuda.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether a fetch has been started and not been waited for."""
        return self._future is not None

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._future is None or self._future.done()

    def start(self) -> None:
        """Start a fetch. On a GPU, everything that reads the last model must have been queued before."""
        assert self._future is None, "one fetch at a time"
        if self.arrived is not self._inbox:
            self._read.record(torch.cuda.current_stream(self.arrived.raw.device))
        self._future = Future()
        self._jobs.put(self._future)

    def wait(self) -> Fetched | None:
        """Wait for the fetch; whose model has arrived, None where none has. No fetch is under way afterwards.

        Raises:
            TimeoutError: the fetch takes much longer than its timeout; names the peer.
            RuntimeError: the fetch failed, though not because of the network; names the peer.
        """
        if self._future is None:
            return None
        start = time.monotonic()
        try:
            return self._future.result(self._timeout + GRACE_SECONDS)
        except FutureTimeoutError:
            raise TimeoutError(
                f"worker {self._name!r}: a fetch from {self._asked!r} did not end within "
                f"{time.monotonic() - start:.1f} s (timeout {self._timeout:g} s)"
            ) from None
        finally:
            self._future = None

    def stop(self) -> None:
        """Let `work()` and all probes end; idempotent. A fetch that is under way is given up."""
        self._connections.stop()
        self._jobs.put(None)

    def work(self) -> None:
        """The body of the fetching thread, until `stop()`."""
        while (future := self._jobs.get()) is not None:
            try:
                with torch.no_grad(), record_function("gossip.fetch"):
                    future.set_result(self._fetch())
            except Exception as error:
                failure = RuntimeError(f"worker {self._name!r}: fetching from {self._asked!r} failed: {error!r}")
                future.set_exception(failure)
                raise failure from error

    def _fetch(self) -> Fetched | None:
        """arrived <- the model of a peer; None where no peer has a model to send now, or none is left to ask."""
        deadline = time.monotonic() + self._timeout
        for suspect in self._scores.start_round():
            self._start_probe(suspect)
        tried: set[str] = set()
        while not self._connections.is_stopped and time.monotonic() < deadline:
            if (peer := self._scores.choose(tried)) is None:
                break
            tried.add(peer)
            self._asked = peer
            self._counts.add(num_fetches=1)
            try:
                standing = self._try(peer, deadline)
            except (OSError, MessageError, RefusedModelError) as error:
                self._scores.failed(peer)
                self._count(peer, error)
                continue
            self._scores.succeeded(peer)
            if standing is not None:
                self._copy_to_device()
                return Fetched(peer, standing)
        self._bound.check_own()  # else done beside the peer's
        return None

    def _try(self, peer: str, deadline: float) -> Standing | None:
        """inbox <- the model of this peer; returns its standing, None where it has no model to send."""
        reply_deadline = min(deadline, time.monotonic() + REPLY_FRACTION * self._timeout)
        with self._asking(peer, MessageKind.FETCH, reply_deadline) as (connection, reply):
            if reply.kind is MessageKind.EMPTY:
                return None
            reply.check(self._shape)
            if reply.kind is not MessageKind.MODEL:
                raise MessageError(f"got kind {reply.kind.name}, expected a model; the peer is broken")
            with record_function("gossip.receive"):
                connection.receive_into(self._inbox.raw.numpy().data, deadline)
        self._bound.check(self._inbox)
        return reply.standing

    @contextlib.contextmanager
    def _asking(self, peer: str, kind: MessageKind, deadline: float) -> Iterator[tuple[PeerConnection, MessageHeader]]:
        """A context with the connection over which a peer was asked, and the header of its reply."""
        if (address := self._peers.get(peer)) is None:
            raise PeerLostError("it was removed")
        connection = connect(address, self._context, deadline)
        with self._connections.holding(connection):
            try:
                connection.secure(deadline)
                connection.send(MessageHeader(kind, self._shape), deadline=deadline)
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

    def _copy_to_device(self) -> None:
        if self.arrived is not self._inbox:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._read)  # the last merge reads what this overwrites
                self.arrived.raw.copy_(self._inbox.raw, non_blocking=True)
            self._stream.synchronize()  # the inbox is free, and training need not wait for this stream

    def _start_probe(self, peer: str) -> None:
        """Ask a peer whether it is there, in a thread of its own; one at a time."""
        if peer not in self._probed:
            self._probed.add(peer)
            deadline = time.monotonic() + min(self._timeout, PEER_SECONDS)
            self._background.start("gossip-probe", partial(self._probe, peer, deadline))

    def _probe(self, peer: str, deadline: float) -> None:
        try:
            with contextlib.suppress(OSError, MessageError), self._asking(peer, MessageKind.PROBE, deadline):
                self._scores.answered(peer)
        finally:
            self._probed.discard(peer)
