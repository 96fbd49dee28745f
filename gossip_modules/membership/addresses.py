"""Several Gloo groups of one worker, made at once, with one exchange of addresses."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ..transport.deadline import Deadline
from ..transport.gloo import CONNECT_FACTOR, at_once, close_ports_at, gloo_backend, gloo_devices, num_devices
from ..transport.job_key import CODE_BYTES, NONCE_BYTES, VARIABLE, Handshake

Exchange: TypeAlias = "Callable[[str, str], Sequence[str]]"
"""Gives the text of this worker to all, under a name, and returns the texts of all workers."""


def connect_groups(
    places: Mapping[str, tuple[int, int]],
    exchange: Exchange,
    *,
    patience: timedelta,
    host: str | None,
    key: bytes | None = None,
) -> list[Any]:
    """Gloo backends in the order of their names; returns when all their ranks are connected.

    [Note: one device] A device of Gloo has a thread, a port and descriptors, so the groups share one. A lazy device
    would give larger groups few connections, but its first message to a departed rank never returns (torch 2.14).

    [Note: strangers at Gloo's ports] Gloo takes any program for the rank that it gives as its own, until all ranks are
    connected. With a key, both ends of each connection then show that they have it, before anything else is sent.

    Args:
        places: by name of each group, the rank of this worker in it, and its size.
        exchange: see `Exchange`; the workers of all groups call it. A RuntimeError of it ends this function.
        patience: the longest time to connect and to show the key, when the addresses are known.
        host: see `gloo_backend`.
        key: the key of the job; None: it has none.

    Raises:
        RuntimeError: a rank does not connect in time, or a stranger has connected in its place.
    """
    addresses, devices, deadlines = Addresses(len(places)), gloo_devices(host), list[Deadline]()

    def make(name: str, rank: int, size: int) -> Any:
        with addresses:
            try:
                return gloo_backend(addresses.store(name), rank, size, patience / CONNECT_FACTOR, devices=devices)
            except RuntimeError:
                close_ports_at(addresses.published)  # before a rank that is late connects
                raise

    def exchange_all() -> None:
        with addresses:
            for device in range(num_devices(host)):
                addresses.add(exchange(str(device), addresses.own(device)))
            deadlines.append(Deadline(patience))  # of the connections and the key together

    makes: list[Callable[[], Any]] = [exchange_all, *(partial(make, name, *place) for name, place in places.items())]
    try:
        _, *backends = at_once(makes, name="connecting")
        close_ports_at(addresses.published)
        if key is not None:
            _show_key(key, places, backends, deadlines[0])
    finally:
        devices.clear()  # the traceback of an error would keep them
    return backends


def _show_key(key: bytes, places: Mapping[str, tuple[int, int]], backends: Sequence[Any], deadline: Deadline) -> None:
    """The three messages of `Handshake`, over all connections at once; the lower rank of each is the listener."""
    ends = [
        (backend, rank, peer, Handshake(key, "link", name, min(rank, peer), max(rank, peer)))
        for (name, (rank, size)), backend in zip(places.items(), backends, strict=True)
        for peer in range(size)
        if peer != rank
    ]

    def turn(messages: Mapping[int, bytes], num_bytes: int) -> dict[int, bytes]:
        """Send messages, by end, and receive the messages of the other ends."""
        works, received = [], {}
        for i, (backend, _, peer, _) in enumerate(ends):
            is_sent = i in messages
            x = torch.frombuffer(bytearray(messages.get(i, bytes(num_bytes))), dtype=torch.uint8)
            works.append((backend.send if is_sent else backend.recv)([x], peer, 0))
            if not is_sent:
                received[i] = x
        for work in works:
            work.wait(deadline.left_for_gloo)
        return {i: bytes(x.tolist()) for i, x in received.items()}

    hellos = {i: Handshake.hello() for i, (_, rank, peer, _) in enumerate(ends) if rank < peer}
    asked = {i: ends[i][3].answer(hello) for i, hello in turn(hellos, NONCE_BYTES).items()}
    answers = turn({i: answer for i, (answer, _) in asked.items()}, Handshake.ANSWER_BYTES)
    replies = {i: ends[i][3].reply(hellos[i], answer) for i, answer in answers.items()}
    found = turn({i: reply or bytes(CODE_BYTES) for i, reply in replies.items()}, CODE_BYTES)
    is_theirs = {i: reply is not None for i, reply in replies.items()}
    is_theirs |= {i: hmac.compare_digest(found[i], expected) for i, (_, expected) in asked.items()}
    if strangers := sorted({ends[i][2] for i, is_known in is_theirs.items() if not is_known}):
        raise RuntimeError(
            f"a program without the key of the job has connected in place of rank {strangers[0]}: its connection is "
            f"closed, and nothing of it was used; let a firewall or a tunnel keep strangers from the ports of Gloo, "
            f"and set {VARIABLE} to the same secret on all workers"
        )


class Addresses:
    """The addresses of the Gloo groups of one worker, made at once.

    [Note: one exchange] Gloo puts the address of a rank into the store of each group, and waits there for the addresses
    of the other ranks. Over a network these are hundreds of requests for each generation of a large job. So the store
    of each group is in memory. When all groups of this worker have put their addresses there, workers exchange them as
    one text each.

    [Note: all addresses at once] A rank with the address of another rank waits inside C++ code until that rank
    connects. So no rank gets an address before the addresses of all workers are there.

    As a context it ends all waits for addresses when its block raises an error.

    Args:
        num_groups: how many groups there are.

    Attributes:
        published: the addresses of this worker.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._moved = threading.Condition()
        self._own: dict[str, dict[str, str]] = {}  # by device, in hexadecimal digits
        self._all: dict[str, str] = {}
        self._failure = ""
        self.published: list[bytes] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, place: object) -> None:
        if error is not None:
            with self._moved:
                self._failure = self._failure or str(error)
                self._moved.notify_all()

    def store(self, group: str) -> dist.Store:
        """The store of a group, by its name."""
        return _GroupStore(self, group)

    def put(self, key: str, address: bytes) -> None:
        """Note the address of this worker in a group; key: ".../device/rank"."""
        with self._moved:
            self._own.setdefault(key.split("/")[-2], {})[key] = address.hex()
            self.published.append(address)
            self._moved.notify_all()

    def own(self, device: int) -> str:
        """The addresses of this worker in all groups, as text; waits until they are there."""
        with self._moved:
            self._wait(lambda: len(self._own.get(str(device), ())) == self._num_groups)
            return json.dumps(self._own[str(device)])

    def add(self, texts: Sequence[str]) -> None:
        """Take in the addresses of all workers."""
        with self._moved:
            for text in texts:
                self._all |= json.loads(text)
            self._moved.notify_all()

    def get(self, key: str) -> bytes:
        """The address of a rank; waits until it is there."""
        with self._moved:
            self._wait(lambda: key in self._all)
            return bytes.fromhex(self._all[key])

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._moved.wait_for(lambda: condition() or bool(self._failure))
        if not condition():
            raise RuntimeError(self._failure)


class _GroupStore(dist.Store):
    """The store for Gloo's look-ups of the addresses of one group."""

    def __init__(self, addresses: Addresses, group: str) -> None:
        super().__init__()
        self._addresses, self._group = addresses, group

    def set(self, key: str, value: str | bytes) -> None:
        """Put the address of this rank."""
        self._addresses.put(f"{self._group}/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The address of a rank; waits for it."""
        return self._addresses.get(f"{self._group}/{key}")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when the addresses are there; the exchange has a limit of its own."""
        for key in keys:
            self.get(key)

    def has_extended_api(self) -> bool:
        """Gloo asks key by key."""
        return False
