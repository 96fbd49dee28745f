"""What several tests of this folder share."""

from __future__ import annotations

import contextlib
import math
import ssl
from collections.abc import Iterator

import torch

from gossip_modules.dpwa.wire.counts import Counts
from gossip_modules.dpwa.wire.distance_bound import DistanceBound
from gossip_modules.dpwa.wire.fetcher import Fetched, ModelFetcher
from gossip_modules.dpwa.wire.message import ModelShape
from gossip_modules.dpwa.wire.peer_scores import PeerScores
from gossip_modules.dpwa.wire.server import ModelServer
from gossip_modules.dpwa.wire.snapshot_pool import SnapshotPool
from gossip_modules.engine.background import Background
from gossip_modules.flat.vector import FlatVector
from gossip_modules.transport.bounded_listener import MIN_CONNECTIONS
from tests.harness.strangers import TIMEOUT


def vector_of(value: float, numel: int = 1000) -> FlatVector:
    """A model whose elements are all equal."""
    return FlatVector.over(torch.full((numel,), value))


def shape_of(x: FlatVector) -> ModelShape:
    return ModelShape.of(["w"], x.layout)


class Served:
    """A server of models like x, with what it is made of."""

    def __init__(
        self,
        x: FlatVector,
        *,
        address: str = "tcp://127.0.0.1:*",
        name: str = "s",
        round_seconds: float = TIMEOUT,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.counts, self.snapshots, self.background = Counts(), SnapshotPool(x.layout, is_pinned=False), Background()
        self.max_connections = MIN_CONNECTIONS
        self.server = ModelServer(
            address,
            name=name,
            shape=shape_of(x),
            snapshots=self.snapshots,
            counts=self.counts,
            background=self.background,
            round_seconds=round_seconds,
            max_connections=lambda: self.max_connections,
            context=context,
        )
        self.address, self.publish = self.server.address, self.snapshots.publish

    def count(self, name: str) -> int:
        """One of its counts."""
        return self.counts.read()[name]


@contextlib.contextmanager
def serving(
    x: FlatVector, *, round_seconds: float = TIMEOUT, context: ssl.SSLContext | None = None
) -> Iterator[Served]:
    """A server of models like x, in its thread; nothing is published yet."""
    served = Served(x, round_seconds=round_seconds, context=context)
    served.background.start("gossip-serve-s", served.server.serve)
    try:
        yield served
        served.background.raise_if_failed()
    finally:
        served.server.stop()
        assert served.background.close(TIMEOUT)


class Asking:
    """A client of one server, of models like x, which has no model of its own."""

    def __init__(self, address: str, x: FlatVector, context: ssl.SSLContext | None = None) -> None:
        self.counts, self.scores, self.background = Counts(), PeerScores({"s": address}, seed=""), Background()
        self.fetcher = ModelFetcher(
            x,
            {"s": address},
            self.scores,
            name="c",
            timeout=TIMEOUT,
            shape=shape_of(x),
            bound=DistanceBound(math.inf, contextlib.nullcontext),
            counts=self.counts,
            background=self.background,
            context=context,
        )

    def fetch(self, inbox: FlatVector) -> Fetched | None:
        """inbox <- the model of the server, if it has one."""
        fetched = self.fetcher._fetch()
        inbox.raw.copy_(self.fetcher.arrived.raw)
        return fetched

    def count(self, name: str) -> int:
        """One of its counts."""
        return self.counts.read()[name]


def fetch(served: Served, inbox: FlatVector, context: ssl.SSLContext | None = None) -> Fetched | None:
    return Asking(served.address, inbox, context).fetch(inbox)
