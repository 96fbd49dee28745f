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
from gossip_modules.membership.liveness.contact import (
    GREETING_BYTES,
    HELLO,
    Contact,
    Greeting,
    LifeSign,
    digest,
    probe,
)
from gossip_modules.membership.liveness.monitor import LivenessMonitor
from gossip_modules.transport import bounded_listener
from gossip_modules.transport.bounded_listener import MIN_CONNECTIONS
from gossip_modules.transport.job_key import CODE_BYTES, Handshake

SECONDS = 30.0
JOB = digest("job")
KEY = b"the key of the job"
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


def greet(mine: LivenessMonitor, watcher: socket.socket, key: bytes | None = None) -> tuple[bytes, bytes]:
    """What a worker with this key sends to the listener, and the greeting that comes."""
    greeting = Greeting(mine.contact, JOB, key)
    hello = read(watcher, HELLO.size)
    assert greeting.take(hello) == b""
    answer = greeting.taken()
    watcher.sendall(answer)
    rest = read(watcher, GREETING_BYTES - HELLO.size)
    greeting.take(rest)
    assert greeting.is_whole or not rest
    return answer, hello + rest


def is_closed(stranger: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return read(stranger, 1) == b""
    return True


@pytest.mark.parametrize("key", [None, KEY], ids=["no-key", "key"])
def test_messages_of_one_connection_are_refused_over_another(key: bytes | None, beats: Beats) -> None:
    """A recorded answer is refused by the listener, and a recorded greeting by the worker that connects."""
    mine = beats(0, key=key)
    with call(mine) as watcher:
        answer, greeting = greet(mine, watcher, key)
        assert read(watcher, 1) == b"+"
    with call(mine) as stranger:
        read(stranger, HELLO.size)
        stranger.sendall(answer)
        assert is_closed(stranger)
    assert not mine._watchers
    again = Greeting(mine.contact, JOB, key)
    again.take(greeting)
    assert (again.has_hello, again.is_whole) == (True, False)
    assert mine.contact.secret not in answer + greeting
    assert "secret" not in repr(mine.contact)


@pytest.mark.parametrize("theirs", [None, b"another key of a job"], ids=["no-key", "another-key"])
def test_a_stranger_with_the_roster_and_without_the_key_is_refused_by_both_ends(
    theirs: bytes | None, beats: Beats
) -> None:
    mine, stranger = beats(0, key=KEY), beats(1, key=theirs)
    with call(mine) as caller:
        _, greeting = greet(mine, caller, theirs)
        assert len(greeting) == HELLO.size, "no proof for strangers"
        assert is_closed(caller)
    signs = probe({1: stranger.contact}, job=JOB, seconds=SECONDS, key=KEY)
    assert signs == {1: LifeSign.SILENT}
    assert probe({0: mine.contact}, job=JOB, seconds=SECONDS, key=KEY) == {0: LifeSign.LIVES}


def test_no_message_of_one_worker_is_one_of_another() -> None:
    contacts = [Contact(worker, ("127.0.0.1", 1), bytes(16)) for worker in (0, 1)]
    nonce = Handshake.hello()
    one, other = (contact.handshake(JOB, KEY) for contact in contacts)
    answer, expected = one.answer(nonce)
    assert one.reply(nonce, answer) == expected
    assert other.reply(nonce, answer) is None
    assert one.reply(nonce, answer[:16] + expected) is None, "the code of the other end"
    assert contacts[0].handshake(digest("another"), KEY).reply(nonce, answer) is None


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
            read(strangers.enter_context(call(mine)), HELLO.size)
        assert len(mine._strangers) <= MIN_CONNECTIONS
        assert len(mine._watchers) == 1
        late = beats(2)
        late.watch({0: mine.contact})
        wait_for(lambda: len(mine._watchers) == 2)
        assert len(mine._strangers) <= MIN_CONNECTIONS
    assert ended == []


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", bytes(64), "half"], ids=["", "HTTP", "zeros", "half"])
def test_a_stranger_is_disconnected_in_time(said: bytes | str, beats: Beats, monkeypatch: pytest.MonkeyPatch) -> None:
    if said != bytes(64):  # else at once, since there are enough bytes for an answer
        monkeypatch.setattr(monitor, "HANDSHAKE_SECONDS", 0.1)
        monkeypatch.setattr(bounded_listener, "TICK_SECONDS", 0.01)
    mine = beats(0)
    said = bytes(20) if isinstance(said, str) else said
    with call(mine) as stranger:
        read(stranger, HELLO.size)
        stranger.sendall(said)
        assert is_closed(stranger)


def test_a_watcher_that_says_more_is_disconnected(beats: Beats) -> None:
    mine = beats(0)
    with call(mine) as watcher:
        greet(mine, watcher)
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
        assert read(late, HELLO.size)[:16] == mine.contact.hello(JOB, b"")[:16], "it accepts again"
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
        nonce = Handshake.hello()
        other.sendall(self.contact.hello(JOB, nonce))
        reply = self.contact.handshake(JOB, None).reply(nonce, read(other, Handshake.ANSWER_BYTES))
        assert reply is not None
        other.sendall(reply)
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


def test_a_stranger_with_the_port_of_a_worker_is_not_heard(beats: Beats) -> None:
    fake = Fake(beats)
    with contextlib.closing(fake):
        other, _ = fake.listener.accept()
        with other:
            other.settimeout(SECONDS)
            other.sendall(fake.contact.hello(JOB, bytes(16)))
            read(other, Handshake.ANSWER_BYTES)
            other.sendall(bytes(32) + b"+")
            assert is_closed(other)
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


@pytest.mark.parametrize(("rest", "expected"), [(b"", LifeSign.SILENT), (bytes(CODE_BYTES), LifeSign.ENDED)])
def test_a_close_after_the_hello_does_not_show_that_a_worker_has_ended(rest: bytes, expected: LifeSign) -> None:
    """The worker may have made room for another connection; a wrong code shows that another program has the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        contact = Contact(7, listener.getsockname(), bytes(16))

        def serve() -> None:
            with listener.accept()[0] as other:
                other.settimeout(SECONDS)
                other.sendall(contact.hello(JOB, bytes(16)))
                read(other, Handshake.ANSWER_BYTES)
                other.sendall(rest)

        thread = threading.Thread(target=serve)
        thread.start()
        assert probe({7: contact}, job=JOB, seconds=SECONDS) == {7: expected}
        thread.join(SECONDS)


def test_a_worker_that_leaves_tells_its_watchers_only(beats: Beats) -> None:
    """Others would take the message for a part of the code."""
    mine = beats(0)
    mine.is_leaving = True
    with call(mine) as watcher, call(mine) as stranger:
        greet(mine, watcher)
        read(stranger, HELLO.size)
        mine.close()
        assert read(stranger, 1) == b""
        assert read(watcher, 1 << 20).strip(b"+") == b"."
