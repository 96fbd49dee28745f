"""Contact: the address of a worker, its secret for identification, and the query for a reply."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

Address = tuple[str, int]
SECRET_BYTES = 16
PACKET = struct.Struct("!8sQ16s")  # the job, the worker that it is about, and a code that only the job can compute
_NUM_PUBLIC = 16  # bytes of a packet that are no secret


class Packet(enum.Enum):
    """The messages of liveness; the code of one kind is of no use for another."""

    GREETING = b"greeting"  # of a listener: it is this worker's
    WATCH = b"watch"  # the answer: the connection is one of a worker of this job


@dataclass(frozen=True)
class Contact:
    """The address of a worker, and its secret for identification.

    [Note: secrets of workers] Each worker draws a random number. The others read it in the roster. A packet has a code
    of the number (HMAC-SHA256), not the number itself. So a stranger cannot learn the number from a connection, and
    cannot speak in the name of the worker. A program that reads the store, or the traffic between workers, can. So can
    one that has recorded a greeting, and listens at the same address and port after the end of the worker, as packets
    have no nonce.

    Attributes:
        worker: its id.
        address: the address of its listener.
        secret: its random number.
    """

    worker: int
    address: Address
    secret: bytes = field(repr=False)

    def packet(self, kind: Packet, job: bytes) -> bytes:
        """The packet of this kind about this worker; `job`: see `digest`."""
        code = hmac.digest(self.secret, kind.value + struct.pack("!8sQ", job, self.worker), "sha256")
        return PACKET.pack(job, self.worker, code)


def is_packet(heard: bytes, expected: bytes) -> bool | None:
    """Whether `heard` begins with the expected packet; None: it may, once more of it has come."""
    if not expected[:_NUM_PUBLIC].startswith(heard[:_NUM_PUBLIC]):
        return False
    return hmac.compare_digest(heard[: PACKET.size], expected) if len(heard) >= PACKET.size else None


def digest(job: str) -> bytes:
    """Eight bytes for a job in packets."""
    return hashlib.sha256(job.encode()).digest()[:8]


class LifeSign(enum.Enum):
    """The result of a probe."""

    LIVES = "lives"
    ENDED = "has ended"  # its machine refuses the connection, or another program has its port
    SILENT = "is silent"  # it is stopped, or its machine is out of reach


def probe(contacts: Mapping[int, Contact], *, job: bytes, seconds: float) -> dict[int, LifeSign]:
    """Connect to the listeners of workers of a job; returns when one has answered, or all are known to have ended.

    Args:
        contacts: the contacts of the workers, by id.
        job: see `digest`.
        seconds: the longest wait.

    Returns:
        The signs of life, by id.
    """
    signs, received = dict.fromkeys(contacts, LifeSign.SILENT), dict.fromkeys(contacts, b"")
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        for worker, contact in contacts.items():
            if (connection := connect(contact.address)) is not None:
                selector.register(connections.enter_context(connection), selectors.EVENT_READ, worker)
        while selector.get_map() and LifeSign.LIVES not in signs.values() and time.monotonic() < deadline:
            for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                worker, other = key.data, key.fileobj
                assert isinstance(other, socket.socket)
                try:
                    data = other.recv(64)
                except ConnectionRefusedError:
                    data = b""
                except OSError:  # no route, or no answer: nothing shows that the process has ended
                    selector.unregister(other)
                    continue
                received[worker] += data
                is_greeting = is_packet(received[worker], contacts[worker].packet(Packet.GREETING, job))
                if is_greeting:
                    signs[worker] = LifeSign.LIVES
                elif not data or is_greeting is False:
                    signs[worker] = LifeSign.ENDED
                    selector.unregister(other)
    return signs


def connect(address: Address) -> socket.socket | None:
    """A connection in the making; None: there is no route to that address.

    Raises:
        OSError: this process has no descriptor left.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        connection.close()
        return None
    return connection
