"""The port of a worker, at which strangers connect too: what they learn, and what they can use up."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gossip_modules.membership.liveness import monitor
from gossip_modules.membership.liveness.contact import PACKET, Contact, Packet, digest
from gossip_modules.membership.liveness.monitor import LivenessMonitor
from gossip_modules.transport import bounded_listener
from gossip_modules.transport.bounded_listener import MIN_CONNECTIONS

SECONDS = 30.0
JOB = digest("job")
Beats = Callable[..., LivenessMonitor]


@pytest.fixture
def beats() -> Iterator[Beats]:
    """Makes heartbeats that end with the test."""
    made: list[LivenessMonitor] = []

    def make(worker: int, **options: Any) -> LivenessMonitor:
        told = {"on_silent": lambda *_: None, "on_ended": lambda _: None, "interval": 0.01, "floor": 1000.0}
        made.append(LivenessMonitor(worker, **{"job": "job", "host": "127.0.0.1", **told, **options}))
        return made[-1]

    yield make
    for mine in made:
        mine.close()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it is so, or the timeout of the test."""
    wait = threading.Event()
    while not condition():
        wait.wait(0.005)


def watch_each_other(mine: LivenessMonitor, other: LivenessMonitor) -> None:
    mine.watch({other.contact.worker: other.contact})
    other.watch({mine.contact.worker: mine.contact})
    for one, two in ((mine, other), (other, mine)):
        wait_for(lambda one=one, two=two: bool(one.has_met and one._peers[two.contact.worker].was_heard))  # type: ignore[misc]
        wait_for(lambda one=one: bool(one._watchers))  # type: ignore[misc]


def read(stranger: socket.socket, size: int) -> bytes:
    """What comes, up to so much; less where the other end closes."""
    data = b""
    while len(data) < size and (more := stranger.recv(size - len(data))):
        data += more
    return data


def call(mine: LivenessMonitor) -> socket.socket:
    return socket.create_connection(mine.contact.address, timeout=SECONDS)


# What a stranger can say.


def test_packets_of_one_kind_tell_nothing_of_another() -> None:
    contact = Contact(1, ("127.0.0.1", 1), bytes(range(16)))
    packets = {contact.packet(kind, JOB) for kind in Packet}
    assert len(packets) == len(Packet)
    assert contact.secret not in b"".join(packets)
    assert "secret" not in repr(contact)


def test_a_worker_listens_at_its_own_address_only(beats: Beats) -> None:
    with call(beats(0, host="127.0.0.2")) as caller:
        assert caller.getpeername()[0] == "127.0.0.2"
    with pytest.raises(OSError, match="Cannot assign requested address"):
        beats(1, host="192.0.2.1")  # of nobody (RFC 5737)


# What strangers can use up.


def test_connections_of_strangers_are_bounded_and_a_worker_among_them_is_watched(beats: Beats) -> None:
    ended: list[int] = []
    mine, other = beats(0), beats(1, on_ended=ended.append)
    watch_each_other(mine, other)
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * MIN_CONNECTIONS):
            read(strangers.enter_context(call(mine)), PACKET.size)
        assert len(mine._strangers) <= MIN_CONNECTIONS
        assert len(mine._watchers) == 1
        late = beats(2)
        late.watch({0: mine.contact})
        wait_for(lambda: len(mine._watchers) == 2)
        assert len(mine._strangers) <= MIN_CONNECTIONS
    assert ended == []


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", bytes(64), "half"], ids=["", "HTTP", "zeros", "half"])
def test_a_stranger_is_disconnected_in_time(said: bytes | str, beats: Beats, monkeypatch: pytest.MonkeyPatch) -> None:
    if said in (b"", "half"):  # else at once
        monkeypatch.setattr(monitor, "HANDSHAKE_SECONDS", 0.1)
        monkeypatch.setattr(bounded_listener, "TICK_SECONDS", 0.01)
    mine = beats(0)
    said = mine.contact.packet(Packet.WATCH, JOB)[:20] if isinstance(said, str) else said
    with call(mine) as stranger:
        read(stranger, PACKET.size)
        stranger.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert read(stranger, 1) == b""


