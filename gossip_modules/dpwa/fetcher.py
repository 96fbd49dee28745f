"""ModelFetcher: fetches the model of one live peer at a time, in the background, while training computes a batch."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import NamedTuple

import torch

from ..devices import host_zeros
from ..engine.background import Background
from ..engine.snapshots import SnapshotPool
from ..flat.distance import distance, norm
from ..flat.nonfinite import is_finite
from ..flat.vector import FlatVector
from ..profiling import span
from ..transport.job_key import key_of
from ..transport.threads import CallThread
from ..transport.traffic import PeerTraffic
from .config import DEFAULT_MAX_DISTANCE, PairwiseConfig
from .interpolation import Standing
from .peer_scores import PeerScores
from .protocol import (
    PEER_SECONDS,
    Counts,
    MessageError,
    MessageHeader,
    MessageKind,
    ModelShape,
    PeerConnection,
    PeerConnections,
    PeerLostError,
    RefusedModelError,
    connect,
)

REPLY_FRACTION = 0.25  # of a round's timeout, until a peer has begun to answer
GRACE_SECONDS = 5.0  # beyond the timeout of a round, for the copy and check of a model that has arrived


_FAILURES = (OSError, MessageError, RefusedModelError)  # of a peer


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
    must have: see [Note: The wire of dpwa] of `PeerConnection`. Peers that failed before are probed meanwhile, each in
    a thread of its own.

    For parameters on a GPU a model arrives in pinned memory and is copied to the GPU on a side stream before the fetch
    counts as done. The memory of the model belongs to the fetching thread from `start` until the future is done, and to
    the training thread otherwise, so there is no lock.

    Args:
        x: the parameters, whose layout and device fetched models have.
        config: the name, the timeout, the TLS and the bound on models of this worker.
        peers: the addresses of the peers by name; any thread may change it.
        scores: the scores of the same peers.
        shape: the shape of x.
        snapshots: the models that this worker has published.
        counts: mutated.
        background: starts the threads that probe.

    Attributes:
        arrived: the model that the last fetch has brought; valid until the next one starts.
        is_own_finite: whether the own model was finite when the last fetch ended.
        traffic: counts the models that peers have sent.
    """

    def __init__(
        self,
        x: FlatVector,
        config: PairwiseConfig,
        peers: Mapping[str, str],
        scores: PeerScores,
        *,
        shape: ModelShape,
        snapshots: SnapshotPool,
        counts: Counts,
        background: Background,
    ) -> None:
        self._config, self._peers, self._scores, self._shape = config, peers, scores, shape
        self._snapshots, self._counts, self._background = snapshots, counts, background
        self._timeout = config.timeout.total_seconds()
        self._connections, self._key = PeerConnections(), key_of()
        self._probed: set[str] = set()
        self._asked: str | None = None  # the last peer, for errors
        self._thread = CallThread(f"gossip-fetch-{config.name}")
        self._future: Future[float] | None = None
        self._fetched: Fetched | None = None
        self.is_own_finite, self.traffic = True, PeerTraffic()
        raw = host_zeros([x.layout.num_bytes], torch.uint8, beside=x.raw.device)
        self._inbox = self.arrived = FlatVector(x.layout, raw)
        if x.raw.device.type != "cpu":
            self.arrived = x.like()
            self._stream = torch.Stream(x.raw.device)
            self._read = torch.Event(x.raw.device)

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
            self._read.record(torch.accelerator.current_stream(self.arrived.raw.device))
        self._future = self._thread.submit(self._run)

    def wait(self) -> Fetched | None:
        """Wait for the fetch; the origin of the model, None where none has arrived. No fetch is under way afterwards.

        Raises:
            TimeoutError: the fetch takes much longer than its timeout; names the peer.
            RuntimeError: the fetch failed, though not because of the network; names the peer.
        """
        if self._future is None:
            return None
        start = time.monotonic()
        try:
            self._future.result(self._timeout + GRACE_SECONDS)
        except FutureTimeoutError:
            raise TimeoutError(
                f"worker {self._config.name!r}: a fetch from {self._asked!r} did not end within "
                f"{time.monotonic() - start:.1f} s (timeout {self._timeout:g} s)"
            ) from None
        finally:
            self._future = None
        return self._fetched

    def stop(self) -> None:
        """End the fetching thread and all probes; idempotent. A fetch that is under way is given up."""
        self._connections.stop()
        self._thread.close()

    def _run(self) -> float:
        """One fetch, in the fetching thread."""
        try:
            with torch.no_grad(), span("gossip.fetch"):
                self._fetched = self._fetch()
        except Exception as error:
            name = self._config.name
            raise RuntimeError(f"worker {name!r}: fetching from {self._asked!r} failed: {error!r}") from error
        return 0.0

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
            start = time.monotonic()
            try:
                standing = self._try(peer, deadline)
            except _FAILURES as error:
                self._scores.failed(peer)
                if isinstance(error, OSError):
                    self._counts.add(num_failed_fetches=1)
                else:
                    self._counts.add(num_refused_models=1)
                    self._counts.refusals[peer] = str(error)
                continue
            self._scores.succeeded(peer)
            if standing is not None:
                num_bytes = self._inbox.layout.num_bytes
                self.traffic.arrived({peer: num_bytes}, {peer: time.monotonic() - start})
                self._copy_to_device()
                return Fetched(peer, standing)
        self._check()  # the own model alone
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
            with span("gossip.receive"):
                connection.receive_into(self._inbox.raw.numpy().data, deadline)
        self._check(self._inbox)
        return reply.standing

    def _check(self, y: FlatVector | None = None) -> None:
        """Check the own model, and refuse a model y that is not finite or too far from it."""
        with self._snapshots.reading() as snapshot:
            own = None if snapshot is None else snapshot.vector
            if y is None:
                self.is_own_finite = own is None or is_finite(own)
            else:
                self.is_own_finite = check_distance(y, own, self._config.max_distance)

    @contextlib.contextmanager
    def _asking(self, peer: str, kind: MessageKind, deadline: float) -> Iterator[tuple[PeerConnection, MessageHeader]]:
        """A context with the connection over which a peer was asked, and the header of its reply."""
        if (address := self._peers.get(peer)) is None:
            raise PeerLostError("it was removed")
        connection = connect(address, self._config.client_ssl, deadline)
        with self._connections.holding(connection):
            try:
                connection.secure(deadline)
                if self._key is not None:
                    connection.show_key(self._key, deadline, is_server=False)
                connection.send(MessageHeader(kind, self._shape), deadline=deadline)
                yield connection, connection.receive(deadline)
            finally:
                self._counts.add(bytes_sent=connection.num_sent, bytes_received=connection.num_received)

    def _copy_to_device(self) -> None:
        if self.arrived is not self._inbox:
            with self._stream:
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
            with contextlib.suppress(*_FAILURES), self._asking(peer, MessageKind.PROBE, deadline):
                self._scores.answered(peer)
        finally:
            self._probed.discard(peer)


