"""The ports of Gloo groups: strangers cannot connect once the ranks are connected."""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import connect
from gossip_modules.transport.gloo import gloo_backend
from gossip_modules.transport.ports import gloo_ports
from tests.harness.ranks import TIMEOUT, run_ranks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ports are closed on Linux only")


def open_ports() -> set[tuple[str, int]]:
    return {found.getsockname() for found in gloo_ports._listeners() if found.family == socket.AF_INET}


def is_connected(stranger: socket.socket) -> bool:
    """On the loopback interface a connection is there as soon as it was asked for, or never."""
    return bool(select.select([], [stranger], [], 0)[1])


def strangers_at(address: tuple[str, int]) -> Iterator[socket.socket]:
    while True:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(address)
        yield stranger


@pytest.mark.parametrize("interfaces", ["", "lo"])
def test_a_connected_group_accepts_no_stranger_and_goes_on(interfaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if interfaces:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    store, before = dist.HashStore(), open_ports()

    def make(group: dist.ProcessGroup) -> Any:
        return gloo_backend(store, group.rank(), 2, TIMEOUT, host=None if interfaces else "127.0.0.1")

    groups = run_ranks(2, make)
    ports = open_ports() - before
    assert len(ports) >= 2
    with ExitStack() as stack:
        for address in ports:
            strangers = strangers_at(address)
            for _ in range(10):
                assert not is_connected(stack.enter_context(next(strangers))), "each would cost a descriptor"
        control = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert is_connected(stack.enter_context(next(strangers_at(control.getsockname())))), "others are as before"

        def add(group: dist.ProcessGroup) -> float:
            x = torch.ones(3)
            groups[group.rank()].allreduce([x]).wait()
            return float(x.sum())

        assert run_ranks(2, add) == [6.0, 6.0]


def test_a_group_that_connects_later_keeps_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()  # its stub has no bytes
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set("0/0", gloo_ports._raw_address(listener))
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        assert gloo_ports.close_ports(store, 0, 1) == 0
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
        assert gloo_ports.close_ports(store, 1, 1) == 0, "it is the port of another rank"
        assert gloo_ports.close_ports(store, 0, 1) == 1


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_the_group_of_a_wrapper_is_closed_too_and_that_of_the_user_is_left_alone() -> None:
    of_the_user = open_ports()
    transport = connect()
    (port,) = open_ports() - of_the_user
    (other,) = of_the_user
    with ExitStack() as stack:
        assert not is_connected(stack.enter_context(next(strangers_at(port))))
        assert is_connected(stack.enter_context(next(strangers_at(other))))
    transport.close()