def test_a_watcher_that_says_more_is_disconnected(beats: Beats) -> None:
    mine = beats(0)
    with call(mine) as watcher:
        read(watcher, PACKET.size)
        watcher.sendall(mine.contact.packet(Packet.WATCH, JOB))
        assert read(watcher, 1) == b"+"
        watcher.sendall(b"more")
        with contextlib.suppress(ConnectionResetError):
            assert not read(watcher, 1 << 20).strip(b"+")  # nothing but heartbeats, until it closes


def test_a_process_without_descriptors_goes_on(beats: Beats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listener is not asked again and again, and it keeps its watchers."""
    monkeypatch.setattr(bounded_listener, "TICK_SECONDS", 0.2)
    ended: list[int] = []
    mine, other = beats(0), beats(1, on_ended=ended.append)
    watch_each_other(mine, other)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        late = held.enter_context(socket.socket())
        late.settimeout(SECONDS)
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.dup(late.fileno()))
        late.connect(mine.contact.address)
        wait_for(lambda: not mine._listener.is_accepting)
        heard = len(other._peers[0].gaps)
        wait_for(lambda: len(other._peers[0].gaps) > heard)  # heartbeats go on
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert read(late, PACKET.size) == mine.contact.packet(Packet.GREETING, JOB), "it accepts again"
    assert len(mine._watchers) == 1
    assert ended == []


# Which connections say that a process has ended.


class Fake:
    """A listener that sends what the test decides, and a worker that watches it."""

    def __init__(self, beats: Beats) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(SECONDS)
        self.contact = Contact(7, self.listener.getsockname(), bytes(16))
        self.ended: list[int] = []
        self.mine = beats(1, on_ended=self.ended.append)
        self.mine.watch({7: self.contact})

    def accept(self) -> socket.socket:
        """Of a watcher, which was greeted and has answered."""
        other, _ = self.listener.accept()
        other.settimeout(SECONDS)
        other.sendall(self.contact.packet(Packet.GREETING, JOB))
        assert read(other, PACKET.size) == self.contact.packet(Packet.WATCH, JOB)
        return other

    def close(self) -> None:
        self.mine.close()
        self.listener.close()


def test_a_connection_that_is_closed_before_the_welcome_is_made_again(beats: Beats) -> None:
    """It may have been closed for another one, of a stranger at the same address."""
    fake = Fake(beats)
    with contextlib.closing(fake):
        for _ in range(2):
            fake.accept().close()
        with fake.accept() as other:
            assert fake.ended == []
            other.sendall(b"+")
        wait_for(lambda: bool(fake.ended))
        assert fake.ended == [7]


def test_a_process_that_ends_before_the_welcome_has_ended(beats: Beats) -> None:
    fake = Fake(beats)
    with contextlib.closing(fake):
        other = fake.accept()
        fake.listener.close()
        other.close()
        wait_for(lambda: fake.ended == [7])


def test_an_answer_goes_only_to_the_worker_that_is_watched(beats: Beats) -> None:
    """A stranger who has its port does not learn what a watcher says."""
    fake = Fake(beats)
    with contextlib.closing(fake):
        other, _ = fake.listener.accept()
        with other:
            other.settimeout(SECONDS)
            other.sendall(PACKET.pack(JOB, 7, b"x" * 16) + b"+")
            with contextlib.suppress(ConnectionResetError):
                assert read(other, 1) == b""
        assert (fake.mine.has_met, fake.mine._peers[7].was_heard, fake.ended) == (False, False, [])


def test_a_worker_that_sends_anything_but_heartbeats_is_heard_no_more(beats: Beats) -> None:
    fake = Fake(beats)
    with contextlib.closing(fake):
        with fake.accept() as other:
            other.sendall(b"+more")
            with contextlib.suppress(ConnectionResetError):
                assert read(other, 1) == b""
        assert fake.ended == []


def test_a_worker_that_leaves_in_order_has_not_ended(beats: Beats) -> None:
    fake = Fake(beats)
    with contextlib.closing(fake):
        with fake.accept() as other:
            other.sendall(b"+.")
        wait_for(lambda: not fake.mine._connected)
        threading.Event().wait(0.1)
        assert fake.ended == []
