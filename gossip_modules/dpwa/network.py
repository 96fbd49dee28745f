"""PairwiseNetwork: the port, the connections and the threads of one worker of pairwise averaging."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..engine.background import Background
from ..flat.vector import FlatVector
from ..transport.bounded_listener import MIN_CONNECTIONS
from .config import PairwiseConfig, check_address
from .wire.counts import Counts
from .wire.distance_bound import DistanceBound
from .wire.fetcher import ModelFetcher
from .wire.message import ModelShape
from .wire.peer_scores import PeerScores
from .wire.server import ModelServer
from .wire.snapshot_pool import SnapshotPool

CONNECTIONS_PER_PEER = 2  # above MIN_CONNECTIONS, for each peer that is known: one to fetch and one to probe


class PairwiseNetwork:
    """A server that answers peers and a fetcher that asks them.

    [Note: threads of dpwa] One thread accepts connections, and each connection is answered in a thread of its own; a
    reply sends a snapshot; see [Note: Serving never blocks training] for the one lock that it shares with training. One
    thread fetches; the memory of the model belongs to it from the start of a fetch until the future of that fetch is
    done. Each probe has a thread too, at most one for each peer. `add_peer` and `remove_peer` may come from any thread:
    the scores have a lock, and the addresses change one at a time. No thread waits for a peer while it holds a lock.

    Args:
        x: the parameters; their layout and device are what is served.
        signature: names, shapes and dtypes of the tensors: `FlatBuffer.signature()`.
        config: the name of this worker, the peers and the options.

    Attributes:
        snapshots: the models that were published.
        server: serves the newest of them.
        fetcher: fetches one model at a time from a peer.
        bound: which models are refused.
        scores: which peer is asked next.
        counts: what was sent, received and refused.

    Raises:
        ValueError: the host of the own address is not known.
        ConnectionError: the own address is taken.
    """

    def __init__(self, x: FlatVector, signature: Sequence[str], config: PairwiseConfig) -> None:
        self._config = config
        self._warned: set[str] = set()
        self._background = Background()
        self.counts = Counts()
        self.scores = PeerScores(config.others, seed=config.seed_of("peers"))
        self.snapshots = SnapshotPool(x.layout, is_pinned=x.raw.is_cuda)
        self.bound = DistanceBound(config.max_distance, self.snapshots.newest)
        shape, seconds = ModelShape.of(signature, x.layout), config.timeout.total_seconds()
        self._peers = config.others
        self.fetcher = ModelFetcher(
            x,
            self._peers,
            self.scores,
            name=config.name,
            timeout=seconds,
            shape=shape,
            bound=self.bound,
            counts=self.counts,
            background=self._background,
            context=config.client_ssl,
        )
        self.server = ModelServer(
            config.peers[config.name],
            name=config.name,
            shape=shape,
            snapshots=self.snapshots,
            counts=self.counts,
            background=self._background,
            round_seconds=seconds,
            max_connections=lambda: MIN_CONNECTIONS + CONNECTIONS_PER_PEER * len(self._peers),
            context=config.server_ssl,
        )
        self._background.start(f"gossip-serve-{config.name}", self.server.serve)
        self._background.start(f"gossip-fetch-{config.name}", self.fetcher.work)

    @property
    def address(self) -> str:
        """The address at which this worker is reached: as configured, with the port that `*` has become."""
        return self.server.address

    def statistics(self) -> dict[str, float]:
        """What went wrong and what arrived; see `PairwiseDataParallel.comm_stats`."""
        return {
            **self.counts.read(),
            "live": 1 + self.scores.num_live,
            "joins": self.scores.num_joins,
            "deaths": self.scores.num_deaths,
            "deadline": self._config.timeout.total_seconds(),
        }

    def add_peer(self, name: str, address: str) -> None:
        """Ask this worker too from the next round on. Replaces a peer of the same name.

        Raises:
            ValueError: no address, or the own name.
        """
        check_address(address, peer=name)
        if name == self._config.name:
            raise ValueError(f"got the own name {name!r}, expected another worker's")
        self._peers[name] = address
        self.scores.add(name)

    def remove_peer(self, name: str) -> None:
        """Do not ask this worker any more. An unknown name is no error."""
        self.scores.remove(name)
        self._peers.pop(name, None)

    def warn_of_refusals(self) -> None:
        """Warn of peers whose model was refused, once of each. Called by the training thread."""
        while self.counts.refusals:
            peer, why = self.counts.refusals.popitem()
            if peer not in self._warned:
                self._warned.add(peer)
                warnings.warn(f"worker {self._config.name!r} refused the model of {peer!r}: {why}", stacklevel=3)

    def raise_if_failed(self) -> None:
        """Raise the error that ended a thread, if any did."""
        self._background.raise_if_failed()

    def close(self) -> None:
        """End all threads and close all sockets; idempotent. A fetch that is under way is given up."""
        self.fetcher.stop()
        self.server.stop()
        self._background.close()
