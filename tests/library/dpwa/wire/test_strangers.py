"""Strangers, keys and garbage at the server of models."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip_modules.dpwa.interpolation import Standing
from gossip_modules.dpwa.wire import plain_server
from gossip_modules.dpwa.wire.client import Fetched
from gossip_modules.dpwa.wire.connection import PeerConnection
from gossip_modules.dpwa.wire.curve_keys import CurveKeys
from gossip_modules.dpwa.wire.message import HEADER_BYTES, Message, MessageError, MessageKind
from gossip_modules.dpwa.wire.plain_server import PlainServer
from gossip_modules.dpwa.wire.server import MAX_REPLIES
from gossip_modules.transport.ports import bounded_listener
from tests.harness.ranks import assert_no_gossip_threads, gossip_threads
from tests.harness.strangers import (
    PING,
    TIMEOUT,
    ask,
    ask_and_never_read,
    connect,
    read,
    wait_until_closed,
    zmtp_handshake,
)
from tests.library.dpwa.wire.serving import asking, fetch, make_server, serving, shape_of, vector_of


def make_keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something that a thread does has happened."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.001)


def num_descriptors() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


# Strangers.


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.binary(max_size=300), max_size=4))
def test_frames_of_strangers_are_dropped(frames: list[bytes]) -> None:
    x = vector_of(1.0, numel=10)
    with serving(x) as server:
        server.publish(x, Standing())
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(server.address)
        if frames:
            stranger.send_multipart(frames)
        assert fetch(server, vector_of(0.0, numel=10)) is not None
        stranger.close()
        context.term()


def test_garbage_is_counted_and_hung_up_on() -> None:
    x = vector_of(1.0)
    with serving(x) as server:
        server.publish(x, Standing())
        reply = Message(MessageKind.MODEL, 0, shape_of(x)).pack()  # which is no request
        garbage = [b"x", b"x" * HEADER_BYTES, reply]
        frames = [bytes([0, len(text)]) + text for text in garbage]
        frames.append(bytes([1, len(reply)]) + reply)  # the first of several
        frames.append(b"\x04\x05\x04PONG")  # a command that answers nothing
        for frame in frames:
            with connect(server.address) as stranger:
                zmtp_handshake(stranger)
                stranger.sendall(frame)
                wait_until_closed(stranger)
        assert server.stats.num_garbage_messages == len(frames)
        with connect(server.address) as stranger:
            zmtp_handshake(stranger)
            ask(stranger, shape_of(x), MessageKind.PROBE)
            answer = Message.parse(read(stranger, 2 + HEADER_BYTES)[2:])
        assert (answer.kind, answer.request) == (MessageKind.ALIVE, 5)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n" * 100, b"\xff" * 1000, bytes(1000), b"\xff" + bytes(8) + b"\x7f\x03" + b"\xaa" * 200],
)
def test_raw_garbage_is_hung_up_on(garbage: bytes) -> None:
    x = vector_of(1.0)
    with serving(x) as server:
        server.publish(x, Standing())
        with connect(server.address) as stranger:
            stranger.sendall(garbage)
            with contextlib.suppress(OSError):  # it has hung up already
                stranger.shutdown(socket.SHUT_WR)
            wait_until_closed(stranger)
        assert fetch(server, vector_of(0.0)) is not None


def test_a_message_that_is_too_long_is_refused_by_its_declared_length() -> None:
    x = vector_of(1.0)
    with serving(x) as server:
        server.publish(x, Standing())
        with connect(server.address) as stranger:
            zmtp_handshake(stranger)
            stranger.sendall(b"\x02" + struct.pack(">Q", 1 << 40))  # a frame of a terabyte, of which nothing follows
            wait_until_closed(stranger)
        assert fetch(server, vector_of(0.0)) is not None


LONG = 6_000_000  # 24 MB, more than the buffers of a connection take


def test_clients_that_do_not_read_keep_nobody_without_a_model() -> None:
    x, inbox = vector_of(0.0, LONG), vector_of(0.0, LONG)
    with serving(x, round_seconds=3600.0) as server, contextlib.ExitStack() as strangers:
        for i in range(MAX_REPLIES):
            server.publish(x, Standing(i))
            strangers.enter_context(ask_and_never_read(server.address, shape_of(x)))
        with asking(server, inbox) as client:
            for i in range(10):
                x.segments[0].fill_(i)
                assert server.publish(x, Standing(100 + i))
                # As many snapshots are being sent as may be, so a peer gets the newest of those.
                assert client.fetch(inbox, TIMEOUT) == Fetched("s", Standing(MAX_REPLIES - 1))
            assert client.stats.num_failed_fetches == 0
            assert len(server._pool.snapshots) <= MAX_REPLIES + 3
            strangers.close()  # they vanish
            deadline = time.monotonic() + TIMEOUT
            while client.fetch(inbox, TIMEOUT) != Fetched("s", Standing(109)):
                assert time.monotonic() < deadline
        assert inbox.segments[0][0] == inbox.segments[0][-1] == 9
        assert server.stats.num_unread_replies == MAX_REPLIES


def test_a_reply_longer_than_a_round_makes_room_for_a_newer_model() -> None:
    x, inbox = vector_of(0.0, LONG), vector_of(0.0, LONG)
    with serving(x, round_seconds=0.0) as server, contextlib.ExitStack() as strangers:
        for i in range(3 * MAX_REPLIES):
            server.publish(x, Standing(i))
            strangers.enter_context(ask_and_never_read(server.address, shape_of(x)))
        server.publish(x, Standing(99))
        assert fetch(server, inbox) == Fetched("s", Standing(99))
        assert server.stats.num_unread_replies > MAX_REPLIES
        assert len(server._pool.snapshots) <= MAX_REPLIES + 3


def test_a_reply_that_is_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_server, "STALLED_SECONDS", 0.2)
    for module in (plain_server, bounded_listener):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.05)
    x = vector_of(0.0, LONG)
    with serving(x) as server:
        server.publish(x, Standing())
        with ask_and_never_read(server.address, shape_of(x)):
            wait_for(lambda: server.stats.num_unread_replies == 1)
        assert server._pool.num_readings() == 0


@pytest.mark.parametrize("is_greeted", [False, True])
def test_time_without_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch, is_greeted: bool) -> None:
    monkeypatch.setattr(plain_server, "IDLE_SECONDS" if is_greeted else "HANDSHAKE_SECONDS", 0.2)
    for module in (plain_server, bounded_listener):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.05)
    with serving(vector_of(0.0)) as server, connect(server.address) as stranger:
        if is_greeted:
            zmtp_handshake(stranger)
        wait_until_closed(stranger)
        assert server.stats.num_refused_connections == (not is_greeted)


def test_a_client_that_only_pings_is_answered_and_kept_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_server, "IDLE_SECONDS", 2.0)
    for module in (plain_server, bounded_listener):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.05)
    with serving(vector_of(0.0)) as server, connect(server.address) as stranger:
        zmtp_handshake(stranger)
        stranger.sendall(b"\x04\x09\x04PING\0\x0ahi")
        assert read(stranger, 9) == b"\x04\x07\x04PONGhi"
        with contextlib.suppress(OSError):
            while True:
                stranger.sendall(PING)
                read(stranger, 7)
        assert server.stats.num_garbage_messages == 0


def test_connections_are_bounded_and_a_peer_among_them_is_served() -> None:
    x, inbox = vector_of(1.0), vector_of(0.0)
    with serving(x) as server, contextlib.ExitStack() as strangers, asking(server, inbox) as client:
        server.publish(x, Standing())
        assert client.fetch(inbox, TIMEOUT) is not None
        before = num_descriptors()
        assert isinstance(server, PlainServer)
        for _ in range(400):
            strangers.enter_context(connect(server.address))
        wait_for(lambda: server.stats.num_refused_connections >= 400 - server.max_connections)
        assert num_descriptors() - 400 - before <= server.max_connections
        assert client.fetch(inbox, TIMEOUT) is not None  # on the connection that it had
        assert fetch(server, inbox) is not None  # and on a new one
        assert client.stats.num_failed_fetches == 0


def test_a_process_without_descriptors_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plain_server, bounded_listener):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.1)
    x, inbox = vector_of(1.0), vector_of(0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(x) as server, asking(server, inbox) as client, contextlib.ExitStack() as strangers:
        server.publish(x, Standing())
        assert client.fetch(inbox, TIMEOUT) is not None
        zmtp_handshake(strangers.enter_context(connect(server.address)))
        late = strangers.enter_context(socket.socket())
        late.settimeout(TIMEOUT)
        strangers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + 16, hard))
        with contextlib.suppress(OSError):
            while True:
                strangers.callback(os.close, os.dup(late.fileno()))
        host, port = server.address.removeprefix("tcp://").split(":")
        late.connect((host, int(port)))
        wait_for(lambda: server.stats.num_refused_connections == 1)
        zmtp_handshake(late)  # in the place of the first one
        assert client.fetch(inbox, TIMEOUT) is not None
        assert client.stats.num_failed_fetches == 0


def test_empty_frames_take_no_memory() -> None:
    x, inbox = vector_of(1.0), vector_of(0.0)
    with serving(x) as server:
        server.publish(x, Standing())
        before = resident_bytes()
        for _ in range(4):
            with connect(server.address) as stranger:
                zmtp_handshake(stranger)
                with contextlib.suppress(OSError):  # it hangs up
                    stranger.sendall(b"\x01\x00" * 5_000_000)  # 10 MB: frames of no bytes, each with one to follow
        assert fetch(server, inbox) is not None
        assert resident_bytes() - before < 32 << 20
        assert server.stats.num_garbage_messages == 4


# Keys.


def test_with_keys_an_authorised_client_is_served() -> None:
    (server_public, server_secret), (public, secret) = make_keys(), make_keys()
    x, inbox = vector_of(4.0), vector_of(0.0)
    with serving(x, CurveKeys(server_public, server_secret, {"c": public})) as server:
        server.publish(x, Standing(1.0))
        curve = CurveKeys(public, secret, {"s": server_public})
        assert fetch(server, inbox, curve) == Fetched("s", Standing(1.0))
        assert torch.equal(inbox.raw, x.raw)
        assert server.stats.num_refused_connections == 0


@pytest.mark.parametrize("stranger", ["no key", "unknown key", "wrong server key"])
def test_with_keys_a_stranger_gets_nothing(stranger: str) -> None:
    (server_public, server_secret), (public, secret), (other_public, other_secret) = (make_keys() for _ in range(3))
    x, inbox = vector_of(4.0), vector_of(0.0)
    curve = {
        "no key": None,
        "unknown key": CurveKeys(other_public, other_secret, {"s": server_public}),
        "wrong server key": CurveKeys(public, secret, {"s": other_public}),
    }[stranger]
    with serving(x, CurveKeys(server_public, server_secret, {"c": public})) as server:
        server.publish(x, Standing(1.0))
        with asking(server, inbox, curve) as client:
            assert client.fetch(inbox, 4.0) is None
            assert client.stats.num_failed_fetches == 1
            assert client.stats.bytes_received == 0
        assert not inbox.raw.any()
        assert server.stats.num_models_sent == 0
        # A stranger in between changes nothing for those who have a key.
        assert fetch(server, inbox, CurveKeys(public, secret, {"s": server_public})) is not None
        assert server.stats.num_refused_connections > 0


def test_keys_can_be_taken_back() -> None:
    (server_public, server_secret), (public, secret) = make_keys(), make_keys()
    x, inbox = vector_of(4.0), vector_of(0.0)
    curve = CurveKeys(public, secret, {"s": server_public})
    with serving(x, CurveKeys(server_public, server_secret)) as server:
        server.publish(x, Standing())
        assert fetch(server, inbox, curve) is None
        server.authorize([public])
        assert fetch(server, inbox, curve) is not None
        server.authorize([])
        assert fetch(server, inbox, curve) is None


def test_a_key_that_is_taken_back_ends_service_on_its_connection_too() -> None:
    (server_public, server_secret), (public, secret) = make_keys(), make_keys()
    x, inbox = vector_of(4.0), vector_of(0.0)
    keys = CurveKeys(public, secret, {"s": server_public})
    with serving(x, CurveKeys(server_public, server_secret, {"c": public})) as server:
        server.publish(x, Standing())
        with asking(server, inbox, keys) as client:
            assert client.fetch(inbox, TIMEOUT) is not None
            server.authorize([])
            assert client.fetch(inbox, 4.0) is None
        assert server.stats.num_models_sent == 1
        assert server.stats.num_refused_connections > 0


# What peers send.


def test_of_a_message_of_many_frames_one_is_read() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.bind("tcp://127.0.0.1:*")
    connection = PeerConnection(context, router.getsockopt_string(zmq.LAST_ENDPOINT), max_bytes=100, keys=None)
    connection.socket.send(b"hello")
    assert router.poll(round(1000 * TIMEOUT))
    router.send_multipart([router.recv_multipart()[0], *[b"frame"] * 50])
    assert connection.socket.poll(round(1000 * TIMEOUT))
    with pytest.raises(MessageError, match="got a message of several frames, expected one"):
        connection.answer()
    assert connection.socket.getsockopt(zmq.RCVMORE)  # the rest has stayed in ZeroMQ
    connection.close()
    router.close()
    context.term()


# Beginning and end.


def test_withdrawn_models_are_not_served() -> None:
    x, inbox = vector_of(1.0), vector_of(0.0)
    with serving(x) as server, asking(server, inbox) as client:
        assert not server.is_serving
        server.publish(x, Standing())
        assert server.is_serving
        assert client.fetch(inbox, TIMEOUT) is not None
        server.withdraw()
        assert not server.is_serving
        assert client.fetch(inbox, TIMEOUT) is None
        assert client.stats.num_failed_fetches == 0
        server.publish(x, Standing())
        assert client.fetch(inbox, TIMEOUT) is not None


def test_a_taken_address_is_an_error_at_once() -> None:
    x = vector_of(1.0)
    with serving(x) as server:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with pytest.raises(
            ConnectionError, match=r"worker 'late': cannot bind tcp://.*another process using this port"
        ):
            make_server(context, server.address, x, name="late")
        context.term()  # which would wait for a socket that was left open


def test_serving_ends_when_told() -> None:
    x = vector_of(1.0)
    with serving(x) as server:
        assert [thread.name for thread in gossip_threads()] == ["gossip-serve-s"]
        server.stop()
        server.stop()
    assert_no_gossip_threads()


def test_publishing_does_not_wait_for_the_lock_of_a_reply() -> None:
    """Publications and fetches race; every model that arrives is one that was published, whole."""
    numel = 50_000
    x, inbox = vector_of(0.0, numel), vector_of(0.0, numel)
    stop = threading.Event()
    with serving(x) as server:
        server.publish(x, Standing(0.0))

        def publish() -> None:
            i = 0
            while not stop.is_set():
                i += 1
                x.segments[0].fill_(i)
                server.publish(x, Standing(i))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            with asking(server, inbox) as client:
                num_arrived = 0
                while num_arrived < 100:
                    fetched = client.fetch(inbox, TIMEOUT)
                    assert client.stats.num_failed_fetches == client.stats.num_refused_models == 0
                    if fetched is not None:  # else it was busy: ZeroMQ has not said yet that it is through
                        assert torch.equal(inbox.segments[0], torch.full((numel,), fetched.standing.clock))
                        num_arrived += 1
        finally:
            stop.set()
            thread.join()
