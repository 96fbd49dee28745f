"""PairwiseNetwork: the sockets and the two threads of one worker of pairwise averaging. Needs pyzmq."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence

import zmq

from ..engine.background import Background
from ..flat.vector import FlatVector
from .config import PairwiseConfig, check_address
from .wire.client import ModelClient
from .wire.curve_keys import check_key
from .wire.curve_server import CurveServer
from .wire.distance_bound import DistanceBound
from .wire.fetcher import ModelFetcher
from .wire.message import ModelShape
from .wire.peer_scores import PeerScores
from .wire.plain_server import PlainServer


class PairwiseNetwork:
    """A server that answers peers and a fetcher that asks them, each in a thread of its own.

    [Note: threads of dpwa] The serving thread sends the snapshot that was published last; see [Note: Serving never
    blocks training] for the one lock that it shares with training. The fetching thread owns the client and its
    connections; a fetch that training has started belongs to it until the future of that fetch is done. `add_peer` and
    `remove_peer` may come from any thread: the client, the scores and the server each have a lock for what these
    change, and `_keys_lock` puts the changes of keys in order. No thread waits for a peer while it holds a lock.

    Args:
        x: the parameters; their layout and device are what is served.
        signature: names, shapes and dtypes of the tensors: `FlatBuffer.signature()`.
        config: who this worker is and whom it asks.

    Attributes:
        server: serves the model that was published last.
        client: the connections to peers.
        fetcher: fetches one model at a time.
        bound: which models are refused.
        scores: which peer is asked next.

    Raises:
        ValueError: an address that is none, or keys that are no pair.
        ConnectionError: the own address is taken.
    """

    def __init__(self, x: FlatVector, signature: Sequence[str], config: PairwiseConfig) -> None:
        curve = config.curve
        if curve is not None:
            curve.check_pair(zmq.curve_public(curve.secret.encode()).decode())
        self._config = config
        self._keys = {} if curve is None else dict(curve.peers)
        self._keys_lock = threading.Lock()
        self._warned: set[str] = set()
        self._is_closed = False
        self.scores = PeerScores(config.others, seed=config.peer_seed)
        shape = ModelShape.of(signature, x.layout)
        with contextlib.ExitStack() as undo:
            # The server needs a context with keys only. It has one of its own, which no peer that we ask can hold up.
            contexts = [undo.enter_context(zmq.Context()) for _ in range(1 if curve is None else 2)]
            self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = contexts
            self.server = self._open_server(x, shape)
            undo.callback(self.server.close)
            self.server.num_peers = len(config.others)
            self.bound = DistanceBound(config.max_distance, self.server.latest)
            self.client = ModelClient(
                contexts[0], config.others, self.scores, shape=shape, curve=curve, bound=self.bound
            )
            undo.callback(self.client.close)
            self.fetcher = ModelFetcher(self.client, x, name=config.name, timeout=config.timeout.total_seconds())
            undo.pop_all()
        self._background = Background()
        self._background.start(f"gossip-serve-{config.name}", self._serve)
        self._background.start(f"gossip-fetch-{config.name}", self.fetcher.work)

    @property
    def address(self) -> str:
        """The address at which this worker is reached: as configured, with the port that `*` has become."""
        return self.server.address

    @property
    def num_bytes_sent(self) -> int:
        """The bytes of all models and headers that were sent."""
        return self.server.stats.bytes_sent + self.client.stats.bytes_sent

    def statistics(self) -> dict[str, float]:
        """What went wrong and what arrived; see `PairwiseDataParallel.comm_stats`."""
        client, server = self.client.stats, self.server.stats
        return {
            "bytes_received": client.bytes_received,
            "num_fetches": client.num_fetches,
            "num_failed_fetches": client.num_failed_fetches,
            "num_refused_models": client.num_refused_models,
            "num_refused_connections": server.num_refused_connections,
            "num_garbage_messages": server.num_garbage_messages,
            "num_unread_replies": server.num_unread_replies,
            "num_models_sent": server.num_models_sent,
            "live": 1 + self.scores.num_live,
            "joins": self.scores.num_joins,
            "deaths": self.scores.num_deaths,
            "deadline": self._config.timeout.total_seconds(),
        }

    def add_peer(self, name: str, address: str, *, public_key: str | None = None) -> None:
        """Ask this worker too from the next round on, and with keys answer it. Replaces a peer of the same name.

        Raises:
            ValueError: no address, the own name, or a key that is missing or not needed.
        """
        check_address(address, peer=name)
        if name == self._config.name:
            raise ValueError(f"got the own name {name!r}, expected another worker's")
        if (public_key is None) != (self._config.curve is None):
            raise ValueError(f"got public_key={public_key!r} of {name!r}, expected one exactly where `curve` is given")
        if public_key is not None:
            check_key(public_key, owner=name)
            with self._keys_lock:
                keys = {**self._keys, name: public_key}
                self.server.authorize(keys.values())
                self._keys = keys
        self.client.add(name, address, public_key)
        self.server.num_peers = self.client.num_peers

    def remove_peer(self, name: str) -> None:
        """Do not ask this worker any more; with keys, do not answer it either. An unknown name is no error."""
        self.client.remove(name)
        self.server.num_peers = self.client.num_peers
        with self._keys_lock:
            if self._keys.pop(name, None) is not None:
                self.server.authorize(self._keys.values())

    def warn_of_refusals(self) -> None:
        """Warn of peers whose model was refused, once of each. Called by the training thread."""
        while self.client.stats.refusals:
            peer, why = self.client.stats.refusals.popitem()
            if peer not in self._warned:
                self._warned.add(peer)
                warnings.warn(f"worker {self._config.name!r} refused the model of {peer!r}: {why}", stacklevel=3)

    def raise_if_failed(self) -> None:
        """Raise the error that ended a thread, if any did."""
        self._background.raise_if_failed()

    def close(self) -> None:
        """End both threads and close all sockets; idempotent. A fetch that is under way is given up."""
        if self._is_closed:
            return
        self._is_closed = True
        self.fetcher.stop()
        self.server.stop()
        if self._background.close():
            for context in self._contexts:
                context.term()

    def _open_server(self, x: FlatVector, shape: ModelShape) -> PlainServer | CurveServer:
        config, layout, is_pinned = self._config, x.layout, x.raw.is_cuda
        address, name = config.peers[config.name], config.name
        if config.curve is not None:
            context, curve = self._contexts[1], config.curve
            return CurveServer(
                context, address, name=name, shape=shape, layout=layout, is_pinned=is_pinned, curve=curve
            )
        seconds = config.timeout.total_seconds()
        return PlainServer(address, name=name, shape=shape, layout=layout, is_pinned=is_pinned, round_seconds=seconds)

    def _serve(self) -> None:
        """The body of the serving thread."""
        try:
            self.server.serve()
        except Exception as error:
            raise RuntimeError(f"worker {self._config.name!r}: serving peers failed: {error!r}") from error