def check_distance(y: FlatVector, x: FlatVector | None, max_distance: float) -> bool:
    """Refuse a model y that is not finite, or where rms(y - x) > max_distance * max(rms(x), 1) with the own model x.

    rms is the root mean square over all d elements. Parameters of honest workers are of the order of 1 throughout
    training, and so are their differences; 10^6 leaves room for statistics of inputs that were not normalised. Before
    the first publication, when the own model is not known, the bound is on rms(y), and at least DEFAULT_MAX_DISTANCE: a
    worker that starts from another's model may be far from it.

    One pass over both models is enough to accept a model; the reason of a refusal takes further passes.

    Args:
        y: a peer's model, in host memory.
        x: the own model, in host memory; None: not known.
        max_distance: the bound, in units of max(rms(x), 1); > 0.

    Returns:
        Whether x is finite; where it is not, only y is checked.

    Raises:
        RefusedModelError: y is not finite or too far away; says how far.
    """
    limit = max_distance if x is not None else max(max_distance, DEFAULT_MAX_DISTANCE)
    root = math.sqrt(max(sum(segment.numel() for segment in y.segments), 1))
    rms = (norm(y.segments) if x is None else distance(y.segments, x.segments)) / root
    if math.isfinite(rms) and rms <= limit:  # so x and y are finite
        return True
    if not is_finite(y):
        raise RefusedModelError("got a model with infinite or NaN values, expected finite ones; the peer diverged")
    if x is not None and not is_finite(x):
        return False
    scale = 1.0 if x is None else max(norm(x.segments) / root, 1.0)
    if not rms <= limit * scale:
        raise RefusedModelError(
            f"got a model at a root mean square distance of {rms:.3g} from ours, expected {limit:g} * {scale:.3g} "
            "at most; the peer has diverged or is broken, or a larger max_distance= is needed"
        )
    return True
