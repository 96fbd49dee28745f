"""What several tests of this folder share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import zmq

from gossip_modules.dpwa.wire.client import Fetched, ModelClient
from gossip_modules.dpwa.wire.curve_keys import CurveKeys
from gossip_modules.dpwa.wire.curve_server import CurveServer
from gossip_modules.dpwa.wire.distance_bound import DistanceBound
from gossip_modules.dpwa.wire.message import ModelShape
from gossip_modules.dpwa.wire.peer_scores import PeerScores
from gossip_modules.dpwa.wire.plain_server import PlainServer
from gossip_modules.dpwa.wire.server import ModelServer
from gossip_modules.engine.background import Background
from gossip_modules.flat.vector import FlatVector
from tests.harness.strangers import (
    TIMEOUT,
)


def vector_of(value: float, numel: int = 1000) -> FlatVector:
    """A model whose elements are all equal."""
    return FlatVector.over(torch.full((numel,), value))


def shape_of(x: FlatVector) -> ModelShape:
    return ModelShape.of(["w"], x.layout)


def make_server(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    x: FlatVector,
    curve: CurveKeys | None = None,
    *,
    name: str = "s",
    round_seconds: float = TIMEOUT,
) -> ModelServer:
    """A server of models like x."""
    shape = shape_of(x)
    if curve is None:
        return PlainServer(
            address, name=name, shape=shape, layout=x.layout, is_pinned=False, round_seconds=round_seconds
        )
    return CurveServer(context, address, name=name, shape=shape, layout=x.layout, is_pinned=False, curve=curve)


@contextlib.contextmanager
def serving(x: FlatVector, curve: CurveKeys | None = None, *, round_seconds: float = TIMEOUT) -> Iterator[ModelServer]:
    """A server of models like x, in its thread; nothing is published yet."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = make_server(context, "tcp://127.0.0.1:*", x, curve, round_seconds=round_seconds)
    background = Background()
    background.start("gossip-serve-s", server.serve)
    try:
        yield server
        background.raise_if_failed()
    finally:
        server.stop()
        assert background.close(TIMEOUT)
        context.term()


def unbounded() -> DistanceBound:
    """Of a client that has no model of its own."""
    return DistanceBound(math.inf, contextlib.nullcontext)


@contextlib.contextmanager
def asking(server: ModelServer, x: FlatVector, curve: CurveKeys | None = None) -> Iterator[ModelClient]:
    """A client of that server, of models like x."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers = {"s": server.address}
    client = ModelClient(context, peers, PeerScores(peers, seed=""), shape=shape_of(x), curve=curve, bound=unbounded())
    try:
        yield client
    finally:
        client.close()
        context.term()


def fetch(server: ModelServer, inbox: FlatVector, curve: CurveKeys | None = None) -> Fetched | None:
    with asking(server, inbox, curve) as client:
        return client.fetch(inbox, TIMEOUT)
