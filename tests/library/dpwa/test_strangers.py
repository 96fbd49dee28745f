"""Strangers and garbage at the server of models: no bytes of theirs crash, hang or exhaust a worker."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossip_modules.dpwa import protocol, server
from gossip_modules.dpwa.fetcher import Fetched
from gossip_modules.dpwa.interpolation import Standing
from gossip_modules.dpwa.protocol import HEADER_BYTES, MessageHeader, MessageKind, PeerLostError
from gossip_modules.engine.snapshots import MAX_SNAPSHOTS
from gossip_modules.transport import bounded_listener
from gossip_modules.transport.job_key import Handshake
from tests.harness.certificates import Authority
from tests.harness.ranks import assert_no_gossip_threads, gossip_threads
from tests.harness.strangers import (
    TIMEOUT,
    answer,
    ask,
    ask_and_never_read,
    connect,
    framed,
    read,
    wait_until_closed,
)
from tests.library.dpwa.serving import Asking, Served, fetch, serving, shape_of, vector_of
from tests.library.dpwa.workers import num_descriptors, wait_for


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def be_impatient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give the other end so much time."""
    for module in (protocol, server):
        monkeypatch.setattr(module, "PEER_SECONDS", seconds)


# Garbage.

X = vector_of(1.0, numel=10)
REQUEST = MessageHeader(MessageKind.FETCH, shape_of(X)).pack()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.binary(max_size=300))
@example(b"GET / HTTP/1.1\r\n\r\n" * 100)
@example(b"\xff" * 1000)
@example(bytes(1000))
@example(struct.pack("<Q", 1 << 63))  # of which nothing follows
@example(struct.pack("<Q", HEADER_BYTES - 1))
@example(framed(REQUEST[:-1]))
@example(framed(REQUEST)[:-1])
@example(framed(REQUEST) + bytes(10_000))
@example(framed(MessageHeader(MessageKind.MODEL, shape_of(X)).pack()))  # which is no request
def test_garbage_ends_its_connection_and_nothing_else(garbage: bytes) -> None:
    with serving(X) as served:
        served.publish(X, Standing())
        with connect(served.address) as stranger:
            with contextlib.suppress(OSError):  # it has hung up already
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
            wait_until_closed(stranger)
        assert fetch(served, vector_of(0.0, numel=10)) is not None


def test_garbage_is_counted() -> None:
    garbage = [framed(b"x"), framed(b"x" * HEADER_BYTES), framed(MessageHeader(MessageKind.MODEL, shape_of(X)).pack())]
    garbage.append(struct.pack("<Q", 1 << 40))  # a frame of a terabyte, of which nothing follows
    with serving(X) as served:
        for one in garbage:
            with connect(served.address) as stranger:
                stranger.sendall(one)
                wait_until_closed(stranger)
        wait_for(lambda: served.count("num_garbage_messages") == len(garbage))
        assert served.count("bytes_sent") == served.count("num_refused_connections") == 0
        with connect(served.address) as stranger:
            ask(stranger, shape_of(X), MessageKind.PROBE)
            assert answer(stranger).kind is MessageKind.EMPTY


def test_bytes_after_a_request_are_not_read() -> None:
    with serving(X) as served:
        served.publish(X, Standing())
        before = resident_bytes()
        for _ in range(4):
            with connect(served.address) as stranger:
                with contextlib.suppress(OSError):  # it hangs up
                    stranger.sendall(framed(REQUEST) + bytes(10_000_000))
                with contextlib.suppress(OSError):
                    wait_until_closed(stranger)
        assert fetch(served, vector_of(0.0, numel=10)) is not None
        assert resident_bytes() - before < 32 << 20


def test_a_client_that_has_closed_its_half_is_answered() -> None:
    with serving(X) as served:
        served.publish(X, Standing(3.0))
        with connect(served.address) as stranger:
            ask(stranger, shape_of(X))
            stranger.shutdown(socket.SHUT_WR)
            assert answer(stranger).standing == Standing(3.0)
            assert read(stranger, 8 + X.layout.num_bytes)[8:] == bytes(X.raw.numpy())
            wait_until_closed(stranger)


