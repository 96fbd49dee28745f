"""Heartbeats: who is silent is noticed, who is slow is not."""

from __future__ import annotations

import socket
import threading

from gossip_modules.membership.heartbeats import Heartbeats

SECONDS = 30.0


class Listener:
    """What one worker was told."""

    def __init__(self) -> None:
        self.silent: list[int] = []
        self.is_told = threading.Event()

    def on_silent(self, worker: int, seconds: float) -> None:
        assert seconds > 1.0
        self.silent.append(worker)
        self.is_told.set()


def test_who_ends_is_silent_and_who_goes_on_is_not() -> None:
    listeners = [Listener() for _ in range(3)]
    beats = [
        Heartbeats(i, job="job", host="127.0.0.1", on_silent=listeners[i].on_silent, interval=0.05, floor=floor)
        for i, floor in enumerate((1.0, 1.0, 20.0))
    ]
    for i, mine in enumerate(beats):
        mine.watch({j: other.address for j, other in enumerate(beats) if j != i})
    heard = threading.Event()
    while not all(peer.was_heard for peer in beats[0]._peers.values()):
        heard.wait(0.01)
    beats[1].close()
    assert listeners[0].is_told.wait(SECONDS)
    assert 1 in listeners[0].silent
    assert 1 not in beats[0]._peers, "who is silent is watched no more"
    for mine in beats:
        mine.close()
    assert listeners[2].silent == [], "its floor is higher"


def test_who_was_never_heard_is_not_silent() -> None:
    """As where a network carries no datagrams."""
    listener = Listener()
    mine = Heartbeats(0, job="job", host="127.0.0.1", on_silent=listener.on_silent, interval=0.01, floor=0.02)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        mine.watch({1: nobody.getsockname()})
        assert not listener.is_told.wait(0.3)
    mine.close()


def test_datagrams_of_strangers_are_dropped() -> None:
    listener = Listener()
    mine = Heartbeats(0, job="job", host="127.0.0.1", on_silent=listener.on_silent, interval=0.01)
    other = Heartbeats(1, job="another job", host="127.0.0.1", on_silent=listener.on_silent, interval=0.01)
    mine.watch({1: other.address})
    other.watch({0: mine.address})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for packet in (b"", b"x" * 16, b"y" * 64, b"z" * 1000):
            stranger.sendto(packet, mine.address)
    assert not listener.is_told.wait(0.2)
    assert not mine._peers[1].was_heard
    assert mine._thread.is_alive()
    mine.close()
    other.close()
