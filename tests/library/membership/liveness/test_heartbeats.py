"""LivenessMonitor: who is silent is noticed, who is slow is not."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from gossip_modules.membership.liveness import monitor
from gossip_modules.membership.liveness.contact import Contact, LifeSign, digest, probe
from gossip_modules.membership.liveness.monitor import LivenessMonitor

SECONDS = 30.0


class Listener:
    """What one worker was told."""

    def __init__(self) -> None:
        self.silent: list[int] = []
        self.ended: list[int] = []
        self.is_told = threading.Event()

    def told(self) -> dict[str, Any]:
        return {"on_silent": self.on_silent, "on_ended": self.ended.append}

    def on_silent(self, worker: int, seconds: float) -> None:
        assert seconds > 1.0
        self.silent.append(worker)
        self.is_told.set()


def test_a_worker_that_ends_is_silent_and_one_that_goes_on_is_not() -> None:
    listeners = [Listener() for _ in range(3)]
    beats = [
        LivenessMonitor(i, job="job", host="127.0.0.1", **listeners[i].told(), interval=0.05, floor=floor)
        for i, floor in enumerate((1.0, 1.0, 20.0))
    ]
    for i, mine in enumerate(beats):
        mine.watch({j: other.contact for j, other in enumerate(beats) if j != i})
    heard = threading.Event()
    while not all(peer.was_heard for peer in beats[0]._peers.values()):
        heard.wait(0.01)
    beats[1].is_leaving = True  # else its connections would tell
    beats[1].close()
    assert listeners[0].is_told.wait(SECONDS)
    assert 1 in listeners[0].silent
    assert 1 not in beats[0]._peers, "who is silent is watched no more"
    for mine in beats:
        mine.close()
    assert listeners[2].silent == [], "its floor is higher"
    assert [listener.ended for listener in listeners] == [[], [], []]


def test_the_next_turn_is_at_the_first_possible_silence() -> None:
    """So silence is noticed when it is too long, and not at the next beat."""
    mine = LivenessMonitor(0, job="job", host="127.0.0.1", **Listener().told(), interval=60.0)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        mine.watch({i: Contact(i, nobody.getsockname(), b"") for i in (1, 2)})
        next_beat = mine._last_beat + 60.0
        assert mine._next_turn() == next_beat, "nobody was heard"
        first, second = mine._peers.values()
        first.was_heard = second.was_heard = True
        assert mine._next_turn() == next_beat
        second.deadline = 30.0
        assert mine._next_turn() == second.last + 30.0
    mine._is_closed.set()
    with socket.create_connection(mine.contact.address):  # it wakes the thread, which waits for the next beat
        mine.close()


def test_a_worker_that_was_never_heard_is_not_silent() -> None:
    """As where a firewall drops its packets."""
    listener = Listener()
    mine = LivenessMonitor(0, job="job", host="127.0.0.1", **listener.told(), interval=0.01, floor=0.02)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        mine.watch({1: Contact(1, nobody.getsockname(), b"")})
        assert not listener.is_told.wait(0.3)
    mine.close()


def test_a_worker_of_another_job_is_not_heard() -> None:
    listener = Listener()
    mine = LivenessMonitor(0, job="job", host="127.0.0.1", **listener.told(), interval=0.01)
    other = LivenessMonitor(1, job="another job", host="127.0.0.1", **listener.told(), interval=0.01)
    mine.watch({1: other.contact})
    other.watch({0: mine.contact})
    assert not listener.is_told.wait(0.2)
    assert not mine._peers[1].was_heard
    assert mine._thread.is_alive()
    mine.close()
    other.close()


_PARENT = """
import os, time

from gossip_modules.membership.liveness.monitor import LivenessMonitor
mine = LivenessMonitor(1, job="job", host="127.0.0.1", on_silent=print, on_ended=print)
print(mine.contact.address[1], mine.contact.secret.hex(), flush=True)
while not mine._watchers:
    time.sleep(0.01)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_a_process_with_forked_children_is_seen_to_end() -> None:
    """The workers of a DataLoader inherit the connections of Gloo, and may live longer than their parent."""
    listener, is_told = Listener(), threading.Event()
    mine = LivenessMonitor(
        0, job="job", host="127.0.0.1", on_silent=listener.on_silent, on_ended=lambda _: is_told.set(), floor=1000.0
    )
    command = [sys.executable, "-W", "ignore", "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port, secret = process.stdout.readline().split()
        mine.watch({1: Contact(1, ("127.0.0.1", int(port)), bytes.fromhex(secret))})
        child = int(process.stdout.readline())
        try:
            wait = threading.Event()
            while not mine.has_met:
                wait.wait(0.01)
            process.kill()
            assert is_told.wait(SECONDS)
            os.kill(child, 0)  # it lives
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)
    mine.close()


def test_a_probe_tells_living_ended_and_silent_workers_apart() -> None:
    listener = Listener()
    mine = LivenessMonitor(1, job="job", host="127.0.0.1", **listener.told())
    contact, job = mine.contact, digest("job")
    with socket.socket() as stopped, socket.socket() as stranger:
        for other in (stopped, stranger):
            other.bind(("127.0.0.1", 0))
            other.listen()

        def answer() -> None:
            with stranger.accept()[0] as other:
                other.sendall(b"SSH-2.0")

        thread = threading.Thread(target=answer)
        thread.start()
        contacts = {i: Contact(i, other.getsockname(), b"") for i, other in ((2, stopped), (3, stranger))}
        assert probe(contacts, job=job, seconds=0.5) == {2: LifeSign.SILENT, 3: LifeSign.ENDED}
        thread.join()
    assert probe({1: contact}, job=job, seconds=SECONDS) == {1: LifeSign.LIVES}
    for another, sign in (
        (Contact(2, contact.address, contact.secret), LifeSign.ENDED),  # another worker has the port now
        (Contact(1, contact.address, bytes(16)), LifeSign.SILENT),  # it refuses the answer
    ):
        assert probe({7: another}, job=job, seconds=SECONDS) == {7: sign}
    mine.close()
    assert probe({1: contact}, job=job, seconds=SECONDS) == {1: LifeSign.ENDED}


def test_heartbeats_end_with_the_object_that_they_tell() -> None:
    """A worker that was lost without `close` would live for ever, in the eyes of the others."""
    listener = Listener()
    mine = LivenessMonitor(1, job="job", host="127.0.0.1", on_silent=listener.on_silent, on_ended=print)
    thread, contact = mine._thread, mine.contact
    assert probe({1: contact}, job=digest("job"), seconds=SECONDS) == {1: LifeSign.LIVES}
    del listener
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert probe({1: contact}, job=digest("job"), seconds=SECONDS) == {1: LifeSign.ENDED}


def test_heartbeats_go_on_after_an_error(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: object) -> None:
        raise ArithmeticError

    listener = Listener()
    mine = LivenessMonitor(0, job="job", host="127.0.0.1", **listener.told(), interval=0.01)
    other = LivenessMonitor(1, job="job", host="127.0.0.1", **listener.told(), interval=0.01)
    wait = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(monitor, "connect", fail)
        mine.watch({1: other.contact})
        while not caplog.records:
            wait.wait(0.01)
    mine.watch({1: other.contact})
    other.watch({0: mine.contact})
    while not (mine._peers[1].was_heard and mine.has_met and other._peers[0].was_heard and other.has_met):
        wait.wait(0.01)
    mine.close()
    other.close()
    assert "the liveness of a worker goes on after an error" in caplog.text