# Time.


@pytest.mark.parametrize("sent", [b"", framed(REQUEST)[:20]])
def test_the_time_of_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    be_impatient(monkeypatch, 0.2)
    with serving(vector_of(0.0)) as served, connect(served.address) as stranger:
        stranger.sendall(sent)
        wait_until_closed(stranger)
        wait_for(lambda: served.count("num_refused_connections") == 1)


def test_a_request_byte_by_byte_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch, 0.3)
    with serving(vector_of(0.0)) as served, connect(served.address) as stranger:
        with contextlib.suppress(OSError):
            for byte in framed(REQUEST):
                stranger.send(bytes([byte]))
                threading.Event().wait(0.05)
        wait_for(lambda: served.count("num_refused_connections") == 1)


LONG = 6_000_000  # 24 MB, more than the buffers of a connection take


def test_a_reply_that_is_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch, 0.2)
    x = vector_of(0.0, LONG)
    with serving(x) as served:
        served.publish(x, Standing())
        with ask_and_never_read(served.address, shape_of(x)):
            wait_for(lambda: served.count("num_unread_replies") == 1)
        assert not any(snapshot.num_readings for snapshot in served.snapshots.snapshots)


def test_a_reply_that_is_read_slowly_ends_with_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    be_impatient(monkeypatch, 0.5)
    x = vector_of(0.0, LONG)
    with serving(x, round_seconds=1.0) as served:
        served.publish(x, Standing())
        with connect(served.address) as stranger:
            ask(stranger, shape_of(x))
            with contextlib.suppress(OSError):
                while stranger.recv(100_000):
                    threading.Event().wait(0.02)  # 5 MB/s, so that all would take 5 s
        wait_for(lambda: served.count("num_unread_replies") == 1)


def test_clients_that_do_not_read_do_not_keep_others_waiting() -> None:
    x, inbox = vector_of(0.0, LONG), vector_of(0.0, LONG)
    with serving(x, round_seconds=3600.0) as served, contextlib.ExitStack() as strangers:
        for i in range(MAX_SNAPSHOTS):
            served.publish(x, Standing(i))
            strangers.enter_context(ask_and_never_read(served.address, shape_of(x)))
        client = Asking(served.address, inbox)
        for i in range(10):
            x.segments[0].fill_(i)
            assert not served.publish(x, Standing(100 + i))  # all snapshots are being sent
            assert client.fetch(inbox) == Fetched("s", Standing(MAX_SNAPSHOTS - 1))
        assert client.count("num_failed_fetches") == 0
        assert len(served.snapshots.snapshots) == MAX_SNAPSHOTS
        strangers.close()  # they vanish
        wait_for(lambda: served.publish(x, Standing(109)))
        assert client.fetch(inbox) == Fetched("s", Standing(109))
        assert inbox.segments[0][0] == inbox.segments[0][-1] == 9
        wait_for(lambda: served.count("num_unread_replies") == MAX_SNAPSHOTS)


def test_a_withdrawn_model_is_not_served_while_strangers_hold_it() -> None:
    x, inbox = vector_of(0.0, LONG), vector_of(0.0, LONG)
    with serving(x) as served, contextlib.ExitStack() as strangers:
        for i in range(MAX_SNAPSHOTS):
            served.publish(x, Standing(i))
            strangers.enter_context(ask_and_never_read(served.address, shape_of(x)))
        served.snapshots.withdraw()
        assert fetch(served, inbox) is None
        assert not served.publish(x, Standing(100))
        assert fetch(served, inbox) is None
        strangers.close()
        wait_for(lambda: served.publish(x, Standing(100)))
        assert fetch(served, inbox) == Fetched("s", Standing(100))


# Connections.


def test_connections_are_bounded_and_a_peer_among_them_is_served() -> None:
    x, inbox = vector_of(1.0), vector_of(0.0)
    with serving(x) as served, contextlib.ExitStack() as strangers:
        served.publish(x, Standing())
        before = num_descriptors()
        for _ in range(400):
            strangers.enter_context(connect(served.address))
        wait_for(lambda: served.count("num_refused_connections") >= 400 - served.max_connections)
        assert num_descriptors() - 400 - before <= served.max_connections
        assert len(gossip_threads()) <= served.max_connections + 2
        assert fetch(served, inbox) is not None


