"""What several tests of this folder share."""

from __future__ import annotations

import contextlib
import math
import ssl
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from gossip_modules.dpwa.config import PairwiseConfig
from gossip_modules.dpwa.fetcher import Fetched, ModelFetcher
from gossip_modules.dpwa.peer_scores import PeerScores
from gossip_modules.dpwa.protocol import Counts, ModelShape
from gossip_modules.dpwa.server import ModelServer
from gossip_modules.engine.background import Background
from gossip_modules.engine.snapshots import SnapshotPool
from gossip_modules.flat.vector import FlatVector
from gossip_modules.transport.bounded_listener import MIN_CONNECTIONS
from tests.harness.strangers import TIMEOUT


def vector_of(value: float, numel: int = 1000) -> FlatVector:
    """A model whose elements are all equal."""
    return FlatVector.over(torch.full((numel,), value))


OWN = {"c": "tcp://127.0.0.1:*"}


def both(context: ssl.SSLContext | None) -> dict[str, Any]:
    """This context for the side that has it, and one that is not used for the other."""
    if context is None:
        return {}
    is_server = context.protocol is ssl.PROTOCOL_TLS_SERVER
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_server else ssl.PROTOCOL_TLS_SERVER)
    return {"server_ssl": context, "client_ssl": other} if is_server else {"server_ssl": other, "client_ssl": context}


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
        self.counts, self.snapshots, self.background = Counts(), SnapshotPool(x), Background()
        self.max_connections = MIN_CONNECTIONS
        self.server = ModelServer(
            PairwiseConfig(name, {name: address}, timeout=timedelta(seconds=round_seconds), **both(context)),
            shape=shape_of(x),
            snapshots=self.snapshots,
            counts=self.counts,
            background=self.background,
            max_connections=lambda: self.max_connections,
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
            PairwiseConfig("c", OWN, timeout=timedelta(seconds=TIMEOUT), max_distance=math.inf, **both(context)),
            {"s": address},
            self.scores,
            shape=shape_of(x),
            snapshots=SnapshotPool(x),
            counts=self.counts,
            background=self.background,
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
