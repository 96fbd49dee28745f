"""Router: packets between devices, which are sockets here."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from gossip_modules.testing.network import Condition, Router

A, B, C = "10.77.1.1", "10.77.1.2", "10.77.1.3"
SECONDS = 20.0


@pytest.fixture
def router() -> Iterator[Router]:
    """Closed at the end."""
    router = Router(seed=1)
    yield router
    router.close()


def host(router: Router, address: str) -> socket.socket:
    """The other end of a device with an address."""
    mine, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    device.setblocking(False)
    router.attach(address, device.detach())
    mine.settimeout(SECONDS)
    return mine


def packet(source: str, target: str, text: str = "") -> bytes:
    """An IPv4 header as far as it is read, and a text."""
    return b"\x45" + bytes(11) + socket.inet_aton(source) + socket.inet_aton(target) + text.encode()


def test_packets_come_to_their_hosts(router: Router) -> None:
    with host(router, A) as a, host(router, B) as b, host(router, C) as c:
        a.send(packet(A, C, "for c"))
        a.send(packet(A, B, "for b"))
        assert b.recv(100) == packet(A, B, "for b")
        assert c.recv(100) == packet(A, C, "for c")


def test_packets_without_a_receiver_and_of_ipv6_are_dropped(router: Router) -> None:
    with host(router, A) as a, host(router, B) as b:
        a.send(packet(A, "10.77.1.9"))
        a.send(b"\x60" + packet(A, B)[1:])
        a.send(packet(A, B, "last"))
        assert b.recv(100) == packet(A, B, "last")


def test_a_part_is_cut_off_until_it_is_mended(router: Router) -> None:
    with host(router, A) as a, host(router, B) as b, host(router, C) as c:
        router.cut("one", [A, B])
        a.send(packet(A, C, "cut"))
        a.send(packet(A, B, "within"))
        assert b.recv(100) == packet(A, B, "within")
        c.send(packet(C, B, "cut"))
        router.mend("one")
        router.mend("never")
        a.send(packet(A, C, "mended"))
        assert c.recv(100) == packet(A, C, "mended")


def test_a_fraction_is_lost(router: Router) -> None:
    router.set_condition(A, Condition(loss=0.25))
    with host(router, A) as a, host(router, B) as b:
        arrived = 0
        for _ in range(100):  # what is not read yet has to fit into the socket
            a.send(packet(A, B, "maybe"))
        for _ in range(50):
            a.send(packet(A, B, "last"))
        while b.recv(100) != packet(A, B, "last"):
            arrived += 1
    assert 50 < arrived < 100


def test_all_are_lost(router: Router) -> None:
    router.set_condition(A, Condition(loss=1.0))
    with host(router, A) as a, host(router, B) as b, host(router, C) as c:
        a.send(packet(A, B, "lost"))
        c.send(packet(C, B, "kept"))
        assert b.recv(100) == packet(C, B, "kept")
        assert not select.select([b], [], [], 0.05)[0]


def test_a_late_packet_comes_after_one_that_is_not(router: Router) -> None:
    router.set_condition(A, Condition(delay=0.3))
    with host(router, A) as a, host(router, B) as b, host(router, C) as c:
        a.send(packet(A, B, "late"))
        while not router._waiting:
            pass
        c.send(packet(C, B, "early"))
        assert b.recv(100) == packet(C, B, "early")
        assert b.recv(100) == packet(A, B, "late")


def test_a_second_device_takes_the_address(router: Router) -> None:
    with host(router, A) as old, host(router, B) as b, host(router, A) as new:
        b.send(packet(B, A, "who"))
        assert new.recv(100) == packet(B, A, "who")
        assert old.recv(100) == b"", "its other end is closed"
    router.close()
    router.close()


def test_packets_with_jitter_overtake_each_other(router: Router) -> None:
    router.set_condition(A, Condition(jitter=0.1))
    with host(router, A) as a, host(router, B) as b:
        sent = [str(k) for k in range(20)]
        for text in sent:
            a.send(packet(A, B, text))
        came = [b.recv(100) for _ in sent]
    assert came != sorted(came, key=[packet(A, B, text) for text in sent].index)
    assert set(came) == {packet(A, B, text) for text in sent}