def test_a_process_without_descriptors_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server, bounded_listener):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.1)
    x, inbox = vector_of(1.0), vector_of(0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(x) as served, contextlib.ExitStack() as strangers:
        served.publish(x, Standing())
        assert fetch(served, inbox) is not None
        wait_for(lambda: not served.server._connections.open)
        first = strangers.enter_context(connect(served.address))
        wait_for(lambda: len(served.server._connections.open) == 1)
        late = strangers.enter_context(socket.socket())
        late.settimeout(TIMEOUT)
        strangers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors() + 16, hard))
        with contextlib.suppress(OSError):
            while True:
                strangers.callback(os.close, os.dup(late.fileno()))
        host, port = served.address.removeprefix("tcp://").split(":")
        late.connect((host, int(port)))
        wait_until_closed(first)
        ask(late, shape_of(x))  # in the place of the first one
        assert answer(late).kind is MessageKind.MODEL


def test_strangers_before_the_handshake_of_tls_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Authority(tmp_path / "ours").contexts()
    x, inbox = vector_of(4.0), vector_of(0.0)
    with serving(x, context=contexts["server_ssl"]) as served, contextlib.ExitStack() as strangers:
        served.publish(x, Standing(1.0))
        for _ in range(served.max_connections + 20):
            strangers.enter_context(connect(served.address))
        wait_for(lambda: served.count("num_refused_connections") >= 20)
        assert fetch(served, inbox, contexts["client_ssl"]) == Fetched("s", Standing(1.0))
        assert torch.equal(inbox.raw, x.raw)
        be_impatient(monkeypatch, 0.2)
        with connect(served.address) as stranger:
            wait_until_closed(stranger)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(garbage=st.binary(max_size=300))
@example(garbage=framed(REQUEST))
def test_garbage_in_place_of_tls_ends_its_connection(garbage: bytes, authority: dict[str, ssl.SSLContext]) -> None:
    with serving(X, context=authority["server_ssl"]) as served:
        served.publish(X, Standing())
        with connect(served.address) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
            wait_until_closed(stranger)
        assert fetch(served, vector_of(0.0, numel=10), authority["client_ssl"]) is not None
        wait_for(lambda: served.count("num_models_sent") == 1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ssl.SSLContext]:
    """The contexts of a worker."""
    return Authority(tmp_path_factory.mktemp("tls") / "ours").contexts()


# Beginning and end.


def test_withdrawn_models_are_not_served() -> None:
    x, inbox = vector_of(1.0), vector_of(0.0)
    with serving(x) as served:
        client = Asking(served.address, inbox)
        assert not served.snapshots.is_open
        served.publish(x, Standing())
        assert served.snapshots.is_open
        assert client.fetch(inbox) is not None
        served.snapshots.withdraw()
        assert not served.snapshots.is_open
        assert client.fetch(inbox) is None
        assert client.count("num_failed_fetches") == 0
        served.publish(x, Standing())
        assert client.fetch(inbox) is not None


def test_a_taken_address_is_an_error_at_once() -> None:
    x = vector_of(1.0)
    with serving(x) as served:
        for address in (served.address, "tcp://no-such-host.invalid:1"):
            with pytest.raises(ConnectionError, match=r"worker 'late': cannot bind tcp://.*is another process using"):
                Served(x, address=address, name="late")


@pytest.mark.parametrize("address", ["tcp://*:*", "tcp://127.0.0.1:0", "tcp://[::1]:*", "tcp://localhost:*"])
def test_addresses_that_leave_something_open(address: str) -> None:
    made = Served(vector_of(1.0), address=address).server
    made.stop()
    made.serve()  # which ends at once
    host, _, port = made.address.removeprefix("tcp://").rpartition(":")
    assert host in ("0.0.0.0", "127.0.0.1", "[::1]")
    assert int(port) > 0


