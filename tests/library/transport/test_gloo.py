"""gloo_backend: over which interface it talks, and what is left of one that could not connect."""

from __future__ import annotations

import socket
import struct
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules.transport.gloo import gloo_backend
from tests.harness.ranks import TIMEOUT


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_the_interfaces_of_the_variable_are_taken_where_no_host_is_given(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    gloo_backend(dist.HashStore(), 0, 1, TIMEOUT).allreduce([torch.ones(1)]).wait()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nonesuch0")
    if host is None:
        with pytest.raises(RuntimeError, match="nonesuch0"):
            gloo_backend(dist.HashStore(), 0, 1, TIMEOUT)
    else:
        gloo_backend(dist.HashStore(), 0, 1, TIMEOUT, host=host).allreduce([torch.ones(1)]).wait()


def published(port: int) -> bytes:
    """What Gloo puts into the store for a rank that listens at this port of the loopback interface."""
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton("127.0.0.1") + bytes(128)
    return struct.pack("=Q1sQ", 1, b"x", len(address)) + address + struct.pack("=2q", 0, 1)


def test_a_backend_that_gave_up_accepts_no_connection_while_somebody_holds_its_error() -> None:
    """Gloo would hand a rank that connects then to the end of the connection, which was freed: the process dies."""
    store = dist.HashStore()
    address: Any = published(65535)  # torch's stub knows no values of bytes
    store.set("0/1", address)  # the rank with the higher port connects to the other one; it never does
    with pytest.raises(RuntimeError, match="Connect timeout") as error:
        gloo_backend(store, 0, 2, timedelta(milliseconds=10), host="127.0.0.1")
    own = store.get("0/0")
    place = own.index(socket.inet_aton("127.0.0.1")) - 2
    (port,) = struct.unpack_from("!H", own, place)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    assert error.value.__traceback__ is not None
