"""BoundedStore: requests that end in time, and say what was asked of which store."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from gossip_modules import Progress
from gossip_modules.transport.stores import BoundedStore
from tests.harness.processes import PRELOADED

SECONDS = 0.5


@pytest.fixture
def server() -> Iterator[tuple[int, dist.TCPStore]]:
    """The process id of a server, and a store that it serves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(writer,), daemon=True)
    process.start()
    try:
        limit = timedelta(seconds=SECONDS)
        assert process.pid is not None
        yield process.pid, dist.TCPStore("127.0.0.1", reader.recv(), timeout=limit, wait_for_workers=False)
    finally:
        process.kill()
        process.join()
        for end in (reader, writer):
            end.close()


def serve(writer: Connection) -> None:
    """Serve a store, and tell its port, until the process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    writer.send(store.port)
    threading.Event().wait()


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process has stopped: one that runs may still answer a request."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while any(state_of(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def state_of(task: Path) -> str:
    return task.joinpath("stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("make", [dist.HashStore, None])
def test_requests_are_those_of_the_store(make: type[dist.Store] | None, request: pytest.FixtureRequest) -> None:
    plain = make() if make is not None else request.getfixturevalue("server")[1]
    store, same = BoundedStore(dist.PrefixStore("a", plain)), BoundedStore(dist.PrefixStore("a", plain))
    assert store.add("number", 2, what="adding") == 2
    assert same.add("number", 3, what="adding") == 5
    assert store.get("text", what="reading") is None
    assert not store.check("text", what="looking")
    store.set("text", "abc", what="writing")
    assert same.get("text", what="reading") == b"abc"
    assert same.check("text", what="looking")


def test_a_frozen_server_is_an_error_in_time_and_may_come_back(server: tuple[int, dist.TCPStore]) -> None:
    """A request that was given up does not make the next one wait as long again."""
    pid, plain = server
    progress = Progress(plain)
    assert progress.add(1) == 1
    stop(pid)
    pattern = (
        rf"adding 1 to the progress 'steps' of the job: its key-value store did not answer \(127.0.0.1:{plain.port}: "
    )
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=pattern + r"no answer within 0\.5 s\)"):
        progress.add(1)
    assert time.monotonic() - start < SECONDS + 1
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=pattern + "no answer to an earlier request"):
        progress.add(1)
    assert time.monotonic() - start < SECONDS / 2
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 20
    while True:  # the request that was given up is carried out, and then others are
        try:
            assert progress.total == 2
            return
        except ConnectionError:
            assert time.monotonic() < deadline


def test_a_caller_with_more_time_waits_for_a_request_that_was_given_up(server: tuple[int, dist.TCPStore]) -> None:
    """Notes of failures are given up early; a `Progress` that shares the thread is not in a hurry."""
    pid, plain = server
    hurried, patient = (BoundedStore(plain, timeout=timedelta(seconds=seconds)) for seconds in (0.1, 20))
    assert patient.add("number", 1, what="adding") == 1
    stop(pid)
    try:
        with pytest.raises(ConnectionError, match="no answer within"):
            hurried.add("number", 1, what="adding")
    finally:
        threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()
    assert patient.add("number", 1, what="adding") == 3


def test_an_error_of_the_store_is_one_of_the_request() -> None:
    class Broken(dist.Store):
        def add(self, key: str, amount: int) -> int:
            raise dist.DistStoreError("no")

    with pytest.raises(
        ConnectionError, match=r"counting: its key-value store did not answer \(Broken: no\); the process"
    ):
        BoundedStore(Broken(), timeout=timedelta(seconds=9)).add("a", 1, what="counting")


def ask_for_ever(store: BoundedStore) -> None:
    while True:
        store.add("a", 1, what="asking")


def test_a_store_goes_with_the_error_of_a_request(server: tuple[int, dist.TCPStore]) -> None:
    """At once: its client has a connection, and nobody collects garbage for long."""
    pid, store = server
    bounded = BoundedStore(store, timeout=timedelta(seconds=SECONDS))
    os.kill(pid, signal.SIGKILL)
    released = weakref.ref(bounded)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ConnectionError, match="asking"):
            ask_for_ever(bounded)  # until the end of the process has come to the client
        del bounded
        assert released() is None
    finally:
        gc.enable()