def test_serving_ends_when_told_also_within_replies() -> None:
    x = vector_of(1.0, LONG)
    with serving(x) as served:
        served.publish(x, Standing())
        with ask_and_never_read(served.address, shape_of(x)), connect(served.address):
            wait_for(lambda: len(gossip_threads()) == 3)
            served.server.stop()
            served.server.stop()
            assert_no_gossip_threads()
        assert served.count("num_unread_replies") == 1


def test_models_arrive_whole_while_others_are_published() -> None:
    numel = 50_000
    x, inbox = vector_of(0.0, numel), vector_of(0.0, numel)
    stop = threading.Event()
    with serving(x) as served:
        served.publish(x, Standing(0.0))

        def publish() -> None:
            i = 0
            while not stop.is_set():
                i += 1
                x.segments[0].fill_(i)
                served.publish(x, Standing(i))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            client = Asking(served.address, inbox)
            for _ in range(100):
                fetched = client.fetch(inbox)
                assert fetched is not None
                assert torch.equal(inbox.segments[0], torch.full((numel,), fetched.standing.clock))
        finally:
            stop.set()
            thread.join()


# The key of the job.


@pytest.mark.parametrize("theirs", ["sixteen bytes and more", "another key of a job", None])
def test_with_a_key_a_model_goes_to_a_worker_with_the_same_key_only(
    theirs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSIP_JOB_KEY", "sixteen bytes and more")
    with serving(X) as served:
        served.publish(X, Standing())
        monkeypatch.delenv("GOSSIP_JOB_KEY") if theirs is None else monkeypatch.setenv("GOSSIP_JOB_KEY", theirs)
        if theirs == "sixteen bytes and more":
            assert fetch(served, vector_of(0.0, numel=10)) is not None
            return
        fetcher = Asking(served.address, X).fetcher
        with (
            pytest.raises(
                ValueError, match=r"expected a worker with the key of the job; set GOSSIP_JOB_KEY to the same"
            ),
            fetcher._asking("s", MessageKind.FETCH, time.monotonic() + TIMEOUT),
        ):
            pass
        assert served.count("num_models_sent") == 0


def test_recorded_messages_of_a_worker_get_a_stranger_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger repeats them over another connection."""
    monkeypatch.setenv("GOSSIP_JOB_KEY", "sixteen bytes and more")
    with serving(X) as served:
        served.publish(X, Standing())
        handshake = Handshake(b"sixteen bytes and more", "dpwa")
        with connect(served.address) as worker:
            answer, expected = handshake.answer(read(worker, 24)[8:])
            worker.sendall(answer)
            assert read(worker, 32) == expected
        with connect(served.address) as stranger:
            read(stranger, 24)
            stranger.sendall(answer + framed(REQUEST))
            wait_until_closed(stranger)
        wait_for(lambda: served.count("num_refused_connections") == 2)
        assert served.count("num_models_sent") == 0


@pytest.mark.parametrize(
    ("said", "error"),
    [(None, TimeoutError), (b"", PeerLostError), (b"gdpw-key" + bytes(16), PeerLostError), (b"GET " * 6, ValueError)],
    ids=["slow", "dead", "dead-after-hello", "another-program"],
)
def test_with_a_key_a_slow_or_dead_peer_is_no_stranger(
    said: bytes | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSIP_JOB_KEY", "sixteen bytes and more")
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as accepted:
        listener.settimeout(TIMEOUT)

        def serve() -> None:
            peer, _ = listener.accept()
            if said is None:
                accepted.enter_context(peer)  # until the end of the test
                return
            with peer:
                peer.sendall(said)
                if said.startswith(b"gdpw"):
                    read(peer, Handshake.ANSWER_BYTES)

        thread = threading.Thread(target=serve)
        thread.start()
        fetcher = Asking(f"tcp://127.0.0.1:{listener.getsockname()[1]}", X).fetcher
        seconds = 0.3 if said is None else TIMEOUT
        with pytest.raises(error), fetcher._asking("s", MessageKind.FETCH, time.monotonic() + seconds):
            pass
        thread.join(TIMEOUT)
