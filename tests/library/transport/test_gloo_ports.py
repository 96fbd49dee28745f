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
from gossip_modules.transport import gloo
from gossip_modules.transport.forks import tcp_sockets
from gossip_modules.transport.gloo import gloo_backend
from tests.harness.ranks import TIMEOUT, run_ranks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ports are closed on Linux only")


def open_ports() -> set[tuple[str, int]]:
    return {found.getsockname() for found in tcp_sockets(is_listening=True) if found.family == socket.AF_INET}


def is_connected(stranger: socket.socket) -> bool:
    """On the loopback interface a connection is there as soon as it was asked for, or never."""
    is_over = bool(select.select([], [stranger], [], 0)[1])
    return is_over and stranger.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0  # else refused, by no group


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
        store.set("0/0", gloo._raw_address(listener))
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        assert gloo.close_ports(store, 0, 1) == 0
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
        assert gloo.close_ports(store, 1, 1) == 0, "it is the port of another rank"
        assert gloo.close_ports(store, 0, 1) == 1


@pytest.fixture
def port_of_the_user() -> Iterator[tuple[str, int]]:
    """Of the default group."""
    before = open_ports()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (port,) = open_ports() - before
    yield port
    dist.destroy_process_group()


def test_the_group_of_a_wrapper_is_closed_too_and_that_of_the_user_is_left_alone(
    port_of_the_user: tuple[str, int],
) -> None:
    before = open_ports()
    transport = connect()
    (port,) = open_ports() - before
    with ExitStack() as stack:
        assert not is_connected(stack.enter_context(next(strangers_at(port))))
        assert is_connected(stack.enter_context(next(strangers_at(port_of_the_user))))
    transport.close()
